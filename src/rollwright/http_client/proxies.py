"""Which proxy a request goes through, as the usual environment variables say.

True of it: `http_proxy`, `https_proxy`, `all_proxy` and `no_proxy` count in lower and upper case, the lower first; this
machine itself is never asked through a proxy. `no_proxy` names hosts, domains, networks, or `*`.
"""

import urllib.request
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit

from rollwright.errors import ConfigError
from rollwright.http_client.url import Url


def proxy_for(url: Url) -> str | None:
    """The proxy's URL; `None`: the server is asked directly."""
    if _is_this_machine(url.host):
        return None
    told = urllib.request.getproxies_environment()
    scheme = url.scheme if told.get(url.scheme) else "all"
    proxy = told.get(scheme)
    if not proxy or _excepted(url, told):
        return None
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    parts = urlsplit(proxy)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        shown = f"{parts.scheme}://{parts.hostname or ''}"
        raise ConfigError(
            f"{scheme}_proxy: {shown!r} is no proxy that can be used; accepted: http:// or https:// and a host"
        )
    return proxy


def _is_this_machine(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _excepted(url: Url, told: dict[str, str]) -> bool:
    if urllib.request.proxy_bypass_environment(f"{url.host}:{url.port}", told):  # type: ignore[attr-defined]
        return True
    try:
        address = ip_address(url.host)
    except ValueError:
        return False
    for each in told.get("no", "").split(","):
        try:
            if address in ip_network(each.strip(), strict=False):
                return True
        except ValueError:
            continue
    return False

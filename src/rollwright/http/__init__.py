"""HTTP/1.1 client and server for engines, stores and gateways, tuned for many small requests.

The client keeps connections alive and knows no redirects, cookies, proxies or compression, because engines, stores and
search servers need none of them. A hosted API may be behind a proxy; `proxy.ProxiedClient` sends requests to it.
"""

from rollwright.http.client import HttpClient
from rollwright.http.connection import BrokenResponse, HttpFault, HttpResponse, TimedOut, Unreachable
from rollwright.http.url import HoldsPassword, Url

__all__ = [
    "BrokenResponse",
    "HoldsPassword",
    "HttpClient",
    "HttpFault",
    "HttpResponse",
    "TimedOut",
    "Unreachable",
    "Url",
]

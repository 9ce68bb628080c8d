"""The web server under the store's and the gateway's endpoints, and what a stranger's connection may cost it."""

from rollwright.http_server.limits import ServerLimits, raise_handle_limit

__all__ = ["ServerLimits", "raise_handle_limit"]

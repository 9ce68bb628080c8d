"""HTTP/1.1 client and server for engines, stores and gateways, tuned for many small requests.

No redirects, cookies, proxies or compression: an engine, a store and a search server need none of them. A hosted API may
be behind a proxy (`proxies`); requests to it then go through a client of their own (`proxied`).
"""

from rollwright.http.client import HttpClient
from rollwright.http.connection import Answer
from rollwright.http.errors import BrokenAnswer, HttpFault, TimedOut, Unreachable
from rollwright.http.url import HoldsPassword, Url

__all__ = [
    "Answer",
    "BrokenAnswer",
    "HoldsPassword",
    "HttpClient",
    "HttpFault",
    "TimedOut",
    "Unreachable",
    "Url",
]

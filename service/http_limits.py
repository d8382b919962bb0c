"""Limits of an HTTP server's clients: how often they may ask, and how failures slow them.

Owns: a bucket of requests a client, and the count of its failed authentications. Must not know:
HTTP, tokens, clocks; every call is given `now`, in seconds.

A client is an address; of IPv6 its first 64 bits, since whoever has one address has all of those.
Both tables are bounded: beyond the bound the client that was seen longest ago is forgotten.
"""

from __future__ import annotations

import ipaddress
from typing import Final

from kvcast.protocol.bounded_map import BoundedMap
from kvcast.protocol.links.backoff import pause_after

MAX_CLIENTS: Final = 4096
FREE_FAILURES: Final = 3
FIRST_DELAY_S: Final = 0.1
MOST_DELAY_S: Final = 3.0
FORGIVEN_AFTER_S: Final = 300.0


def client_of(address: str) -> str:
    """What stands for a client in the tables."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return str(ip.ipv4_mapped)
        return str(ipaddress.IPv6Network((ip, 64), strict=False))
    return str(ip)


class RateLimit:
    """`rate_per_s` requests a second a client, and twice as many at once after a pause; a rate of 0
    allows everything."""

    def __init__(self, rate_per_s: float) -> None:
        self._rate = rate_per_s
        self._burst = max(1.0, 2 * rate_per_s)
        self._buckets: BoundedMap[str, tuple[float, float]] = BoundedMap(MAX_CLIENTS)

    def __len__(self) -> int:
        return len(self._buckets)

    def wait_s(self, client: str, now: float) -> float:
        """Take one request's worth: 0 if it may go on, else in how long the next may."""
        if not self._rate:
            return 0.0
        left, since = self._buckets.get(client, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._rate)
        short = left < 1.0
        self._buckets[client] = (left if short else left - 1.0, now)
        return (1.0 - left) / self._rate if short else 0.0


class Failures:
    """Failed authentications a client: the first few cost nothing, each further one waits twice as
    long, up to a bound. Success, or five minutes of peace, is forgiveness."""

    def __init__(self) -> None:
        self._failures: BoundedMap[str, tuple[int, float]] = BoundedMap(MAX_CLIENTS)

    def __len__(self) -> int:
        return len(self._failures)

    def failed(self, client: str, now: float) -> float:
        """Count one; how long its answer is to be held back."""
        count, at = self._failures.get(client, (0, now))
        count = 1 if now - at > FORGIVEN_AFTER_S else count + 1
        self._failures[client] = (count, now)
        if count <= FREE_FAILURES:
            return 0.0
        return pause_after(count - FREE_FAILURES, FIRST_DELAY_S, MOST_DELAY_S)

    def succeeded(self, client: str) -> None:
        """Forgive."""
        self._failures.pop(client, None)

"""Rate limits of namespaces: operations and bytes a second.

Owns: the token buckets. Must not know: clients, or what an operation is.

A namespace has one bucket for operations and one for bytes; each holds what is allowed in
`BURST_S`. An operation is let in while neither is in debt. It then takes what it costs, even if
that is more than the bucket has, since it is known only afterwards how many bytes a get has
brought. So in any span of time no more passes than the rate allows in it, one full bucket, and what
is in progress. An operation that is larger than a bucket passes, too; the next one waits until it
is paid off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

BURST_S: Final = 1.0


class Bucket:
    """Of `rate` tokens a second, full at first."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._tokens = rate * BURST_S
        self._at: float | None = None

    def in_debt(self, now: float) -> bool:
        """Whether nothing may be let in now."""
        if self._at is not None and now > self._at:
            gained = (now - self._at) * self.rate
            self._tokens = min(self.rate * BURST_S, self._tokens + gained)
        self._at = now if self._at is None else max(now, self._at)
        return self._tokens <= 0

    def take(self, cost: float) -> None:
        """Something was let in that costs so much."""
        self._tokens -= cost


@dataclass(frozen=True)
class RateLimit:
    """Of one namespace, a second; 0 = no limit."""

    operations_per_s: float = 0.0
    bytes_per_s: float = 0.0


class Limits:
    """The buckets of all namespaces that have limits."""

    def __init__(self) -> None:
        self._operations: dict[int, Bucket] = {}
        self._bytes: dict[int, Bucket] = {}

    def configure(self, limits: Mapping[int, RateLimit]) -> None:
        """State all limits; those that have not changed go on."""
        _set_rates(self._operations, {n: limit.operations_per_s for n, limit in limits.items()})
        _set_rates(self._bytes, {n: limit.bytes_per_s for n, limit in limits.items()})

    def is_limited(self, namespace: int) -> bool:
        """Whether a namespace has any limit."""
        return namespace in self._operations or namespace in self._bytes

    def admit(self, now: float, namespace: int, operations: int) -> bool:
        """Whether so many operations may begin; if so, they are counted."""
        counted, sized = self._operations.get(namespace), self._bytes.get(namespace)
        if counted is not None and counted.in_debt(now):
            return False
        if sized is not None and sized.in_debt(now):
            return False
        if counted is not None:
            counted.take(operations)
        return True

    def moved(self, namespace: int, size_bytes: int) -> None:
        """What was let in has moved so many bytes."""
        bucket = self._bytes.get(namespace)
        if bucket is not None:
            bucket.take(size_bytes)


def _set_rates(buckets: dict[int, Bucket], rates: Mapping[int, float]) -> None:
    for namespace in [n for n in buckets if not rates.get(n)]:
        del buckets[namespace]
    for namespace, rate in rates.items():
        if rate and (namespace not in buckets or buckets[namespace].rate != rate):
            buckets[namespace] = Bucket(rate)

"""Two tenants that take all they can get of one home, or put there all they can, by TCP.

Owns: what they ask for, and what each must have got of the home's link by its weight, as a plain
sum over the time in which both were there all along. Must not know: how the product shares a link
(`kvcast.protocol.links.departures`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from kvcast.protocol.links.stream import LinkStream
from kvcast.protocol.messages.bulk import (
    BULK_PROTOCOL_VERSION,
    DONE,
    HELD,
    MAX_BULK_MESSAGE_BYTES,
    BulkBlocks,
    BulkGet,
    BulkHello,
    BulkPut,
    BulkTaken,
    CalleeMessage,
    PutHeader,
    WantedBlock,
)
from kvcast.protocol.messages.wire import digest_of
from kvcast.simulation.agent import SimAgent, SimHost
from kvcast.simulation.cluster import Cluster
from kvcast.simulation.model import ViolationError
from kvcast.simulation.streams import Process, StreamDriver

BLOCK_BYTES: Final = 8000
BLOCKS: Final = 4
"""In one request; two requests wait at the home all the time, on each connection."""
CONNECTIONS: Final = 2
"""Of each tenant."""
BEGINS_S: Final = 0.3
"""When the blocks are there."""
SETTLES_S: Final = 1.2
"""From when on shares are looked at: then neither has saved anything any more."""
LEAST_S: Final = 0.8
"""For so long at least."""
_TOLERANCE: Final = 0.15
"""Of what both got; half of what a weight that counts for nothing would change."""
_AT_ONCE_BYTES: Final = 64 * 1024
"""Beyond the link's rate, at any time."""


class _Caller(LinkStream[CalleeMessage]):
    """Asks for the same block again and again."""

    def __init__(self, node_id: str, namespace: int, key: bytes) -> None:
        super().__init__(CalleeMessage, max_message_bytes=MAX_BULK_MESSAGE_BYTES)
        self.refused = False
        self._get = BulkGet(namespace, [WantedBlock(key)] * BLOCKS)
        self._coming = 0
        self._send(BulkHello(BULK_PROTOCOL_VERSION, node_id))
        for _ in range(2):
            self._send(self._get)

    def _message(self, now: float, message: CalleeMessage) -> None:
        headers = message.blocks if isinstance(message, BulkBlocks) else []
        if not headers or any(header.status != DONE for header in headers):
            self.refused = True
            self._close(now)
            return
        for header in headers:
            self._skip_block(header.size_bytes)
            self._coming += 1

    def _block_came(self, now: float, digest: int | None) -> None:
        self._coming -= 1
        if not self._coming:
            self._send(self._get)

    def end(self, now: float) -> None:
        """Ask for nothing more."""
        self._close(now)


class _Putter(LinkStream[CalleeMessage]):
    """Puts the same block again and again. The home has it already, and reads its bytes all the
    same, since they follow at once."""

    def __init__(self, node_id: str, put: BulkPut, content: bytes) -> None:
        super().__init__(CalleeMessage, max_message_bytes=MAX_BULK_MESSAGE_BYTES)
        self.refused = False
        self._put = put
        self._content = memoryview(content)
        self._send(BulkHello(BULK_PROTOCOL_VERSION, node_id))
        for _ in range(2):
            self._put_all()

    def _put_all(self) -> None:
        self._send(self._put)
        for _ in self._put.blocks:
            self._send_block(self._content)

    def _message(self, now: float, message: CalleeMessage) -> None:
        if isinstance(message, BulkTaken) and set(message.statuses) == {HELD}:
            self._put_all()
        else:
            self.refused = True
            self._close(now)

    def end(self, now: float) -> None:
        """Put nothing more."""
        self._close(now)


class Blast:
    """One home's link, from `begin` to `end`. ViolationError where weights did not count."""

    def __init__(self, cluster: Cluster, home: SimHost, number: int) -> None:
        self._cluster = cluster
        self._home = home
        self._process = home.process
        self._rng = cluster.world.stream(f"fault/{number}/blast")
        self._namespaces = list(cluster.plan.rights)[:2]
        self._puts = self._rng.random() < 0.5
        self._block = self._rng.randbytes(BLOCK_BYTES)
        self._callers: list[_Caller | _Putter] = []
        self._drivers: list[StreamDriver] = []
        self._sent: Counter[int] = Counter()
        self._faults_then = 0
        self._since: float | None = None
        """Since when shares count."""

    def begin(self) -> bool:
        """Put the blocks, and ask for them soon; False where this pool has no two such tenants."""
        cluster = self._cluster
        wanted = {}
        for namespace in self._namespaces:
            users = [
                host
                for host in cluster.running()
                if host is not self._home and cluster.model.may_use(host.number, namespace)
            ]
            key = self._key_of_home(namespace)
            if (
                not users
                or key is None
                or not cluster.put(users[0].number, namespace, key, self._block)
            ):
                return False
            wanted[namespace] = key, users
        if len(wanted) < 2:
            return False
        self._watch()
        cluster.world.after(BEGINS_S, lambda: self._ask(wanted))
        return True

    def _key_of_home(self, namespace: int) -> bytes | None:
        """A key of which the home is the first."""
        for _ in range(200):
            key = self._rng.randbytes(16)
            if self._cluster.model.homes_of((namespace, key))[:1] == [self._home.number]:
                return key
        return None

    def _watch(self) -> None:
        assert self._process is not None
        core = self._process.core
        shared = core.arrivals if self._puts else core.departures
        sent = shared.sent

        def watched(now: float, namespace: int, size_bytes: int) -> None:
            self._sent[namespace] += size_bytes
            sent(now, namespace, size_bytes)

        shared.sent = watched  # type: ignore[method-assign]

    def _caller(self, node_id: str, namespace: int, key: bytes) -> _Caller | _Putter | None:
        if not self._puts:
            return _Caller(node_id, namespace, key)
        assert self._process is not None
        pool = self._process.core.pool
        meaning = pool.meaning_of(namespace) if pool is not None else None
        if pool is None or meaning is None:
            return None
        header = PutHeader(key, BLOCK_BYTES, digest_of(self._block))
        put = BulkPut(namespace, pool.epoch, meaning, [header] * BLOCKS, True)
        return _Putter(node_id, put, self._block)

    def _ask(self, wanted: dict[int, tuple[bytes, list[SimHost]]]) -> None:
        cluster = self._cluster
        for namespace, (key, users) in wanted.items():
            for number in range(CONNECTIONS):
                host = users[number % len(users)]
                caller = self._caller(host.options.node_id, namespace, key)
                if caller is None:
                    continue
                end = cluster.open_bulk(host, self._home.options.node_id)
                self._callers.append(caller)
                self._drivers.append(
                    StreamDriver(cluster.world, Process(cluster.world), end, caller)
                )
        cluster.world.after(SETTLES_S, self._settled)

    def _settled(self) -> None:
        self._sent.clear()
        self._since = self._cluster.world.now
        self._faults_then = self._cluster.faults_begun

    def end(self) -> None:
        """Ask for nothing more, and judge."""
        world = self._cluster.world
        judged = self._judged()
        for caller, driver in zip(self._callers, self._drivers, strict=True):
            caller.end(world.now)
            driver.flush()
        if judged is None:
            return
        process, span_s = judged
        world.counts["blasts_judged"] += 1
        first, second = self._namespaces
        total = self._sent[first] + self._sent[second]
        weights = [self._cluster.plan.settings[n].weight for n in self._namespaces]
        due = weights[0] / sum(weights)
        got = self._sent[first] / max(1, total)
        rate = self._cluster.plan.bulk_link_bits_per_s / 8 * process.host.options.clock_rate
        if abs(got - due) > _TOLERANCE:
            raise ViolationError(
                0,
                f"of what two tenants {'put to' if self._puts else 'got of'} host "
                f"{process.host.number} by TCP, the first had {got:.2f}, and by its weight "
                f"{due:.2f}, in {span_s:.2f} s",
            )
        if total > rate * span_s + _AT_ONCE_BYTES:
            raise ViolationError(
                0,
                f"host {process.host.number} moved {total} bytes by TCP in {span_s:.2f} s, which "
                "its link does not carry",
            )

    def _judged(self) -> tuple[SimAgent, float] | None:
        """Whether both were there all the time and nothing else was wrong: then by whom they were
        answered, and for how long."""
        cluster, process = self._cluster, self._home.process
        span_s = cluster.world.now - self._since if self._since is not None else 0.0
        alone = cluster.faults_on == 1 and cluster.faults_begun == self._faults_then
        there = len(self._callers) == 2 * CONNECTIONS and all(
            not caller.closed and not caller.refused for caller in self._callers
        )
        if process is None or process is not self._process or span_s < LEAST_S:
            return None
        weighed = all(
            process.core.weight_of(n) == cluster.plan.settings[n].weight for n in self._namespaces
        )
        return (process, span_s) if alone and there and weighed else None


def blast(cluster: Cluster, home: SimHost, number: int) -> Callable[[], None] | None:
    """Let two tenants ask all they can of a home; what ends it, None where there are no two."""
    one = Blast(cluster, home, number)
    return one.end if one.begin() else None

"""What is said to an agent on its RDMA link, fuzzed.

Owns: the entry point, and a card that does at once what it is told and moves no bytes. Must not
know: how inputs are found (`engine`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcast.bench.fuzz.entry_points import agent_of_two, check_store, hold
from kvcast.bench.fuzz.targets import KEY, NAMESPACE, StreamHarness, entry_point, stream_of
from kvcast.protocol.links import grants, rdma, rdma_callee, stream
from kvcast.protocol.messages import rdma as messages
from kvcast.protocol.messages.bulk import PutHeader, WantedBlock, meaning_of
from kvcast.protocol.messages.wire import digest_of

_ENDPOINT = messages.Endpoint(bytes(16), 5, 0, 4096, 16)
_PIECE_BYTES = 200


def rdma_caller_messages() -> list[messages.RdmaCallerMessage]:
    """One of each that another agent says."""
    return [
        messages.RdmaHello(messages.RDMA_PROTOCOL_VERSION, "node-2", _ENDPOINT),
        messages.RdmaGet(1, 1, [WantedBlock(KEY[::-1]), WantedBlock(KEY, 0, 9)]),
        messages.RdmaPut(
            2,
            1,
            3,
            meaning_of(NAMESPACE),
            [PutHeader(KEY, 5, digest_of(b"hello")), PutHeader(KEY, 5, digest_of(bytes(5)))],
        ),
        messages.RdmaFinished(2),
        messages.RdmaFinished(1),
    ]


class _Pair:
    """Everything succeeds, but every ninth window."""

    endpoint = _ENDPOINT

    def __init__(self, completed: Callable[[list[rdma.Completed]], None]) -> None:
        self._completed = completed
        self._done: list[rdma.Completed] = []
        self._windows = 0

    def join(self, remote: messages.Endpoint) -> None:
        pass

    def post(self, work: Sequence[rdma.Work]) -> None:
        for order in work:
            opens = isinstance(order, rdma.OpenWindow)
            self._windows += opens
            fails = opens and self._windows % 9 == 0
            self._done.append(rdma.Completed(order.token, "no window is left" if fails else ""))

    def report(self) -> bool:
        """Tell what was done; whether there was anything."""
        done, self._done = self._done, []
        if done:
            self._completed(done)
        return bool(done)

    def close(self) -> None:
        self._done.clear()


class _Card:
    """Makes one pair."""

    max_transfer_bytes = 1 << 20
    pair: _Pair | None = None

    def make_pair(self, completed: Callable[[list[rdma.Completed]], None]) -> _Pair:
        self.pair = _Pair(completed)
        return self.pair


@entry_point("rdma-link", "what other agents say on an agent's RDMA link", rdma_callee, stream)
class RdmaLinkHarness(StreamHarness):
    """Another agent asks for windows, and its bytes never come."""

    good = rdma_caller_messages

    def __init__(self) -> None:
        self._agent = agent_of_two()
        hold(self._agent, KEY[::-1], b"y" * 3000)

    def corpus(self) -> list[bytes]:
        hello, get, put, *finished = rdma_caller_messages()
        return [
            stream_of([hello, get, put, *finished]),
            stream_of([hello, get]),
            stream_of([hello, put, finished[0]]),
        ]

    def run(self, data: bytes) -> None:
        agent, now = self._agent, 0.0
        link = rdma_callee.RdmaCallee(
            *(now, agent.serving, rdma.RdmaOptions(), agent.metrics),
            *(grants.Grants(rdma.RdmaOptions.grant_bytes), "node-2"),
        )
        card = _Card()
        holder = rdma.PairHolder(link, card, lambda: now, lambda: None)

        def settle() -> None:
            holder.carry_out()
            while card.pair is not None and card.pair.report():
                link.check()
                holder.carry_out()
            link.bytes_to_send(now, 1 << 20)
            link.check()

        for start in range(0, len(data), _PIECE_BYTES):
            if link.closed:
                break
            link.received(now, data[start : start + _PIECE_BYTES])
            settle()
            now += 0.001
        if len(data) % 3:
            link.lost(now)
        while (when := link.get_timer()) is not None:
            now = when
            link.handle_timer(now)
            settle()
        settle()
        assert link.closed
        check_store(agent.store)

    def close(self) -> None:
        self._agent.close()

"""What inference engines ask of a pool: seeded generators, and how much they ask for.

Owns: who reads which prefix when, and what the engines know beforehand (a reader group, a storm).
Must not know: pools, clients, clocks; bench/replay.py plays the requests. traces.py makes the same
requests of a trace.

A request is one engine's turn on one node: it asks for the longest prefix of its keys that the
pool holds, gets it, computes the rest and (if `writes`) puts it. Keys are chained: a key names
its block and everything before it. docs/architecture.md ("The problem") says which workloads make
reads coincide, and that independent chats do not: `chat` is the counter-case.

Every generator is endless, in order of `time_s`, and gives the same requests for the same
options; replay and demo take as many as fit their budget.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from kvcast.protocol.bounded_map import BoundedMap

Dispatch = Literal["round-robin", "affinity"]
DISPATCHES: tuple[Dispatch, ...] = ("round-robin", "affinity")

TENSOR_PARALLEL_RANKS = 4
"""Hosts that one engine of `tp-mla` spans."""
TP_MLA_GATHER_MS = 10
"""How long a home may hold its answer for joiners: the ranks of an engine, which are told at one
moment, and of which one is only as late as its processor is;"""
ROLLOUT_GATHER_MS = 40
FAN_OUT_GATHER_MS = 40
STORM_GATHER_MS = 60
"""the same for those who begin by themselves: scaled to a software switch of a few thousand frames
a second, on which a block takes tens of milliseconds; hardware would want microseconds."""

MAX_OPEN_CONVERSATIONS = 64
MAX_CONVERSATION_PREFIXES = 8
"""A conversation of so many prefixes' blocks ends with that turn: an endless stream of requests
shall not be made of ever longer ones."""
_NUMBERS_REMEMBERED = 10_000
"""Requests of one kind in a mix on which a later one may still depend."""


class WorkloadError(ValueError):
    """A workload that cannot be generated, or a trace that cannot be read; says where and why."""


@dataclass(frozen=True, slots=True)
class Request:
    """One engine's turn on one node.

    `number` counts from 0 in a workload. It starts at `time_s` (seconds from the workload's
    start), but not before request `after` has ended; `jitter_s` later in any case. Where `group`
    is not empty, its nodes (`node` first) are the ranks of one engine: a reader group known
    beforehand, which all get the same blocks at once; `node` alone looks up and writes.
    """

    number: int
    time_s: float
    node: int
    keys: tuple[bytes, ...]
    kind: str
    namespace: str = "bench"
    writes: bool = True
    after: int | None = None
    jitter_s: float = 0.0
    group: tuple[int, ...] = ()
    gather_ms: int = 0


@dataclass(frozen=True)
class WorkloadOptions:
    """What a generator is asked for."""

    nodes: int = 8
    seed: int = 1
    rate_per_s: float = 4.0
    """Prompts (not reads) that arrive a second, over the whole pool."""
    prefix_blocks: int = 8
    """Blocks of a typical shared prefix; suffixes and turns are a fraction of it."""
    dispatch: Dispatch = "round-robin"

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise WorkloadError(f"a workload needs at least one node, not {self.nodes}")
        if not self.rate_per_s > 0:
            raise WorkloadError(f"a rate of {self.rate_per_s} prompts a second is not positive")
        if self.prefix_blocks < 1:
            raise WorkloadError("a prefix has at least one block")


def chain(parent: bytes, content: object) -> bytes:
    """The key of a block with this content behind the prefix that `parent` names (b"" = none)."""
    return hashlib.blake2b(parent + repr(content).encode(), digest_size=16).digest()


def chained(prefix: tuple[bytes, ...], content: object, blocks: int) -> tuple[bytes, ...]:
    """`prefix` and `blocks` further keys for that content."""
    keys = list(prefix)
    for index in range(blocks):
        keys.append(chain(keys[-1] if keys else b"", (content, index)))
    return tuple(keys)


class Dispatcher:
    """Which node serves a request: a stateless router, or one that remembers prefixes.

    round-robin: the next node, whatever the prompt. affinity: the node that last served the
    longest prefix of the prompt, if that is more than its first block; else round-robin.
    """

    def __init__(self, policy: Dispatch, nodes: int) -> None:
        self._policy = policy
        self._turn = itertools.cycle(range(nodes))
        self._served: dict[bytes, int] = {}

    def node(self, keys: tuple[bytes, ...]) -> int:
        chosen: int | None = None
        if self._policy == "affinity":
            for key in reversed(keys[1:]):
                if key in self._served:
                    chosen = self._served[key]
                    break
        if chosen is None:
            chosen = next(self._turn)
        if self._policy == "affinity":
            self._served.update(dict.fromkeys(keys, chosen))
        return chosen


# --- generators ---------------------------------------------------------------------------------


@dataclass
class _Arrivals:
    """What the generators share: a seeded source, Poisson arrivals, request numbers."""

    options: WorkloadOptions
    kind: str
    weight: float = 1.0
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.kind}/{self.options.seed}")

    def times(self) -> Iterator[float]:
        now = 0.0
        while True:
            now += self.rng.expovariate(self.options.rate_per_s * self.weight)
            yield now

    def blocks(self, share: float) -> int:
        """About `share` of a prefix's blocks, at least one."""
        mean = self.options.prefix_blocks * share
        return max(1, round(self.rng.uniform(0.5, 1.5) * mean))

    def goes_on(self, keys: tuple[bytes, ...]) -> bool:
        """Whether a conversation of these blocks may have another turn."""
        return len(keys) < MAX_CONVERSATION_PREFIXES * self.options.prefix_blocks


def _tp_mla(make: _Arrivals) -> Iterator[Request]:
    """Turns of conversations on engines that span several hosts; all ranks read at once."""
    options, rng = make.options, make.rng
    ranks = min(TENSOR_PARALLEL_RANKS, options.nodes)
    engines = [
        tuple(range(first, first + ranks)) for first in range(0, options.nodes - ranks + 1, ranks)
    ]
    turn = itertools.cycle(engines)
    open_conversations: list[tuple[int, tuple[bytes, ...], int]] = []
    for at, conversation in zip(make.times(), itertools.count(), strict=False):
        if open_conversations and rng.random() < 0.6:
            place = rng.randrange(len(open_conversations))
            name, history, after = open_conversations.pop(place)
            keys, waits_for = (
                chained(history, (make.kind, name, len(history)), make.blocks(0.3)),
                after,
            )
        else:
            name, waits_for = conversation, None
            keys = chained((), (make.kind, options.seed, name), make.blocks(1.0))
        group, number = next(turn), next(make.numbers)
        # The ranks are told at about the same time; the first one's READ gives the others a moment.
        yield Request(
            number,
            at,
            group[0],
            keys,
            make.kind,
            after=waits_for,
            group=group,
            gather_ms=TP_MLA_GATHER_MS,
        )
        if make.goes_on(keys) and len(open_conversations) < MAX_OPEN_CONVERSATIONS:
            open_conversations.append((name, keys, number))


def _rollout(make: _Arrivals) -> Iterator[Request]:
    """One node prefills a prompt; then G samples of it start at once, each on its own node."""
    options, rng = make.options, make.rng
    samples = min(8, options.nodes)
    for at, prompt in zip(make.times(), itertools.count(), strict=False):
        nodes = rng.sample(range(options.nodes), samples)
        keys = chained((), (make.kind, options.seed, prompt), make.blocks(1.0))
        first = next(make.numbers)
        yield Request(first, at, nodes[0], keys, make.kind)
        for sample, node in enumerate(nodes[1:] + nodes[:1]):
            yield Request(
                next(make.numbers),
                at,
                node,
                chained(keys, (make.kind, prompt, sample), 1),
                make.kind,
                after=first,
                jitter_s=min(0.02, rng.expovariate(1 / 0.002)),
                gather_ms=ROLLOUT_GATHER_MS,
            )


def _fan_out(make: _Arrivals) -> Iterator[Request]:
    """An agent with a long context spawns sub-agents on other nodes; all continue from it."""
    options, rng = make.options, make.rng
    for at, agent in zip(make.times(), itertools.count(), strict=False):
        width = min(options.nodes, rng.randint(3, 8))
        nodes = rng.sample(range(options.nodes), width)
        context = chained((), (make.kind, options.seed, agent), make.blocks(1.5))
        first = next(make.numbers)
        yield Request(first, at, nodes[0], context, make.kind)
        for child, node in enumerate(nodes[1:] or nodes):
            yield Request(
                next(make.numbers),
                at,
                node,
                chained(context, (make.kind, agent, child), make.blocks(0.2)),
                make.kind,
                after=first,
                jitter_s=min(0.05, rng.expovariate(1 / 0.005)),
                gather_ms=FAN_OUT_GATHER_MS,
            )


def _storm(make: _Arrivals) -> Iterator[Request]:
    """A version goes live: one warm node holds the hot prefixes, all others start cold."""
    options, rng = make.options, make.rng
    for at, rollout in zip(make.times(), itertools.count(), strict=False):
        warm = rng.randrange(options.nodes)
        hot = [
            chained((), (make.kind, options.seed, rollout, prefix), make.blocks(0.5))
            for prefix in range(3)
        ]
        written = []
        for keys in hot:
            number = next(make.numbers)
            written.append(number)
            yield Request(number, at, warm, keys, make.kind, namespace=f"storm-{rollout % 4}")
        for node in range(options.nodes):
            if node == warm:
                continue
            after, late = written[-1], min(0.05, rng.expovariate(1 / 0.01))
            for keys in hot:
                number = next(make.numbers)
                yield Request(
                    number,
                    at,
                    node,
                    keys,
                    make.kind,
                    namespace=f"storm-{rollout % 4}",
                    after=after,
                    jitter_s=late,
                    gather_ms=STORM_GATHER_MS,
                )
                after, late = number, 0.0


def _chat(make: _Arrivals) -> Iterator[Request]:
    """Independent users; each turn's prompt is the conversation so far and one more message."""
    options, rng = make.options, make.rng
    dispatcher = Dispatcher(options.dispatch, options.nodes)
    open_chats: list[tuple[int, tuple[bytes, ...], int]] = []
    for at, user in zip(make.times(), itertools.count(), strict=False):
        if open_chats and rng.random() < 0.75:
            name, history, after = open_chats.pop(rng.randrange(len(open_chats)))
            keys = chained(history, (make.kind, name, len(history)), make.blocks(0.3))
            waits_for: int | None = after
        else:
            name, waits_for = user, None
            keys = chained((), (make.kind, options.seed, name), make.blocks(0.6))
        number = next(make.numbers)
        yield Request(number, at, dispatcher.node(keys), keys, make.kind, after=waits_for)
        if make.goes_on(keys) and len(open_chats) < MAX_OPEN_CONVERSATIONS:
            open_chats.append((name, keys, number))


def _prompt_rollout(make: _Arrivals) -> Iterator[Request]:
    """A new system prompt: one node computes it; the others meet it with their next user's turn."""
    options, rng = make.options, make.rng
    for at, prompt in zip(make.times(), itertools.count(), strict=False):
        nodes = rng.sample(range(options.nodes), options.nodes)
        keys = chained((), (make.kind, options.seed, prompt), make.blocks(1.0))
        first = next(make.numbers)
        yield Request(first, at, nodes[0], keys, make.kind)
        for user, node in enumerate(nodes[1:]):
            yield Request(
                next(make.numbers),
                at,
                node,
                chained(keys, (make.kind, prompt, user), 1),
                make.kind,
                after=first,
                jitter_s=min(2.0, rng.expovariate(1 / 0.4)),
            )


def _model_load(make: _Arrivals) -> Iterator[Request]:
    """A version's weights, all of them on every node, as cold nodes start together."""
    options, rng = make.options, make.rng
    for at, version in zip(make.times(), itertools.count(), strict=False):
        nodes = rng.sample(range(options.nodes), options.nodes)
        keys = chained((), (make.kind, options.seed, version), 4 * options.prefix_blocks)
        first = next(make.numbers)
        yield Request(first, at, nodes[0], keys, make.kind)
        for node in nodes[1:]:
            yield Request(
                next(make.numbers),
                at,
                node,
                keys,
                make.kind,
                writes=False,
                after=first,
                jitter_s=min(0.05, rng.expovariate(1 / 0.01)),
                gather_ms=STORM_GATHER_MS,
            )


def _prefill_decode(make: _Arrivals) -> Iterator[Request]:
    """A prefill node hands a prompt to the ranks of a decode engine on up to four other nodes."""
    options, rng = make.options, make.rng
    ranks = max(1, min(TENSOR_PARALLEL_RANKS, options.nodes - 1))
    for at, prompt in zip(make.times(), itertools.count(), strict=False):
        nodes = rng.sample(range(options.nodes), min(options.nodes, ranks + 1))
        keys = chained((), (make.kind, options.seed, prompt), make.blocks(1.0))
        first, group = next(make.numbers), tuple(nodes[1:]) or tuple(nodes)
        yield Request(first, at, nodes[0], keys, make.kind)
        yield Request(
            next(make.numbers),
            at,
            group[0],
            keys,
            make.kind,
            writes=False,
            after=first,
            group=group,
            gather_ms=TP_MLA_GATHER_MS,
        )


_MIX = (("chat", 0.40), ("tp-mla", 0.25), ("fan-out", 0.15), ("rollout", 0.15), ("storm", 0.05))
"""Shares of the arriving prompts; a storm is one prompt here, though it makes dozens of reads."""


def _mix(make: _Arrivals) -> Iterator[Request]:
    """All of the others at once, by shares of the arriving prompts."""
    streams = [
        _GENERATORS[kind](_Arrivals(make.options, kind, weight=share)) for kind, share in _MIX
    ]
    tagged = [
        ((request.time_s, place, request) for request in stream)
        for place, stream in enumerate(streams)
    ]
    numbers = [BoundedMap[int, int](_NUMBERS_REMEMBERED) for _ in streams]
    for _, place, request in heapq.merge(*tagged, key=lambda item: (item[0], item[1])):
        number = next(make.numbers)
        mine = numbers[place]
        after = None if request.after is None else mine.get(request.after)
        mine[request.number] = number
        yield replace(request, number=number, after=after)


_GENERATORS: dict[str, Callable[[_Arrivals], Iterator[Request]]] = {
    "tp-mla": _tp_mla,
    "rollout": _rollout,
    "fan-out": _fan_out,
    "storm": _storm,
    "prompt-rollout": _prompt_rollout,
    "model-load": _model_load,
    "prefill-decode": _prefill_decode,
    "chat": _chat,
    "mix": _mix,
}

DESCRIPTIONS = {
    "tp-mla": (
        f"conversations on engines whose {TENSOR_PARALLEL_RANKS} tensor-parallel ranks sit on "
        "different hosts; with MLA every rank needs the same latent KV, so every fetch is "
        "N-to-1"
    ),
    "rollout": (
        "reinforcement learning: one node prefills a prompt, then up to 8 samples of it start "
        "at once on different nodes; they allow a short gather time"
    ),
    "fan-out": (
        "an agent with a long context spawns 2 to 7 sub-agents on other nodes within some "
        "milliseconds; each continues from the shared context"
    ),
    "storm": (
        "scale-out or a new version: one warm node holds the hot prefixes, and all other nodes, "
        "cold, want all of them at the same moment"
    ),
    "chat": (
        "independent multi-turn chats, spread over the nodes by --dispatch; reads hardly ever "
        "coincide, so this is what kvcast does not help with"
    ),
    "prompt-rollout": (
        "a new system prompt: one node computes it, and every other node wants it with the next "
        "user's turn there, within a second or two"
    ),
    "model-load": "the weights of a new version: cold nodes want all of its blocks at once",
    "prefill-decode": (
        f"a prefill node hands each prompt to a decode engine of {TENSOR_PARALLEL_RANKS} ranks on "
        "other nodes, which read it at once"
    ),
    "mix": "many kinds at once (the default): " + ", ".join(f"{s:.0%} {k}" for k, s in _MIX),
}
NAMES = tuple(_GENERATORS)


def generate(name: str, options: WorkloadOptions) -> Iterator[Request]:
    """The endless stream of requests of that workload; WorkloadError for an unknown name."""
    generator = _GENERATORS.get(name)
    if generator is None:
        raise WorkloadError(f"no workload {name!r}; there are {', '.join(NAMES)}")
    return generator(_Arrivals(options, name))


# --- how much a workload asks for ---------------------------------------------------------------


@dataclass
class Demand:
    """What requests would ask of a pool whose nodes keep everything that they read or wrote.

    `remote_reads` counts blocks that a node reads and has not got: an upper bound, since some of
    them are at home there. `distinct_remote` counts the different ones among them.
    """

    requests: int = 0
    written: int = 0
    remote_reads: int = 0
    _written: set[tuple[str, bytes]] = field(default_factory=set)
    _held: set[tuple[int, str, bytes]] = field(default_factory=set)
    _remote: set[tuple[str, bytes]] = field(default_factory=set)

    @property
    def distinct_remote(self) -> int:
        return len(self._remote)

    def add(self, request: Request) -> None:
        """Count one request, which comes after all those counted before."""
        self.requests += 1
        for key in request.keys:
            block = (request.namespace, key)
            if block in self._written:
                for node in request.group or (request.node,):
                    if (node, *block) not in self._held:
                        self.remote_reads += 1
                        self._remote.add(block)
                        self._held.add((node, *block))
            elif request.writes:
                self.written += 1
                self._written.add(block)
                self._held.add((request.node, *block))


def take(
    requests: Iterable[Request], *, remote_reads: int, written: int, requests_at_most: int
) -> tuple[list[Request], Demand]:
    """The first requests whose demand stays within all three bounds, and that demand.

    The first request is always taken.
    """
    taken: list[Request] = []
    demand = Demand()
    for request in requests:
        if taken and (
            demand.remote_reads >= remote_reads
            or demand.written >= written
            or demand.requests >= requests_at_most
        ):
            break
        demand.add(request)
        taken.append(request)
    return taken, demand

"""Which engine a request goes to: the one that will have its first token soonest, all considered.

Owns: the choice, the refusal, and what both rest on. Must not know: HTTP, ZeroMQ, tokenizers, the
pool's agents. Follows Mooncake's Conductor (the smallest estimated time to first token, early
rejection) and NetKV (a transfer has a cost, and the link that it takes is shared).

For each engine that is up:

    first token = max(wait behind its queue, link free) + load + compute

`load`: blocks that the pool, or the engine's host, holds beyond the engine's own prefix; they are
loaded only if that is sooner than computing them. With a prefetch the load begins when the request
is sent, and so goes on while it waits; without, behind the wait. `compute`: the rest of the
prompt.

The smallest sum wins, but for two corrections. Work that is done twice delays whoever comes next,
so an engine's own work counts `work_weight` times more; and each answer that it is decoding slows
all others a little. Equal choices go to who was sent something least recently. No chance is
involved: the same events at the same times give the same choices.

A request with a deadline that no engine can meet is refused before it costs anything: with
`OVERLOADED` if an idle engine could have met it, else `TOO_LONG`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from kvcast.routing.core.costs import CostModel
from kvcast.routing.core.hashing import Chain
from kvcast.routing.core.index import PrefixIndex, Run
from kvcast.routing.core.load import Average, EngineLoad


class Place(enum.Enum):
    """Where an engine's events say that a block lies."""

    ENGINE = "engine"
    """In the memory that it computes with."""
    HOST = "host"
    """In the memory, or on the disk, of its host: for this engine alone."""


class Reason(enum.Enum):
    """Why a request is refused."""

    NO_ENGINE = "no engine is up"
    FULL = "every engine has as many requests as it may have"
    OVERLOADED = "no engine can meet the deadline now"
    TOO_LONG = "no engine could meet the deadline even when idle"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked: the chain of its whole blocks, its length, and tokens a block."""

    chain: Chain
    tokens: int
    block_tokens: float

    def tokens_of(self, blocks: int) -> int:
        """The tokens of so many blocks; at least one of the prompt's is left to compute."""
        return max(0, min(round(blocks * self.block_tokens), self.tokens - 1))


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a request would meet at an engine. Lengths in tokens of the prompt: what the engine
    holds, what its host has beyond that, what is brought from the pool beyond both; the rest is
    computed."""

    engine: str
    engine_tokens: int
    host_tokens: int
    pool_tokens: int
    wait_s: float
    load_s: float
    compute_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Send it there. `prefetch`: the blocks of the chain, by position, that its node is to fetch
    from the pool meanwhile; empty where that does not pay."""

    estimate: Estimate
    prefetch: range

    @property
    def engine(self) -> str:
        return self.estimate.engine


@dataclass(frozen=True, slots=True)
class Refusal:
    """Do not send it anywhere. `retry_after_s`: when it would be worth another try."""

    reason: Reason
    retry_after_s: float


@dataclass(frozen=True)
class RouterOptions:
    """How the router chooses, and what it keeps at most."""

    costs: CostModel = field(default_factory=CostModel)
    slots: int = 64
    """Requests that an engine runs at once."""
    max_in_flight: int = 256
    """Requests that an engine may have, running and waiting; more are refused."""
    expect_s: float = 60.0
    """How long blocks are taken for held that a request sent somewhere will leave there, unless an
    event says so before. Without events this is all that the router knows: make it minutes."""
    work_weight: float = 1.0
    """How many times more an engine's own work counts than the same time spent waiting."""
    decode_weight_s: float = 0.0005
    """Seconds that each answer that an engine is decoding counts."""
    alike: float = 0.05
    """Engines of which one is worse than the best by less than this share are equal: else those
    that were a little slower once would get nothing any more."""
    pool_saves_all: bool = False
    """The engines' connectors put all that they compute into the pool: a prompt whose first token
    has come is there, too."""
    prefetches: bool = True
    """There is somebody to send a prefetch to."""
    max_blocks: int = 2_000_000
    """Blocks in the index."""
    max_expected: int = 500_000
    """Pairs of block and engine that are expected."""


@dataclass(slots=True)
class _Engine:
    name: str
    held: int
    """Its number as a holder in the index, and its host's."""
    host: int
    load: EngineLoad
    up: bool = True
    last_sent: int = 0
    """The turn of its last request; of those that had none, the first added goes first."""


class Router:
    """Engines are known by name, requests by an id of the caller's."""

    def __init__(self, options: RouterOptions | None = None) -> None:
        self.options = options or RouterOptions()
        self.index = PrefixIndex(self.options.max_blocks, self.options.max_expected)
        self._pool = self.index.add_holder()
        self._engines: dict[str, _Engine] = {}
        self._sent_to: dict[str, _Engine] = {}
        self._chains: dict[str, Chain] = {}
        self._fleet = Average()
        self._turn = 0

    # --- what the router hears ------------------------------------------------------------------

    def add_engine(self, name: str, slots: int | None = None) -> None:
        """An engine that may be sent requests; ValueError if the name is taken."""
        if name in self._engines:
            raise ValueError(f"there is an engine {name!r} already")
        self._engines[name] = _Engine(
            name,
            self.index.add_holder(),
            self.index.add_holder(),
            EngineLoad(slots or self.options.slots, self._fleet),
        )

    @property
    def engines(self) -> list[str]:
        return list(self._engines)

    def load_of(self, engine: str) -> EngineLoad:
        return self._engines[engine].load

    def is_up(self, engine: str) -> bool:
        return self._engines[engine].up

    def set_up(self, engine: str, up: bool) -> None:
        """An engine answers, or does not any more. What it held stays: `cleared` says otherwise."""
        self._engines[engine].up = up

    def stored(self, engine: str, blocks: Iterable[int], place: Place = Place.ENGINE) -> None:
        """An engine has these blocks now."""
        self.index.stored(self._holder(engine, place), blocks)

    def removed(self, engine: str, blocks: Iterable[int], place: Place = Place.ENGINE) -> None:
        """An engine has these blocks no longer."""
        self.index.removed(self._holder(engine, place), blocks)

    def cleared(self, engine: str) -> None:
        """An engine has nothing any more: it was told to forget, or is a new process."""
        self.index.clear(self._holder(engine, Place.ENGINE))
        self.index.clear(self._holder(engine, Place.HOST))

    def pooled(self, blocks: Iterable[int]) -> None:
        """The pool has these blocks now."""
        self.index.stored(self._pool, blocks)

    def unpooled(self, blocks: Iterable[int]) -> None:
        """The pool has these blocks no longer."""
        self.index.removed(self._pool, blocks)

    def fetched(self, engine: str, blocks: Iterable[int], now: float) -> None:
        """An engine's agent has these blocks of the pool in its own memory, or will in a moment."""
        holder = self._holder(engine, Place.HOST)
        self.index.expect(holder, blocks, now + self.options.expect_s)

    def first_token(self, request: str, now: float, *, seen: bool = True) -> None:
        """A request's answer has begun. Not `seen`: it is taken to have begun by now, which says
        nothing of its engine's pace."""
        engine = self._sent_to.get(request)
        if engine is None:
            return
        engine.load.first_token(request, now, seen=seen)
        if self.options.pool_saves_all:
            self.index.expect(self._pool, self._chains[request], now + self.options.expect_s)

    def ended(self, request: str, now: float, *, computed: bool = True) -> None:
        """A request's answer has ended. `computed`: so was its prompt; else none is expected."""
        engine = self._sent_to.pop(request, None)
        if engine is None:
            return
        engine.load.ended(request, now)
        chain = self._chains.pop(request)
        if not computed:
            self.index.unexpect(engine.held, chain)

    # --- what it says ---------------------------------------------------------------------------

    def route(
        self,
        request: str,
        prompt: Prompt,
        now: float,
        *,
        deadline_s: float = math.inf,
        without: Collection[str] = (),
    ) -> Choice | Refusal:
        """Where a request goes; from then on it is in flight there until `ended`.

        `deadline_s`: its first token must come within so many seconds from now; `without`: engines
        that have failed it. ValueError if the request is in flight already.
        """
        if request in self._sent_to:
            raise ValueError(f"request {request!r} is in flight")
        able = [each for each in self._engines.values() if each.up and each.name not in without]
        if not able:
            return Refusal(Reason.NO_ENGINE, 1.0)
        free = [each for each in able if not self._is_full(each)]
        if not free:
            return Refusal(Reason.FULL, min(each.load.decode_s for each in able))
        runs = self.index.runs(prompt.chain, now)
        meet: list[tuple[float, _Engine, Estimate]] = []
        soonest = idle = math.inf
        for engine in free:
            estimate = self._estimate(engine, prompt, runs, now)
            soonest = min(soonest, estimate.ttft_s)
            idle = min(idle, estimate.load_s + estimate.compute_s)
            if estimate.ttft_s <= deadline_s:
                meet.append((self._score(engine, estimate), engine, estimate))
        if not meet:
            reason = Reason.TOO_LONG if idle > deadline_s else Reason.OVERLOADED
            return Refusal(reason, max(0.0, soonest - deadline_s))
        enough = min(score for score, _, _ in meet) * (1 + self.options.alike)
        _, engine, estimate = min(
            (each for each in meet if each[0] <= enough), key=lambda each: each[1].last_sent
        )
        self._send(request, engine, estimate, prompt.chain, now)
        return Choice(estimate, self._prefetch(prompt, estimate))

    def estimates(self, prompt: Prompt, now: float) -> list[Estimate]:
        """What a request would meet at each engine that is up, in the order of their names."""
        runs = self.index.runs(prompt.chain, now)
        engines = sorted(self._engines.values(), key=lambda each: each.name)
        return [self._estimate(each, prompt, runs, now) for each in engines if each.up]

    # --- how -------------------------------------------------------------------------------------

    def _is_full(self, engine: _Engine) -> bool:
        return len(engine.load.in_flight) >= self.options.max_in_flight

    def _holder(self, engine: str, place: Place) -> int:
        known = self._engines[engine]
        return known.held if place is Place.ENGINE else known.host

    def _estimate(self, engine: _Engine, prompt: Prompt, runs: list[Run], now: float) -> Estimate:
        own, near, far = self._held(engine, runs)
        costs, load = self.options.costs, engine.load
        own_tokens = prompt.tokens_of(own)
        near_tokens = prompt.tokens_of(own + near) - own_tokens
        far_tokens = prompt.tokens_of(own + near + far) - own_tokens - near_tokens
        near_s, far_s = costs.host_s(near_tokens), costs.pool_s(far_tokens)
        wait_s = load.wait_s(now)
        link_s = max(0.0, load.link_free_at - now)
        begin = own_tokens + near_tokens
        # From the pool only what comes sooner than it would be computed: an engine that is idle may
        # be quicker than a link on which others wait.
        if far_tokens:
            computed_s = costs.compute_s(begin, begin + far_tokens) * load.pace
            if max(0.0, link_s - wait_s) + far_s >= computed_s:
                far_tokens, far_s = 0, 0.0
        load_s = near_s + far_s
        compute_s = costs.compute_s(begin + far_tokens, prompt.tokens) * load.pace
        if not far_tokens:
            ready_s = wait_s + load_s
        elif self.options.prefetches:
            ready_s = max(wait_s + near_s, link_s + load_s)
        else:
            ready_s = max(wait_s, link_s) + load_s
        return Estimate(
            engine.name,
            own_tokens,
            near_tokens,
            far_tokens,
            wait_s,
            load_s,
            compute_s,
            ready_s + compute_s,
        )

    def _held(self, engine: _Engine, runs: list[Run]) -> tuple[int, int, int]:
        """Blocks of the prefix that the engine has, that its host has beyond, and the pool."""
        index = self.index
        own_bit, host_bit = index.bit_of(engine.held), index.bit_of(engine.host)
        pool_bit = index.bit_of(self._pool)
        counts = [0, 0, 0]
        stage = 0
        for run in runs:
            for at, bits in (
                (0, own_bit),
                (1, own_bit | host_bit),
                (2, own_bit | host_bit | pool_bit),
            ):
                if at >= stage and run.holders & bits:
                    stage = at
                    counts[at] += run.blocks
                    break
            else:
                break
        return counts[0], counts[1], counts[2]

    def _score(self, engine: _Engine, estimate: Estimate) -> float:
        options = self.options
        work_s = estimate.compute_s + estimate.load_s
        return (
            estimate.ttft_s
            + options.work_weight * work_s
            + options.decode_weight_s * engine.load.decoding
        )

    def _send(
        self, request: str, engine: _Engine, estimate: Estimate, chain: Chain, now: float
    ) -> None:
        self._turn += 1
        engine.last_sent = self._turn
        self._sent_to[request] = engine
        self._chains[request] = chain
        far_s = self.options.costs.pool_s(estimate.pool_tokens)
        work_s = estimate.compute_s / engine.load.pace
        engine.load.sent(request, work_s, far_s, estimate.ttft_s, now)
        self.index.expect(engine.held, chain, now + self.options.expect_s)

    def _prefetch(self, prompt: Prompt, estimate: Estimate) -> range:
        if not (estimate.pool_tokens and self.options.prefetches):
            return range(0)
        first = estimate.engine_tokens + estimate.host_tokens
        last = first + estimate.pool_tokens
        return range(
            math.floor(first / prompt.block_tokens),
            min(len(prompt.chain), math.ceil(last / prompt.block_tokens)),
        )

"""A simulation of engines behind a router: who computes, loads and decodes what, and when.

Owns: the simulated engines and their pool, in virtual time. Must not know: how a router chooses, or
what is reported. Nothing here measures anything real.

The model, all of it:

- An engine computes one prompt at a time, in the order in which they came, as fast as `CostModel`
  says times its own `speed`; answers are decoded beside it, each token in `decode_s_per_token` and
  `decode_s_per_sequence` more for each answer beside it, fixed when the answer begins. It runs
  `slots` requests at once, those that load included.
- It keeps the blocks of prompts in `kv_tokens` of memory, the least recently used gives way; blocks
  of requests that run stay. A prompt that finds no room waits. Blocks of answers are not kept (a
  trace does not say which later block is which answer).
- The pool keeps every block that was computed, `pool_tokens` in all, the least recently used gives
  way. Any engine loads from it over a link of its own, one load after the other, at
  `CostModel.pool_bytes_per_s`; it does so when the prompt's turn comes (and then others go on while
  it loads) or, with a prefetch, when the request arrives; and only what comes sooner than it would
  be computed. Writing to the pool costs nothing, and its homes' links are never the limit.
- What an engine stored or removed is told `event_delay_s` later.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvcast.routing.core.costs import CostModel
from kvcast.simulation.world import World


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request of a workload. `blocks`: names of its whole blocks, each of which names the prefix
    up to its end."""

    number: int
    arrives_s: float
    blocks: tuple[int, ...]
    tokens: int
    answer_tokens: int
    block_tokens: float

    def tokens_of(self, blocks: int) -> int:
        """The tokens of so many blocks, of which the prompt's last token is none."""
        return max(0, min(round(blocks * self.block_tokens), self.tokens - 1))


@dataclass(frozen=True)
class EngineModel:
    """What every simulated engine is like; see above."""

    costs: CostModel = field(default_factory=CostModel)
    slots: int = 64
    kv_tokens: int = 500_000
    pool_tokens: int = 8_000_000
    decode_s_per_token: float = 0.015
    decode_s_per_sequence: float = 0.0001
    event_delay_s: float = 0.005


@dataclass(slots=True)
class Outcome:
    """What became of a request; lengths in tokens of its prompt."""

    request: SimulatedRequest
    engine: int
    ttft_s: float
    engine_tokens: int
    pool_tokens: int
    ended_s: float = 0.0


class Policy(Protocol):
    """Chooses engines, and hears what happens to them."""

    def choose(self, request: SimulatedRequest, now: float) -> tuple[int, range] | None:
        """The engine, and which of the request's blocks are prefetched; None = refused."""

    def first_token(self, request: SimulatedRequest, now: float) -> None: ...

    def ended(self, request: SimulatedRequest, now: float) -> None: ...

    def stored(self, engine: int, blocks: Sequence[int]) -> None: ...

    def removed(self, engine: int, blocks: Sequence[int]) -> None: ...

    def pooled(self, blocks: Sequence[int]) -> None: ...

    def unpooled(self, blocks: Sequence[int]) -> None: ...


class _Memory:
    """Blocks in order of their last use, and how many tokens they are."""

    def __init__(self, tokens: int) -> None:
        self.free = tokens
        self._blocks: OrderedDict[int, int] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def use(self, block: int) -> None:
        self._blocks.move_to_end(block)

    def prefix(self, blocks: Sequence[int], first: int = 0) -> int:
        """How many of these blocks are here in a row, from `first` on."""
        count = first
        while count < len(blocks) and blocks[count] in self._blocks:
            count += 1
        return count

    def add(self, block: int, tokens: int, kept: dict[int, int]) -> list[int]:
        """Add or use a block; what gave way, of that which is not `kept`."""
        if block in self._blocks:
            self._blocks.move_to_end(block)
            return []
        gone: list[int] = []
        self._blocks[block] = tokens
        self.free -= tokens
        while self.free < 0:
            victim = next((one for one in self._blocks if one not in kept and one != block), None)
            if victim is None:
                break
            self.free += self._blocks.pop(victim)
            gone.append(victim)
        return gone


@dataclass(slots=True)
class _Running:
    request: SimulatedRequest
    loaded_at: float | None = None
    """When its prefetch, or its load, is over; None = there is none."""
    loaded_blocks: int = 0
    pool_tokens: int = 0
    engine_tokens: int = 0


class _Engine:
    def __init__(self, simulation: Simulation, number: int, speed: float) -> None:
        self.simulation = simulation
        self.number = number
        self.speed = speed
        self.memory = _Memory(simulation.model.kv_tokens)
        self.kept: dict[int, int] = {}
        """Blocks of requests that run -> how many of those."""
        self.kept_tokens = 0
        self.waiting: deque[_Running] = deque()
        self.loading = 0
        self.decoding = 0
        self.computing = False
        self.link_free_at = 0.0

    def arrives(self, request: SimulatedRequest, prefetch: range, now: float) -> None:
        running = _Running(request)
        if len(prefetch):
            held = self.memory.prefix(request.blocks)
            in_pool = min(prefetch.stop, self.simulation.pool.prefix(request.blocks, held))
            if in_pool > held:
                self._load(running, held, in_pool, now)
        self.waiting.append(running)
        self.go_on(now)

    def go_on(self, now: float) -> None:
        """Take the next prompt, if one can be taken."""
        model = self.simulation.model
        while self.waiting and not self.computing:
            if self.decoding + self.loading >= model.slots:
                return
            running = self.waiting[0]
            request = running.request
            if self.kept_tokens + request.tokens > model.kv_tokens and self.kept_tokens:
                return
            self.waiting.popleft()
            held = self.memory.prefix(request.blocks)
            if running.loaded_at is None:
                in_pool = self.simulation.pool.prefix(request.blocks, held)
                if in_pool > held and self._load_pays(request, held, in_pool, now):
                    self._load(running, held, in_pool, now)
            if running.loaded_at is not None and running.loaded_at > now:
                self.loading += 1
                self.simulation.at(running.loaded_at, self._loaded, running)
                continue
            self._compute(running, now)

    def _load_pays(self, request: SimulatedRequest, held: int, in_pool: int, now: float) -> bool:
        first, last = request.tokens_of(held), request.tokens_of(in_pool)
        costs = self.simulation.model.costs
        wait_s = max(0.0, self.link_free_at - now)
        return wait_s + costs.pool_s(last - first) < costs.compute_s(first, last) / self.speed

    def _load(self, running: _Running, held: int, in_pool: int, now: float) -> None:
        request = running.request
        tokens = request.tokens_of(in_pool) - request.tokens_of(held)
        took = self.simulation.model.costs.pool_s(tokens)
        self.link_free_at = max(now, self.link_free_at) + took
        running.loaded_at, running.loaded_blocks = self.link_free_at, in_pool
        for block in request.blocks[held:in_pool]:
            self.simulation.pool.use(block)

    def _loaded(self, running: _Running, now: float) -> None:
        """A load that the prompt's turn waited for is over: it is next."""
        self.loading -= 1
        running.loaded_at = now
        self.waiting.appendleft(running)
        self.go_on(now)

    def _compute(self, running: _Running, now: float) -> None:
        request = running.request
        held = self.memory.prefix(request.blocks)
        usable = max(held, running.loaded_blocks)
        running.engine_tokens = request.tokens_of(held)
        running.pool_tokens = request.tokens_of(usable) - running.engine_tokens
        first = request.tokens_of(usable)
        took = self.simulation.model.costs.compute_s(first, request.tokens) / self.speed
        for block in request.blocks:
            self.kept[block] = self.kept.get(block, 0) + 1
        self.kept_tokens += request.tokens
        self.computing = True
        self.simulation.at(now + took, self._computed, running)

    def _computed(self, running: _Running, now: float) -> None:
        self.computing = False
        self.decoding += 1
        request, model = running.request, self.simulation.model
        self._keep(request, now)
        self.simulation.first_token(
            Outcome(
                request,
                self.number,
                now - request.arrives_s,
                running.engine_tokens,
                running.pool_tokens,
            ),
            now,
        )
        token_s = model.decode_s_per_token + model.decode_s_per_sequence * self.decoding
        self.simulation.at(now + request.answer_tokens * token_s, self._answered, running)
        self.go_on(now)

    def _keep(self, request: SimulatedRequest, now: float) -> None:
        new = [block for block in request.blocks if block not in self.memory]
        gone: list[int] = []
        size = max(1, round(request.block_tokens))
        for block in request.blocks:
            gone += self.memory.add(block, size, self.kept)
        self.simulation.stored(self.number, new, gone, request, now)

    def _answered(self, running: _Running, now: float) -> None:
        self.decoding -= 1
        request = running.request
        for block in request.blocks:
            self.kept[block] -= 1
            if not self.kept[block]:
                del self.kept[block]
        self.kept_tokens -= request.tokens
        self.simulation.ended(request, now)
        self.go_on(now)


class Simulation:
    """Runs requests through a policy on `speeds` many engines, each so many times as fast as the
    cost model says; `outcomes` by request, and how many were `refused`."""

    def __init__(self, model: EngineModel, policy: Policy, speeds: Sequence[float]) -> None:
        self.model = model
        self.policy = policy
        self.pool = _Memory(model.pool_tokens)
        self.outcomes: dict[int, Outcome] = {}
        self.refused = 0
        self._engines = [_Engine(self, number, speed) for number, speed in enumerate(speeds)]
        self._world = World(0)

    def run(self, requests: Sequence[SimulatedRequest]) -> None:
        """Until every answer has ended."""
        for request in requests:
            self.at(request.arrives_s, self._arrives, request)
        self._world.run()

    def at(self, time_s: float, action: Callable[[Any, float], None], subject: Any) -> None:
        self._world.at(time_s, lambda: action(subject, self._world.now))

    def _arrives(self, request: SimulatedRequest, now: float) -> None:
        choice = self.policy.choose(request, now)
        if choice is None:
            self.refused += 1
            return
        engine, prefetch = choice
        self._engines[engine].arrives(request, prefetch, now)

    # --- what engines tell ----------------------------------------------------------------------

    def first_token(self, outcome: Outcome, now: float) -> None:
        self.outcomes[outcome.request.number] = outcome
        self.policy.first_token(outcome.request, now)

    def ended(self, request: SimulatedRequest, now: float) -> None:
        self.outcomes[request.number].ended_s = now
        self.policy.ended(request, now)

    def stored(
        self,
        engine: int,
        new: list[int],
        gone: list[int],
        request: SimulatedRequest,
        now: float,
    ) -> None:
        """An engine keeps `new` instead of `gone`; what is new goes to the pool as well."""
        size = max(1, round(request.block_tokens))
        unpooled: list[int] = []
        pooled = [block for block in request.blocks if block not in self.pool]
        for block in request.blocks:
            unpooled += self.pool.add(block, size, {})
        told = (engine, new, gone, pooled, unpooled)
        self.at(now + self.model.event_delay_s, self._tell, told)

    def _tell(
        self, told: tuple[int, list[int], list[int], list[int], list[int]], _now: float
    ) -> None:
        engine, new, gone, pooled, unpooled = told
        self.policy.stored(engine, new)
        self.policy.removed(engine, gone)
        self.policy.pooled(pooled)
        self.policy.unpooled(unpooled)

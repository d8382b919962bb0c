"""vLLM's connector: `--kv-transfer-config` with this module's `KvcastConnector`.

Owns: what vLLM asks of a connector (KVConnectorBase_V1), in its terms, and which facts of an engine
name its blocks. Must not know: how the pool is talked to (`link`), or what is looked up, loaded and
saved, and when (`planner`, `loads`); this module translates.

The scheduler's half plans, and asks the pool what it holds. The workers' halves load and save. What
a worker has to say goes back with each step: which loads and saves have ended. Blocks that
are being saved are kept from reuse by their reference count, so neither the end of a request nor a
preemption has to wait for a save.

Loads are asynchronous, between steps: a request waits for its blocks while others are computed. A
request that is alone may be loaded by layers instead: its other tokens are computed in the same
step, and each layer waits for its bytes. What such a step has computed is thrown away if a part
did not come; until that is known nothing of it is saved, and no other request is taken up, which
could find it in the engine's cache.

Written against vLLM 0.32; `docs/engines.md` says what was tried.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import platform
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import vllm
from kvcast.hostagent.connectors.counters import (
    GAUGES,
    LOAD_BUCKETS_S,
    NAMES,
    Counters,
    merged,
    split,
)
from kvcast.hostagent.connectors.idling import LEAST_S, Idling
from kvcast.hostagent.connectors.link import Link, LinkOptions, OpenSave
from kvcast.hostagent.connectors.loads import LoadTable, OpenLoad
from kvcast.hostagent.connectors.naming import (
    NamespaceName,
    RankFacts,
    group_sizes,
    hashing_facts,
    namespace_name,
)
from kvcast.hostagent.connectors.options import ConnectorOptions, handover_of, parse_options
from kvcast.hostagent.connectors.planner import Load, Planner, PlannerOptions, Save
from kvcast.hostagent.connectors.torch_memory import TorchMemory
from kvcast.hostagent.connectors.weighing import Pace, Steps, Weighed, Weighing
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, UniformTypeKVCacheSpecs

TELL_S = 30.0
"""How often the log says at most whether prefixes are loaded or computed."""
NULL_BLOCK = 0
"""vLLM's id for a block that is not there (out of a sliding window)."""

_log = logging.getLogger("kvcast.connector")


@dataclass
class KvcastMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to all workers, with each step. `cuts`: loads of which only so many
    blocks are still wanted. `readers`: for each part of the model that
    several ranks hold alike, the nodes of those ranks. `idle_s`: how long
    this step, in which nothing is computed, may wait for news of a load; 0 if something is."""

    loads: list[Load] = field(default_factory=list)
    cuts: list[tuple[int, int]] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    readers: dict[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)
    idle_s: float = 0.0


@dataclass
class KvcastWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers to the scheduler: loads that have ended (request, number, blocks that came,
    why not more), and how many workers are done with which save, and how many of its blocks, from
    the first, the pool has taken from each of them at least. `progress`: of requests with loads
    under way, the load's number and how many blocks all workers have. `pace`: what they have seen
    of their loads."""

    loads: list[tuple[str, int, int, str]] = field(default_factory=list)
    saves: dict[int, tuple[int, int]] = field(default_factory=dict)
    progress: dict[str, tuple[int, int]] = field(default_factory=dict)
    pace: Pace | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvcastWorkerMetadata:
        assert isinstance(other, KvcastWorkerMetadata)
        saves = dict(self.saves)
        for number, (reports, taken) in other.saves.items():
            before, least = saves.get(number, (0, taken))
            saves[number] = before + reports, min(least, taken)
        progress = dict(self.progress)
        for name, load in other.progress.items():
            progress[name] = min(progress.get(name, load), load)
        paces = [one.pace for one in (self, other) if one.pace is not None]
        pace = sum(paces, Pace()) if paces else None
        return KvcastWorkerMetadata(self.loads + other.loads, saves, progress, pace)


@dataclass
class KvcastHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """From each worker to the scheduler, once: what its blocks are called, into how many parts each
    is cut, by which of them it is looked up, and on which node it is."""

    namespace: NamespaceName
    parts: int
    probe: int
    rank: RankFacts
    node_id: str


class KvcastStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of a step, as `kvcast.hostagent.connectors.counters` names them, and load times."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KvcastStats:
        return KvcastStats(
            data={
                "counts": merged(self.counts, other.data.get("counts", {})),
                "load_times_s": [*self.times_s, *other.data.get("load_times_s", [])],
                "gauges": self.gauges | other.data.get("gauges", {}),
            }
        )

    @property
    def counts(self) -> dict[str, float]:
        counts: dict[str, float] = self.data.get("counts", {})
        return counts

    @property
    def times_s(self) -> list[float]:
        times: list[float] = self.data.get("load_times_s", [])
        return times

    @property
    def gauges(self) -> dict[str, float]:
        gauges: dict[str, float] = self.data.get("gauges", {})
        return gauges

    def reduce(self) -> dict[str, int | float]:
        shown: dict[str, int | float] = {
            f"kvcast {key.replace('|', ' ')}": amount for key, amount in sorted(self.counts.items())
        }
        shown |= {f"kvcast {name}": round(value, 6) for name, value in self.gauges.items()}
        if self.times_s:
            shown["kvcast longest load (s)"] = round(max(self.times_s), 4)
        return shown

    def is_empty(self) -> bool:
        return not self.counts and not self.times_s


class KvcastPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counts for vLLM's /metrics: `vllm:kvcast_…_total`, and how long loads took."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counts = {
            name: self._counter_cls(
                name=f"vllm:kvcast_{name}_total",
                documentation=f"kvcast: {text}.",
                labelnames=labelnames + ([label] if label else []),
            )
            for name, (label, text) in NAMES.items()
        }
        self._gauges = {
            name: self._gauge_cls(
                name=f"vllm:kvcast_{name}", documentation=f"kvcast: {text}.", labelnames=labelnames
            )
            for name, text in GAUGES.items()
        }
        self._times = self._histogram_cls(
            name="vllm:kvcast_load_seconds",
            documentation="kvcast: how long loads took, in seconds.",
            buckets=list(LOAD_BUCKETS_S),
            labelnames=labelnames,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.get("counts", {}).items():
            name, label = split(key)
            labels = [*values, label] if NAMES[name][0] else values
            self._counts[name].labels(*labels).inc(amount)
        for name, value in transfer_stats_data.get("gauges", {}).items():
            self._gauges[name].labels(*values).set(value)
        for seconds in transfer_stats_data.get("load_times_s", []):
            self._times.labels(*values).observe(seconds)


class KvcastConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Prefixes that any engine of the pool has computed are read by all the others."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm_does()
        options = parse_options(self._kv_transfer_config.kv_connector_extra_config)
        self._counters = Counters()
        self._scheduler: _SchedulerHalf | None = None
        self._worker: _WorkerHalf | None = None
        self._metadata: KvcastMetadata | None = None
        if reason := _unsupported(vllm_config, kv_cache_config):
            if role == KVConnectorRole.SCHEDULER:
                _log.warning("kvcast is not used: %s", reason)
            return
        if role == KVConnectorRole.SCHEDULER:
            self._recompute_what_fails()
            self._scheduler = _SchedulerHalf(vllm_config, kv_cache_config, options, self._counters)
        else:
            self._worker = _WorkerHalf(vllm_config, kv_cache_config, options, self._counters)

    def _recompute_what_fails(self) -> None:
        """vLLM's default ends a request with an error where a block of its cache cannot be read."""
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            _log.info("kvcast sets kv_load_failure_policy to recompute: it is a cache")
            self._kv_transfer_config.kv_load_failure_policy = "recompute"

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # --- worker -------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._worker is not None:
            self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KvcastHandshake | None:
        return self._worker.handshake if self._worker is not None else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, KvcastMetadata)
        self._metadata = connector_metadata
        if self._worker is not None:
            self._worker.step_begins(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None and self._metadata is not None:
            self._worker.load(self._metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self._worker is not None and self._metadata is not None:
            self._worker.layer_computed(layer_name, self._metadata)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A graph of the whole step would wait for no layer. Saves need no waiting: what no layer
        has begun to save is saved when the step is over."""
        return parse_options(extra_config).load_by_layers

    def wait_for_save(self) -> None:
        if self._worker is not None and self._metadata is not None:
            self._worker.save(self._metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.get_transfer_results(finished_req_ids).finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        if self._worker is not None:
            self._worker.report(results, self._metadata.idle_s if self._metadata else 0.0)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_bad_block_ids() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KvcastWorkerMetadata | None:
        return self._worker.take_news() if self._worker is not None else None

    # --- scheduler ----------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        if self._scheduler is not None:
            workers = [one for one in metadata.values() if isinstance(one, KvcastHandshake)]
            self._scheduler.meet(workers)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.manager = kv_cache_manager

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.matched(request, num_computed_tokens)
        return tokens, bool(tokens) and not self._scheduler.loads_by_layers(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None and num_external_tokens:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvcastMetadata:
        if self._scheduler is None:
            return KvcastMetadata()
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        news = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(news, KvcastWorkerMetadata):
            self._scheduler.hear(news)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.busy

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.planner.saving_blocks > 0

    def take_events(self) -> Iterable[Any]:
        return self._scheduler.take_events() if self._scheduler is not None else ()

    def reset_cache(self) -> bool | None:
        """The pool is others', too, and keeps what it holds; so False: nothing was emptied."""
        if self._scheduler is None:
            return True
        self._scheduler.planner.forget()
        return False

    # --- both ---------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KvcastStats | None:
        counts, times = self._counters.take(), self._counters.take_times()
        if not counts and not times:
            return None
        weighing = self._scheduler.weighing if self._scheduler is not None else None
        gauges = weighing.shown if weighing is not None else {}
        return KvcastStats(data={"counts": counts, "load_times_s": times, "gauges": gauges})

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvcastStats | None:
        return KvcastStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvcastPromMetrics:
        return KvcastPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.link.close()
        if self._scheduler is not None:
            self._scheduler.link.close()


class _SchedulerHalf:
    """The connector in the scheduler's process."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        options: ConnectorOptions,
        counters: Counters,
    ) -> None:
        config = vllm_config.kv_transfer_config
        self._vllm_config = vllm_config
        self._block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._options = options
        whole, keeps = _only_whole(vllm_config), not _is_hybrid(kv_cache_config)
        self.weighing = (
            Weighing(self._block_tokens, whole=whole, keeps=keeps) if options.weigh else None
        )
        self._loaded, self._tell_at = True, 0.0
        self._steps = Steps(getattr(vllm_config, "max_concurrent_batches", 1))
        self.planner = Planner(
            PlannerOptions(
                deadline_s=options.deadline_s,
                lookup_s=options.lookup_s,
                fresh_s=options.fresh_s,
                await_s=options.await_s,
                retry_s=options.retry_s,
                save_s=options.save_s,
                least_blocks=-(-options.least_tokens // self._block_tokens),
                most_saving=max(16, int(kv_cache_config.num_blocks * options.saving_share)),
                workers=vllm_config.parallel_config.world_size,
                load=config.is_kv_consumer,
                save=config.is_kv_producer,
                whole=whole,
                keeps=keeps,
            ),
            counters,
            self.weighing,
        )
        self.link = Link(_link_options(options, "scheduler"), counters)
        self.manager: Any = None
        self._parts = self._probe = 0
        self._readers: dict[tuple[int, int], tuple[str, ...]] = {}
        self._requests: dict[str, Any] = {}
        self._here: dict[str, int] = {}
        """How many blocks of a request were computed when it was first scheduled."""
        self._answers: deque[tuple[str, int, int | None]] = deque()
        self._news = threading.Event()
        self._idling = Idling()
        self._events_on = bool(getattr(vllm_config.kv_events_config, "enable_kv_cache_events", 0))
        self._stored: dict[int, tuple[Any, Save]] = {}
        """Saves under way that are to be told as KV events, as far as the pool has taken them."""
        self._events: list[Any] = []
        self._agreed = False
        self._by_layers_last = 0
        """The number of the last load by layers."""
        self._by_layers = options.load_by_layers
        if self._by_layers and (reason := _not_by_layers(vllm_config, kv_cache_config)):
            _log.warning("kvcast: load_by_layers is not used: %s", reason)
            self._by_layers = False
        _warn_of_seeds(vllm_config)

    @property
    def busy(self) -> bool:
        """Whether the engine must go on stepping for us."""
        return bool(self.planner.saving)

    def meet(self, workers: list[KvcastHandshake]) -> None:
        """Hear from all workers what their blocks are called."""
        if not workers:
            return
        first = min(workers, key=lambda one: (one.rank.pipeline_rank, one.rank.tensor_rank))
        self._parts = first.parts
        self._probe = first.probe
        if self._options.groups:
            alike: dict[tuple[int, int], list[str]] = {}
            for one in sorted(workers, key=lambda one: one.rank.tensor_rank):
                part = (one.rank.pipeline_rank, one.rank.shard)
                alike.setdefault(part, []).append(one.node_id)
            self._readers = {
                part: tuple(dict.fromkeys(nodes))
                for part, nodes in alike.items()
                if len(set(nodes)) > 1 and all(nodes)
            }
        # What a group reads must not be fetched by one of its nodes alone.
        self.link.use(first.namespace, prefetch=self._options.prefetch and not self._readers)

    def arrived(self, request: Any) -> None:
        if not self._parts:
            return
        if not self._agreed:
            self._agreed = True
            self.link.agree(_hashing_facts(self._vllm_config), self._hashes_differ)
        name = request.request_id
        self._requests[name] = request
        hashes = request.block_hashes[: self._most(request)]
        if request.skip_reading_prefix_cache:
            hashes = []
        self._idling.woken()
        awaits, readers = handover_of(request.kv_transfer_params)
        here = self._cached(hashes)
        self._step_ended()
        self.planner.arrived(
            time.monotonic(),
            name,
            hashes,
            here,
            near=self._near(hashes[here:]),
            busy_tokens=self._busy_tokens(name),
            awaits=awaits,
            readers=readers,
        )
        self._send_lookups()

    def _near(self, hashes: list[bytes]) -> int:
        """As `Link.near`, where it makes a difference."""
        if self.weighing is None or not self.weighing.measured:
            return 0
        return self.link.near(hashes, self._parts, self._probe)

    def _busy_tokens(self, but: str = "") -> int:
        """Tokens of prompts that the engine has taken up and not computed, but that request's."""
        if self.weighing is None or not self.weighing.measured:
            return 0
        total = 0
        for name, request in self._requests.items():
            comes = None if name == but else self.planner.has_from_pool(name)
            if comes is not None:
                done = max(request.num_computed_tokens, comes * self._block_tokens)
                total += max(0, request.num_prompt_tokens - done)
        return total

    def _tell_of_turns(self) -> None:
        """Say so in the log where from now on prefixes are computed, or loaded again."""
        weighing, now = self.weighing, time.monotonic()
        if weighing is None or now < self._tell_at:
            return
        if weighing.loads is not self._loaded:
            self._loaded, self._tell_at = weighing.loads, now + TELL_S
            _log.info(
                "kvcast: prefixes are %s for now: %s",
                "loaded" if weighing.loads else "computed, but for some that are tried",
                ", ".join(f"{name} {value:.4g}" for name, value in weighing.shown.items()),
            )

    def _tell_agent(self) -> None:
        """Have the agent know what became of prefixes, for `kvcast status`."""
        out = self.planner.out
        if out.weighed != Weighed():
            weighed, out.weighed = out.weighed, Weighed()
            self.link.tell(weighed, self.weighing.paces if self.weighing else (0.0, 0.0))

    def _step_ended(self) -> None:
        """The engine asks or tells something: so no step is under way, if there is one at a
        time."""
        if self._steps.single:
            self._learn(self._steps.ended(time.monotonic()))

    def _learn(self, told: tuple[int, float] | None) -> None:
        if told is not None and self.weighing is not None:
            self.weighing.computed(*told)

    def _most(self, request: Any) -> int:
        """Of how many blocks the pool may bring: one token at least is computed."""
        return int(min((request.num_tokens - 1) // self._block_tokens, len(request.block_hashes)))

    def _cached(self, hashes: list[bytes]) -> int:
        """How many of these the engine holds itself, from the first."""
        if self.manager is None or not self.manager.enable_caching:
            return 0
        pool = self.manager.block_pool
        groups = list(range(len(self.manager.kv_cache_config.kv_cache_groups)))
        count = 0
        for one in hashes:
            if pool.get_cached_block(one, groups) is None:
                break
            count += 1
        return count

    def matched(self, request: Any, computed_tokens: int) -> int | None:
        if not self._parts or request.skip_reading_prefix_cache:
            return 0
        self._requests.setdefault(request.request_id, request)
        self._step_ended()
        self._hear_answers()
        here = computed_tokens // self._block_tokens
        most = self._most(request)
        hashes = request.block_hashes[:most]
        count = self.planner.matched(
            time.monotonic(),
            request.request_id,
            hashes,
            here,
            most,
            request.num_tokens - most * self._block_tokens,
            near=self._near(hashes[here:]),
            busy_tokens=self._busy_tokens(request.request_id),
            preemptions=request.num_preemptions,
        )
        self._tell_of_turns()
        self._send_lookups()
        return None if count is None else count * self._block_tokens

    def loads_by_layers(self, request: Any) -> bool:
        """Whether nobody else has to wait while this request's step waits for the pool."""
        return self._by_layers and self._requests.keys() == {request.request_id}

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        count = tokens // self._block_tokens
        self.planner.allocated(
            time.monotonic(),
            request.request_id,
            request.block_hashes,
            count,
            blocks.get_block_ids(),
            by_layers=self.loads_by_layers(request),
        )

    def step(self, output: Any) -> KvcastMetadata:
        now = time.monotonic()
        idle = not output.total_num_scheduled_tokens
        if idle and self.planner.asking:
            self._news.wait(LEAST_S)
            self._idling.woken()
        self._news.clear()
        self._hear_answers()
        for load in self.planner.out.loads:
            if load.by_layers:
                self._by_layers_last = load.number
        for name, scheduled in output.num_scheduled_tokens.items():
            request = self._requests.get(name)
            if request is not None:
                self._here.setdefault(name, request.num_computed_tokens // self._block_tokens)
                self._save(now, request, request.num_computed_tokens + scheduled, None)
        self._let_go()
        self._tell_agent()
        self._time(output)
        self.planner.review(now, self._busy_tokens())
        out = self.planner.out
        if out.loads or out.cuts:
            self._idling.woken()
        idle_s = self._idling.pause_s(now, idle=idle)
        metadata = KvcastMetadata(
            list(out.loads), list(out.cuts), list(out.saves), self._readers, idle_s
        )
        out.loads.clear()
        out.cuts.clear()
        out.saves.clear()
        return metadata

    def _time(self, output: Any) -> None:
        """A step begins: what does computing take? One that waits for layers does not tell."""
        scheduled = output.num_scheduled_tokens.values()
        of_prompts = sum(count for count in scheduled if count > 1)
        if any(load.by_layers for load in self.planner.out.loads):
            of_prompts = 0
        now = time.monotonic()
        self._learn(self._steps.began(now, of_prompts, output.total_num_scheduled_tokens))

    def _save(
        self, now: float, request: Any, tokens: int, block_ids: tuple[list[int], ...] | None
    ) -> None:
        """Save what is full and computed of a request, `tokens` of which are. `block_ids`: as in
        `Planner.computed`; None: vLLM is asked."""
        if not self._options.save_generated:
            tokens = min(tokens, request.num_prompt_tokens)
        name = request.request_id
        full = min(tokens // self._block_tokens, len(request.block_hashes))
        if not self.planner.unsaved(name, full):
            return
        if block_ids is None:
            block_ids = self.manager.get_block_ids(name)
        full = min(full, *map(len, block_ids))
        save = self.planner.computed(
            now, name, request.block_hashes, full, block_ids, here=self._here.get(name, 0)
        )
        if save is not None:
            pool = self.manager.block_pool
            pool.touch([pool.blocks[i] for i in _real(save.block_ids)])
            if self._events_on:
                self._stored[save.number] = (request, save)

    def _let_go(self) -> None:
        pool = self.manager.block_pool
        while self.planner.out.let_go:
            number, block_ids = self.planner.out.let_go.popleft()
            pool.free_blocks([pool.blocks[i] for i in reversed(_real(block_ids))])
            self._stored.pop(number, None)

    def hear(self, news: KvcastWorkerMetadata) -> None:
        now = time.monotonic()
        self._step_ended()
        if news.pace is not None:
            self.planner.paced(news.pace)
        for name, (number, came) in news.progress.items():
            self.planner.progressed(name, number, came)
        for name, number, came, reason in news.loads:
            request = self._requests.get(name)
            hashes = request.block_hashes if request is not None else []
            if request is not None and reason and number == self._by_layers_last:
                self._hide(request)
            self.planner.loaded(now, name, number, came, hashes, reason)
        for number, (reports, taken) in news.saves.items():
            stored = self._stored.get(number)
            if stored is not None:
                request, save = stored
                stored = self._stored[number] = (
                    request,
                    replace(save, hashes=save.hashes[:taken]),
                )
            if self.planner.saved(number, reports) and stored is not None and stored[1].hashes:
                self._events.append(
                    _stored_event(*stored, self._block_tokens, self._options.event_medium)
                )
        self._let_go()

    def _hide(self, request: Any) -> None:
        """Take out of the engine's own cache what was computed on top of blocks that did not come;
        vLLM leaves it there, to be computed again by a request that may end before."""
        [block_ids] = self.manager.get_block_ids(request.request_id)
        right = request.num_computed_tokens // self._block_tokens
        self.manager.evict_blocks({one for one in block_ids[right:] if one != NULL_BLOCK})

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> None:
        name = request.request_id
        now = time.monotonic()
        self._step_ended()
        if self._requests.pop(name, None) is not None and name in self._here:
            self._save(now, request, request.num_computed_tokens, block_ids)
        self._here.pop(name, None)
        self.planner.finished(name)
        if not self._requests:
            self._steps.rests()

    def take_events(self) -> list[Any]:
        events, self._events = self._events, []
        return events

    def _send_lookups(self) -> None:
        while self.planner.out.lookups:
            lookup = self.planner.out.lookups.popleft()

            def answered(
                held: int | None, name: str = lookup.request, number: int = lookup.number
            ) -> None:
                self._answers.append((name, number, held))
                self._news.set()

            alone = self._by_layers and self._requests.keys() == {lookup.request}
            self.link.look_up(lookup, self._parts, self._probe, answered, by_layers=alone)

    def _hear_answers(self) -> None:
        now = time.monotonic()
        while self._answers:
            self.planner.answered(now, *self._answers.popleft())

    def _hashes_differ(self, theirs: bytes) -> None:
        _log.warning(
            "kvcast: another engine of this model hashes its blocks otherwise, so neither finds "
            "what the other has computed. Give all engines the same PYTHONHASHSEED, the same "
            "--prefix-caching-hash-algo and the same Python, or use sha256_cbor. Theirs: %s. "
            "Ours: %s.",
            theirs.decode(errors="replace")[:200],
            _hashing_facts(self._vllm_config).decode(),
        )


class _WorkerHalf:
    """The connector in a worker's process."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        options: ConnectorOptions,
        counters: Counters,
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._options = options
        self._counters = counters
        self._whole = _only_whole(vllm_config)
        self._rank = _rank_facts(vllm_config, kv_cache_config)
        self._memory: TorchMemory | None = None
        self._table = LoadTable()
        self._bad: set[int] = set()
        self._part_of: dict[str, int] = {}
        self._layers: list[set[str]] = []
        """Of each part, the layers that it consists of."""
        self._by_layers: list[OpenLoad] = []
        """Loads that this step waits for."""
        self._clear: Callable[[], None] = lambda: None
        """Has copies of this step's loads wait for what was under way in the engine's memory."""
        self._saves_by_layers = options.save_by_layers and not _computed_in_pieces(vllm_config)
        self._uncomputed: list[set[str]] = []
        self._saving: list[OpenSave] | None = None
        """Saves of this step, once its first layers are computed, and which layers are not."""
        self._news = KvcastWorkerMetadata()
        self._saved: deque[tuple[int, int]] = deque()
        """Saves that have ended, and how many of their blocks the pool has taken."""
        self._readers: tuple[str, ...] = ()
        self._node_id = ""
        self._namespace: NamespaceName | None = None
        self.handshake: KvcastHandshake | None = None
        self.link = Link(_link_options(options, f"worker {self._rank.tensor_rank}"), counters)

    def register(self, kv_caches: dict[str, Any]) -> None:
        """The engine's memory is there."""
        groups = self._kv_cache_config.kv_cache_groups
        blocks = self._kv_cache_config.num_blocks
        tensors = [[kv_caches[name] for name in group.layer_names] for group in groups]
        sizes = [
            group_sizes(
                [one.numel() * one.element_size() // blocks for one in layers],
                self._options.block_bytes,
            )
            for layers in tensors
        ]
        self._memory = TorchMemory(
            tensors,
            sizes,
            blocks=blocks,
            null_block=NULL_BLOCK,
            lock_pages=self._options.lock_pages,
        )
        for group, counts in zip(groups, sizes, strict=True):
            names = iter(group.layer_names)
            self._layers += [set(itertools.islice(names, count)) for count in counts]
        self._part_of = {name: at for at, names in enumerate(self._layers) for name in names}
        model = self._vllm_config.model_config
        self._namespace = namespace_name(
            tenant=self._options.tenant,
            model=self._options.model or model.model,
            revision=model.revision or "",
            version=self._options.version,
            rank=self._rank,
            layout=_layout(self._vllm_config, self._kv_cache_config, self._memory.layout),
        )
        self.link.use(self._namespace)
        self._node_id = self.link.node_id()
        self.link.prepare(self._memory)
        self.handshake = KvcastHandshake(
            self._namespace,
            len(self._memory.part_bytes),
            self._probe(groups),
            self._rank,
            self._node_id,
        )
        _log.info(
            "kvcast: %s, node %s; a block of %d tokens is %d parts of %s bytes",
            self._namespace,
            self._node_id or "unknown (no agent yet)",
            groups[0].kv_cache_spec.block_size,
            len(self._memory.part_bytes),
            sorted(set(self._memory.part_bytes)),
        )

    def _probe(self, groups: list[Any]) -> int:
        """The part by which blocks are looked up: the last that is always there, and not only as
        long as a sliding window reaches it."""
        assert self._memory is not None
        parts = range(len(self._memory.part_bytes))
        always = [
            part
            for part in parts
            if isinstance(groups[self._memory.cache_group[part]].kv_cache_spec, FullAttentionSpec)
        ]
        return (always or list(parts))[-1]

    def step_begins(self, metadata: KvcastMetadata) -> None:
        """Nothing of this step is computed yet. What earlier steps still do, and vLLM's zeroing of
        new blocks, goes before what this step loads."""
        memory = self._memory
        if memory is not None and metadata.loads:
            mark = memory.mark()
            self._clear = lambda: memory.wait_for(mark)

    def load(self, metadata: KvcastMetadata) -> None:
        if self._memory is None:
            return
        readers = metadata.readers.get((self._rank.pipeline_rank, self._rank.shard), ())
        if readers != self._readers:
            assert self._namespace is not None
            self._readers = readers
            self.link.use(self._namespace, readers)
        for load in metadata.loads:
            opened = self.link.load(load, self._table, self._memory, self._clear)
            if load.by_layers:
                self._by_layers.append(opened)
        metadata.loads = []
        for number, blocks in metadata.cuts:
            self._table.cut(number, blocks)
        metadata.cuts = []

    def wait_for_layer(self, name: str) -> None:
        """Before a layer is computed: wait for what this step loads of it."""
        part = self._part_of.get(name)
        if part is None or not self._by_layers:
            return
        began = time.monotonic()
        for opened in self._by_layers:
            if not opened.wait_for(part, max(0.0, opened.deadline - time.monotonic())):
                opened.stop("deadline")
        self._counters.add("layer_wait_seconds", time.monotonic() - began)

    def layer_computed(self, name: str, metadata: KvcastMetadata) -> None:
        """A layer's part of this step's blocks is in the engine's memory."""
        part = self._part_of.get(name)
        if part is None or not self._saves_by_layers or not self._begin_saves(metadata):
            return
        self._uncomputed[part].discard(name)
        if not self._uncomputed[part]:
            self._computed([part])

    def save(self, metadata: KvcastMetadata) -> None:
        """All layers are computed."""
        if self._begin_saves(metadata):
            self._computed(range(len(self._layers)))
        self._saving = None

    def _begin_saves(self, metadata: KvcastMetadata) -> bool:
        """Whether there is something to save in this step."""
        if self._memory is None:
            return False
        if self._saving is None:
            self._saving = []
            self._uncomputed = [set(names) for names in self._layers]
            saves, metadata.saves = metadata.saves, []
            for save in saves:
                if self._rank.saves:
                    self._saving.append(self._begin_save(save, self._memory))
                else:
                    self._saved.append((save.number, len(save.hashes)))
        return bool(self._saving)

    def _begin_save(self, save: Save, memory: TorchMemory) -> OpenSave:
        probe = self.handshake.probe if self.handshake is not None else 0
        return self.link.save(
            save, memory, probe, lambda taken: self._saved.append((save.number, taken))
        )

    def _computed(self, parts: Iterable[int]) -> None:
        memory = self._memory
        assert memory is not None
        mark = memory.mark()
        for opened in self._saving or ():
            opened.computed(parts, lambda: memory.wait_for(mark))

    def report(self, results: KVConnectorTransferResults, idle_s: float) -> None:
        """What has ended since the last step."""
        if idle_s and self._table.waiting:
            self._table.wait(idle_s)
        elif idle_s and not self._saved:
            time.sleep(LEAST_S / 2)
        hybrid = _is_hybrid(self._kv_cache_config)
        for opened in self._by_layers:  # the step that waited for them is over
            self._table.conclude(opened, "not_awaited")
        self._by_layers.clear()
        for ended in self._table.take(time.monotonic()):
            if self._whole and ended.came < len(ended.load.hashes):
                ended = replace(ended, came=0)
            load = ended.load
            if not load.by_layers:
                results.finished_recving.add(load.request)
            self._news.loads.append((load.request, load.number, ended.came, ended.reason))
            if ended.reason or ended.came < len(load.hashes):
                self._counters.add(
                    "miss_blocks", len(load.hashes) - ended.came, reason=ended.reason or "unknown"
                )
                if hybrid:
                    results.failed_recving.add(load.request)
                else:
                    self._bad |= ended.bad_block_ids
        while self._saved:
            number, taken = self._saved.popleft()
            self._news.saves[number] = 1, taken

    def take_bad_block_ids(self) -> set[int]:
        bad, self._bad = self._bad, set()
        return bad

    def take_news(self) -> KvcastWorkerMetadata | None:
        if self._options.weigh:
            self._news.progress = self._table.progress()
            self._news.pace = self._table.meter.take(time.monotonic())
        if self._news == KvcastWorkerMetadata():
            return None
        news, self._news = self._news, KvcastWorkerMetadata()
        return news


# --- facts of an engine ---------------------------------------------------------------------------


def _unsupported(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why this engine's blocks cannot be put into a pool; "" if they can."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1:
        return "decode context parallelism spreads a block's tokens over ranks"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return "prefill context parallelism spreads a block's tokens over ranks"
    media = vllm_config.model_config.multimodal_config
    caching = vllm_config.cache_config.enable_prefix_caching
    if media is not None and not media.mm_processor_cache_gb and not caching:
        return (
            "vLLM names images by a counter, which another engine has for other images, where both "
            "--enable-prefix-caching and --mm-processor-cache-gb are off"
        )
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        return "the model has no KV cache"
    sizes = set()
    for group in groups:
        spec = group.kv_cache_spec
        sizes.add(spec.block_size)
        kinds = (
            list(spec.kv_cache_specs.values())
            if isinstance(spec, UniformTypeKVCacheSpecs)
            else [spec]
        )
        if not all(isinstance(kind, AttentionSpec) for kind in kinds):
            return f"a cache of kind {type(spec).__name__} is no attention cache"
        if getattr(group, "host_resident", False):
            return "a cache group lies in the host's memory"
    if len(sizes) > 1 or sizes != {kv_cache_config.hash_block_size or sizes.copy().pop()}:
        return f"cache groups have blocks of {sorted(sizes)} tokens; one size is needed"
    return ""


def _computed_in_pieces(vllm_config: Any) -> bool:
    """Whether a layer that was computed once in a step may not be done with it."""
    return bool(
        getattr(vllm_config.parallel_config, "use_ubatching", False)
        or vllm_config.speculative_config
    )


def _not_by_layers(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why requests cannot be computed while their blocks come; "" if they can. What vLLM does where
    a block does not come then is right only where no step is scheduled before that is known."""
    if getattr(vllm_config, "max_concurrent_batches", 2) > 1:
        return "steps are scheduled ahead (--no-async-scheduling; no pipeline parallelism)"
    if getattr(vllm_config, "use_v2_model_runner", True):
        return "vLLM's second model runner goes on with what it computed on a load that failed"
    if _is_hybrid(kv_cache_config):
        return "the model has several cache groups"
    if _computed_in_pieces(vllm_config):
        return "batches are computed in pieces"
    return ""


def _is_hybrid(kv_cache_config: Any) -> bool:
    """Whether the model has several cache groups: then vLLM computes all of a prefix anew if a part
    of it did not come (`failed_recving`), since a block's id says nothing without its group."""
    return len(kv_cache_config.kv_cache_groups) > 1


def _only_whole(vllm_config: Any) -> bool:
    """Whether this engine's attention cannot go on behind a prefix but by one token: so with vLLM's
    MLA on CPUs without AMX, for which vLLM turns its own prefix caching off."""
    from vllm.platforms import current_platform

    return bool(
        current_platform.is_cpu()
        and vllm_config.model_config.use_mla
        and not vllm_config.scheduler_config.enable_chunked_prefill
    )


def _rank_facts(vllm_config: Any, kv_cache_config: Any) -> RankFacts:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tensor, pipeline = get_tp_group(), get_pp_group()
    replicas = int(getattr(kv_cache_config, "kv_tp_replicas", 1) or 1)
    if tensor.world_size % replicas:
        replicas = 1
    return RankFacts(
        tensor.rank_in_group,
        tensor.world_size,
        pipeline.rank_in_group,
        pipeline.world_size,
        replicas,
    )


def _layout(vllm_config: Any, kv_cache_config: Any, tensors: str) -> dict[str, str]:
    """All that decides what the bytes of a block mean, by name."""
    import torch

    model, cache = vllm_config.model_config, vllm_config.cache_config
    groups = kv_cache_config.kv_cache_groups
    config = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    return {
        "engine": f"vllm {vllm.__version__}",
        "block_tokens": str(groups[0].kv_cache_spec.block_size),
        "dtype": str(model.dtype).removeprefix("torch."),
        "cache_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "config": hashlib.sha256(
            json.dumps(config, sort_keys=True, default=str).encode()
        ).hexdigest(),
        "specs": repr([group.kv_cache_spec for group in groups]),
        "layers": repr([group.layer_names for group in groups]),
        "order": str(getattr(kv_cache_config, "kv_cache_layout", None)),
        "tensors": tensors,
        "backends": _backends(vllm_config),
        "speculation": repr(getattr(vllm_config.speculative_config, "model", None)),
        "machine": f"{platform.machine()} {_isa(torch)}",
    }


def _isa(torch: Any) -> str:
    """What the layout inside of a CPU's block depends on; "" on others."""
    return torch.backends.cpu.get_cpu_capability() if not torch.cuda.is_available() else ""


def _backends(vllm_config: Any) -> str:
    layers = vllm_config.compilation_config.static_forward_context
    names = {
        layer.get_attn_backend().get_name()
        for layer in layers.values()
        if hasattr(layer, "get_attn_backend")
    }
    return ",".join(sorted(names))


def _hashing_facts(vllm_config: Any) -> bytes:
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if not algorithm.endswith("_cbor"):  # these hash what pickle makes
        algorithm += f", Python {sys.version_info.major}.{sys.version_info.minor}"
    try:
        from vllm.v1.core.kv_cache_utils import get_none_hash_seed

        seed = get_none_hash_seed()
    except ImportError:
        seed = os.environ.get("PYTHONHASHSEED", "")
    return hashing_facts(algorithm, seed)


def _warn_of_seeds(vllm_config: Any) -> None:
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm.startswith("xxhash") and os.environ.get("PYTHONHASHSEED") is None:
        _log.warning(
            "kvcast: --prefix-caching-hash-algo %s takes a random seed in each process, so no "
            "other engine will find what this one computes. Set PYTHONHASHSEED to one number on "
            "all nodes, or use sha256_cbor.",
            algorithm,
        )


def _stored_event(request: Any, save: Save, block_tokens: int, medium: str) -> Any:
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.core.kv_cache_utils import (
        generate_block_hash_extra_keys,
        maybe_convert_block_hash,
        to_event_extra_keys,
    )

    parent = request.block_hashes[save.first - 1] if save.first else None
    begin = save.first * block_tokens
    end = begin + len(save.hashes) * block_tokens
    lora = request.lora_request
    extra: list[Any] = []  # a salt, for one: without it the blocks would be another prompt's
    images = 0
    for at in range(begin, end, block_tokens):
        keys, images = generate_block_hash_extra_keys(request, at, at + block_tokens, images)
        extra.append(keys)
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(one) for one in save.hashes],
        parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
        token_ids=list(request.all_token_ids[begin:end]),
        block_size=block_tokens,
        lora_id=lora.adapter_id if lora else None,
        medium=medium,
        lora_name=lora.name if lora else None,
        extra_keys=to_event_extra_keys(extra),
    )


def _real(block_ids: Iterable[Iterable[int]]) -> list[int]:
    return [one for ids in block_ids for one in ids if one != NULL_BLOCK]


def _link_options(options: ConnectorOptions, role: str) -> LinkOptions:
    return LinkOptions(
        options.agent_socket,
        f"vllm {role}, pid {os.getpid()}",
        options.window_bytes,
        options.verify,
        options.ack,
        options.weigh,
    )


def _log_as_vllm_does() -> None:
    """vLLM shows what its own loggers say."""
    theirs = logging.getLogger("vllm")
    if not _log.handlers:
        _log.handlers = list(theirs.handlers)
        _log.setLevel(theirs.level)
        _log.propagate = False

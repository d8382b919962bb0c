"""vLLM's secondary tier, below its CPU offload (`OffloadingConnector`, `TieringOffloadingSpec`).

Owns: what vLLM asks of a SecondaryTierManager, in its terms, and which facts of an engine name its
chunks. Must not know: how the pool is talked to (`block_link`), or what it was asked
(`lookup_answers`).

vLLM copies between the accelerator and a region of the host's memory; this tier copies between that
region and the pool. All calls come from the scheduler's thread, and none waits. A chunk is a row of
the region: the bytes of all ranks of the engine, one behind the other.

Written against vLLM 0.32; `docs/engines.md` says what was tried.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import platform
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, ClassVar

import vllm
from kvcast.hostagent.connectors.block_link import BlockLink, Named
from kvcast.hostagent.connectors.counters import NAMES, Counters, split
from kvcast.hostagent.connectors.lookup_answers import Found, Question
from kvcast.hostagent.connectors.naming import (
    NamespaceName,
    RankFacts,
    hashing_facts,
    key_of,
    namespace_name,
)
from kvcast.hostagent.connectors.options import StoreOptions, parse_store_options
from kvcast.hostagent.connectors.transfers import CAME, Transfer
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.core.kv_cache_utils import get_none_hash_seed
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

OWNERSHIP = "kvcast"
"""What KV events call this tier."""
DRAIN_GRACE_S = 1.0
"""How much longer than its deadline a job is waited for when all are to end."""

_log = logging.getLogger("kvcast.connector")


class KvcastTier(SecondaryTierManager):  # type: ignore[misc]
    """Chunks that any engine of the pool has offloaded are found by all the others."""

    medium: ClassVar[Medium] = Medium.STORAGE
    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        """`options`: what stands in the tier's configuration, besides `type`, see `StoreOptions`;
        ConfigurationError names what is not understood."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality.REMOTE
        parsed = parse_store_options(options)
        self._namespace = _namespace(offloading_spec, parsed, self.block_size_bytes)
        self._bytes = primary_kv_view.cast("B")
        self._counters = Counters()
        self._link = BlockLink(parsed, f"vllm tier, pid {os.getpid()}", self._counters)
        config = offloading_spec.config
        self._link.weigh(config.groups[0].tokens_per_block * config.cache.blocks_per_chunk)
        self._found = Found()
        self._answers: deque[tuple[list[Question], Transfer]] = deque()
        self._jobs: dict[int, tuple[TransferJob, Transfer]] = {}
        self._finished: deque[int] = deque()
        self._tells = bool(offloading_spec.kv_events_config.enable_kv_cache_events)
        self._events: list[OffloadingEvent] = []
        self._link.compare(self._namespace, _hashing_facts(), self._hashes_differ)
        _log.info("kvcast: %s; a chunk is %d bytes", self._namespace, self.block_size_bytes)

    # --- questions ------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        self._hear_answers()
        request = req_context.req_id
        chain = f"{request} {get_offload_group_idx(key)}"
        position = req_context.get_offload_key_position(key) or 0
        held = self._found.ask(request, key, chain, position)
        if held is None:
            return LookupResult.RETRY
        return LookupResult.HIT if held else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self._hear_answers()
        questions = self._found.take_questions()
        if questions:
            self._link.find(
                [self._named(one.name, one.chain) for one in questions],
                functools.partial(self._answered, questions),
            )

    def _answered(self, questions: list[Question], transfer: Transfer) -> None:
        self._answers.append((questions, transfer))

    def _hear_answers(self) -> None:
        self._link.end_due()
        while self._answers:
            questions, transfer = self._answers.popleft()
            for one, outcome in zip(questions, transfer.outcomes, strict=True):
                self._found.answered(one.name, one.number, outcome == CAME)

    def on_request_finished(self, req_context: Any) -> None:
        self._found.finished(req_context.req_id)

    # --- jobs -----------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        names, rooms = self._described(job_metadata)
        done = functools.partial(self._ended, job_metadata.job_id)
        self._remember(job_metadata, self._link.save(names, rooms, done))

    def submit_load(self, job_metadata: TransferJob) -> None:
        names, rooms = self._described(job_metadata)
        done = functools.partial(self._ended, job_metadata.job_id)
        self._remember(job_metadata, self._link.load(names, rooms, done))

    def _described(self, job: TransferJob) -> tuple[list[Named], list[memoryview]]:
        size = self.block_size_bytes
        begins = [int(chunk) * size for chunk in job.chunk_ids]
        return (
            [self._named(key) for key in job.keys],
            [self._bytes[begin : begin + size] for begin in begins],
        )

    def _named(self, key: bytes, chain: str = "") -> Named:
        return Named(self._namespace, key_of(key), chain, chain.rpartition(" ")[0])

    def _remember(self, job: TransferJob, transfer: Transfer) -> None:
        self._jobs[job.job_id] = job, transfer

    def _ended(self, job_id: int, transfer: Transfer) -> None:
        self._finished.append(job_id)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._link.end_due()
        results = []
        while self._finished:
            job, transfer = self._jobs.pop(self._finished.popleft())
            results.append(self._result(job, transfer))
        return results

    def _result(self, job: TransferJob, transfer: Transfer) -> JobResult:
        came = [key for key, one in zip(job.keys, transfer.came, strict=True) if one]
        if job.is_promotion:
            self._found.failed(
                key for key, one in zip(job.keys, transfer.came, strict=True) if not one
            )
        elif came and self._tells:
            self._events.append(
                OffloadingEvent(
                    keys=came,
                    medium=self.medium,
                    removed=False,
                    locality=self.locality,
                    ownership=OWNERSHIP,
                )
            )
        return JobResult(
            job.job_id,
            success=len(came) == len(job.keys),
            successful_keys=came if job.is_promotion else None,
            transfer_time=time.monotonic() - job.submit_time,
            transfer_bytes=len(came) * self.block_size_bytes,
        )

    def drain_jobs(self) -> None:
        """Wait until every job has ended; each does by its deadline."""
        for _, transfer in list(self._jobs.values()):
            transfer.wait(max(transfer.deadline - time.monotonic(), 0.0) + DRAIN_GRACE_S)
        self._link.end_due()

    # --- the rest -------------------------------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return {
            _metric(name): OffloadingCounterMetadata(
                documentation=f"kvcast: {text}.", labelnames=(label,) if label else ()
            )
            for name, (label, text) in NAMES.items()
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        counts = self._counters.take()
        if not counts:
            return None
        stats = OffloadingConnectorStats()
        for key, amount in counts.items():
            name, label = split(key)
            stats.increase_counter(_metric(name), amount, (label,) if NAMES[name][0] else ())
        return stats

    def shutdown(self) -> None:
        self._link.close()
        self._jobs.clear()
        self._bytes.release()

    def _hashes_differ(self, theirs: bytes) -> None:
        _log.warning(
            "kvcast: another engine of this model makes its block hashes from another seed, so "
            "neither finds what the other has computed. Give all engines the same PYTHONHASHSEED, "
            "and the same --prefix-caching-hash-algo. Theirs: %s. Ours: %s.",
            theirs.decode(errors="replace")[:200],
            _hashing_facts().decode(),
        )


def _metric(name: str) -> str:
    return f"vllm:kvcast_{name}_total"


def _namespace(spec: Any, options: StoreOptions, chunk_bytes: int) -> NamespaceName:
    """The namespace of one engine's chunks. vLLM tells a tier neither the model's revision nor its
    quantisation: `revision` and `version` are for that."""
    config = spec.config
    parallel = asdict(config.parallel)
    rank = RankFacts(tensor_size=parallel["tp_size"], pipeline_size=parallel["pp_size"])
    for name in ("rank", "data_parallel_index", "data_parallel_size", "data_parallel_rank_local"):
        del parallel[name]  # a row holds the bytes of all ranks; replicas hold the same
    layout = {
        "engine": f"vllm {vllm.__version__}, tier",
        "dtype": str(config.model.dtype),
        "block_tokens": str(config.cache.tokens_per_hash),
        "cache": json.dumps(asdict(config.cache), sort_keys=True),
        "groups": json.dumps([asdict(group) for group in config.groups]),
        "parallel": json.dumps(parallel, sort_keys=True),
        "worker_bytes": str(config.worker_kv_bytes_per_block),
        "chunk_bytes": str(chunk_bytes),
        "replicated": str(getattr(spec, "replicated_layout", config.replicated_layout)),
        "canonical": str(config.canonical_layout),
        "order": str(config.kv_cache_layout),
        "machine": platform.machine(),
    }
    return namespace_name(
        tenant=options.tenant,
        model=options.model or config.model.name,
        revision=options.revision,
        version=options.version,
        rank=rank,
        layout=layout,
    )


def _hashing_facts() -> bytes:
    # The algorithm is not told to a tier. Hashes of two algorithms never meet, so this names the
    # seed alone, which is what goes wrong without a word.
    return hashing_facts("vllm", get_none_hash_seed())

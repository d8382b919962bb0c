"""LMCache's L2 adapter: `--l2-adapter` of type plugin with this module's `KvcastL2Adapter`.

Owns: what LMCache asks of an L2AdapterInterface, in its terms, and which of its facts name a chunk.
Must not know: how the pool is talked to (`block_link`).

LMCache's controllers submit tasks from several threads and are told of their ends by event
descriptors, one for each kind. A namespace is a model with a shape and types of its chunks; rank,
group, salt and hash are in the key. LMCache's locks are hints here: a load may miss.

Written against LMCache 0.5.6; `docs/engines.md` says what was tried.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

import lmcache
from kvcast.hostagent.connectors.block_link import BlockLink, Named
from kvcast.hostagent.connectors.counters import Counters, merged
from kvcast.hostagent.connectors.naming import NamespaceName, RankFacts, key_of, namespace_name
from kvcast.hostagent.connectors.options import ConfigurationError, parse_store_options
from kvcast.hostagent.connectors.transfers import CAME, Transfer
from kvcast.protocol.bounded_map import BoundedMap
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

RESULTS_KEPT: Final = 65_536
"""Ends of tasks that nobody has asked for yet, of each kind, and chunks that were stored here; of
more, the oldest are forgotten."""
NOT_IN_MEMORY: Final = "not_in_host_memory"

_log = logging.getLogger("kvcast.connector")


class _Results:
    """Ends of tasks of one kind, and the descriptor that tells of them."""

    def __init__(self) -> None:
        self._notifier = create_event_notifier()
        self._ended: BoundedMap[int, Any] = BoundedMap(RESULTS_KEPT)
        self._lock = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        return int(self._notifier.fileno())

    def put(self, task: int, result: Any) -> None:
        with self._lock:
            if not self._closed:
                self._ended[task] = result
                self._notifier.notify()

    def take(self, task: int) -> Any:
        with self._lock:
            return self._ended.pop(task, None)

    def take_all(self) -> dict[int, Any]:
        with self._lock:
            ended, self._ended = dict(self._ended), BoundedMap(RESULTS_KEPT)
        return ended

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._notifier.close()


class KvcastL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Chunks that any LMCache of the pool has stored are found by all the others."""

    def __init__(self, adapter_params: dict[str, Any], l1_memory_desc: object = None) -> None:
        """`adapter_params`: see `StoreOptions`; ConfigurationError names what is not understood.
        `l1_memory_desc` is not needed."""
        super().__init__()
        self._options = parse_store_options(adapter_params)
        if self._options.model:
            raise ConfigurationError("kvcast's adapter: LMCache names the models, not `model`")
        self._counters = Counters()
        self._totals: dict[str, float] = {}
        self._link = BlockLink(self._options, f"lmcache, pid {os.getpid()}", self._counters)
        if self._options.chunk_tokens:
            self._link.weigh(self._options.chunk_tokens)
        elif self._options.prefill_tokens_per_s:
            raise ConfigurationError(
                "kvcast's adapter: with `prefill_tokens_per_s` say `chunk_tokens`, too: LMCache's "
                "chunk_size, which it does not tell its adapters"
            )
        self._stores, self._lookups, self._loads = _Results(), _Results(), _Results()
        self._numbers = itertools.count()
        self._kept: BoundedMap[ObjectKey, tuple[int, str]] = BoundedMap(RESULTS_KEPT)
        """Of what was stored here last: bytes that LMCache was told of, and the layout."""
        self._lock = threading.Lock()

    # --- descriptors ----------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        return self._loads.fileno()

    # --- stores ---------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        task = next(self._numbers)
        described = self._described(keys, objects)
        if described is None:
            self._counters.add("save_failures", len(keys), reason=NOT_IN_MEMORY)
            self._stores.put(task, L2StoreResult(False, 0))
            return task
        names, rooms = described
        sizes = [len(room) for room in rooms]

        def stored(transfer: Transfer) -> None:
            new = [at for at, outcome in enumerate(transfer.outcomes) if outcome == CAME]
            with _told():
                self._keep(keys, objects, sizes, transfer)
                if new:
                    self._notify_keys_stored([keys[at] for at in new], [sizes[at] for at in new])
            total_bytes = sum(sizes[at] for at in new)
            self._stores.put(task, L2StoreResult(all(transfer.came), total_bytes))

        self._link.save(names, rooms, stored)
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        self._link.end_due()
        return self._stores.take_all()

    # --- lookups --------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        task = next(self._numbers)
        layouts = [self._layout_of(key, group_layout_descs) for key in keys]
        known = [at for at, layout in enumerate(layouts) if layout is not None]
        names = [self._named(keys[at], layouts[at] or "") for at in known]
        asked = [keys[at] for at in known]

        def answered(transfer: Transfer) -> None:
            bitmap = Bitmap(len(keys))
            for at, came in zip(known, transfer.came, strict=True):
                if came:
                    bitmap.set(at)
            held = [key for key, came in zip(asked, transfer.came, strict=True) if came]
            with _told():
                if held:
                    self._notify_keys_accessed(held)
            self._lookups.put(task, bitmap)

        self._link.find(names, answered)
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        self._link.end_due()
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing is locked."""

    # --- loads ----------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        task = next(self._numbers)
        described = self._described(keys, objects)
        if described is None or any(room.readonly for room in described[1]):
            self._counters.add("miss_blocks", len(keys), reason=NOT_IN_MEMORY)
            self._loads.put(task, Bitmap(len(keys)))
            return task

        def loaded(transfer: Transfer) -> None:
            bitmap = Bitmap(len(keys))
            for at, came in enumerate(transfer.came):
                if came:
                    bitmap.set(at)
            self._loads.put(task, bitmap)

        self._link.load(*described, loaded)
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        self._link.end_due()
        return self._loads.take(task_id)

    # --- the rest -------------------------------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """Have the pool forget chunks, for all who share it; it is done soon, or not at all."""
        known = [key for key in keys if self._layout_of(key, {}) is not None]

        def forgotten(transfer: Transfer) -> None:
            gone = [key for key, came in zip(known, transfer.came, strict=True) if came]
            with self._lock:
                sizes = [self._kept.pop(key, (0, ""))[0] for key in gone]
            with _told():
                if gone:
                    self._notify_keys_deleted(gone, sizes)

        names = [self._named(key, self._layout_of(key, {}) or "") for key in known]
        self._link.forget(names, forgotten)

    def report_status(self) -> dict[str, Any]:
        """Whether the pool answers, what is under way, and all counts since the start."""
        with self._lock:
            self._totals = merged(self._totals, self._counters.take())
            totals = dict(self._totals)
        return {
            "is_healthy": self._link.well,
            "type": "kvcast",
            "socket": self._options.agent_socket,
            "under_way": self._link.under_way,
            "counts": totals,
        }

    def close(self) -> None:
        self._link.close()
        for results in (self._stores, self._lookups, self._loads):
            results.close()

    def _described(
        self, keys: Sequence[ObjectKey], objects: Sequence[Any]
    ) -> tuple[list[Named], list[memoryview]] | None:
        """The pool's names of chunks, and their bytes in place; None where they are not in the
        host's memory."""
        if len(keys) != len(objects):
            raise ValueError(f"{len(keys)} keys and {len(objects)} objects")
        layouts = [_layout(one.metadata) for one in objects]
        try:
            rooms = [memoryview(one.byte_array).cast("B") for one in objects]
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            _log.warning("kvcast takes objects in the host's memory only: %r", error)
            return None
        names = [self._named(key, layout) for key, layout in zip(keys, layouts, strict=True)]
        return names, rooms

    def _layout_of(self, key: ObjectKey, descs: dict[int, MemoryLayoutDesc]) -> str | None:
        desc = descs.get(key.object_group_id)
        if desc is not None:
            return _layout_text(desc.shapes, desc.dtypes)
        with self._lock:
            return self._kept.get(key, (0, None))[1]

    def _keep(
        self, keys: list[ObjectKey], objects: list[Any], sizes: list[int], transfer: Transfer
    ) -> None:
        """Remember chunks that are in the pool now."""
        with self._lock:
            for at, (key, one) in enumerate(zip(keys, objects, strict=True)):
                if transfer.outcomes[at] == CAME:
                    self._kept[key] = sizes[at], _layout(one.metadata)
                elif transfer.came[at] and key not in self._kept:
                    self._kept[key] = 0, _layout(one.metadata)

    def _named(self, key: ObjectKey, layout: str) -> Named:
        return Named(
            _namespace(
                self._options.tenant,
                key.model_name,
                self._options.revision,
                self._options.version,
                ObjectKey.WorldSizeFromKVRank(key.kv_rank),
                layout,
            ),
            key_of(
                key.chunk_hash,
                key.kv_rank.to_bytes(8, "little"),
                key.object_group_id.to_bytes(8, "little"),
                key.cache_salt.encode(),
            ),
            chain=f"{key.kv_rank} {key.object_group_id} {key.cache_salt}",
        )


@functools.lru_cache(maxsize=1024)
def _namespace(
    tenant: str, model: str, revision: str, version: str, world_size: int, layout: str
) -> NamespaceName:
    return namespace_name(
        tenant=tenant,
        model=model,
        revision=revision,
        version=version,
        rank=RankFacts(tensor_size=max(world_size, 1)),
        layout={"engine": f"lmcache {lmcache.__version__}", "chunk": layout},
    )


def _layout_text(shapes: Sequence[Any], dtypes: Sequence[Any]) -> str:
    return repr([(tuple(shape), str(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)])


def _layout(metadata: Any) -> str:
    """What the bytes of a chunk mean, as the controller says it when it asks for one."""
    if metadata.shapes is not None and metadata.dtypes is not None:
        return _layout_text(metadata.shapes, metadata.dtypes)
    return _layout_text([metadata.shape], [metadata.dtype])


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What LMCache's listeners raise must not keep a task from its end."""
    try:
        yield
    except Exception:
        _log.exception("a listener of LMCache has failed")

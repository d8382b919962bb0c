"""SGLang's HiCache storage: `--hicache-storage-backend dynamic` with this module's `KvcastHiCache`.

Owns: what SGLang asks of a HiCacheStorage, in its terms, and which of its facts name a page. Must
not know: how the pool is talked to (`block_link`).

SGLang's storage threads wait for each call; so each has a deadline, and no call raises for what the
pool does. A page is one block of the pool, in whatever pieces it lies in the host's memory.

Where SGLang says which pages come before those of a call ("hicache_storage_pass_prefix_keys" in its
extra configuration), the pool is told, so that the policy `value` knows prefixes.

Written against SGLang 0.5.23; `docs/engines.md` says what was tried.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import torch
from kvcast.hostagent.connectors.block_link import BlockLink, Named, Room
from kvcast.hostagent.connectors.counters import Counters, merged
from kvcast.hostagent.connectors.naming import NamespaceName, RankFacts, key_of, namespace_name
from kvcast.hostagent.connectors.options import (
    ConfigurationError,
    StoreOptions,
    parse_store_options,
)
from kvcast.hostagent.connectors.transfers import DEADLINE, Transfer
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, PoolName
from sglang.version import __version__ as sglang_version

GRACE_S: Final = 0.05
"""How much longer than its deadline a task is waited for; then it is ended from here."""
PARAMETERS: Final = "adapter_params"
"""Under this name stand kvcast's options in SGLang's extra configuration."""
NO_MEMORY: Final = "not_in_host_memory"
_POOL_FACTS: Final = (
    "layout",
    "dtype",
    "page_size",
    "layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "head_group_num",
    "size_per_token",
)
"""What a pool of the host's memory says of the bytes of its pages, where it has it."""

_log = logging.getLogger("kvcast.connector")


class KvcastHiCache(HiCacheStorage):  # type: ignore[misc]
    """Pages that any engine of the pool has backed up are found by all the others."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: object = None) -> None:
        """Options stand in the extra configuration under "adapter_params", see `StoreOptions`;
        ConfigurationError names what is not understood. `kwargs` is SGLang's, and not needed."""
        self._config = storage_config
        self._options = parse_store_options((storage_config.extra_config or {}).get(PARAMETERS))
        self._counters = Counters()
        self._totals: dict[str, float] = {}
        self._lock = threading.Lock()
        self._link = BlockLink(self._options, f"sglang, pid {os.getpid()}", self._counters)
        self._namespace: NamespaceName | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._namespace = _namespace(self._config, mem_pool_host, self._options)
        self._link.weigh(self._options.chunk_tokens or int(getattr(mem_pool_host, "page_size", 1)))
        _log.info("kvcast: %s", self._namespace)

    def on_host_pools_registered(self) -> None:
        """All pools are known; ConfigurationError where there are several."""
        others = {str(name) for name in getattr(self, "registered_pools", {})} - {str(PoolName.KV)}
        if others:
            raise ConfigurationError(
                "kvcast's adapter takes models with one pool of host memory; this one has "
                f"{', '.join(sorted(others))}, too"
            )

    # --- questions ------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: object = None) -> int:
        """How many pages the pool holds, from the first without a gap."""
        names = self._names(keys)
        if not names:
            return 0
        came = self._came(self._link.find(names, _nothing, _places(names, extra_info)))
        return came.index(False) if False in came else len(came)

    # --- pages, in place ------------------------------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: object = None
    ) -> list[bool]:
        """Bring pages into the host's memory; whether each came."""
        rooms = self._pages(keys, host_indices)
        return self._load(keys, rooms, extra_info)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: object = None
    ) -> list[bool]:
        """Save pages from the host's memory; whether the pool holds each."""
        rooms = self._pages(keys, host_indices)
        return self._save(keys, rooms, extra_info)

    def _pages(self, keys: list[str], host_indices: torch.Tensor) -> list[Room] | None:
        """Where pages lie: the pool of the host's memory tells their pieces' addresses."""
        try:
            addresses, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        except (AttributeError, AssertionError, ValueError, NotImplementedError) as error:
            _log.warning("kvcast cannot tell where pages lie: %r", error)
            return None
        if not keys or len(addresses) % len(keys) or len(addresses) != len(sizes):
            return None
        views = [_memory(at, size) for at, size in zip(addresses, sizes, strict=True)]
        each = len(views) // len(keys)
        return [tuple(views[at : at + each]) for at in range(0, len(views), each)]

    # --- pages, as tensors ----------------------------------------------------------------------

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Bring pages into these tensors; None for each that did not come."""
        targets = list(target_locations or [])
        rooms = _tensors(targets, len(keys))
        came = self._load(keys, rooms)
        if rooms is None:
            return [None] * len(keys)
        return [one if here else None for one, here in zip(targets, came, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value if value is not None else target_location])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Save pages from tensors; whether the pool holds them all."""
        sources = list((values if values is not None else target_locations) or [])
        return all(self._save(keys, _tensors(sources, len(keys), copy=True)))

    # --- both -----------------------------------------------------------------------------------

    def _load(
        self, keys: list[str], rooms: Sequence[Room] | None, extra_info: object = None
    ) -> list[bool]:
        names = self._names(keys)
        if rooms is None or not names:
            self._counters.add("miss_blocks", len(keys), reason=NO_MEMORY)
            return [False] * len(keys)
        places = _places(names, extra_info)
        return self._came(self._link.load(names, rooms, _nothing, places))

    def _save(
        self, keys: list[str], rooms: Sequence[Room] | None, extra_info: object = None
    ) -> list[bool]:
        names = self._names(keys)
        if rooms is None or not names:
            self._counters.add("save_failures", len(keys), reason=NO_MEMORY)
            return [False] * len(keys)
        places = _places(names, extra_info)
        return self._came(self._link.save(names, rooms, _nothing, places))

    def _names(self, keys: Sequence[str]) -> list[Named]:
        """The pool's names of pages; none before there is a pool of the host's memory."""
        if self._namespace is None:
            return []
        return [Named(self._namespace, _key(key)) for key in keys]

    def _came(self, transfer: Transfer) -> list[bool]:
        """Wait for a task, no longer than its deadline."""
        if not transfer.wait(max(transfer.deadline - time.monotonic(), 0.0) + GRACE_S):
            transfer.end(DEADLINE)
        return transfer.came

    # --- the rest -------------------------------------------------------------------------------

    def counts(self) -> dict[str, float]:
        """All counts since the start, as `kvcast.hostagent.connectors.counters` names them."""
        with self._lock:
            self._totals = merged(self._totals, self._counters.take())
            return dict(self._totals)

    def clear(self) -> None:
        """The pool is others', too, and keeps what it holds."""
        _log.warning("kvcast's pool is shared, and is not cleared: give it another version instead")

    def close(self) -> None:
        self._link.close()
        counts = ", ".join(f"{name}: {amount:g}" for name, amount in sorted(self.counts().items()))
        _log.info("kvcast ends: %s", counts or "nothing was asked of it")


def _key(page: str) -> bytes:
    return key_of(page.encode())


def _places(names: Sequence[Named], extra_info: object) -> dict[bytes, tuple[bytes, int]]:
    """What is before each of these pages in their prompt, as a client's `prefix`, where SGLang says
    what is before the first of them."""
    before: list[str] | None = getattr(extra_info, "prefix_keys", None)
    if before is None:
        return {}
    keys = [name.key for name in names]
    above = [_key(before[-1]) if before else b"", *keys]
    return {key: (above[at], len(before) + at) for at, key in enumerate(keys)}


def _nothing(_: Transfer) -> None:
    """Who asked waits for the transfer itself."""


def _memory(address: int, size_bytes: int) -> memoryview:
    """The host's memory at an address that SGLang gave."""
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B")


def _tensors(given: Sequence[Any], count: int, *, copy: bool = False) -> list[Room] | None:
    """Tensors as bytes, in place; None where there are not `count` of them in the host's memory.
    `copy`: those that do not lie in one piece may be copied, since they are only read."""
    if len(given) != count:
        return None
    rooms: list[Room] = []
    for one in given:
        if not isinstance(one, torch.Tensor) or one.device.type != "cpu":
            return None
        if not one.is_contiguous():
            if not copy:
                return None
            one = one.contiguous()
        rooms.append(memoryview(one.detach().reshape(-1).view(torch.uint8).numpy()))
    return rooms


def _namespace(config: Any, pool: Any, options: StoreOptions) -> NamespaceName:
    """The namespace of one rank's pages; ranks that hold the same bytes share it."""
    ranks, rank = config.tp_size, config.tp_rank
    if config.is_mla_model:  # replicated, but for the parts of a page that DCP gives to ranks
        ranks, rank = config.dcp_size, config.dcp_rank
    layout = {
        "engine": f"sglang {sglang_version}",
        "block_tokens": str(getattr(pool, "page_size", "")),
        "host_pool": type(pool).__name__,
        "context": f"{config.attn_cp_rank}/{config.attn_cp_size}",
        "logical_page": str(config.logical_page_size),
        "split": f"{config.should_split_heads} {config.tp_lcm_size}",
        **{name: str(getattr(pool, name, None)) for name in _POOL_FACTS},
    }
    if layout["dtype"].startswith("torch."):
        layout["dtype"] = layout["dtype"].removeprefix("torch.")
    return namespace_name(
        tenant=options.tenant,
        model=options.model or config.model_name or "unnamed",
        revision=options.revision,
        version=options.version,
        rank=RankFacts(rank, ranks, config.pp_rank, config.pp_size),
        layout=layout,
    )

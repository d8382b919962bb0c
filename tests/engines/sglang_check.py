"""SGLang's own storage classes with kvcast behind them: runs in the engines' environment.

`python sglang_check.py SCENARIO ARGUMENT…`: prints "right", or fails. SGLang's pools of host memory
do not import without its kernels, so `HostPool` stands in for one: a tensor, and the addresses of
each page's pieces in it, for layouts that keep a page together and for those that do not.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from kvcast.hostagent.connectors.naming import key_of
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    HiCacheStorageFailureInjector,
    PoolName,
)
from sglang.srt.mem_cache.storage import StorageBackendFactory

PAGE, LAYERS, HEADS, WIDTH, PAGES = 16, 3, 2, 32, 32
WAIT_S = 30.0


class HostPool:
    """What a storage backend sees of a pool of host memory."""

    def __init__(self, layout: str = "page_first", dtype: Any = torch.bfloat16) -> None:
        self.layout, self.dtype, self.page_size = layout, dtype, PAGE
        self.layer_num, self.head_num, self.head_dim = LAYERS, HEADS, WIDTH
        # K and V, by page or by layer.
        tokens = PAGES * PAGE
        order = (2, tokens, LAYERS) if layout == "page_first" else (2, LAYERS, tokens)
        self.kv_buffer = torch.zeros((*order, HEADS, WIDTH), dtype=dtype)

    def fill(self, seed: int) -> None:
        raw = self.kv_buffer.view(torch.uint8)
        raw.copy_(
            torch.randint(
                0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
            )
        )

    def pieces(self, page: int) -> list[torch.Tensor]:
        begin, end = page * PAGE, (page + 1) * PAGE
        if self.layout == "page_first":
            return [self.kv_buffer[half, begin:end] for half in range(2)]
        return [
            self.kv_buffer[half, layer, begin:end] for layer in range(LAYERS) for half in range(2)
        ]

    def page(self, page: int) -> bytes:
        return b"".join(
            piece.contiguous().view(torch.uint8).numpy().tobytes() for piece in self.pieces(page)
        )

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        assert len(indices) % PAGE == 0
        pieces = [piece for at in indices.tolist()[::PAGE] for piece in self.pieces(at // PAGE)]
        sizes = [piece.numel() * piece.element_size() for piece in pieces]
        return [piece.data_ptr() for piece in pieces], sizes

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(2 * PAGE * LAYERS * HEADS * WIDTH, dtype=self.dtype)


def indices(pages: Sequence[int]) -> torch.Tensor:
    return torch.cat([torch.arange(at * PAGE, (at + 1) * PAGE) for at in pages])


def keys(label: str, count: int) -> list[str]:
    return [hashlib.sha256(f"{label} {at}".encode()).hexdigest() for at in range(count)]


def make(
    socket: str, pool: Any, params: dict[str, Any] | None = None, **config: Any
) -> HiCacheStorage:
    """A backend as SGLang makes one of its extra configuration."""
    facts: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "a/model",
        "extra_config": {
            "backend_name": "kvcast",
            "module_path": "kvcast.hostagent.connectors.sglang",
            "class_name": "KvcastHiCache",
            "interface_v1": 1,
            "adapter_params": {"socket": socket, "lookup_s": 2.0} | (params or {}),
        },
    }
    backend = StorageBackendFactory.create_backend(
        "dynamic", HiCacheStorageConfig(**(facts | config)), pool
    )
    assert isinstance(backend, HiCacheStorage)
    assert not backend.exists(keys("early", 1)[0]), "before there is a pool there are no pages"
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    return backend


def contract(one: str, other: str) -> None:
    """Each call, between two nodes, in place and by tensors."""
    for layout in ("page_first", "layer_first"):
        mine, theirs = HostPool(layout), HostPool(layout)
        mine.fill(1)
        here, there = make(one, mine), make(other, theirs)
        names = keys(layout, 8)
        assert there.batch_exists(names) == 0
        assert here.batch_set_v1(names[:6], indices(range(6))) == [True] * 6
        assert here.batch_set_v1(names[:6], indices(range(6))) == [True] * 6
        assert there.batch_exists(names) == 6
        assert there.batch_exists([names[7], *names[:6]]) == 0, "counted from the first"
        assert there.exists(names[5])
        assert not there.exists(names[6])
        places = [9, 3, 30, 0, 17, 5, 6, 7]  # elsewhere in memory
        came = there.batch_get_v1(names, indices(places))
        assert came == [True] * 6 + [False] * 2
        for at in range(6):
            assert theirs.page(places[at]) == mine.page(at)
        untouched = set(range(PAGES)) - set(places[:6])
        assert not any(any(theirs.page(at)) for at in untouched)
        here.close()
        there.close()

    pool = HostPool()
    here, there = make(one, pool), make(other, HostPool())
    values = [torch.rand(2 * PAGE * LAYERS * HEADS * WIDTH).to(torch.bfloat16) for _ in range(4)]
    names = keys("tensors", 5)
    assert here.set(names[0], values[0])
    assert here.batch_set(names[:4], values)
    assert here.batch_set(names[:1], [values[0].reshape(2, -1).t()]), "held already"
    targets = [pool.get_dummy_flat_data_page() for _ in names]
    got = there.batch_get(names, targets)
    assert isinstance(got, list)
    assert got[4] is None
    assert all(torch.equal(a, b) for a, b in zip(got[:4], values, strict=True))
    one_page = there.get(names[2], pool.get_dummy_flat_data_page())
    assert torch.equal(one_page, values[2])
    assert there.get(keys("never", 1)[0], pool.get_dummy_flat_data_page()) is None
    # What cannot be answered is a miss, as a list, and never None.
    assert there.batch_get(names, None) == [None] * 5
    assert there.batch_get(names, targets[:2]) == [None] * 5
    assert there.batch_get_v1(names, torch.arange(3)) == [False] * 5
    assert here.batch_set_v1(names, torch.arange(3)) == [False] * 5
    assert not here.batch_set(names, None)
    assert there.batch_exists([]) == 0
    assert there.batch_get_v1([], torch.arange(0)) == []
    there.clear()
    assert there.batch_exists(names) == 4, "the pool is others', too"
    counts = there.counts()
    assert counts["load_blocks|tier=local"] + counts.get("load_blocks|tier=bulk", 0) > 0
    here.close()
    there.close()


def told(one: str, other: str) -> None:
    """What SGLang says of the pages before those of a call, each call passes on."""
    pool = HostPool()
    pool.fill(1)
    here, there = make(one, pool), make(other, HostPool())
    names = keys("told", 8)
    pages = [key_of(name.encode()) for name in names]
    passed: list[tuple[str, dict[bytes, tuple[bytes, int]]]] = []
    for backend in (here, there):
        for call in ("find", "load", "save"):
            method = getattr(backend._link, call)

            def noted(*given: Any, call: str = call, method: Any = method) -> Any:
                passed.append((call, given[-1]))
                return method(*given)

            setattr(backend._link, call, noted)
    begin = HiCacheStorageExtraInfo(prefix_keys=[])
    behind = HiCacheStorageExtraInfo(prefix_keys=names[:5])
    assert here.batch_set_v1(names[:5], indices(range(5)), begin) == [True] * 5
    assert here.batch_set_v1(names[5:], indices(range(5, 8)), behind) == [True] * 3
    assert there.batch_exists(names[5:], behind) == 3
    assert there.batch_get_v1(names[5:], indices(range(3)), behind) == [True] * 3
    assert there.batch_get_v1(names[:2], indices(range(2)), HiCacheStorageExtraInfo()) == [True] * 2
    assert there.batch_get_v1(names[:2], indices(range(2))) == [True] * 2
    places = {page: (pages[at - 1] if at else b"", at) for at, page in enumerate(pages)}
    first, last = ({page: places[page] for page in some} for some in (pages[:5], pages[5:]))
    assert passed == [
        *(("save", first), ("save", last), ("find", last), ("load", last)),
        *(("load", {}), ("load", {})),
    ], passed
    here.close()
    there.close()


def apart(one: str, other: str) -> None:
    """Ranks that hold other bytes, other types, layouts and versions find nothing."""
    mine = HostPool()
    mine.fill(1)
    names = keys("a", 4)
    here = make(one, mine)
    assert all(here.batch_set_v1(names, indices(range(4))))
    others: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (HostPool("layer_first"), {}, {}),
        (HostPool(dtype=torch.float16), {}, {}),
        (HostPool(), {"version": "2"}, {}),
        (HostPool(), {"revision": "main"}, {}),
        (HostPool(), {}, {"model_name": "b/model"}),
        (HostPool(), {}, {"tp_size": 2}),
        (HostPool(), {}, {"tp_size": 2, "tp_rank": 1}),
        (HostPool(), {}, {"pp_size": 2}),
        (HostPool(), {}, {"attn_cp_size": 2, "attn_cp_rank": 1}),
    ]
    for pool, params, config in others:
        there = make(other, pool, params, **config)
        assert there.batch_exists(names) == 0, (params, config)
        assert there.batch_get_v1(names, indices(range(4))) == [False] * 4
        there.close()
    same = make(other, HostPool(), {}, dp_rank=3)
    assert same.batch_exists(names) == 4
    same.close()
    # Ranks of an MLA model hold the same bytes.
    ranks = [
        make(socket, HostPool(), {}, is_mla_model=True, tp_size=4, tp_rank=rank)
        for rank, socket in ((0, one), (3, other))
    ]
    assert all(ranks[0].batch_set_v1(names, indices(range(4))))
    assert ranks[1].batch_exists(names) == 4
    for each in (*ranks, here):
        each.close()


def hung(one: str, other: str, pid: str) -> None:
    """An agent that hangs: each call ends by its deadline, and stale hits do not time out again
    and again."""
    mine, theirs = HostPool(), HostPool()
    mine.fill(1)
    writer = make(one, mine)
    names = keys("a", 12)
    assert all(writer.batch_set_v1(names, indices(range(12))))
    writer.close()
    limits = {"lookup_s": 0.3, "load_s": 0.4, "save_s": 0.4, "prefetch": False}
    backend = make(other, theirs, limits)
    assert backend.batch_exists(names) == 12
    os.kill(int(pid), signal.SIGSTOP)
    try:
        longest, total = 0.0, time.monotonic()
        for turn in range(30):
            began = time.monotonic()
            if backend.batch_exists(names):
                came = backend.batch_get_v1(names, indices(range(12)))
                for at, one_came in enumerate(came):
                    assert theirs.page(at) == (mine.page(at) if one_came else bytes(2 * 6144))
            backend.batch_set_v1(keys(f"b {turn}", 2), indices(range(2)))
            longest = max(longest, time.monotonic() - began)
        total = time.monotonic() - total
        assert longest < 3.0, longest
        assert total < 12.0, "repeated time-outs"
    finally:
        os.kill(int(pid), signal.SIGCONT)
    end = time.monotonic() + WAIT_S
    while backend.batch_exists(names) < 12 or not all(
        backend.batch_get_v1(names, indices(range(12)))
    ):
        assert time.monotonic() < end
        time.sleep(0.2)
    assert [theirs.page(at) for at in range(12)] == [mine.page(at) for at in range(12)]
    assert backend.counts()["lookups_failed|reason=left_alone"] > 0
    backend.close()


def crowd(one: str, other: str) -> None:
    """Many threads at once: none fails, and none gets another's page."""
    mine, theirs = HostPool(), HostPool()
    mine.fill(1)
    here, there = make(one, mine, {"load_s": 20.0}), make(other, theirs, {"load_s": 20.0})
    failures: list[BaseException] = []

    def play(number: int) -> None:
        try:
            pages = range(number * 2, number * 2 + 2)
            for turn in range(8):
                names = keys(f"{number} {turn}", 2)
                assert here.batch_set_v1(names, indices(pages)) == [True] * 2
                assert there.batch_exists(names) == 2
                assert there.batch_get_v1(names, indices(pages)) == [True] * 2
                for at in pages:
                    assert theirs.page(at) == mine.page(at)
                    for piece in theirs.pieces(at):
                        piece.zero_()
        except BaseException as error:
            failures.append(error)

    players = [threading.Thread(target=play, args=(number,)) for number in range(PAGES // 2)]
    for player in players:
        player.start()
    for player in players:
        player.join()
    assert not failures, failures
    here.close()
    there.close()


def injected(one: str) -> None:
    """Behind SGLang's own injector of failures, all is as it says."""
    from sglang.srt.environ import envs

    with envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.5):
        pool = HostPool()
        pool.fill(1)
        backend = make(one, pool)
        assert isinstance(backend, HiCacheStorageFailureInjector)
        names = keys("a", 6)
        while not all(backend.batch_set_v1(names, indices(range(6)))):
            pass
        wanted = [pool.page(at) for at in range(6)]
        pool.kv_buffer.zero_()
        while not all(backend.batch_get_v1(names, indices(range(6)))):
            pass
        assert [pool.page(at) for at in range(6)] == wanted


def wrong() -> None:
    for params in ({"sockett": "x"}, {"load_s": -1}):
        try:
            make("/nonexistent/agent.sock", HostPool(), params)
        except ValueError as error:
            said = str(error)
        else:
            raise AssertionError(params)
        assert "kvcast" in said
    backend = make("/nonexistent/agent.sock", HostPool())
    backend.register_mem_host_pool_v2(HostPool(), PoolName.KV)
    backend.on_host_pools_registered()
    backend.register_mem_host_pool_v2(HostPool(), PoolName.MAMBA)
    try:
        backend.on_host_pools_registered()
    except ValueError as error:
        said = str(error)
    else:
        raise AssertionError("several pools")
    assert "mamba" in said
    names = keys("a", 2)
    assert backend.batch_exists(names) == 0
    assert backend.batch_set_v1(names, indices(range(2))) == [False] * 2
    assert backend.batch_get_v1(names, indices(range(2))) == [False] * 2
    backend.close()


if __name__ == "__main__":
    scenarios: dict[str, Any] = {
        "contract": contract,
        "told": told,
        "apart": apart,
        "crowd": crowd,
        "hung": hung,
        "injected": injected,
        "wrong": wrong,
    }
    scenarios[sys.argv[1]](*sys.argv[2:])
    print("right")

"""LMCache's own classes with kvcast's L2 adapter: runs in the engines' environment.

`python lmcache_check.py SCENARIO ARGUMENT…`: prints "right", or fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import select
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from lmcache.v1.check.check_mode_test_l2_adapter import run_test_mode
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

SHAPE = torch.Size([2, 4, 16, 64])
DTYPE = torch.bfloat16
LAYOUT = MemoryLayoutDesc([SHAPE], [DTYPE])
WAIT_S = 30.0


def adapter_config(socket: str, **params: Any) -> Any:
    """What a user says to `--l2-adapter`, as LMCache parses it."""
    said = {
        "type": "plugin",
        "module_path": "kvcast.hostagent.connectors.lmcache",
        "class_name": "KvcastL2Adapter",
        "adapter_params": {"socket": socket, "lookup_s": 2.0} | params,
    }
    return parse_args_to_l2_adapters_config(Namespace(l2_adapter=[json.dumps(said)]))


def make(socket: str, **params: Any) -> Any:
    [config] = adapter_config(socket, **params).adapters
    return create_l2_adapter(config)


def keys(label: str, count: int, model: str = "a/model", rank: int = 0, **more: Any) -> list[Any]:
    kv_rank = ObjectKey.ComputeKVRank(2, rank, 2, rank)
    return [
        ObjectKey(hashlib.sha256(f"{label} {at}".encode()).digest(), model, kv_rank, **more)
        for at in range(count)
    ]


def objects(count: int, seed: int | None, shape: Any = SHAPE, dtype: Any = DTYPE) -> list[Any]:
    made = []
    for at in range(count):
        generator = torch.Generator().manual_seed((seed or 0) * 1000 + at)
        size = shape.numel() * dtype.itemsize
        raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        raw = raw if seed is not None else torch.zeros_like(raw)
        metadata = MemoryObjMetadata(
            shape, dtype, raw.data_ptr(), size, 1, fmt=MemoryFormat.KV_2LTD
        )
        made.append(TensorMemoryObj(raw, metadata, parent_allocator=None))
    return made


def contents(made: Sequence[Any]) -> list[bytes]:
    return [bytes(one.byte_array) for one in made]


def wait(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(WAIT_S * 1000), "a descriptor is never signalled"
    with contextlib.suppress(BlockingIOError):
        consume_fd(fd)


def store(adapter: Any, names: Sequence[Any], made: Sequence[Any]) -> Any:
    task = adapter.submit_store_task(list(names), list(made))
    done: dict[int, Any] = {}
    end = time.monotonic() + WAIT_S
    while task not in done:
        assert time.monotonic() < end
        wait(adapter.get_store_event_fd())
        done |= adapter.pop_completed_store_tasks()
    return done[task]


def bits(bitmap: Any, count: int) -> list[bool]:
    return [bool(bitmap.test(at)) for at in range(count)]


def answer(fd: int, query: Any, task: int, count: int) -> list[bool]:
    end = time.monotonic() + WAIT_S
    while (bitmap := query(task)) is None:
        assert time.monotonic() < end
        wait(fd)
    assert query(task) is None, "a result is told once"
    return bits(bitmap, count)


def lookup(adapter: Any, names: Sequence[Any], layouts: Any = None) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(
        list(names), {0: LAYOUT} if layouts is None else layouts
    )
    fd = adapter.get_lookup_and_lock_event_fd()
    return answer(fd, adapter.query_lookup_and_lock_result, task, len(names))


def load(adapter: Any, names: Sequence[Any], made: Sequence[Any]) -> list[bool]:
    task = adapter.submit_load_task(list(names), list(made))
    return answer(adapter.get_load_event_fd(), adapter.query_load_result, task, len(names))


def theirs(socket: str) -> None:
    """The check that LMCache ships for L2 adapters."""
    said = {
        "type": "plugin",
        "module_path": "kvcast.hostagent.connectors.lmcache",
        "class_name": "KvcastL2Adapter",
        "adapter_params": {"socket": socket, "lookup_s": 2.0},
    }
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        asyncio.run(run_test_mode("a/model", l2_adapter=[json.dumps(said)], num_keys=8))
    text = out.getvalue()
    print(text)
    assert "Failed" not in text
    assert "FAIL" not in text
    for words in (
        "8/8 correctly absent",
        "Batch store OK",
        "8/8 found",
        "(loaded): 8/8",
        "(content): 8/8",
    ):
        assert words in text, words


class Listener(L2AdapterListener):
    def __init__(self) -> None:
        self.stored: list[tuple[Any, int]] = []
        self.deleted: list[Any] = []

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.stored += zip(keys, sizes, strict=True)

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        raise RuntimeError("a listener that fails")

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        self.deleted += keys


def contract(one: str, other: str) -> None:
    """The interface, sentence by sentence, between two processes' worth of adapters."""
    here, there = make(one), make(other)
    fds = [
        fd
        for adapter in (here, there)
        for fd in (
            adapter.get_store_event_fd(),
            adapter.get_lookup_and_lock_event_fd(),
            adapter.get_load_event_fd(),
        )
    ]
    assert len(set(fds)) == 6
    listener = Listener()
    here.register_listener(listener)
    there.register_listener(listener)
    names, mine = keys("a", 6), objects(6, 1)
    assert lookup(here, names, {}) == [False] * 6, "nothing is known, not even a layout"
    result = store(here, names[:5], mine[:5])
    size = len(contents(mine)[0])
    assert (result.is_successful(), result.bytes_transferred()) == (True, 5 * size)
    assert listener.stored == [(name, size) for name in names[:5]]
    again = store(here, names[:5], mine[:5])
    assert (again.is_successful(), again.bytes_transferred()) == (True, 0)
    assert here.get_usage().total_bytes_used == 5 * size, "what was there is not counted again"
    assert lookup(there, names) == [True] * 5 + [False]
    got = objects(6, None)
    assert load(there, names, got) == [True] * 5 + [False]
    assert contents(got)[:5] == contents(mine)[:5]
    assert not any(contents(got)[5])
    there.submit_unlock(names)
    assert lookup(here, names[:5], {}) == [True] * 5, "the layout of what it stored itself"

    # What is another user's, model's, rank's, group's, or of another shape or type, is not found.
    for apart in (
        keys("a", 5, cache_salt="user"),
        keys("a", 5, model="another/model"),
        keys("a", 5, rank=1),
        keys("a", 5, object_group_id=1),
    ):
        layouts = {0: LAYOUT, 1: LAYOUT}
        assert lookup(there, apart, layouts) == [False] * 5
        assert store(there, apart, objects(5, 2)).is_successful()
        assert lookup(there, apart, layouts) == [True] * 5
    assert lookup(there, names[:5], {0: MemoryLayoutDesc([SHAPE], [torch.float16])}) == [False] * 5
    wide = torch.Size([2, 4, 16, 128])
    assert lookup(there, names[:5], {0: MemoryLayoutDesc([wide], [DTYPE])}) == [False] * 5
    assert load(there, names[:5], objects(5, None, wide)) == [False] * 5
    got = objects(5, None)
    assert load(there, names[:5], got) == [True] * 5
    assert contents(got) == contents(mine)[:5]
    for params in ({"version": "2"}, {"revision": "main"}):
        elsewhere = make(other, **params)
        assert lookup(elsewhere, names) == [False] * 6
        elsewhere.close()

    # A store that fails says so, and leaves nothing to be found.
    huge = torch.Size([48 << 20])  # more than an agent has
    big = keys("big", 1)
    assert not store(here, big, objects(1, 3, huge, torch.uint8)).is_successful()
    layout = {0: MemoryLayoutDesc([huge], [torch.uint8])}
    assert lookup(here, big, layout) == [False]
    assert lookup(there, big, layout) == [False]

    here.delete(names[:2])
    end = time.monotonic() + WAIT_S
    while len(listener.deleted) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert here.get_usage().total_bytes_used == 3 * size
    assert (left := lookup(here, names[:5])) == [False] * 2 + [True] * 3, left
    status = here.report_status()
    assert status["is_healthy"] is True
    assert status["counts"]["save_blocks"] == 5
    assert here.report_status()["counts"] == status["counts"], "they are totals"
    assert there.report_status()["counts"]["miss_blocks|reason=not_found"] > 0
    here.close()
    there.close()
    here.close()


def threads(one: str, other: str) -> None:
    """Two controllers' threads, and more, at once: no result is lost or another's."""
    adapter, failures = make(one), []

    def play(number: int) -> None:
        try:
            for turn in range(6):
                names, mine = keys(f"{number} {turn}", 4), objects(4, number * 100 + turn)
                task = adapter.submit_store_task(names, mine)
                end = time.monotonic() + WAIT_S
                while task not in stored:
                    with gate:
                        stored.update(adapter.pop_completed_store_tasks())
                    assert time.monotonic() < end
                    time.sleep(0.002)
                task = adapter.submit_lookup_and_lock_task(names, {0: LAYOUT})
                while (found := adapter.query_lookup_and_lock_result(task)) is None:
                    assert time.monotonic() < end
                    time.sleep(0.002)
                assert bits(found, 4) == [True] * 4
                got = objects(4, None)
                task = adapter.submit_load_task(names, got)
                while (came := adapter.query_load_result(task)) is None:
                    assert time.monotonic() < end
                    time.sleep(0.002)
                assert bits(came, 4) == [True] * 4
                assert contents(got) == contents(mine)
        except BaseException as error:
            failures.append(error)
            raise

    gate, stored = threading.Lock(), dict[int, Any]()
    players = [threading.Thread(target=play, args=(number,)) for number in range(6)]
    for player in players:
        player.start()
    for player in players:
        player.join()
    assert not failures
    adapter.close()


def manager(socket: str) -> StorageManager:
    memory = L1MemoryManagerConfig(16 << 20, use_lazy=False, shm_name="")
    return StorageManager(
        StorageManagerConfig(L1ManagerConfig(memory), EvictionConfig("LRU"), adapter_config(socket))
    )


def managed(one: str, other: str) -> None:
    """LMCache's storage manager, with its store and prefetch controllers, on two nodes."""
    here, there = manager(one), manager(other)
    names = keys("a", 8)
    reserved = here.reserve_write(names, LAYOUT)
    assert len(reserved) == 8
    for at, name in enumerate(names):
        reserved[name].tensor.fill_(float(at + 1))
    here.finish_write(names)
    rows = [GroupedObjectKeys(keys("a", 10), 0, LAYOUT)]
    end = time.monotonic() + WAIT_S
    while True:
        handle = there.submit_prefetch_task(PrefetchTaskSpec(rows))
        assert there.wait_prefetch_status(handle, WAIT_S), "a prefetch never ends"
        result = there.query_prefetch_status(handle)
        assert result is not None
        if result.l2_hit_count + result.l1_hit_count >= 8:
            break
        assert time.monotonic() < end, result
        time.sleep(0.2)
    assert sum(row.popcount() for row in result.hit_cells) == 8, "a prefix, up to its end"
    with there.read_prefetched_results(names) as read:
        assert read is not None
        for at, one_object in enumerate(read):
            wanted = torch.full(SHAPE, float(at + 1), dtype=DTYPE)
            assert torch.equal(one_object.tensor, wanted)
    here.close()
    there.close()


def hung(one: str, other: str, pid: str) -> None:
    """An agent that hangs: every task ends by its deadline, and then at once."""
    writer = make(one)
    names, mine = keys("a", 12), objects(12, 1)
    assert store(writer, names, mine).is_successful()
    writer.close()
    adapter = make(other, lookup_s=0.3, load_s=0.4, save_s=0.4, retry_s=0.0, prefetch=False)
    assert all(lookup(adapter, names))
    os.kill(int(pid), signal.SIGSTOP)
    try:
        began = time.monotonic()
        got = objects(12, None)
        came = load(adapter, names, got)
        assert not all(came)
        for at, one_came in enumerate(came):
            assert contents(got)[at] == (contents(mine)[at] if one_came else bytes(16384))
        assert lookup(adapter, keys("b", 3)) == [False] * 3
        assert not store(adapter, keys("c", 3), objects(3, 2)).is_successful()
        assert lookup(adapter, keys("d", 3)) == [False] * 3
        for _ in range(20):  # stale hits cost nothing any more
            assert lookup(adapter, keys("e", 3)) == [False] * 3
        assert time.monotonic() - began < 10
        assert adapter.report_status()["is_healthy"] is False
    finally:
        os.kill(int(pid), signal.SIGCONT)
    end = time.monotonic() + WAIT_S
    while not all(lookup(adapter, names)):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert adapter.report_status()["is_healthy"] is True
    os.kill(int(pid), signal.SIGSTOP)
    try:
        task = adapter.submit_store_task(keys("f", 2), objects(2, 3))
        assert task not in adapter.pop_completed_store_tasks()
        adapter.close()  # in the middle of it
    finally:
        os.kill(int(pid), signal.SIGCONT)


def wrong() -> None:
    """What is not understood is named at the start."""
    for params in ({"sockett": "x"}, {"model": "x"}, {"load_s": -1}, {"prefill_tokens_per_s": 9}):
        try:
            make("/nonexistent/agent.sock", **params)
        except ValueError as error:
            said = str(error)
        else:
            raise AssertionError(params)
        assert "kvcast" in said
    adapter = make("/nonexistent/agent.sock")
    names = keys("a", 2)
    assert not store(adapter, names, objects(2, 1)).is_successful()
    assert lookup(adapter, names) == [False] * 2
    assert load(adapter, names, objects(2, None)) == [False] * 2
    adapter.close()


if __name__ == "__main__":
    scenarios: dict[str, Any] = {
        "theirs": theirs,
        "contract": contract,
        "threads": threads,
        "managed": managed,
        "hung": hung,
        "wrong": wrong,
    }
    scenarios[sys.argv[1]](*sys.argv[2:])
    print("right")

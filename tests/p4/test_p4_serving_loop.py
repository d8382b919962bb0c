"""What may happen to a segment while a READ of it goes round and round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pool_switch
import pytest
from kvcast.protocol.messages import wire
from kvcast.switchsim.llvm.switch import CompiledSwitch
from kvcast.switchsim.reference import switch as switch_module
from pool_engine import both_engines  # noqa: F401 - an autouse fixture
from pool_switch import KEY, PoolSwitch, content_of, endpoint, ports

CONTENT = content_of(6 * wire.CHUNK_BYTES)
OTHER = content_of(6 * wire.CHUNK_BYTES, seed=8)
DIGEST = wire.digest_of(CONTENT)


@pytest.fixture
def pool() -> PoolSwitch:
    return PoolSwitch()


def between_passes(
    monkeypatch: pytest.MonkeyPatch, after: int, happens: Callable[[], object]
) -> None:
    """Let something happen after that many chunks were served, as a controller's write would."""
    if isinstance(pool_switch.Switch(), CompiledSwitch):
        pytest.skip("compiled code cannot be interrupted between two passes")
    next_pass = switch_module._Run.next_pass

    def interrupted(run: Any, phv: Any, frame: bytes) -> None:
        next_pass(run, phv, frame)
        if run.passes == after:
            happens()

    monkeypatch.setattr(switch_module._Run, "next_pass", interrupted)


def test_an_eviction_sends_the_rest_to_the_home(
    pool: PoolSwitch, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = pool.make_resident(KEY, CONTENT)
    pool.answer(2, CONTENT)
    between_passes(monkeypatch, 2, lambda: pool.table("resident").delete(handle))

    out = pool.read(3, tag=5, flags=wire.FLAG_PADDED)

    assert [(r.port, r.frame.chunk) for r in out[:2]] == [(3, 0), (3, 1)]
    (rest,) = out[2:]
    assert (rest.port, rest.source, rest.destination) == (1, endpoint(3), endpoint(1))
    assert rest.frame.op == wire.OP_READ
    assert rest.frame.wanted == 0b111100
    assert rest.frame.flags == wire.FLAG_PARTIAL | wire.FLAG_PADDED
    assert rest.frame.digest == DIGEST, "of the copy that the reader has begun to get"
    assert (rest.frame.tag, rest.frame.size, rest.frame.chunk) == (5, 0, 0)
    decisions = ("hit", "serving", "partial")
    assert [pool.decided(name) for name in decisions] == [1, 1, 1]
    assert ports(pool.read(4)) == [1], "the rest of a READ opens no entry"
    assert pool.decided("new") == 1


@pytest.mark.parametrize("content", [CONTENT, OTHER], ids=["same copy", "another copy"])
def test_a_new_generation_sends_the_rest_to_the_home(
    pool: PoolSwitch, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    handle = pool.make_resident(KEY, CONTENT, slot=3, generation=1)
    pool.answer(2, CONTENT)

    def admit_anew() -> None:
        pool.table("resident").delete(handle)
        pool.make_resident(KEY, content, slot=3, generation=2)

    between_passes(monkeypatch, 4, admit_anew)
    out = pool.read(3)
    assert [r.frame.chunk for r in out if r.port == 3] == [0, 1, 2, 3]
    assert [(r.frame.op, r.frame.wanted) for r in out if r.port == 1] == [(wire.OP_READ, 0b110000)]


def test_a_move_to_another_slot_is_an_eviction_too(
    pool: PoolSwitch, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = pool.make_resident(KEY, CONTENT, slot=3, generation=1)
    pool.answer(2, CONTENT)

    def move() -> None:
        pool.table("resident").delete(handle)
        pool.make_resident(KEY, CONTENT, slot=4, generation=2)

    between_passes(monkeypatch, 1, move)
    out = pool.read(3)
    assert [(r.port, r.frame.chunk) for r in out[:-1]] == [(3, 0)]
    assert out[-1].port == 1


def test_a_rest_whose_home_is_gone_is_dropped(
    pool: PoolSwitch, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = pool.make_resident(KEY, CONTENT)
    pool.answer(2, CONTENT)

    def home_goes() -> None:
        pool.table("resident").delete(handle)
        pool.table("l2_forward").clear()

    between_passes(monkeypatch, 1, home_goes)
    assert [r.frame.chunk for r in pool.read(3)] == [0]
    assert pool.decided("dropped") == 1


def test_every_pass_uses_the_entry_and_the_read_counts_once(pool: PoolSwitch) -> None:
    handle = pool.make_resident(KEY, CONTENT, slot=9)
    pool.answer(2, CONTENT)
    filled, _ = pool.table("resident").read_counter(handle)
    pool.read(3)
    assert pool.table("resident").read_counter(handle)[0] - filled == 6
    counter = next(c for n, c in pool.switch.counters.items() if n.endswith("resident_hits"))
    assert counter.read(9)[0] == 1
    assert (pool.decided("hit"), pool.decided("serving")) == (1, 5)


def test_a_port_without_a_serve_group_is_answered_by_the_home(pool: PoolSwitch) -> None:
    pool.make_resident(KEY, CONTENT)
    pool.answer(2, CONTENT)
    guard = pool.table("port_guard")
    at = endpoint(3)
    guard.delete(next(e.handle for e in guard if e.key[0].value == 3))
    pool.add("port_guard", (3, at.ip), "admit", 0b100, 0)
    assert ports(pool.read(3)) == [1]


def test_a_forged_instance_of_a_pass_does_not_exist(pool: PoolSwitch) -> None:
    """DATA's own fields (digest, size, chunk) in a READ from a host are malformed, so a READ in
    the state in which one goes round cannot come from outside."""
    pool.make_resident(KEY, CONTENT)
    pool.answer(2, CONTENT)
    forged = wire.Frame(
        wire.OP_READ, 7, KEY, chunk=1, size=len(CONTENT), digest=DIGEST, wanted=0b111100
    )
    assert pool.send(3, 1, forged) == []
    assert pool.decided("dropped") == 1

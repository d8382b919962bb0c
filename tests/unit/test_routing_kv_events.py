"""KV events as the router takes them: both forms, order, gaps, restarts, and what is no event."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fake_engine import _as_array, cleared, removed, stored
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.routing.core.costs import CostModel
from kvcast.routing.core.hashing import token_chain
from kvcast.routing.core.kv_events import EngineEvents, EventError, decode_batch
from kvcast.routing.core.router import Prompt, Router, RouterOptions

TOKENS = list(range(64))


def batch(*events: dict[str, Any], as_maps: bool = False) -> bytes:
    if as_maps or any("group_idx" in event for event in events):
        return msgspec.msgpack.encode({"ts": 1.0, "events": list(events)})
    return msgspec.msgpack.encode([1.0, [_as_array(event) for event in events], 0])


def engine(**options: Any) -> tuple[Router, EngineEvents]:
    router = Router(RouterOptions(costs=CostModel(pool_latency_s=0.0)))
    router.add_engine("e")
    return router, EngineEvents(router, "e", **options)


def held(router: Router, tokens: list[int] = TOKENS, **names: Any) -> tuple[int, int, int]:
    """Tokens that the engine has of this prompt, that its host has beyond, and the pool."""
    chain = token_chain(tokens, 16, **names)
    (estimate,) = router.estimates(Prompt(chain, len(tokens) + 1, 16), 0.0)
    return estimate.engine_tokens, estimate.host_tokens, estimate.pool_tokens


@pytest.mark.parametrize("as_maps", [False, True])
def test_what_is_stored_is_held_and_what_is_removed_is_not(as_maps: bool) -> None:
    router, events = engine()
    events.heard(0, batch(stored([b"a", b"b"], TOKENS[:32]), as_maps=as_maps))
    events.heard(1, batch(stored([b"c"], TOKENS[32:48], parent=b"b"), as_maps=as_maps))
    assert held(router) == (48, 0, 0)
    events.heard(2, batch(removed([b"c"]), as_maps=as_maps))
    assert held(router) == (32, 0, 0)
    events.heard(3, batch(cleared(), as_maps=as_maps))
    assert held(router) == (0, 0, 0)
    assert len(events) == 0


def test_older_arrays_are_shorter_and_a_batch_may_be_an_array_of_maps() -> None:
    router, events = engine()
    older = ["BlockStored", [1, 2], None, TOKENS[:32], 16, None]
    events.heard(0, msgspec.msgpack.encode([1.0, [older]]))
    newer = {**stored([3], TOKENS[32:48], parent=2), "locality": "LOCAL", "group_idx": 0}
    events.heard(1, msgspec.msgpack.encode([1.0, [newer], 0]))
    assert held(router) == (48, 0, 0)
    events.heard(2, msgspec.msgpack.encode([1.0, [["BlockRemoved", [2]]]]))
    assert held(router) == (16, 0, 0)


def test_hashes_may_be_numbers() -> None:
    router, events = engine()
    events.heard(0, batch(stored([2**64 - 1, 5], TOKENS[:32])))
    assert held(router) == (32, 0, 0)


def test_what_tells_prompts_apart_for_the_engine_does_so_here() -> None:
    router, events = engine()
    events.heard(0, batch(stored([1], TOKENS[:16], extra=[["l", "salt"]])))
    events.heard(1, batch(stored([2], TOKENS[16:32], parent=1, extra=[["l"]])))
    events.heard(2, batch(stored([3], TOKENS[:16], lora="other")))
    assert held(router) == (0, 0, 0)
    assert held(router, lora_name="l", cache_salt="salt") == (32, 0, 0)
    assert held(router, lora_name="other") == (16, 0, 0)


def test_other_media_are_the_hosts_and_kvcasts_is_the_pools() -> None:
    router, events = engine()
    events.heard(0, batch(stored([1, 2, 3], TOKENS[:48])))
    # An engine says of its other media which blocks, and not what is in them.
    host = {**stored([1], [0], medium="CPU"), "token_ids": [], "block_hashes": [1, 2]}
    pool = {**host, "medium": "kvcast", "block_hashes": [1, 2, 3]}
    events.heard(1, batch(host, pool))
    events.heard(2, batch(removed([1, 2, 3])))
    assert held(router) == (0, 32, 16)
    events.heard(3, batch(removed([2], "CPU"), removed([3], "kvcast")))
    assert held(router) == (0, 16, 16)
    assert len(events) == 2
    events.heard(4, batch(removed([1], "CPU"), removed([1, 2], "kvcast")))
    assert len(events) == 0


def test_a_block_behind_an_unknown_parent_is_counted_and_left_out() -> None:
    router, events = engine()
    events.heard(0, batch(stored([2], TOKENS[16:32], parent=1), removed([9])))
    assert held(router) == (0, 0, 0)
    assert events.counts["orphans_total"] == 2


def test_a_gap_waits_for_its_replay_and_then_goes_on() -> None:
    router, events = engine()
    assert events.heard(0, batch(stored([1], TOKENS[:16]))) == "taken"
    last = batch(stored([3], TOKENS[32:48], parent=2))
    assert events.heard(2, last) == "gap"
    assert events.next_sequence == 1
    assert events.heard(1, batch(stored([2], TOKENS[16:32], parent=1))) == "taken"
    assert events.heard(2, last) == "taken"
    assert events.heard(2, last) == "old"
    assert held(router) == (48, 0, 0)


def test_what_never_comes_is_skipped_and_counted_and_the_rest_kept() -> None:
    router, events = engine()
    events.heard(0, batch(stored([1], TOKENS[:16])))
    events.skip_to(4)
    assert events.heard(4, batch(removed([7]))) == "taken"
    assert events.counts["batches_lost_total"] == 3
    assert held(router) == (16, 0, 0)


def test_a_stream_that_is_met_in_the_middle_asks_for_its_beginning() -> None:
    _, events = engine()
    assert events.heard(5, batch(cleared())) == "gap"
    assert events.next_sequence == 0


def test_a_batch_that_was_another_one_before_is_another_process() -> None:
    router, events = engine()
    events.heard(0, batch(stored([1], TOKENS[:16])))
    events.heard(1, batch(stored([2], TOKENS[16:32], parent=1)))
    assert events.heard(0, batch(stored([8], TOKENS[:16], parent=None), cleared())) == "taken"
    assert held(router) == (0, 0, 0)
    assert events.counts["restarts_total"] == 1
    assert events.next_sequence == 1


def test_the_table_is_bounded() -> None:
    router, events = engine(max_blocks=2)
    events.heard(0, batch(stored([1, 2, 3, 4], TOKENS)))
    assert len(events) == 2
    assert held(router) == (32, 0, 0)
    assert events.counts["beyond_bound_total"] == 2
    events.heard(1, batch(removed([1, 2])))
    events.heard(2, batch(stored([5], TOKENS[:16])))
    assert held(router) == (16, 0, 0)


def test_blocks_of_another_size_are_counted_and_left_out() -> None:
    router, events = engine()
    events.heard(0, batch(stored([1], TOKENS[:16])))
    events.heard(1, batch(stored([2], TOKENS[:32])))
    assert events.counts["other_block_sizes_total"] == 1
    assert held(router) == (16, 0, 0)


def test_of_several_groups_of_layers_one_without_a_window_decides() -> None:
    router, events = engine()
    window = {
        **stored([1, 2], TOKENS[:32]),
        "group_idx": 0,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 16,
    }
    whole = {**stored([1, 2], TOKENS[:32]), "group_idx": 1}
    other = {**stored([3], TOKENS[32:48], parent=2), "group_idx": 2}
    events.heard(0, batch(window, whole, other, {**removed([1]), "group_idx": 0}))
    assert held(router) == (32, 0, 0)
    assert events.counts["other_groups_total"] == 3
    events.heard(1, batch({**removed([2]), "group_idx": 1}))
    assert held(router) == (16, 0, 0)


def test_events_that_we_do_not_know_are_left_out() -> None:
    router, events = engine()
    payload = {"events": [{"type": "SomethingNew", "x": 1}]}
    assert events.heard(0, msgspec.msgpack.encode(payload)) == "taken"
    assert held(router) == (0, 0, 0)


def test_whole_hashes_are_told_for_the_pools_keys() -> None:
    told: list[tuple[int, bytes]] = []
    _, events = engine(pool_keys=lambda ours, theirs: told.append((ours, theirs)))
    events.heard(0, batch(stored([b"x" * 32, 7], TOKENS[:32])))
    assert told == [(token_chain(TOKENS, 16)[0], b"x" * 32)]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(3),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode({"events": 3}),
        msgspec.msgpack.encode([1.0, [3]]),
        msgspec.msgpack.encode([1.0, [[]]]),
        msgspec.msgpack.encode([1.0, [[1, 2]]]),
        msgspec.msgpack.encode([1.0, [["BlockStored"]]]),
        msgspec.msgpack.encode([1.0, [["BlockRemoved", [1.5]]]]),
        msgspec.msgpack.encode([1.0, [["BlockRemoved", [1], 5]]]),
        msgspec.msgpack.encode([1.0, [["BlockRemoved", [1], "GPU", "x"]]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", [1], 1.5, [1], 1]]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [1, 2], 1]]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [1], 0]]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [1], 1, 0, "", "", [3]]]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [1], 1, 0, "", "", []]]]),
        b"\x91" * 5000,
    ],
)
def test_what_is_no_batch_is_refused_counted_and_does_not_stop_the_stream(payload: bytes) -> None:
    router, events = engine()
    with pytest.raises(EventError):
        events.heard(0, payload)
    assert events.counts["malformed_total"] == 1
    assert events.heard(1, batch(stored([1], TOKENS[:16]))) == "taken"
    assert held(router) == (16, 0, 0)


def test_token_ids_that_are_none_are_counted() -> None:
    router, events = engine()
    wrong = {**stored([1], [0]), "token_ids": [-5], "block_size": 1}
    assert events.heard(0, batch(wrong)) == "taken"
    assert events.counts["malformed_total"] == 1
    assert held(router) == (0, 0, 0)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.one_of(
                st.none(),
                st.integers(-(2**63), 2**64 - 1),
                st.text(max_size=5),
                st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "events"]),
            ),
            lambda inner: st.one_of(
                st.lists(inner, max_size=9), st.dictionaries(st.text(max_size=12), inner)
            ),
            max_leaves=25,
        ).map(msgspec.msgpack.encode),
    )
)
def test_any_bytes_are_events_or_an_event_error(payload: bytes) -> None:
    _, events = engine()
    try:
        decode_batch(payload)
        events.heard(0, payload)
    except EventError:
        pass

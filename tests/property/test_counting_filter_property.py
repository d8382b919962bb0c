"""The filter of what lies below DRAM, in Python and as compiled code asks it.

Oracle: a `Counter` of the blocks that were added and not removed. Cannot see: who adds them
(`test_hostagent_ssd`, `test_hostagent_lower_tiers`).
"""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.hostagent.tiers.counting_filter import COUNTERS_A_BLOCK, CountingFilter
from kvcast.native.subset import Library, ctypes_of
from kvcast.protocol import courier
from kvcast.protocol.courier import Question, may_be_below
from kvcast.protocol.messages.wire import BlockId
from kvcast.protocol.placement import address_of_buffer

_NAMES = 24


def block(number: int) -> BlockId:
    """Some are of the same key in several namespaces."""
    key = random.Random(number % (_NAMES // 2)).randbytes(16)
    return BlockId(1 + number // (_NAMES // 2), key)


@cache
def _asked() -> Any:
    return Library(may_be_below).call(may_be_below)


def compiled_says(of_blocks: CountingFilter, asked: BlockId) -> bool:
    """What compiled code makes of the same counters."""
    mine: Any = courier.blank()
    mine.below = address_of_buffer(of_blocks.memory)
    mine.below_bits = of_blocks.bits
    question: Any = ctypes_of(Question)()
    question.namespace = asked.namespace
    question.key = int.from_bytes(asked.key[:8], "little")
    question.rest_of_key = int.from_bytes(asked.key[8:], "little")
    return bool(_asked()(ctypes.addressof(mine), ctypes.addressof(question)))


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(0, _NAMES - 1), st.sampled_from([1, 1, 1, 2, 254, 300]), st.booleans()
        )
    )
)
def test_it_never_says_that_a_block_is_not_there_that_is(
    steps: list[tuple[int, int, bool]],
) -> None:
    of_blocks, there = CountingFilter(), Counter[int]()
    for number, times, added in steps:
        for _ in range(times if added else min(times, there[number])):
            there[number] += 1 if added else -1
            (of_blocks.add if added else of_blocks.remove)(block(number))
        for each in range(_NAMES):
            may = of_blocks.may_hold(block(each))
            assert may or not there[each]
            assert compiled_says(of_blocks, block(each)) == may


def test_what_has_gone_is_forgotten_unless_its_counters_were_full() -> None:
    of_blocks = CountingFilter()
    for number in range(_NAMES):
        for _ in range(255 if number == 0 else 100):
            of_blocks.add(block(number))
    for number in range(_NAMES):
        for _ in range(255 if number == 0 else 100):
            of_blocks.remove(block(number))
    assert of_blocks.may_hold(block(0)), "it is not known how often it was added"
    assert Counter(of_blocks.memory.tobytes()) == {0: (1 << of_blocks.bits) - 2, 255: 2}


def test_it_is_seldom_wrong_with_a_quarter_of_what_there_can_be() -> None:
    most = 8192
    of_blocks = CountingFilter(most)
    assert 1 << of_blocks.bits == COUNTERS_A_BLOCK * most
    rng = random.Random(1)
    for _ in range(most // 4):
        of_blocks.add(BlockId(1, rng.randbytes(16)))
    wrong = sum(of_blocks.may_hold(BlockId(1, rng.randbytes(16))) for _ in range(4000))
    assert 100 < wrong < 300, "about 5 %"


def test_a_courier_without_lower_tiers_has_nothing_to_ask() -> None:
    mine: Any = courier.blank()
    question: Any = ctypes_of(Question)()
    assert not _asked()(ctypes.addressof(mine), ctypes.addressof(question))

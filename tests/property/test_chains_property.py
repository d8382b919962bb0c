"""Chains of keys, in compiled code, beside a plain model.

Oracle: lists and dicts of Python. Cannot see: an index that changes while it is looked at, since
whoever asks is also who writes it.
"""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.hostagent.tiers.index import Index, buckets_for
from kvcast.protocol import chains
from kvcast.protocol.messages import shared
from kvcast.protocol.messages.wire import BUCKETS, KEY_BYTES, BlockId, bucket_of

ARENA_BYTES = 1 << 20
KEYS = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES) | st.integers(0, 40).map(
    lambda number: (number % 5).to_bytes(8, "big") + number.to_bytes(8, "big")
)


@settings(deadline=None)
@given(
    held=st.lists(st.tuples(st.sampled_from((1, 2)), KEYS), unique=True, max_size=200),
    gone=st.sets(st.integers(0, 199)),
    asked=st.lists(KEYS, max_size=70),
)
def test_a_chain_is_looked_up_as_its_keys_one_by_one(
    held: list[tuple[int, bytes]], gone: set[int], asked: list[bytes]
) -> None:
    memory = memoryview(bytearray(shared.index_bytes(buckets_for(ARENA_BYTES))))
    index = Index(memory, ARENA_BYTES, 7)
    here = set()
    for number, (namespace, key) in enumerate(held):
        cell = index.publish(BlockId(namespace, key), 0, 5, 4096, 9)
        if cell and number in gone:
            index.withdraw(cell)
        elif cell:
            here.add((namespace, key))
    keys = asked + [key for _, key in held]
    probe = chains.Probe(memory)
    for namespace in (1, 2, 3):
        bits = probe.held(namespace, b"".join(keys))
        assert bits == chains.bits_of((namespace, key) in here for key in keys)
        first = next((n for n, key in enumerate(keys) if (namespace, key) not in here), len(keys))
        assert chains.prefix_of(bits) == first


@settings(deadline=None)
@given(
    keys=st.lists(KEYS, max_size=70),
    held=st.integers(min_value=0, max_value=(1 << 70) - 1),
    homes=st.lists(st.sampled_from((1, 2, 3, 65534, chains.NOBODY)), min_size=1, max_size=9),
    answers=st.integers(min_value=0, max_value=(1 << 90) - 1),
)
def test_a_chain_is_parted_among_homes_up_to_the_gap_and_put_together_again(
    keys: list[bytes], held: int, homes: list[int], answers: int
) -> None:
    chain = b"".join(keys)
    assert chains.count_of(chain) == len(keys)
    assert chains.keys_of(chain) == keys
    held &= chains.mask_of(len(keys))
    table = array("H", (homes[bucket % len(homes)] for bucket in range(BUCKETS)))
    expected: dict[int, list[int]] = {}
    for position, key in enumerate(keys):
        if not held >> position & 1:
            node = table[bucket_of(key)]
            if node == chains.NOBODY:
                break
            expected.setdefault(node, []).append(position)
    parts = chains.parted(chain, held, table)
    assert parts.keys() == expected.keys()
    together = held
    for node, positions in expected.items():
        part = parts[node]
        assert part.keys == b"".join(keys[position] for position in positions)
        if part.positions is None:
            assert positions == list(range(len(keys)))
        else:
            assert list(part.positions) == positions
        # An answer may say too much.
        together = chains.merged(together, len(keys), part, answers)
        for number, position in enumerate(positions):
            held |= (answers >> number & 1) << position
    assert together == held


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=40))
def test_bits_are_flags_the_first_lowest(flags: list[bool]) -> None:
    bits = chains.bits_of(flags)
    assert [bool(bits >> number & 1) for number in range(len(flags))] == flags
    assert bits >> len(flags) == 0
    first = flags.index(False) if False in flags else len(flags)
    assert chains.prefix_of(bits) == first

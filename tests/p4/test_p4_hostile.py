"""Any frame on any port: one decision each, no fault, and nothing to a port that must not have it.

Oracle: bookkeeping (every frame is counted under exactly one decision) and isolation (namespaces,
bytes). Blind to whether the decision is the right one; the other suites say that.
"""

from __future__ import annotations

import random

import pytest
from kvcast.protocol.messages import ethernet, wire
from p4_frames import random_frames
from pool_engine import both_engines  # noqa: F401 - an autouse fixture
from pool_switch import DECISIONS, KEY, NAMESPACE, PoolSwitch, content_of

HOSTS = 5
FRAMES = 4000
OP_AT = 43
CONTENTS = {
    KEY: content_of(3 * wire.CHUNK_BYTES - 100, seed=3),
    b"w" * 16: content_of(wire.SEGMENT_BYTES),
    b"n" * 16: content_of(5000, seed=1),
}


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "plain"])
def test_every_frame_is_decided_once_and_no_wrong_byte_leaves(enabled: bool) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    pool = PoolSwitch(HOSTS, enabled=enabled, heat_threshold=3)
    for slot, key in enumerate(CONTENTS):
        pool.make_resident(key, CONTENTS[key], slot=slot)
    pool.add("reader_group", (NAMESPACE, 5), "set_reader_group", 0b1010, 1024)
    pool.switch.set_multicast_group(1024, [(2, 0), (4, 0), (4, 255)])

    # A home that sends other bytes under a digest is for the readers to find out.
    frames = random_frames(random.Random(seed), HOSTS, CONTENTS, FRAMES, honest_home=True)
    for port, frame in frames:
        pool.now_us += 500
        for _, out in pool.switch.process(port, frame, pool.now_us):
            check_served(frame, out)

    decided = {name: pool.decided(name) for name in DECISIONS}
    assert sum(decided.values()) - decided["serving"] == FRAMES
    stats = pool.switch.stats
    assert (stats.dropped_abandoned, stats.index_out_of_range) == (0, 0)
    assert stats.dropped_unknown_group == stats.dropped_recirculation_bound == 0
    if enabled:
        assert min(decided.values()) >= 0
        assert decided["hit"] > 0
        assert decided["shared"] > 0
    else:
        assert set(decided) - {name for name, count in decided.items() if count == 0} == {
            "forwarded",
            "dropped",
        }


def check_served(sent: bytes, out: bytes) -> None:
    """A DATA that came of a READ is a whole, well-formed frame with the block's own bytes."""
    if sent[OP_AT : OP_AT + 1] != bytes([wire.OP_READ]) or out[OP_AT] != wire.OP_DATA:
        return
    frame = wire.decode(ethernet.unwrap(out).payload)
    content = CONTENTS[frame.key]
    assert frame.namespace == NAMESPACE
    assert frame.digest == wire.digest_of(content)
    at = frame.chunk * wire.CHUNK_BYTES
    expected = content[at : at + wire.CHUNK_BYTES].ljust(wire.CHUNK_BYTES, b"\0")
    assert bytes(frame.payload) == expected

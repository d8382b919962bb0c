"""The read path's bench measures what it says: whole blocks, right bytes, beside a bare pair.

Oracle: the bench's own comparison of every byte of its last round, and arithmetic on what it
reports. Cannot see: whether the numbers are good.
"""

from __future__ import annotations

import pytest
from kvcast.bench.read_path import PATHS, Settings, measure


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_blocks_come_whole_by_every_path(path: str) -> None:
    size, blocks = (300 << 10) + 7, 3
    found = measure(Settings(path, size, blocks, 0.3))
    assert (found["missed"], found["wrong_blocks"]) == (0, 0)
    assert found["chunks_per_s"] > 0
    assert found["bare_datagrams_per_s"] > 0
    ratio = found["chunks_per_s"] / found["bare_datagrams_per_s"]
    assert found["read_path_over_bare"] == pytest.approx(ratio)
    assert found["home_ns_a_byte"] > 0
    assert found["reader_ns_a_byte"] > 0

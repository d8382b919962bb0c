"""A map with a bound. Oracle: a plain list of what was set when. Cannot see: what is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcast.protocol.bounded_map import BoundedMap


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 7), st.integers())))
def test_it_holds_what_was_set_last(limit: int, sets: list[tuple[int, int]]) -> None:
    kept: BoundedMap[int, int] = BoundedMap(limit)
    order: list[tuple[int, int]] = []
    for key, value in sets:
        kept[key] = value
        order = [item for item in order if item[0] != key] + [(key, value)]
        order = order[-limit:]
        assert list(kept.items()) == order


def test_reading_keeps_nothing_alive() -> None:
    kept: BoundedMap[str, int] = BoundedMap(2)
    kept["a"], kept["b"] = 1, 2
    assert kept["a"] == kept.get("a") == 1
    kept["c"] = 3
    assert list(kept) == ["b", "c"]


def test_every_way_of_setting_is_bounded() -> None:
    kept: BoundedMap[int, int] = BoundedMap(3)
    kept.update({number: number for number in range(9)})
    assert list(kept) == [6, 7, 8]
    assert kept.setdefault(9, 1) == 1
    assert list(kept) == [7, 8, 9]


def test_a_map_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        BoundedMap(0)

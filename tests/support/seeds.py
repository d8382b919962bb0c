"""Seeds of a test that is repeated with each of them."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(count: int, *, quick: int) -> list[Any]:
    """The seeds 0 to `count`, of which `make check` takes the first `quick`."""
    return [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= quick)) for seed in range(count)]

"""The model finds what it should: every planted bug, by a seed that is known to show it.

Oracle: the violation of an invariant that the bug is bound to break, in a run that is clean
without the bug. Cannot see: bugs that nobody has thought of planting. When the plan, the model or
a bug changes, `find_planted_bugs.py` finds the seeds anew.
"""

from __future__ import annotations

import pytest
from kvcast.simulation.cluster import Product
from kvcast.simulation.plan import Mask, features_of
from kvcast.simulation.run import run_seed
from kvcast.simulation.switch import ENGINES, product_program
from planted_bug_seeds import SEEDS
from planted_bugs import BUGS
from test_simulation_seeds import CLEAN_SEEDS

ENGINE = ENGINES[next(iter(ENGINES))]


@pytest.mark.slow
@pytest.mark.mutation
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    bug = BUGS[name]
    with bug.plant(ENGINE) as product:
        outcome = run_seed(SEEDS[name].quick, product, bug.mask)
    assert outcome.violation is not None, f"no invariant was violated by: {name}"
    number, text = outcome.violation
    assert number in bug.invariants, f"{number}: {text}\n{outcome.detail}"


@pytest.fixture(scope="module")
def product() -> Product:
    return Product(ENGINE, product_program())


@pytest.mark.slow
@pytest.mark.mutation
@pytest.mark.parametrize(
    ("seed", "features"),
    sorted(
        {(known.quick, tuple(sorted(BUGS[name].features))) for name, known in SEEDS.items()}
        - {(seed, tuple(sorted(features_of(seed)))) for seed in CLEAN_SEEDS}
    ),
)
def test_the_seed_is_clean_without_the_bug(
    product: Product, seed: int, features: tuple[str, ...]
) -> None:
    assert run_seed(seed, product, Mask(features=frozenset(features))).violation is None


def test_every_bug_has_a_seed() -> None:
    assert set(SEEDS) == set(BUGS)
    assert len(BUGS) >= 20

"""A seed that fails tells what happened to the fetches of the blocks concerned.

Oracle: a planted bug in the requester, whose violation names a block.
"""

from __future__ import annotations

import re

import pytest
from kvcast.simulation import command
from kvcast.simulation.run import MAX_STORIES, run_seed
from kvcast.simulation.switch import ENGINES
from planted_bug_seeds import SEEDS
from planted_bugs import BUGS

NAME = "the reader does not compare the digest of the whole block"
ENGINE = next(iter(ENGINES))


def test_a_violation_comes_with_the_stories_of_its_block(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with BUGS[NAME].plant(ENGINES[ENGINE]) as product:
        outcome = run_seed(SEEDS[NAME].quick, product, BUGS[NAME].mask)
    assert outcome.violation is not None
    heads = re.findall(r"^host \d+, fetch \d+ of \d+/([0-9a-f]{32}): ", outcome.stories, re.M)
    assert 1 <= len(heads) <= MAX_STORIES
    assert all(key[:8] in outcome.violation[1] for key in heads)
    assert "BEGIN -> RECEIVING" in outcome.stories
    options = command.build_parser().parse_args(["--no-shrink"])
    command.tell_violation(outcome, options)
    assert outcome.stories in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_in_which_all_holds_has_no_stories() -> None:
    clean = run_seed(9, command.product(ENGINE))
    assert clean.violation is None
    assert clean.stories == ""

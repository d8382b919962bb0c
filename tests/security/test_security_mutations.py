"""Every defence of docs/security.md is taken out, and the tests that its row names fail.

Oracle: the tests themselves, as the page's table names them; `defence_mutations.py` says which
defence is taken out how, and `shortcomings` what counts as failing: the test itself, not its set-
up, ends in an assertion that does not hold, or in an expected error that did not come. A mutation
that cannot be planted, an import error, a skip, an error of another kind or a hanging test are
none. That the tests pass with the defences in place is what they show when they run by
themselves. Cannot see: a defence that the table does not name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from defence_mutations import MUTATIONS, Mutation
from mutation_runner import ROOT, Report, Runner, node_id_of, running
from test_security_table import rows

pytestmark = [pytest.mark.slow, pytest.mark.mutation]


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with running() as runner:
        yield runner


def threats() -> dict[str, set[str]]:
    """The tests that each row names."""
    return {
        threat: set(re.findall(r"`(test_\w+)`", tests))
        for threat, _, tests in rows()
        if not threat.startswith("**")
    }


def shortcomings(mutation: Mutation, report: Report) -> list[str]:
    """What keeps the mutation from having been noticed by each of its tests."""
    if report["applied"]:
        return [report["applied"]]
    problems = []
    for test in mutation.tests:
        wanted = node_id_of(test)
        cases = {
            each: found
            for each, found in report["tests"].items()
            if each == wanted or each.startswith(f"{wanted}[")
        }
        if not cases:
            problems.append(f"{test} did not run (pytest ended with {report.get('exit')})")
        for name, found in cases.items():
            where = f"{name}: {found['outcome']} in {found['when']}: {found.get('text', '')}"
            if (found["outcome"], found["when"]) != ("failed", "call"):
                problems.append(where)
            elif found["error"] not in mutation.errors or "Timeout" in found["text"]:
                problems.append(f"{where}: not by an assertion")
            elif mutation.line not in found["line"]:
                problems.append(f"{where}: not at {mutation.line!r} but at {found['line']!r}")
    return problems


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_a_defence_taken_out_is_noticed(runner: Runner, name: str) -> None:
    mutation = MUTATIONS[name]
    report = runner.run(name, mutation.tests)
    outcomes = {found["outcome"] for found in report["tests"].values()}
    if not report["applied"] and outcomes == {"skipped"}:
        pytest.skip(f"its tests skip here: {', '.join(mutation.tests)}")
    problems = shortcomings(mutation, report)
    assert not problems, "\n".join([*problems, report.get("log", "")])


def test_every_row_and_every_test_of_the_table_is_broken_by_a_mutation() -> None:
    table = threats()
    broken: dict[str, set[str]] = {threat: set() for threat in table}
    for mutation in MUTATIONS.values():
        for row, tests in mutation.breaks.items():
            (threat,) = [each for each in table if each.startswith(row)]
            assert tests, (mutation.name, row)
            names = {test.partition("[")[0] for test in tests}
            assert names <= table[threat], f"{mutation.name}: the row does not name {names}"
            broken[threat] |= names
    assert {t: sorted(tests - broken[t]) for t, tests in table.items() if tests - broken[t]} == {}


def test_every_test_that_a_mutation_names_can_be_found() -> None:
    for mutation in MUTATIONS.values():
        assert mutation.tests, mutation.name
        for test in mutation.tests:
            assert (ROOT / node_id_of(test).partition("::")[0]).exists(), (mutation.name, test)


# --- the judge ------------------------------------------------------------------------------------


def test_a_defence_that_stays_is_not_taken_for_a_failing_test(runner: Runner) -> None:
    tests = ("test_names_are_bounded", "test_a_rule_names_tenants")
    report = runner.run("nothing", tests)
    assert report["exit"] == 0
    mutation = Mutation("nothing", {"row": tests}, _no_mutation)
    assert len(shortcomings(mutation, report)) == 2
    assert "passed in call" in shortcomings(mutation, report)[0]


def test_what_cannot_be_planted_or_cannot_be_imported_is_no_failing_test(runner: Runner) -> None:
    tests = ("test_names_are_bounded",)
    for name, said in (("planted nowhere", "AttributeError"), ("no import", "did not run")):
        mutation = Mutation(name, {"row": tests}, _no_mutation)
        (problem,) = shortcomings(mutation, runner.run(name, tests))
        assert said in problem


def test_only_an_assertion_of_the_test_itself_is_a_failure() -> None:
    def problems(**found: str) -> list[str]:
        mutation = Mutation("s", {"row": ("tests/a.py::test_x[a]",)}, _no_mutation, line="heard")
        result = {"outcome": "failed", "when": "call", "error": "AssertionError", "text": "no"}
        tests = {"tests/a.py::test_x[a]": result | {"line": "assert heard == []"} | found}
        return shortcomings(mutation, {"applied": "", "tests": tests, "exit": 1})

    assert problems() == []
    assert problems(error="Failed", text="DID NOT RAISE") == []
    for wrong in (
        {"outcome": "skipped"},
        {"outcome": "passed"},
        {"when": "setup"},
        {"error": "KeyError"},
        {"error": "Failed", "text": "Timeout (>30.0s) from pytest-timeout."},
        {"line": "assert said == []"},
    ):
        assert len(problems(**wrong)) == 1, wrong


def _no_mutation() -> object:
    raise AssertionError("this is for the judge, and never taken out")

"""The threat model in docs/security.md names tests; each of them exists, and is run.

Oracle: the test functions in the sources. Cannot see: whether a test shows what the row says; that
is what test_security_mutations.py tries, by taking the defence out.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "security.md"
GROUPS = (
    "tenant against tenant",
    "host against pool",
    "network",
    "engines that share prefixes",
    "whoever loads a folder against who fetches it",
    "pool against engine",
    "operators' mistakes",
)


def rows() -> list[tuple[str, str, str]]:
    """Threat, what stops it, tests; a group's title has no tests."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## Threats\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {len(row) for row in cells} == {3}
    return [(row[0], row[1], row[2]) for row in cells]


def defined_tests() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(node.name)
    return found


def test_every_threat_names_what_stops_it_and_a_test_that_there_is() -> None:
    there_are = defined_tests()
    threats = [row for row in rows() if not row[0].startswith("**")]
    assert len(threats) >= 30
    for threat, stopped_by, tests in threats:
        named = re.findall(r"`(test_\w+)`", tests)
        assert stopped_by, threat
        assert named, threat
        assert re.sub(r"`test_\w+`|[,\s]", "", tests) == "", threat
        assert not set(named) - there_are, threat


def test_the_table_has_all_groups() -> None:
    titles = [row[0].strip("*") for row in rows() if row[0].startswith("**")]
    assert titles == list(GROUPS)

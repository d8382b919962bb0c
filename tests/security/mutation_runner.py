"""Runs tests with a defence taken out, each mutation in a process of its own.

`Runner` starts one server (this file as a script), which imports what the tests need once and then
forks for each mutation: the child takes the defence out, before pytest imports any test module,
runs the named tests, and says what became of each. Children of that child (daemons that a test
starts) find the mutation by `mutated/sitecustomize.py`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
TEST_TIMEOUT_S = 120
RUN_TIMEOUT_S = 150.0

Report = dict[str, Any]
"""`applied`: "" or why the mutation was not planted; `tests`: by node id, what became of it
(outcome, when, error, text, and the line of the test); `exit`: pytest's; `log`: what it printed."""


# --- what the tests use ---------------------------------------------------------------------------


@functools.cache
def places() -> dict[str, str]:
    """The file of every test function by its name; names that are there twice are left out."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                and node.name[:5] == "test_"
            ):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    return {name: paths[0] for name, paths in found.items() if len(paths) == 1}


def node_id_of(test: str) -> str:
    """pytest's name of a test that is named by its function, or by file and function."""
    return test if "::" in test else f"{places()[test.partition('[')[0]]}::{test}"


class Runner:
    """The server. `run` may be called any number of times, and `close` once."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvs-", dir="/tmp")
        self._number = 0
        here = [str(HERE), *(str(ROOT / "tests" / name) for name in ("support", "integration"))]
        path = [str(HERE / "mutated"), *here, os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": ":".join(filter(None, path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, name: str, tests: tuple[str, ...]) -> Report:
        """What becomes of these tests (names, or names with a case in brackets)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._number += 1
        ids = [node_id_of(test) for test in tests]
        order = {"name": name, "ids": ids, "folder": f"{self._folder.name}/{self._number}"}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the mutation server is gone"
        report: Report = json.loads(line)
        return report

    def close(self) -> None:
        """End the server, and remove what the tests left behind."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        shutil.rmtree(self._folder.name, ignore_errors=True)
        self._folder.cleanup()


@contextlib.contextmanager
def running() -> Iterator[Runner]:
    runner = Runner()
    try:
        yield runner
    finally:
        runner.close()


# --- the server -----------------------------------------------------------------------------------


def serve() -> None:
    """Orders from standard input, reports to standard output, one a line."""
    _import_what_tests_need()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints does not come between the answers
    for line in sys.stdin:
        answers.write(json.dumps(_in_a_child(json.loads(line))) + "\n")
        answers.flush()


def _import_what_tests_need() -> None:
    """What the tests import, but for modules of theirs: those must find the mutation planted."""
    import defence_mutations as mutations

    named = {test for mutation in mutations.MUTATIONS.values() for test in mutation.tests}
    wanted = {"pytest", "_pytest.main", "pytest_asyncio.plugin", "pytest_timeout"}
    ours = {path.stem for path in (ROOT / "tests").rglob("*.py")}
    paths = {ROOT / node_id_of(test).partition("::")[0] for test in named}
    for path in [*paths, *(ROOT / "tests" / "integration").glob("*_harness.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                wanted.add(node.module)
    for module in sorted(wanted):
        if module.partition(".")[0] not in ours:
            importlib.import_module(module)


def _in_a_child(order: dict[str, Any]) -> Report:
    """Fork, run, and read the report; a child that hangs is ended, with all that it started."""
    log = Path(order["folder"] + ".log")
    come, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(come)
        os.setpgid(0, 0)
        _child(order, log, go)
    os.close(go)
    parts: list[bytes] = []
    deadline = time.monotonic() + RUN_TIMEOUT_S
    try:
        while select.select([come], [], [], max(0.0, deadline - time.monotonic()))[0]:
            part = os.read(come, 65536)
            if not part:
                break
            parts.append(part)
        else:
            parts = [b'{"applied": "the run took too long", "tests": {}}']
    finally:
        os.close(come)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    report: Report = json.loads(b"".join(parts) or b'{"applied": "the run died", "tests": {}}')
    with contextlib.suppress(OSError):
        report["log"] = log.read_text(errors="replace")[-6000:]
    return report


def _child(order: dict[str, Any], log: Path, go: int) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.set_inheritable(go, False)
    report: Report = {"applied": "", "tests": {}}
    try:
        _run(order, report)
    except BaseException:
        report["applied"] = traceback.format_exc()
    sys.stdout.flush()
    with os.fdopen(go, "w") as out:
        out.write(json.dumps(report))
    os._exit(0)


def _run(order: dict[str, Any], report: Report) -> None:
    import defence_mutations as mutations

    mutation = (mutations.MUTATIONS | mutations.FOR_THE_JUDGE)[order["name"]]
    os.environ["KVCAST_TESTS_ARE_TO_FAIL"] = "yes"
    if mutation.in_daemons:
        os.environ["KVCAST_MUTATION"] = mutation.name
    with mutation.take_out():
        try:
            report["exit"] = _pytest(order, report["tests"])
        except Exception:  # what a test left behind may fail when pytest cleans up
            report["exit"] = traceback.format_exc()


def _pytest(order: dict[str, Any], tests: dict[str, Any]) -> int:
    import pytest

    class Recorder:
        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[None]:
            said: Any = yield
            result = said.get_result()
            if result.when != "call" and result.passed:
                return
            found = {"outcome": result.outcome, "when": result.when, "error": "", "line": ""}
            if call.excinfo is not None:
                found["error"] = call.excinfo.type.__name__
                found["text"] = call.excinfo.exconly(tryshort=True)[:300]
                of_test = [e for e in call.excinfo.traceback if Path(e.path) == item.path]
                found["line"] = str(of_test[-1].statement).strip() if of_test else ""
            if result.when == "teardown" and item.nodeid in tests:
                return  # what became of the test itself stands
            tests[item.nodeid] = found

    flags = ["-p", "no:cacheprovider", "-q", "--tb=short", "--no-header", f"--rootdir={ROOT}"]
    # Of plugins that the server has imported already, assertions are not rewritten; no test cares.
    flags += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    flags += [f"--basetemp={order['folder']}", f"--timeout={TEST_TIMEOUT_S}"]
    return int(pytest.main([*flags, *order["ids"]], plugins=[Recorder()]))


if __name__ == "__main__":
    serve()

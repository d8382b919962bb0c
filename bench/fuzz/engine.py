"""The fuzzing engine: inputs in, finds out; the same for the same seed.

Owns: the corpus and how it grows, what counts as a find, and how a find is made smaller. Must not
know: any one entry point (`targets`, `entry_points`).

A `Target` names an entry point and makes a `Harness` for it. The harness has well-formed inputs to
begin with, knows how to spoil one with its structure in mind, and runs one: whatever the entry
point is allowed to say (its named errors) it swallows, and anything else that comes out of `run`
is a find. So is an input that takes longer than `limit_s`, a record that the entry point logs with
a traceback (somebody caught there what nobody expected), and memory that grows by more than
`growth_mib`.

Coverage: while a harness runs, the lines of its target's modules are traced (`sys.settrace`), as
pairs of the line before and the line after. An input that saw a pair for the first time joins the
corpus, and is spoiled in its turn. Targets whose work happens elsewhere trace nothing.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final, Protocol

MAX_CORPUS: Final = 4096
MAX_INPUT_BYTES: Final = 1 << 20
_GROW_SPAN: Final = 256
"""Inputs between two looks at the process's memory."""
_SHRINK_TRIES: Final = 200


class Harness(Protocol):
    """One entry point, ready to be told something."""

    def corpus(self) -> list[bytes]:
        """Inputs to begin with."""

    def spoil(self, data: bytes, rng: random.Random) -> bytes:
        """The input with something wrong about it."""

    def run(self, data: bytes) -> None:
        """Tell it to the entry point; raises what the entry point should not."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Target:
    """An entry point to be fuzzed: its name, what it is, and how to stand before it. `modules` are
    traced for coverage."""

    name: str
    what: str
    harness: Callable[[], Harness]
    modules: tuple[ModuleType, ...] = ()


class HangError(Exception):
    """An input took longer than it may."""


class LoggedError(Exception):
    """The entry point logged a traceback."""


class GrowthError(Exception):
    """The process grew by more than it may while it was told the last inputs."""


@dataclass(frozen=True)
class Find:
    """An input that an entry point did not take well, made small."""

    target: str
    data: bytes
    kind: str
    text: str

    @property
    def name(self) -> str:
        """A file's name for it."""
        return f"{self.target}-{hashlib.sha256(self.data).hexdigest()[:16]}"


@dataclass
class Report:
    """What came of one target."""

    target: str
    inputs: int = 0
    seconds: float = 0.0
    begun_with: int = 0
    """Inputs to begin with; what the corpus has beyond them was kept for what it reached."""
    corpus: int = 0
    coverage: int = 0
    """Pairs of lines seen."""
    growth_mib: float = 0.0
    finds: list[Find] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        finds = [
            {"name": f.name, "kind": f.kind, "text": f.text, "input": f.data.hex()}
            for f in self.finds
        ]
        return {**vars(self), "finds": finds}


@dataclass(frozen=True)
class Options:
    """How long, from where, and what is too much. `inputs` and `seconds`: whichever comes first."""

    seed: int = 1
    inputs: int | None = None
    seconds: float | None = None
    limit_s: float = 5.0
    growth_mib: float = 48.0
    most_finds: int = 5
    guided: bool = True


class _Coverage:
    """Traces the lines of some modules; `edges` are the pairs seen so far."""

    def __init__(self, modules: tuple[ModuleType, ...]) -> None:
        self._files = {str(module.__file__) for module in modules}
        self._numbers = {name: number for number, name in enumerate(sorted(self._files))}
        self.edges: set[tuple[int, int, int]] = set()
        self.fresh = 0

    @contextmanager
    def traced(self) -> Iterator[None]:
        if not self._files:
            yield
            return
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        number = self._numbers.get(frame.f_code.co_filename)
        if number is None:
            return None
        last = 0
        edges = self.edges

        def line(frame: FrameType, event: str, _argument: Any) -> Any:
            nonlocal last
            if event == "line":
                edge = (number, last, frame.f_lineno)
                last = frame.f_lineno
                if edge not in edges:
                    edges.add(edge)
                    self.fresh += 1
            return line

        return line


def anonymous_mib() -> float:
    """The process's own memory, in MiB."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0


def fuzz(target: Target, options: Options, extra: list[bytes] | None = None) -> Report:
    """Tell an entry point hostile things; what came of it. Runs in the main thread only (`limit_s`
    is kept by a signal). `extra`: further inputs to begin with."""
    rng = random.Random(f"{target.name}/{options.seed}")
    report = Report(target.name)
    coverage = _Coverage(target.modules if options.guided else ())
    started = time.monotonic()
    with _heard_logs() as logged:
        harness = target.harness()
        try:
            _fuzz(harness, target, options, report, rng, coverage, extra or [], logged)
        finally:
            harness.close()
    report.seconds = round(time.monotonic() - started, 3)
    return report


class _Logged(logging.Handler):
    """Keeps the last record with a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.record: logging.LogRecord | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.record = record

    def take(self) -> LoggedError | None:
        record, self.record = self.record, None
        if record is None or record.exc_info is None or record.exc_info[1] is None:
            return None
        error = LoggedError(f"{record.getMessage()}: {record.exc_info[1]!r}")
        return error.with_traceback(record.exc_info[2])


@contextmanager
def _heard_logs() -> Iterator[_Logged]:
    """Meanwhile nothing is written, and tracebacks are kept."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    logged = _Logged()
    root.handlers[:] = [logged]
    root.setLevel(logging.ERROR)
    try:
        yield logged
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _fuzz(
    harness: Harness,
    target: Target,
    options: Options,
    report: Report,
    rng: random.Random,
    coverage: _Coverage,
    extra: list[bytes],
    logged: _Logged,
) -> None:
    started = time.monotonic()
    corpus = [*harness.corpus(), *extra]
    assert corpus, "a harness needs an input to begin with"
    pending = list(corpus)
    report.begun_with = len(corpus)
    base_mib = last_mib = 0.0
    while not _is_over(report, options, started):
        if pending:
            data = pending.pop(0)
        else:
            parent = rng.choice(corpus[-64:]) if rng.random() < 0.5 else rng.choice(corpus)
            data = harness.spoil(parent, rng)[:MAX_INPUT_BYTES]
        coverage.fresh = 0
        error = tell(harness, data, options.limit_s, coverage, logged)
        report.inputs += 1
        report.corpus, report.coverage = len(corpus), len(coverage.edges)
        if error is not None:
            _note(target, data, error, options, report, logged)
            continue
        if coverage.fresh and len(corpus) < MAX_CORPUS:
            corpus.append(data)
        if report.inputs % _GROW_SPAN == 0:
            gc.collect()
            mib = anonymous_mib()
            # The first span fills caches; growth is measured from its end.
            base_mib = base_mib or mib
            report.growth_mib = round(mib - base_mib, 1)
            if report.growth_mib > options.growth_mib and mib > last_mib:
                grown = GrowthError(f"{report.growth_mib:.0f} MiB in {report.inputs} inputs")
                report.finds.append(Find(target.name, data, "GrowthError", str(grown)))
                return
            last_mib = mib


def _is_over(report: Report, options: Options, started: float) -> bool:
    if options.inputs is not None and report.inputs >= options.inputs:
        return True
    if len(report.finds) >= options.most_finds:
        return True
    return options.seconds is not None and time.monotonic() - started >= options.seconds


def tell(
    harness: Harness,
    data: bytes,
    limit_s: float,
    coverage: _Coverage | None = None,
    logged: _Logged | None = None,
) -> BaseException | None:
    """Run one input; what came out that should not have."""
    hung: list[HangError] = []

    def too_long(_number: int, _frame: FrameType | None) -> None:
        hung.append(HangError(f"longer than {limit_s:g} s"))
        raise hung[-1]

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
    error: BaseException | None = None
    try:
        with (coverage or _Coverage(())).traced():
            harness.run(data)
    except (Exception, SystemExit) as raised:
        error = raised
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    noticed = None if logged is None else logged.take()
    # An event loop or a broad `except` may have swallowed the alarm.
    return hung[0] if hung else error or noticed


def _note(
    target: Target,
    data: bytes,
    error: BaseException,
    options: Options,
    report: Report,
    logged: _Logged,
) -> None:
    """Make the find small and note it, unless its place is known."""
    kind, place = type(error).__name__, _place(error)
    if any(find.kind == kind and find.text.endswith(f" at {place}") for find in report.finds):
        return
    tries = 0 if isinstance(error, HangError) else _SHRINK_TRIES

    def still(shorter: bytes) -> bool:
        harness = target.harness()
        try:
            again = tell(harness, shorter, options.limit_s, None, logged)
        finally:
            harness.close()
        return again is not None and type(again).__name__ == kind and _place(again) == place

    step = max(1, len(data) // 2)
    while tries > 0 and step:
        at = 0
        while at < len(data) and tries > 0:
            shorter = data[:at] + data[at + step :]
            tries -= 1
            if still(shorter):
                data = shorter
            else:
                at += step
        step //= 2
    report.finds.append(Find(target.name, data, kind, f"{str(error)[:300]} at {place}"))


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"

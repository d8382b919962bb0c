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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

from kvcast.bench.hostile_bytes import mutate
from kvcast.bench.usage import anonymous_mib

MAX_CORPUS: Final = 4096
MAX_INPUT_BYTES: Final = 1 << 20
_GROW_SPAN: Final = 256
"""Inputs between two looks at the process's memory."""
_SHRINK_TRIES: Final = 200


class Harness(ABC):
    """One entry point, ready to be told something."""

    @abstractmethod
    def corpus(self) -> list[bytes]:
        """Inputs to begin with."""

    def spoil(self, data: bytes, rng: random.Random) -> bytes:
        """The input with something wrong about it."""
        return mutate(data, rng)

    @abstractmethod
    def run(self, data: bytes) -> None:
        """Tell it to the entry point; raises what the entry point should not."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Give back what it holds."""


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


def fuzz(target: Target, options: Options, extra: Sequence[bytes] = ()) -> Report:
    """Tell an entry point hostile things; what came of it. Runs in the main thread only (`limit_s`
    is kept by a signal). `extra`: further inputs to begin with."""
    started = time.monotonic()
    with _heard_logs() as logged:
        harness = target.harness()
        try:
            run = _Run(target, options, logged)
            run.go(harness, [*harness.corpus(), *extra], started)
        finally:
            harness.close()
    run.report.seconds = round(time.monotonic() - started, 3)
    return run.report


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


class _Run:
    """One run on one target."""

    def __init__(self, target: Target, options: Options, logged: _Logged) -> None:
        self.report = Report(target.name)
        self._target = target
        self._options = options
        self._logged = logged
        self._rng = random.Random(f"{target.name}/{options.seed}")
        self._coverage = _Coverage(target.modules if options.guided else ())

    def go(self, harness: Harness, corpus: list[bytes], started: float) -> None:
        assert corpus, "a harness needs an input to begin with"
        report, coverage, rng = self.report, self._coverage, self._rng
        pending = list(corpus)
        report.begun_with = len(corpus)
        base_mib = last_mib = 0.0
        while not self._is_over(started):
            if pending:
                data = pending.pop(0)
            else:
                parent = rng.choice(corpus[-64:]) if rng.random() < 0.5 else rng.choice(corpus)
                data = harness.spoil(parent, rng)[:MAX_INPUT_BYTES]
            coverage.fresh = 0
            error = tell(harness, data, self._options.limit_s, coverage, self._logged)
            report.inputs += 1
            report.corpus, report.coverage = len(corpus), len(coverage.edges)
            if error is not None:
                self._note(data, error)
                continue
            if coverage.fresh and len(corpus) < MAX_CORPUS:
                corpus.append(data)
            if report.inputs % _GROW_SPAN == 0:
                gc.collect()
                mib = anonymous_mib("self")
                # The first span fills caches; growth is measured from its end.
                base_mib = base_mib or mib
                report.growth_mib = round(mib - base_mib, 1)
                if report.growth_mib > self._options.growth_mib and mib > last_mib:
                    text = f"{report.growth_mib:.0f} MiB in {report.inputs} inputs"
                    report.finds.append(Find(self._target.name, data, "GrowthError", text))
                    return
                last_mib = mib

    def _is_over(self, started: float) -> bool:
        options, report = self._options, self.report
        if options.inputs is not None and report.inputs >= options.inputs:
            return True
        if len(report.finds) >= options.most_finds:
            return True
        return options.seconds is not None and time.monotonic() - started >= options.seconds

    def _note(self, data: bytes, error: BaseException) -> None:
        """Make the find small and note it, unless its place is known."""
        kind, place, finds = type(error).__name__, _place(error), self.report.finds
        if any(find.kind == kind and find.text.endswith(f" at {place}") for find in finds):
            return
        tries = 0 if isinstance(error, HangError) else _SHRINK_TRIES
        step = max(1, len(data) // 2)
        while tries > 0 and step:
            at = 0
            while at < len(data) and tries > 0:
                shorter = data[:at] + data[at + step :]
                tries -= 1
                if self._still(shorter, kind, place):
                    data = shorter
                else:
                    at += step
            step //= 2
        finds.append(Find(self._target.name, data, kind, f"{str(error)[:300]} at {place}"))

    def _still(self, shorter: bytes, kind: str, place: str) -> bool:
        """Whether the same find comes of a shorter input."""
        harness = self._target.harness()
        try:
            again = tell(harness, shorter, self._options.limit_s, None, self._logged)
        finally:
            harness.close()
        return again is not None and type(again).__name__ == kind and _place(again) == place


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


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"

"""By what compiled code is found without making its IR again.

Oracle: what the loaded functions return, and how often IR was made.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kvcast.native import subset
from kvcast.native.sources import sources_of
from kvcast.native.subset import Library

TEXT = """
from kvcast.native.subset import U64, native

FACTOR = 2

@native
def times(a: U64) -> U64:
    return a * FACTOR

@native
def plus(a: U64) -> U64:
    return a + 100

@native
def answer(a: U64) -> U64:
    return times(a) + 1
"""
NAME = "example_of_compiled_functions"


def made(folder: Path, text: str = TEXT) -> ModuleType:
    """A module of that text."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{NAME}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield made(tmp_path / "sources")
    del sys.modules[NAME]


@pytest.fixture
def makings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One element for each time that IR is made."""
    makings: list[object] = []
    real = subset.module_of

    def counted(roots: Any) -> Any:
        makings.append(roots)
        return real(roots)

    monkeypatch.setattr(subset, "module_of", counted)
    return makings


def answer(example: Any, a: int = 5) -> int:
    library = Library(example.answer)
    return int(library.call(example.answer)(a))


def test_ir_is_made_once(example: Any, makings: list[object]) -> None:
    assert [answer(example), answer(example)] == [11, 11]
    assert len(makings) == 1


def other_callee(example: Any) -> None:
    example.times = example.plus


def other_number(example: Any) -> None:
    example.FACTOR = 3


@pytest.mark.parametrize(
    ("change", "then"), [(other_callee, 106), (other_number, 16)], ids=["callee", "number"]
)
def test_what_somebody_puts_in_the_place_of_what_is_written_is_compiled(
    example: Any, makings: list[object], change: Callable[[Any], None], then: int
) -> None:
    assert answer(example) == 11
    times, factor = example.times, example.FACTOR
    change(example)
    assert [answer(example), answer(example)] == [then, then]
    example.times, example.FACTOR = times, factor
    assert answer(example) == 11
    assert len(makings) == 2


@pytest.mark.parametrize(
    ("old", "new", "then"),
    [
        ("FACTOR = 2", "FACTOR = 4", 21),
        ("a * FACTOR", "a * FACTOR * 3", 31),
        ("return times(a) + 1", "return plus(a) + 1", 106),
        ("a: U64) -> U64:\n    return a * F", "a: U8) -> U64:\n    return a * F", 11),
        ("FACTOR = 2", "# FACTOR: so many times as much\nFACTOR = 2", 11),
    ],
    ids=["number", "code", "callee", "type", "comment"],
)
def test_another_text_is_compiled_anew(
    example: Any, makings: list[object], tmp_path: Path, old: str, new: str, then: int
) -> None:
    assert answer(example) == 11
    assert TEXT.count(old) == 1
    text = TEXT.replace(old, new).replace("import U64", "import U8, U64")
    changed = made(tmp_path / "changed", text)
    assert [answer(changed), answer(changed)] == [then, then]
    assert len(makings) == 2


def another(
    monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, name: str = "kvcast.another"
) -> None:
    """Load a module of kvcast's of that text, which its file only says."""
    module = ModuleType(name)
    module.__file__ = str(folder / f"{name}{len(text)}.py")
    Path(module.__file__).write_text(text)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    "line",
    [
        "from kvcast.another import times",
        "from kvcast.another import (\n    times,\n)",
        "from kvcast import another, native",
        "from kvcast import (\n    native,\n    another as that,\n)",
        "import kvcast.another",
        "import kvcast.another as that",
        "from kvcast.native import between",
    ],
)
def test_the_text_of_what_a_module_imports_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    another(monkeypatch, tmp_path, "from kvcast import another\n", "kvcast.native.between")
    another(monkeypatch, tmp_path, "def times(): pass\n")
    sys.modules["kvcast.another"].times = None  # type: ignore[attr-defined]
    example = made(tmp_path / "importing", f"{line}\n{TEXT}")
    before = sources_of([example.answer])
    another(monkeypatch, tmp_path, "def times(): return 1\n")
    assert sources_of([example.answer]) not in (before, None)


def test_what_else_a_process_has_loaded_does_not_count(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sources_of([example.answer])
    another(monkeypatch, tmp_path, "A = 1\n")
    assert sources_of([example.answer]) == before


def test_the_text_of_the_compiler_counts(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = {sources_of([example.answer])}
    for name in ("kvcast.native.subset", "kvcast.native.writer"):
        other = tmp_path / f"{name}.py"
        other.write_text("from kvcast.native import linux\n")
        monkeypatch.setattr(sys.modules[name], "__file__", str(other))
        digests.add(sources_of([example.answer]))
    assert len(digests - {None}) == 3


def test_who_has_loaded_a_text_before_it_changed_does_not_pass_for_the_new_one(
    example: Any, tmp_path: Path
) -> None:
    # Of another length: of two of one length, written in one second, Python takes one's bytecode
    # for the other's.
    changed = TEXT.replace("a * FACTOR", "a + a * FACTOR")
    (tmp_path / "sources" / f"{NAME}.py").write_text(changed)
    before = sources_of([example.answer])
    after = sources_of([made(tmp_path / "sources", changed).answer])
    assert None not in (before, after)
    assert before != after


def test_of_a_text_that_cannot_be_read_nothing_is_known(example: Any, tmp_path: Path) -> None:
    assert sources_of([example.answer]) is not None
    elsewhere = made(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / f"{NAME}.py").unlink()
    assert sources_of([elsewhere.answer]) is None
    elsewhere.__file__ = None
    assert sources_of([elsewhere.answer]) is None


@pytest.mark.parametrize("damage", [b"", b"x" * 200])
def test_a_damaged_file_of_the_cache_is_made_anew(
    example: Any, makings: list[object], tmp_path: Path, damage: bytes
) -> None:
    assert answer(example) == 11
    for kind in ("*.of", "*.o"):
        (file,) = (tmp_path / "cache" / "kvcast" / "native").glob(kind)
        file.write_bytes(damage)
        assert [answer(example), answer(example)] == [11, 11]
    assert len(makings) == 3

"""What decides on the IR of compiled functions, as one digest.

Owns: `sources_of`, by which code is found in the cache without making its IR first; to make that
takes an agent more time than all else that it does at its start. Must not know: the subset, or
where code is kept.

Whatever can change the IR changes the digest:

- the text of the functions' modules, of the compiler's, and of every module of kvcast's that one of
  these imports at its top: whatever a function, a type or a constant comes from is there. What else
  a process has loaded is not, so that agents, tests and tools share what one of them has made;
- which functions they are, one by one, and the numbers that they name. Somebody may have put others
  in their place (tests do), or the text may have changed since it was loaded.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final

_COMPILER: Final = ("kvcast.native.subset", "kvcast.native.writer")
_IMPORT: Final = re.compile(
    r"^(?:from|import) (kvcast[\w.]*)(?: import (\([^)]*\)|.*))?", re.MULTILINE
)


def sources_of(roots: Sequence[Callable[..., Any]]) -> str | None:
    """The digest for these functions and all that they call, hexadecimal; None = a text cannot be
    read, and so nothing is known."""
    digest = hashlib.sha256(sys.version.encode())
    functions = list(_closure(roots))
    needed = [*_COMPILER, *(function.__module__ for function in functions)]
    try:
        for name, file in sorted(_with_imports(needed).items()):
            digest.update(f"{name} {_text(file).digest}\n".encode())
    except OSError:
        return None
    for function in functions:
        code = function.__code__
        place = f"{function.__module__}.{function.__qualname__} {code.co_filename}"
        digest.update(f"{place} {code.co_firstlineno} {_numbers(function)}\n".encode())
        digest.update(code.co_code)
    return digest.hexdigest()


@dataclass(frozen=True)
class _Text:
    digest: str
    imported: tuple[str, ...]
    """Modules of kvcast's, and names that may be modules."""


@cache
def _text(file: str) -> _Text:
    text = Path(file).read_bytes()
    imported = []
    for found in _IMPORT.finditer(text.decode(errors="replace")):
        package, names = found.groups(default="")
        imported += [package, *(f"{package}.{name}" for name in re.findall(r"\w+", names))]
    return _Text(hashlib.sha256(text).hexdigest(), tuple(imported))


def _with_imports(needed: Sequence[str]) -> dict[str, str]:
    """The files of these modules, of what they import, and so on. Raises FileNotFoundError where
    one of these has none; of what they import, folders and names that are no modules have none."""
    files: dict[str, str] = {}
    modules = list(needed)
    for name in modules:  # which grows
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None and name in needed:
            raise FileNotFoundError(name)
        if file is not None and name not in files:
            files[name] = file
            modules += _text(file).imported
    return files


def _closure(roots: Sequence[Callable[..., Any]]) -> Iterator[FunctionType]:
    """These functions and all that they call, in an order that only they decide."""
    needed = list(roots)
    seen = set(needed)
    for function in needed:  # which grows
        assert isinstance(function, FunctionType)
        yield function
        for name in function.__code__.co_names:
            found = function.__globals__.get(name)
            if isinstance(found, FunctionType) and found not in seen:
                seen.add(found)
                needed.append(found)


def _numbers(function: FunctionType) -> list[Any]:
    """The numbers in a function's code, and those that it names, itself or as a module's."""
    code = function.__code__
    numbers = [value for value in code.co_consts if isinstance(value, int | tuple)]
    for name in code.co_names:
        found = function.__globals__.get(name)
        if isinstance(found, int):
            numbers.append(int(found))
        elif isinstance(found, ModuleType | type):
            inner = (getattr(found, attribute, None) for attribute in code.co_names)
            numbers += [int(value) for value in inner if isinstance(value, int)]
    return numbers

"""What decides on the IR of compiled functions, as one digest.

Owns: `sources_of`, by which code is found in the cache without making its IR first; to make that
takes an agent more time than all else that it does at its start. Must not know: the subset, or
where code is kept.

Whatever can change the IR changes the digest:

- the text of every module of kvcast's that is loaded, and of the functions' own: whatever a
  function, a type or a constant comes from is there;
- which functions they are, one by one, and the numbers that they name. Somebody may have put others
  in their place (tests do), or the text may have changed since it was loaded.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any


def sources_of(roots: Sequence[Callable[..., Any]]) -> str | None:
    """The digest for these functions and all that they call, hexadecimal; None = a text cannot be
    read, and so nothing is known."""
    digest = hashlib.sha256(sys.version.encode())
    functions = list(_closure(roots))
    # Other threads may import meanwhile.
    modules = {name for name in tuple(sys.modules) if name.startswith("kvcast.")}
    for name in sorted(modules | {function.__module__ for function in functions}):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None:
            if name in modules:  # a folder
                continue
            return None
        try:
            digest.update(f"{name} {_text_digest(file)}\n".encode())
        except OSError:
            return None
    for function in functions:
        code = function.__code__
        place = f"{function.__module__}.{function.__qualname__} {code.co_filename}"
        digest.update(f"{place} {code.co_firstlineno} {_numbers(function)}\n".encode())
        digest.update(code.co_code)
    return digest.hexdigest()


@cache
def _text_digest(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


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

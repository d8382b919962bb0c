"""What objects of a class a piece of code makes, for tests that look at them afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")


@contextmanager
def remembered(kind: type[T]) -> Iterator[list[T]]:
    """The objects of that class that are made meanwhile, in their order."""
    objects: list[T] = []
    make = kind.__init__

    def made(self: T, *arguments: Any, **rest: Any) -> None:
        make(self, *arguments, **rest)
        objects.append(self)

    with mock.patch.object(kind, "__init__", made):
        yield objects

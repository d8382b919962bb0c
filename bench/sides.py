"""The processes of a measurement that has several, and what is said to them and by them.

Owns: that they end with it, and lines of JSON by their standard input and output. Must not know:
what they do.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def running(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """One of them: a module that is run, and killed in the end."""
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def hear(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it says next; RuntimeError if it has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a side of the measurement has ended early")
    said: dict[str, Any] = json.loads(line)
    return said


def tell(process: subprocess.Popen[str], message: Any) -> None:
    """Say something to it."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()

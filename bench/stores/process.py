"""A worker (`kvcast.bench.stores.worker`) as the bench sees it: started, asked, ended.

Owns: its pipes, its patience with it. Must not know: what it is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcast.bench.stores.client import WAIT_S, StoreError
from kvcast.topologies.part import LOG_TAIL_BYTES, die_with_parent

_PATIENCE_S = 4 * WAIT_S
_LINE_BYTES = 1 << 24
_GRACE_S = 3.0


class WorkerProcess:
    """One worker; what it and its libraries print is in `log_path`."""

    def __init__(
        self, name: str, prefix: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> None:
        self.name = name
        self._command = [*prefix, sys.executable, "-m", "kvcast.bench.stores.worker"]
        self._environment = {**os.environ, **environment}
        self._log_path = log_path
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it; it answers when it is ready."""
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environment,
                limit=_LINE_BYTES,
                preexec_fn=die_with_parent(),
                start_new_session=True,  # a Ctrl-C at the terminal is the bench's to handle
            )

    async def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Have it do something; StoreError if that fails, or the process ends or is silent."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        try:
            process.stdin.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
            async with asyncio.timeout(_PATIENCE_S):
                await process.stdin.drain()
                line = await process.stdout.readline()
        except TimeoutError:
            raise StoreError(f"{self.name}: no answer to {what} in {_PATIENCE_S:g} s") from None
        except OSError:
            pass  # it has ended
        if not line:
            raise StoreError(f"{self.name}: ended at {what}; it said: {self._last_words()}")
        answer = json.loads(line)
        assert isinstance(answer, dict)
        if "error" in answer:
            raise StoreError(f"{self.name}: {what}: {answer['error']}")
        return answer

    def pause(self) -> None:
        """Have it take no processor time until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self) -> None:
        """End it: by the end of its input, or else with SIGKILL."""
        process = self._process
        if process is None:
            return
        self.resume()
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_GRACE_S):
                await process.wait()
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await process.wait()

    def _last_words(self) -> str:
        with self._log_path.open("rb") as log:
            log.seek(max(0, self._log_path.stat().st_size - LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines[-4:]) or "nothing"

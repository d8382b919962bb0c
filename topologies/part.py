"""One process of a pool: started, watched, logged, killed by its own pid.

Owns: the life of a child process, its ready line, its log file. Must not know: what the process
is. A part never outlives the process that started it: the kernel kills it when its parent dies
(PR_SET_PDEATHSIG), and `stop` asks with SIGTERM before it insists with SIGKILL.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

TERM_GRACE_S = 5.0
"""How long a part may take to end after SIGTERM before it is killed."""

LOG_TAIL_BYTES = 4096
"""How much of a dead part's log an error quotes."""

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02


class PartError(RuntimeError):
    """A part did not start, or died; the message ends with the tail of its log."""


def die_with_parent() -> Callable[[], None] | None:
    """A `preexec_fn` that has the kernel kill the child when its parent thread ends.

    None where the system has no such thing (only Linux does). A process that uses gRPC, too, has to
    turn its handlers of forks off before it imports that (`kvcast.bench`).
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # the parent died before the request took hold

    return ask


class Part:
    """A named child process whose command can be run again after it died.

    `log_path` receives both of its output streams. `ready` is the ready line (contract of
    kvcast.service.readiness.announce_ready), or {} for a program that prints none.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        announces: bool = True,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.log_path = log_path
        self.ready: dict[str, Any] = {}
        self.starts = 0
        self.environment = dict(environment) if environment is not None else None
        self._announces = announces
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        """The process id while it runs, else None."""
        return self._process.pid if self._process is not None and self.running else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def returncode(self) -> int | None:
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Start the command (again); PartError if it cannot be executed."""
        if self.running:
            raise PartError(f"{self.name} runs already, as process {self.pid}")
        log = self.log_path.open("ab")
        try:
            log.write(f"$ {' '.join(self.command)}\n".encode())
            log.flush()
            self._log_start = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                preexec_fn=die_with_parent(),
                start_new_session=True,  # a Ctrl-C at the terminal is the parent's to handle
            )
        except OSError as error:
            raise PartError(f"{self.name}: cannot run {self.command[0]}: {error}") from error
        finally:
            log.close()
        self.starts += 1
        self.ready = {}

    async def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """The ready line's facts; PartError with the log's tail if the part dies or is late."""
        if not self._announces:
            return {}
        for _ in range(max(1, round(timeout_s / _POLL_S))):
            ended = not self.running
            self.ready = self._ready_facts()
            if self.ready:
                return self.ready
            if ended:
                raise self.failure("ended before it was ready")
            await asyncio.sleep(_POLL_S)
        raise self.failure(f"not ready after {timeout_s:g} s")

    async def wait(self) -> int:
        """Wait for the process to end; its exit status."""
        assert self._process is not None
        return await self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal if the process runs."""
        if self._process is not None and self.running:
            try:
                self._process.send_signal(number)
            except ProcessLookupError:
                pass

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.send_signal(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()

    async def stop(self, grace_s: float = TERM_GRACE_S) -> None:
        """SIGTERM, then SIGKILL after `grace_s`; waits until the process is gone."""
        if self._process is None:
            return
        if self.running:
            self.send_signal(signal.SIGTERM)
            self.send_signal(signal.SIGCONT)
            try:
                # `wait_for` of Python 3.11 hears of no cancellation as the process ends.
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
            except TimeoutError:
                self.send_signal(signal.SIGKILL)
                await self._process.wait()

    def kill_now(self) -> None:
        """SIGKILL without waiting: for exit paths on which no loop runs any more."""
        if self._process is not None and self._process.returncode is None:
            try:
                os.kill(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def log_tail(self) -> str:
        """The last lines that the part printed."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, log.tell() - LOG_TAIL_BYTES))
                return log.read().decode(errors="replace").strip()
        except OSError:
            return ""

    def failure(self, what: str) -> PartError:
        """A PartError about this part that quotes its log."""
        status = "" if self.running else f" (exit status {self.returncode})"
        return PartError(f"{self.name}: {what}{status}; {self.log_path} ends:\n{self.log_tail()}")

    def _ready_facts(self) -> dict[str, Any]:
        """The ready line, if this start of the part has printed it; else {}."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            for line in log:
                if not line.startswith(b"{"):
                    continue
                try:
                    facts = json.loads(line)
                except ValueError:
                    continue
                if isinstance(facts, dict) and facts.get("event") == "ready":
                    return facts
        return {}

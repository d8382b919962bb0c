"""An engine's process as tests and benchmarks see it: started, asked, ended.

Owns: its pipes, the patience with it, what a user says to `--kv-transfer-config`. Must not know:
what it is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvcast.topologies.part import die_with_parent

START_S: Final = 240.0
ANSWER_S: Final = 600.0
_LINE_BYTES: Final = 1 << 26
_GRACE_S: Final = 30.0

Prompt: TypeAlias = list[int]
Answers: TypeAlias = list[dict[str, Any]]


class EngineError(RuntimeError):
    """An engine did not start, or ended; the message has the end of its log."""


def transfer(socket: Path | str, **extra: Any) -> dict[str, Any]:
    """What a user says to `--kv-transfer-config`; `extra`: the connector's options."""
    return {
        "kv_connector": "KvcastConnector",
        "kv_connector_module_path": "kvcast.hostagent.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"socket": str(socket)} | extra,
    }


def make_model(python: Path, kind: str, folder: Path) -> Path:
    """A model of random weights in a folder of its kind's name (`tiny_models` has the kinds)."""
    path = folder / kind
    done = subprocess.run(
        [str(python), "-m", "kvcast.bench.engines.tiny_models", kind, str(path)],
        capture_output=True,
        timeout=START_S,
        check=False,
    )
    if done.returncode:
        raise EngineError(f"no model {kind}: {done.stderr.decode(errors='replace')[-2000:]}")
    return path


class Engine:
    """An engine's process (`kvcast.bench.engines.process`)."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self.log = log

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls,
        python: Path,
        log: Path,
        environment: Mapping[str, str],
        *,
        prefix: Sequence[str] = (),
        **options: Any,
    ) -> AsyncIterator[Engine]:
        """An engine with these options of vLLM's; ends with the block. `prefix`: words before its
        command."""
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *(*prefix, str(python)),
                *("-m", "kvcast.bench.engines.process", json.dumps(options)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=out,
                limit=_LINE_BYTES,
                env={**os.environ, **environment},
                preexec_fn=die_with_parent(),
            )
        engine = cls(process, log)
        try:
            await engine._line(START_S)
            yield engine
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                async with asyncio.timeout(_GRACE_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    async def _line(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            line = b""
        if not line:
            raise EngineError(f"an engine has ended or hangs: {self.log_text()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        await self._process.stdin.drain()
        return await self._line(ANSWER_S)

    async def generate(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int = 8,
        *,
        handover: Mapping[str, Any] | None = None,
        salt: str = "",
    ) -> Answers:
        """All at once; each answer with tokens, logprobs, how many tokens were cached, and how the
        request has ended. `seconds`: how long all took together. `handover`: what the requests say
        to the connector; `salt`: their cache_salt."""
        order = {
            "prompts": [list(prompt) for prompt in prompts],
            "max_tokens": max_tokens,
            "handover": dict(handover or {}),
            "salt": salt,
        }
        answer = await self._ask(order)
        answers: Answers = answer["answers"]
        for one in answers:
            one["seconds"] = answer["seconds"]
        return answers

    async def stats(self) -> dict[str, float]:
        """The connector's totals, from vLLM's metrics: "name" or "name|label=value"."""
        totals = await self._ask({"stats": True})
        return {
            name.removeprefix("vllm:kvcast_").replace("_total", ""): value
            for name, value in totals.items()
        }

    async def saved(self, blocks: int, timeout_s: float = 30.0) -> None:
        """Wait until it has saved so many blocks since its start."""
        end = time.monotonic() + timeout_s
        stats: dict[str, float] = {}
        while time.monotonic() < end:
            await self.generate([[3]], 1)  # in one process, news of saves come with steps
            stats = await self.stats()
            if stats.get("save_blocks", 0) >= blocks:
                return
            await asyncio.sleep(0.1)
        raise EngineError(f"{blocks} blocks did not reach the pool: {stats}")

    async def hashes(self, prompt: Prompt) -> list[bytes]:
        """vLLM's hashes of the prompt's full blocks."""
        return [bytes.fromhex(one) for one in (await self._ask({"hashes": prompt}))["hashes"]]

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

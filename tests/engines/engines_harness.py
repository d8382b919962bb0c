"""What the tests of engines share: engines in processes of the engines' environment, and a pool.

The pool runs in this environment, the engines in `.venv-engines` (`make setup-engines`); without
that, or in `make test`, all of these tests are skipped. KVCAST_ENGINES_PYTHON names the Python of
another environment, such as one with vLLM for GPUs; kvcast must be installed there, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kvcast.bench.engines import damage, engine
from kvcast.bench.engines.engine import ANSWER_S, START_S, Answers, Engine, Prompt
from kvcast.bench.replay import EGRESS_COUNTERS
from kvcast.hostagent.client import AsyncClient
from kvcast.hostagent.connectors.naming import keys_of
from kvcast.topologies.part import die_with_parent
from kvcast.topologies.pool import Pool, PoolOptions
from kvcast.topologies.star import Star
from own_address import own_address, own_port

HERE = Path(__file__).resolve().parent
PYTHON = Path(
    os.environ.get("KVCAST_ENGINES_PYTHON") or HERE.parents[1] / ".venv-engines" / "bin" / "python"
)
PATIENCE = {"deadline_s": 60.0, "lookup_s": 20.0, "weigh": False}
"""Where blocks are to come: on a crowded machine the connector's defaults are soon over, and so
small a model is computed sooner than its blocks come."""
HASTE = {"deadline_s": 4.0, "lookup_s": 2.0}
"""Where the pool fails."""
LAYER_BYTES = 32 * 1024
"""A block of one layer of the Llama-like model in float32."""
MODEL_NAME = "model"

ASKED = "KVCAST_TEST_ENGINES"
"""Set by `make test-engines`; these tests take minutes, and `make test` has none to spare."""


def _has_gpu() -> bool:
    """Whether the engines' Python is one with a GPU; only another environment's can be."""
    if not (os.environ.get("KVCAST_ENGINES_PYTHON") and PYTHON.exists()):
        return False
    probe = "import torch; print(torch.cuda.is_available())"
    done = subprocess.run([str(PYTHON), "-c", probe], capture_output=True, check=False, timeout=120)
    return done.stdout.strip() == b"True"


HAS_GPU = _has_gpu()
on_cpus = pytest.mark.skipif(
    HAS_GPU, reason="the engines' Python has a GPU, and this is about vLLM on CPUs"
)

needs_engines = pytest.mark.skipif(
    not PYTHON.exists() or not os.environ.get(ASKED),
    reason="make test-engines runs these, in an environment of their own",
)


def needs_package(name: str) -> pytest.MarkDecorator:
    """Skips tests of an engine whose package is not in the engines' environment."""
    there = any(PYTHON.parents[1].glob(f"lib/python*/site-packages/{name}"))
    return pytest.mark.skipif(not there, reason=f"make setup-engines installs {name}")


def prompts_of(seed: object, count: int, shared: int = 1900, own: int = 100) -> list[Prompt]:
    """Prompts with a shared prefix of so many tokens."""
    system = random.Random(f"{seed} shared")
    prefix = [system.randrange(3, 1024) for _ in range(shared)]
    return [
        [*prefix, *(each.randrange(3, 1024) for _ in range(own))]
        for each in (random.Random(f"{seed} {number}") for number in range(count))
    ]


def transfer(socket: Path | str, **extra: Any) -> dict[str, Any]:
    """What a user says to `--kv-transfer-config`."""
    return engine.transfer(socket, **({"model": MODEL_NAME} | PATIENCE | extra))


def make_model(kind: str, folder: Path) -> Path:
    """A model of random weights."""
    return engine.make_model(PYTHON, kind, folder)


def running(log: Path, **options: Any) -> contextlib.AbstractAsyncContextManager[Engine]:
    """An engine with these options of vLLM's; ends with the block."""
    return Engine.running(PYTHON, log, {}, **options)


class Server:
    """vLLM's OpenAI server, started as users start it, and who hears its KV events."""

    def __init__(self, port: int, events: asyncio.subprocess.Process, log: Path) -> None:
        self._port = port
        self._events = events
        self._stored = 0
        self.log = log

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, log: Path, model: Path, config: dict[str, Any]) -> AsyncIterator[Server]:
        """A server with this `--kv-transfer-config`."""
        address, port, events_port = own_address(), own_port(), own_port()
        endpoint = f"tcp://{address}:{events_port}"
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [
            *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--served-model-name", MODEL_NAME, "--host", address, "--port", str(port)),
            *("--enforce-eager", "--block-size", "32", "--max-model-len", "4096"),
            *("--dtype", "float32", "--max-num-seqs", "8"),
            *("--kv-transfer-config", json.dumps(config)),
            *(
                "--kv-events-config",
                json.dumps(
                    {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
                ),
            ),
        ]
        async with contextlib.AsyncExitStack() as stack:
            processes = []
            for words, out in ((command, log.open("wb")), (["-c", _LISTENER, endpoint], None)):
                if out is not None:
                    stack.callback(out.close)
                process = await asyncio.create_subprocess_exec(
                    str(PYTHON),
                    *words,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out or asyncio.subprocess.PIPE,
                    stderr=out or asyncio.subprocess.DEVNULL,
                    env=environment,
                    preexec_fn=die_with_parent(),
                )
                processes.append(process)
                stack.push_async_callback(_end, process)
            server = cls(port, processes[1], log)
            end = time.monotonic() + START_S
            while True:
                assert processes[0].returncode is None, log.read_text(errors="replace")[-3000:]
                with contextlib.suppress(OSError):
                    await server._get("/health")
                    break
                assert time.monotonic() < end, log.read_text(errors="replace")[-3000:]
                await asyncio.sleep(0.5)
            yield server

    async def _get(self, path: str, body: object = None) -> str:
        def ask() -> str:
            request = urllib.request.Request(
                f"http://{own_address()}:{self._port}{path}",
                None if body is None else json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                return str(answer.read().decode())

        return await asyncio.to_thread(ask)

    async def complete(self, prompt: Prompt, max_tokens: int) -> list[int]:
        """The tokens of a completion."""
        body = {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        [choice] = json.loads(await self._get("/v1/completions", body))["choices"]
        return [int(one) for one in choice["token_ids"]]

    async def shows(self, name: str, total: float) -> None:
        """Wait until the metrics of that name add up to `total`."""
        end = time.monotonic() + 60
        value = 0.0
        while time.monotonic() < end:
            value = sum(
                float(line.rpartition(" ")[2])
                for line in (await self._get("/metrics")).splitlines()
                if line.startswith(f"vllm:{name}{{")
            )
            if value == total:
                return
            await asyncio.sleep(0.3)
        raise AssertionError(f"{name} is {value}, not {total}")

    async def stored_events(self, blocks: int) -> bool:
        """Wait until events have told of so many blocks in the pool."""
        assert self._events.stdout is not None
        while self._stored < blocks:
            line = await asyncio.wait_for(self._events.stdout.readline(), 60)
            assert line
            self._stored += int(line)
        return self._stored == blocks


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 30)
        except TimeoutError:
            process.kill()
            await process.wait()


_LISTENER = """
import msgspec, sys, zmq
from vllm.distributed.kv_events import BlockStored, KVEventBatch
socket = zmq.Context().socket(zmq.SUB)
socket.bind(sys.argv[1])  # vLLM connects to an endpoint without a wildcard
socket.setsockopt_string(zmq.SUBSCRIBE, "")
decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
while True:
    for event in decoder.decode(socket.recv_multipart()[-1]).events:
        if isinstance(event, BlockStored) and event.medium == "KVCAST":
            assert len(event.token_ids) == len(event.block_hashes) * event.block_size
            print(len(event.block_hashes), flush=True)
"""
"""Prints how many blocks each event says to be stored in the pool."""

RECOMPUTED = 1e-3 if HAS_GPU else 1e-4
"""How far log-probabilities of one prompt may lie apart where other numbers of its tokens were
cached: vLLM's own kernels add up in another order then, with its own cache, too. (In float32: 1e-6
on CPUs, 1e-4 on GPUs; in bfloat16 that order moves them by 0.02.)"""


def same(answers: Answers, expected: Answers) -> bool:
    """Whether tokens and all log-probabilities are the same, to the last bit."""
    return [(one["tokens"], one["logprobs"]) for one in answers] == [
        (one["tokens"], one["logprobs"]) for one in expected
    ]


def right(answers: Answers, expected: Answers) -> bool:
    """Whether the tokens are the same, and the log-probabilities but for the order of sums."""
    return len(answers) == len(expected) and all(
        one["tokens"] == other["tokens"]
        and len(one["logprobs"]) == len(other["logprobs"])
        and all(
            abs(mine[token] - theirs[token]) < RECOMPUTED
            for mine, theirs in zip(one["logprobs"], other["logprobs"], strict=True)
            for token in mine.keys() & theirs.keys()
        )
        for one, other in zip(answers, expected, strict=True)
    )


@contextlib.asynccontextmanager
async def pool_of(folder: Path, nodes: int = 3, **options: Any) -> AsyncIterator[Pool]:
    """A pool whose nodes are not taken for dead because engines keep the machine busy."""
    settings: dict[str, Any] = {"arena_bytes": 128 << 20, "lease_s": 30.0} | options
    async with Pool(Star.of(nodes), PoolOptions(**settings), folder / "pool") as pool:
        yield pool


async def corrupt(pool: Pool, block_hash: bytes, part: int = 0) -> int:
    """Change one byte of a part of a block wherever it lies; at how many nodes that was."""
    return await damage.corrupt(pool, MODEL_NAME, block_hash, part)


async def egress_bytes(pool: Pool) -> float:
    """What homes have sent to readers."""
    total = 0.0
    for socket in pool.sockets.values():
        async with await AsyncClient.connect(str(socket)) as client:
            counters = await client.stats()
            total += sum(counters[name] for name in EGRESS_COUNTERS)
    return total


async def saved(one: Engine, prompts: Sequence[Prompt], block_tokens: int = 32) -> None:
    """Wait until all that these prompts are of lies in the pool (`one` began with none)."""
    blocks = {
        tuple(prompt[: block_tokens * (number + 1)])
        for prompt in prompts
        for number in range(len(prompt) // block_tokens)
    }
    await one.saved(len(blocks))


async def in_pool(pool: Pool, one: Engine, prompts: Sequence[Prompt], parts: int) -> None:
    """Wait until every part of every full block of these prompts can be found."""
    keys: list[bytes] = []
    for prompt in prompts:
        keys += [key for block in await one.hashes(prompt) for key in keys_of(block, parts)]
    async with await AsyncClient.connect(str(next(iter(pool.sockets.values())))) as client:
        names = (await client.describe()).namespaces
        [namespace] = [each.namespace for each in names if each.model == MODEL_NAME]
        end = time.monotonic() + 60
        held = 0
        while time.monotonic() < end:
            await one.generate([[3]], 1)  # in one process, saves of the last step come with a step
            held = await client.exists(namespace, keys, 30.0)
            if held == len(keys):
                return
            await asyncio.sleep(0.2)
    raise AssertionError(f"{held} of {len(keys)} parts are in the pool")

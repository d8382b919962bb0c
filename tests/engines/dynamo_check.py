"""Dynamo's own indexer, fed with what the connector and the tier tell: runs in the engines'
environment.

`python dynamo_check.py FOLDER`: prints "right", or fails. vLLM's classes make requests, hashes and
events, and publish them; Dynamo's indexer (its service of its own, with the router's code) listens,
and is asked about prompts.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from kvcast.hostagent.connectors.options import ConnectorOptions
from kvcast.hostagent.connectors.planner import Save
from kvcast.hostagent.connectors.vllm import _stored_event
from vllm import SamplingParams
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.request import Request

BLOCK = 16
WAIT_S = 30.0
MODEL = "model"
SALT = "dynamo-cache-salt:"
"""With this Dynamo's workers mark the salts that they give to vLLM."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Indexer:
    """Dynamo's indexer in a process, which listens to these workers."""

    def __init__(self, workers: dict[int, str], log: Path) -> None:
        self._port = free_port()
        self.log = log
        said = ",".join(f"{worker}={endpoint}" for worker, endpoint in workers.items())
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "dynamo.indexer", "--block-size", str(BLOCK)),
                    *("--port", str(self._port), "--workers", said, "--model-name", MODEL),
                ],
                stdout=out,
                stderr=out,
            )
        end = time.monotonic() + WAIT_S
        while True:
            try:
                self.ask("/workers")
                return
            except (OSError, urllib.error.URLError):
                assert time.monotonic() < end, log.read_text()[-2000:]
                time.sleep(0.1)

    def ask(self, path: str, body: object = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read())

    def held(self, tokens: list[int], **more: str) -> dict[int, tuple[int, int]]:
        """Of a prompt, by worker: tokens in its own memory, and in that or any lower tier."""
        body = {"token_ids": tokens, "model_name": MODEL} | more
        found = self.ask("/query", body)["instances"]
        return {int(worker): (one["gpu"], one["disk"]) for worker, one in found.items()}

    def shows(self, tokens: list[int], expected: dict[int, tuple[int, int]], **more: str) -> None:
        end = time.monotonic() + WAIT_S
        while (held := self.held(tokens, **more)) != expected:
            assert time.monotonic() < end, (held, expected, self.log.read_text()[-2000:])
            time.sleep(0.1)


class Worker:
    """What a vLLM engine with the connector publishes."""

    def __init__(self, endpoint: str, medium: str) -> None:
        self.medium = medium
        self._publisher = ZmqEventPublisher(0, endpoint)

    def request(self, tokens: list[int], salt: str | None = None) -> Request:
        hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        sampling = SamplingParams(max_tokens=1)
        return Request("r", tokens, sampling, None, cache_salt=salt, block_hasher=hasher)

    def saved(self, tokens: list[int], first: int = 0, salt: str | None = None) -> Any:
        """What the connector says of the blocks of a prompt that it has put into the pool."""
        request = self.request(tokens, salt)
        hashes = tuple(request.block_hashes[first:])
        ids = (tuple(range(len(hashes))),)
        return _stored_event(request, Save(1, "r", first, hashes, ids, 1.0), BLOCK, self.medium)

    def publish(self, *events: Any) -> None:
        self._publisher.publish(KVEventBatch(ts=time.time(), events=list(events)))

    def close(self) -> None:
        self._publisher.shutdown()


def prompt(label: int, blocks: int) -> list[int]:
    return [label * 10_000 + at for at in range(blocks * BLOCK)]


def main(folder: Path) -> None:
    init_none_hash(sha256_cbor)
    default = ConnectorOptions().event_medium
    endpoints = {number: f"ipc://{folder}/worker-{number}" for number in (1, 2, 3)}
    workers = {
        1: Worker(endpoints[1], "EXTERNAL"),
        2: Worker(endpoints[2], default),
        3: Worker(endpoints[3], "EXTERNAL"),
    }
    indexer = Indexer(endpoints, folder / "indexer.log")
    try:
        first, second = prompt(1, 6), prompt(2, 4)
        # Until it listens, a publisher's batches are lost; so this one is published until it shows.
        for worker in (1, 3):
            own = prompt(100 + worker, 2)
            end = time.monotonic() + WAIT_S
            while not indexer.held(own):
                workers[worker].publish(workers[worker].saved(own))
                assert time.monotonic() < end, indexer.log.read_text()[-2000:]
                time.sleep(0.1)
            indexer.shows(own, {worker: (0, 2 * BLOCK)})
        # Saved in two steps, the second behind the first.
        workers[1].publish(workers[1].saved(first[: 2 * BLOCK]))
        workers[1].publish(workers[1].saved(first, first=2))
        indexer.shows(first, {1: (0, 6 * BLOCK)})
        indexer.shows([*first, *prompt(9, 2)], {1: (0, 6 * BLOCK)})
        indexer.shows([*first[: 3 * BLOCK], *prompt(9, 2)], {1: (0, 3 * BLOCK)})
        indexer.shows(prompt(9, 3), {})
        # What the engine itself says of its own memory is another tier of the same prompt.
        of_pool = workers[3].saved(first)
        of_engine = BlockStored(
            **{name: getattr(of_pool, name) for name in BlockStored.__struct_fields__}
            | {"medium": "GPU"}
        )
        workers[3].publish(of_pool, of_engine)
        expected = {1: (0, 6 * BLOCK), 3: (6 * BLOCK, 6 * BLOCK)}
        indexer.shows(first, expected)
        hashes = [maybe_convert_block_hash(one) for one in workers[3].request(first).block_hashes]
        workers[3].publish(BlockRemoved(block_hashes=hashes, medium="GPU"))
        indexer.shows(first, {1: (0, 6 * BLOCK), 3: (0, 6 * BLOCK)})
        # Another user's salt makes it another prompt.
        third = prompt(3, 2)
        workers[3].publish(workers[3].saved(third, salt=f"{SALT}user"))
        workers[3].publish(workers[3].saved(prompt(4, 2)))
        indexer.shows(prompt(4, 2), {3: (0, 2 * BLOCK)})
        indexer.shows(third, {})
        indexer.shows(third, {3: (0, 2 * BLOCK)}, cache_salt="user")
        indexer.shows(third, {}, cache_salt="another")
        # A medium that Dynamo does not know is left out, which is why there is the option.
        for _ in range(5):
            workers[2].publish(workers[2].saved(second))
            time.sleep(0.1)
        workers[1].publish(workers[1].saved(second))
        indexer.shows(second, {1: (0, 4 * BLOCK)})
        assert "Failed to decode" not in indexer.log.read_text()
    finally:
        indexer.process.send_signal(signal.SIGTERM)
        try:
            indexer.process.wait(10)
        except subprocess.TimeoutExpired:
            indexer.process.kill()
            indexer.process.wait()
        for worker in workers.values():
            worker.close()


if __name__ == "__main__":
    os.environ.setdefault("DYN_LOG", "info")
    main(Path(sys.argv[1]))
    print("right")

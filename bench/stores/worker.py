"""A process that asks one store, and is told what by JSON lines on its standard input.

Owns: the clock around every operation, and the comparison of every byte that a get returned,
outside of the timed part. Must not know: which stores are compared with which, how often, or why.

    python -m kvcast.bench.stores.worker

Operations come in *units*, each a list of keys that one call asks for. `turn` prepares, runs and
checks one unit after the other. `prepare`, `run` and `finish` do the same in three steps over all
units, so that several processes can run theirs at once, and none compares bytes while another is
being timed. What the store's libraries print goes to standard error.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvcast.bench.stores.client import StoreClient, StoreError, blocks_of, compared
from kvcast.service.commands import explain


class _Unit(NamedTuple):
    keys: list[bytes]
    call: Callable[[], Any]


class Worker:
    """Does what the lines say; one at a time."""

    def __init__(self) -> None:
        self._client: StoreClient | None = None
        self._kind = ""
        self._wanted: dict[bytes, bytes] = {}
        self._units: list[_Unit] = []
        self._got: list[Any] = []

    def answer(self, line: str) -> dict[str, Any]:
        """Obey a line; what to say about it. What fails is told under "error"."""
        request = json.loads(line)
        try:
            done = getattr(self, f"_do_{request.pop('do')}")(**request)
            assert isinstance(done, dict)
            return done
        except Exception as error:  # a store's library may raise anything
            return {"error": explain(error)}

    @property
    def client(self) -> StoreClient:
        """The client; StoreError before `open`."""
        if self._client is None:
            raise StoreError("no store is open")
        return self._client

    def _do_open(self, client: str, options: Mapping[str, Any]) -> dict[str, Any]:
        module, _, name = client.partition(":")
        made = getattr(importlib.import_module(module), name)(options)
        assert isinstance(made, StoreClient)
        self._client = made
        return {"introduction": made.introduction}

    def _do_reserve(self, keys: list[str], size_bytes: int) -> dict[str, Any]:
        return {"where": self.client.reserve(_keys(keys), size_bytes)}

    def _do_place(self, keys: list[str], size_bytes: int, local: bool) -> dict[str, Any]:
        return {"where": self.client.place(_keys(keys), size_bytes, local=local)}

    def _do_look(self, keys: list[str], size_bytes: int) -> dict[str, Any]:
        wrong, missing = self.client.look(_keys(keys), size_bytes)
        return {"wrong_bytes": wrong, "missing": missing}

    def _do_drop(self, keys: list[str]) -> dict[str, Any]:
        self.client.drop(_keys(keys))
        return {}

    def _do_turn(self, units: list[list[str]], **what: Any) -> dict[str, Any]:
        told: dict[str, Any] = {"seconds": [], "release_s": [], "origins": []}
        told |= {"wrong_bytes": 0, "missing": 0}
        self._expect(units, **what)
        for unit in units:
            self._prepare([unit], **what)
            told["seconds"] += self._do_run()["seconds"]
            for name, value in self._do_finish().items():
                told[name] += value
        return told

    def _do_prepare(self, units: list[list[str]], **what: Any) -> dict[str, Any]:
        self._expect(units, **what)
        self._prepare(units, **what)
        return {}

    def _expect(self, units: list[list[str]], kind: str, size_bytes: int, **_: Any) -> None:
        """Make all blocks beforehand: the less is done between two operations, the better."""
        keys = [key for unit in units for key in _keys(unit)]
        self._wanted = {} if kind == "exists" else blocks_of(keys, size_bytes)
        gc.collect()

    def _prepare(
        self, units: list[list[str]], kind: str, size_bytes: int, where: Mapping[str, Any]
    ) -> None:
        self._kind, self._got = kind, []
        self._units = [
            _Unit(keys, self._call(kind, keys, size_bytes, where)) for keys in map(_keys, units)
        ]

    def _call(
        self, kind: str, keys: list[bytes], size_bytes: int, where: Mapping[str, Any]
    ) -> Callable[[], Any]:
        client = self.client
        if kind == "get":
            return client.getter(keys, size_bytes, where)
        if kind == "exists":
            return client.asker(keys)
        (key,) = keys
        if kind == "place":
            return client.placer(key, self._wanted[key])
        return client.putter(key, self._wanted[key], where, local=False)

    def _do_run(self, at_s: float = 0.0) -> dict[str, Any]:
        """Run what was prepared, not before `at_s` of the monotonic clock."""
        gc.disable()
        time.sleep(max(0.0, at_s - time.monotonic()))
        times: list[float] = []
        began_s = time.monotonic()
        for unit in self._units:
            start_s = time.perf_counter()
            got = unit.call()
            times.append(time.perf_counter() - start_s)
            self._got.append(got)
        ended_s = time.monotonic()
        gc.enable()
        return {"seconds": times, "began_s": began_s, "ended_s": ended_s}

    def _do_finish(self) -> dict[str, Any]:
        """Compare what came with what should have come, and give it back."""
        wrong = missing = 0
        for unit, got in zip(self._units, self._got, strict=True):
            if self._kind == "get":
                wanted = {key: self._wanted[key] for key in unit.keys}
                wrong_here, missing_here = compared(wanted, got)
                wrong += wrong_here
                missing += missing_here
            elif self._kind == "exists":
                missing += len(unit.keys) - got
        origins = sorted(self.client.origins())
        self._got, self._units = [], []
        start_s = time.perf_counter()
        self.client.release()
        return {
            "wrong_bytes": wrong,
            "missing": missing,
            "origins": origins,
            "release_s": [time.perf_counter() - start_s],
        }

    def close(self) -> None:
        """Let go of the store."""
        if self._client is not None:
            self._client.close()


def _keys(names: list[str]) -> list[bytes]:
    return [bytes.fromhex(name) for name in names]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    try:
        for line in sys.stdin:
            answers.write(json.dumps(worker.answer(line)) + "\n")
            answers.flush()
        worker.close()
    finally:
        answers.flush()
        sys.stderr.flush()
        os._exit(0)  # libraries with threads of their own may not come to an end by themselves


if __name__ == "__main__":
    main()

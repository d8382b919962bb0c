"""The question: on this machine's GPU, is a prefix that the pool holds sooner there than computed?

    python -m kvcast.bench.gpu --python PATH --json FILE

Owns: what engines are asked for, in which order, the report. Must not know: how an engine or a pool
is run (`engines/`, `kvcast.topologies`).

PATH is the Python of an environment with kvcast and vLLM for this machine's GPU. Without a GPU the
same is measured with vLLM for CPUs, and a smaller model (`--model llama`).

**What is measured.** Engines of one model stand beside each other on one GPU, and are asked one
after the other. The first computes prompts, and the pool takes its blocks: all into the DRAM of
its own node. Then it is asked again, which its own cache answers. The others load the same prompts:

- `own_agent`: out of the same node's agent, as the connector does by default,
- `pages_not_locked`: without page-locking the arena for the GPU (`lock_pages` is off),
- `not_verified`: without checking the bytes once more (`verify` is off),
- `other_node`: from another node's agent, over this machine's loopback. No card and no link is in
  the way here, and all agents share the machine: this is no figure for a network.

The pool does not weigh here (`weigh` is off), so that everything is loaded, also where computing is
sooner. Times are medians over prompts of how long one token takes, in seconds.

**The fields at the top** are those of the longest prefix: `own_agent_over_computed` and so on, a
way's time ÷ the time of prompts that nobody has computed; below 1 the pool is sooner.
`wrong_outputs`: answers whose four tokens and log-probabilities are not, to the last bit, what the
first engine says with the prefix in its own cache; `not_all_cached`: answers for which a part of a
prefix was computed after all. `cases` has all of it, with `prefix_bytes`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvcast.bench.engines.command import add_options, measured
from kvcast.bench.engines.engine import Engine, Prompt, make_model, transfer
from kvcast.bench.engines.process import DEFAULTS
from kvcast.service import provenance
from kvcast.service.commands import CommandError, run_command
from kvcast.service.options import HelpFormatter
from kvcast.service.reports import say
from kvcast.service.statistics import ratio
from kvcast.topologies.pool import Pool, PoolOptions
from kvcast.topologies.star import Star

PREFIXES: Final = (4096, 16_384)
ROUNDS: Final = 3
TOKENS: Final = 4
"""That an answer is compared by."""
SAVED_S: Final = 120.0
FIRST: Final = "computed"
WAYS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "own_agent": ("node-1", {}),
    "pages_not_locked": ("node-1", {"lock_pages": False}),
    "not_verified": ("node-1", {"verify": False}),
    "other_node": ("node-2", {}),
}
"""On which node the engine is, and its connector's options."""
PATIENCE: Final = {"deadline_s": 120.0, "lookup_s": 20.0, "save_s": SAVED_S, "saving_share": 1.0}
TINY: Final = ("llama", "gemma")
SHAPES: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
"""Of Llama 3.1 8B; vLLM fills such a model with random weights."""


def _engine_options(
    model: str, python: Path, folder: Path, prefixes: Sequence[int]
) -> dict[str, Any]:
    longest = max(prefixes) + 64
    options: dict[str, Any] = {"max_model_len": longest, "max_num_batched_tokens": longest}
    if model in TINY:
        return options | {"model": str(make_model(python, model, folder))}
    options |= {"dtype": "auto", "block_size": 16, "skip_tokenizer_init": True}
    if model != "8b":
        return options | {"model": model}
    path = folder / model
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SHAPES), encoding="utf-8")
    return options | {"model": str(path), "load_format": "dummy"}


def _prompt(label: str, tokens: int) -> Prompt:
    system = random.Random(label)
    return [system.randrange(3, 1000) for _ in range(tokens)]


async def _seconds(engine: Engine, prompt: Prompt) -> tuple[float, dict[str, Any]]:
    """How long one token takes, and the answer."""
    [answer] = await engine.generate([prompt], 1)
    return answer["seconds"], answer


async def _measure(
    engines: dict[str, Engine], prefix: int, rounds: int, block_tokens: int, saved_blocks: int
) -> dict[str, Any]:
    """One case: a prefix of so many tokens. `saved_blocks`: what the first engine saved before."""
    first = engines[FIRST]
    prompts = [_prompt(f"{prefix} {number}", prefix) for number in range(rounds)]
    times: dict[str, list[float]] = {
        FIRST: [(await _seconds(first, one))[0] for one in prompts],
        "own_cache": [(await _seconds(first, one))[0] for one in prompts],
    }
    expected = [(await first.generate([one], TOKENS))[0] for one in prompts]
    await first.saved(saved_blocks + rounds * (prefix // block_tokens), SAVED_S)
    wrong = partly = 0
    for name in [one for one in engines if one != FIRST]:
        times[name] = []
        for prompt, right in zip(prompts, expected, strict=True):
            seconds, loaded = await _seconds(engines[name], prompt)
            times[name].append(seconds)
            partly += loaded["cached"] < (prefix - 1) // block_tokens * block_tokens
            [answer] = await engines[name].generate([prompt], TOKENS)
            wrong += any(answer[one] != right[one] for one in ("tokens", "logprobs"))
    return {
        "prefix_tokens": prefix,
        "seconds": {name: statistics.median(found) for name, found in times.items()},
        "all_seconds": times,
        "wrong_outputs": wrong,
        "not_all_cached": partly,
    }


async def run(arguments: argparse.Namespace, so_far: dict[str, Any]) -> dict[str, Any]:
    """Start everything, and measure; `so_far`: the report in the making."""
    python = Path(arguments.python)
    if not python.exists():
        raise CommandError(f"there is no {python}: make setup-engines, or --python")
    prefixes = sorted(arguments.prefixes)
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcast-gpu-")))
        logs = Path(arguments.logs) if arguments.logs else scratch
        logs.mkdir(parents=True, exist_ok=True)
        options = _engine_options(arguments.model, python, scratch, prefixes)
        options["kv_cache_memory_bytes"] = int(arguments.kv_gib * 2**30)
        settings = PoolOptions(
            arena_bytes=int(arguments.arena_gib * 2**30),
            replicas=0,
            homes=("node-1",),
            lease_s=30.0,
        )
        pool = await stack.enter_async_context(Pool(Star.of(2), settings, scratch / "pool"))
        say(f"starting {1 + len(arguments.ways)} engines (a minute)")

        async def start(name: str) -> Engine:
            node, extra = WAYS.get(name, ("node-1", {}))
            said = transfer(pool.sockets[node], model="bench", weigh=False, **PATIENCE, **extra)
            return await stack.enter_async_context(
                Engine.running(python, logs / f"{name}.log", {}, kv_transfer_config=said, **options)
            )

        names = [FIRST, *arguments.ways]
        engines = dict(zip(names, await asyncio.gather(*map(start, names)), strict=True))
        block_tokens = options.get("block_size", DEFAULTS["block_size"])
        say("warming up")
        for name, engine in engines.items():
            for prefix in prefixes:  # kernels are compiled for what they are first asked for
                await engine.generate([_prompt(f"warm {prefix} {name}", prefix)], 1)
        await engines[FIRST].saved(sum(prefix // block_tokens for prefix in prefixes), SAVED_S)
        cases: list[dict[str, Any]] = []
        so_far |= {
            "model": arguments.model,
            "cases": cases,
            "provenance": provenance.provenance(),
        }
        for prefix in prefixes:
            say(f"a prefix of {prefix} tokens")
            before = await engines[FIRST].stats()
            case = await _measure(
                engines, prefix, arguments.rounds, block_tokens, int(before["save_blocks"])
            )
            after = await engines[FIRST].stats()
            saved = {name: after[name] - before[name] for name in ("save_bytes", "save_blocks")}
            case["prefix_bytes"] = (
                saved["save_bytes"] / saved["save_blocks"] * (prefix // block_tokens)
            )
            cases.append(case)
        return _report(so_far)


def _report(found: dict[str, Any]) -> dict[str, Any]:
    cases = found["cases"]
    seconds = cases[-1]["seconds"]
    return found | {
        **{
            f"{name}_over_{FIRST}": ratio(took, seconds[FIRST])
            for name, took in seconds.items()
            if name != FIRST
        },
        **{name: sum(case[name] for case in cases) for name in ("wrong_outputs", "not_all_cached")},
    }


def _show(report: dict[str, Any]) -> None:
    for case in report["cases"]:
        print(f"{case['prefix_tokens']} tokens, {case['prefix_bytes'] / 2**20:.0f} MiB of KV:")
        for name, seconds in case["seconds"].items():
            print(f"    {name:18} {1e3 * seconds:8.1f} ms")
    print(f"wrong outputs: {report['wrong_outputs']}; not all cached: {report['not_all_cached']}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.bench.gpu",
        description=__doc__.partition("\n")[0],
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--model",
        default="8b",
        help="8b: Llama 3.1 8B's shapes with random weights (16 GB on the GPU for each engine); "
        f"{', '.join(TINY)}: tiny, for CPUs; else a model's folder",
    )
    parser.add_argument(
        "--prefixes", type=int, nargs="+", default=list(PREFIXES), metavar="TOKENS", help="lengths"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="prompts of each length")
    parser.add_argument(
        "--ways",
        nargs="*",
        default=list(WAYS),
        choices=list(WAYS),
        help="how prompts are loaded, by an engine each",
    )
    parser.add_argument(
        "--kv-gib", type=float, default=12.0, help="each engine's KV memory, in GiB: all prompts"
    )
    parser.add_argument(
        "--arena-gib",
        type=float,
        default=24.0,
        help="each of two agents' DRAM, in GiB; page-locking takes all of it",
    )
    add_options(parser)
    return parser


async def _command(arguments: argparse.Namespace) -> int:
    if min(*arguments.prefixes, arguments.rounds) < 1:
        raise CommandError("prefixes and rounds are at least 1")
    if min(arguments.kv_gib, arguments.arena_gib) <= 0:
        raise CommandError("there is some memory")
    return await measured(arguments, run, _show, lambda report: bool(report["wrong_outputs"]))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    return run_command(lambda: _command(arguments), log_level="warning")


if __name__ == "__main__":
    raise SystemExit(main())

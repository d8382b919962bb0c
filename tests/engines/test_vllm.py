"""vLLM engines that share a pool: the same answers as without one, whatever fails.

Oracle: an engine without a connector. Where as many tokens come from the pool as that engine finds
in its own cache, tokens and log-probabilities are the same to the last bit; where fewer come, the
same but for the order of sums. Cannot see: several machines; GPUs, unless the engines' Python has
one (KVCAST_ENGINES_PYTHON).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
from engines_harness import (
    HASTE,
    LAYER_BYTES,
    Server,
    corrupt,
    egress_bytes,
    in_pool,
    make_model,
    needs_engines,
    on_cpus,
    pool_of,
    prompts_of,
    right,
    running,
    same,
    saved,
    transfer,
)
from kvcast.bench.engines.engine import Answers, Engine, Prompt
from kvcast.hostagent.client import Client

pytestmark = [needs_engines, pytest.mark.in_step, pytest.mark.slow, pytest.mark.timeout(900)]

HANG_S = 60.0
"""Far beyond the deadline and any computing here: who takes longer hangs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Path:
    return make_model("llama", folder)


FAULTS = ("home", "switch", "controller", "corrupt", "paused", "agent", "back", "storm")


@pytest.fixture(scope="module")
def families() -> dict[str, list[Prompt]]:
    """Prompts that share a prefix, for each thing that is tried."""
    families = {name: prompts_of(name, 2) for name in ("hits", *FAULTS)}
    families["storm"] = prompts_of("storm", 12, shared=0, own=640)
    return families


class Computed:
    """What an engine without a pool answers: when a prompt is new to it, and when it has just had
    it, so that all of its blocks are in its own cache."""

    def __init__(self) -> None:
        self.new: dict[str, Answers] = {}
        self.again: dict[str, Answers] = {}


@pytest.fixture(scope="module")
def computed(llama: Path, families: dict[str, list[Prompt]], folder: Path) -> Computed:
    async def compute() -> Computed:
        computed = Computed()
        async with running(folder / "alone.log", model=str(llama)) as engine:
            for name, prompts in families.items():
                computed.new[name] = await one_by_one(engine, prompts)
                computed.again[name] = await one_by_one(engine, prompts)
        return computed

    return asyncio.run(compute())


async def one_by_one(engine: Engine, prompts: list[Prompt]) -> Answers:
    return [(await engine.generate([prompt]))[0] for prompt in prompts]


def all_ended(answers: Answers) -> bool:
    return all(one["finish"] == "length" and one["seconds"] < HANG_S for one in answers)


async def told(socket: Path, prefixes: int) -> float:
    """How many prefixes an agent was told of that were loaded whole, once it was of so many."""

    def ask() -> float:
        end = time.monotonic() + HANG_S
        with Client(str(socket)) as client:
            while (whole := client.stats()["prefixes_whole_total"]) < prefixes:
                assert time.monotonic() < end, whole
                time.sleep(0.1)
        return whole

    return await asyncio.to_thread(ask)


async def test_what_one_node_computed_the_others_read(
    llama: Path,
    families: dict[str, list[Prompt]],
    computed: Computed,
    tmp_path: Path,
) -> None:
    prompts = families["hits"]
    shareable = [len(prompt) // 32 * 32 for prompt in prompts]
    async with pool_of(tmp_path) as pool:
        for node in ("node-1", "node-2", "node-3"):
            log = tmp_path / f"{node}.log"
            extra = transfer(
                pool.sockets[node], block_bytes=LAYER_BYTES, load_by_layers=node == "node-3"
            )
            async with running(log, model=str(llama), kv_transfer_config=extra) as engine:
                answers = await one_by_one(engine, prompts)
                stats = await engine.stats()
                if node == "node-1":
                    assert same(answers, computed.new["hits"])
                    assert answers[0]["cached"] == 0
                    await saved(engine, prompts)
                else:
                    assert same(answers, computed.again["hits"]), (node, stats)
                    # The second prompt finds the shared prefix in the engine itself by then.
                    cached = [one["cached"] for one in answers]
                    assert sum(cached) > 0.95 * sum(shareable), (node, cached)
                    came = sum(n for name, n in stats.items() if name.startswith("load_blocks"))
                    assert came == len(
                        {tuple(p[: 32 * (at + 1)]) for p in prompts for at in range(len(p) // 32)}
                    )
                    assert stats.get("save_blocks", 0) == 0  # what is there is not saved again
                    assert await told(pool.sockets[node], len(prompts)) == len(prompts)
                if node == "node-2":
                    [salted] = await engine.generate([prompts[0]], salt="another's")
                    assert (salted["cached"], right([salted], computed.new["hits"][:1])) == (
                        0,
                        True,
                    )


async def test_three_engines_at_once(
    llama: Path,
    families: dict[str, list[Prompt]],
    computed: Computed,
    tmp_path: Path,
) -> None:
    prompts = families["hits"]
    async with pool_of(tmp_path) as pool:

        async def play(engine: Engine) -> dict[str, float]:
            for _ in range(2):
                answers = await engine.generate(prompts)
                assert right(answers, computed.new["hits"])
                assert all_ended(answers)
            return await engine.stats()

        async with contextlib.AsyncExitStack() as engines:
            together = await asyncio.gather(
                *(
                    engines.enter_async_context(
                        running(
                            tmp_path / f"{node}.log",
                            model=str(llama),
                            kv_transfer_config=transfer(socket),
                        )
                    )
                    for node, socket in pool.sockets.items()
                )
            )
            stats = await asyncio.gather(*map(play, together))
        assert not any("failed" in name for each in stats for name in each), stats


async def test_whatever_dies_every_request_ends_right_and_in_time(
    llama: Path,
    families: dict[str, list[Prompt]],
    computed: Computed,
    tmp_path: Path,
) -> None:
    async with pool_of(tmp_path, replicas=1, lease_s=3.0) as pool:
        # A GPU computes sooner than is saved; then saves of requests that are over are left out.
        extra = transfer(pool.sockets["node-1"], saving_share=1.0)
        async with running(
            tmp_path / "first.log", model=str(llama), kv_transfer_config=extra
        ) as first:
            everything = [prompt for name in FAULTS for prompt in families[name]]
            assert len(await first.generate(everything, 1)) == len(everything)
            await saved(first, everything)
        extra = transfer(pool.sockets["node-2"], retry_s=0.5, **HASTE)
        async with running(
            tmp_path / "second.log", model=str(llama), kv_transfer_config=extra
        ) as second:

            async def ends_right(name: str) -> Answers:
                answers = await one_by_one(second, families[name])
                assert right(answers, computed.new[name]), name
                assert all_ended(answers), name
                return answers

            [prompt, _] = families["corrupt"]
            assert await corrupt(pool, (await second.hashes(prompt))[5]) > 0
            await ends_right("corrupt")
            assert (await second.stats())["failed_loads|reason=corrupt"] == 1

            # Half of all loads fail, all at once.
            for prompt in families["storm"][::2]:
                assert await corrupt(pool, (await second.hashes(prompt))[5]) > 0
            answers = await second.generate(families["storm"])
            assert right(answers, computed.new["storm"])
            assert all_ended(answers)
            assert (await second.stats())["failed_loads|reason=corrupt"] == 1 + 6

            await pool.kill("switch")
            await ends_right("switch")
            await pool.restart("switch")
            await pool.wait_programmed(60)

            await pool.kill("controller")
            await ends_right("controller")
            await pool.restart("controller")
            await pool.wait_programmed(60)

            pool.pause("node-2")
            await ends_right("paused")
            pool.resume("node-2")

            await pool.kill("node-3")  # the home of a third of all blocks
            await ends_right("home")
            await pool.restart("node-3")
            await pool.wait_programmed(60)

            await pool.kill("node-2")
            await ends_right("agent")
            await pool.restart("node-2")
            await pool.wait_programmed(60)
            await asyncio.sleep(3.0)

            before = await second.stats()
            answers = await ends_right("back")
            after = await second.stats()
            assert after["lookups"] > before["lookups"], "the pool is used again"
            assert sum(one["cached"] for one in answers) > 0
        assert "Traceback" not in (tmp_path / "second.log").read_text(errors="replace")


@on_cpus
async def test_a_part_that_does_not_come_while_its_step_computes_leaves_nothing_wrong_behind(
    llama: Path,
    families: dict[str, list[Prompt]],
    computed: Computed,
    tmp_path: Path,
) -> None:
    """Loads by layers: the engine has computed some layers when a later one's bytes are bad, or
    when the time is over. Whoever reads afterwards what it saved, or what it has in its cache, gets
    what is right."""
    layers: dict[str, Any] = {"block_bytes": LAYER_BYTES, "load_by_layers": True}
    names = ("home", "switch", "corrupt", "controller")
    async with pool_of(tmp_path, replicas=0) as pool:
        async with running(
            tmp_path / "first.log",
            model=str(llama),
            kv_transfer_config=transfer(pool.sockets["node-1"], block_bytes=LAYER_BYTES),
        ) as first:
            # The last 100 tokens of each prompt are for the second engine to compute and save.
            heads = [prompt[:1952] for name in names for prompt in families[name]]
            await first.generate(heads, 1)
            await saved(first, heads)
        async with running(
            tmp_path / "second.log",
            model=str(llama),
            kv_transfer_config=transfer(pool.sockets["node-2"], **layers),
        ) as second:
            for name, part in (("home", 2), ("switch", 0)):
                [prompt, other] = families[name]
                assert await corrupt(pool, (await second.hashes(prompt))[5], part) > 0
                before = await second.stats()
                assert right(await second.generate([prompt]), computed.new[name][:1]), name
                after = await second.stats()
                assert after["loads_by_layers"] == before.get("loads_by_layers", 0) + 1
                assert (
                    after["failed_loads|reason=corrupt"]
                    == before.get("failed_loads|reason=corrupt", 0) + 1
                )
                answers = await second.generate([other, prompt])
                assert right(answers, computed.new[name][::-1]), name
            # Two at once, of one prefix that does not come: neither is alone.
            prompts = families["corrupt"]
            assert await corrupt(pool, (await second.hashes(prompts[0]))[5], 3) > 0
            assert right(await second.generate(prompts), computed.new["corrupt"])
            told = [prompt for name in names[:3] for prompt in families[name]]
            await in_pool(pool, second, told, parts=4)
        async with running(
            tmp_path / "hasty.log",
            model=str(llama),
            kv_transfer_config=transfer(pool.sockets["node-2"], **(layers | {"deadline_s": 0.02})),
        ) as hasty:
            answers = await one_by_one(hasty, families["controller"])
            assert right(answers, computed.new["controller"])
            assert all_ended(answers)
            await in_pool(pool, hasty, families["controller"], parts=4)
        async with running(
            tmp_path / "third.log",
            model=str(llama),
            kv_transfer_config=transfer(pool.sockets["node-3"], **layers),
        ) as third:
            for name in names:
                answers = await one_by_one(third, families[name])
                # What the others computed on top of what came, and recomputed, is there and right.
                assert right(answers, computed.new[name]), name
                assert [one["cached"] for one in answers] == [1984, 1984], name
            assert not any("failed" in one for one in await third.stats())


async def test_prefixes_that_come_later_than_they_are_computed_are_computed(
    llama: Path, families: dict[str, list[Prompt]], computed: Computed, tmp_path: Path
) -> None:
    """A block of 128 KiB takes the link 0.5 s, and the engine some milliseconds."""
    prompts, expected = families["storm"], computed.new["storm"]
    slow = {"replicas": 0, "homes": ("node-1",), "link_rate_bits_per_s": 2e6}
    async with pool_of(tmp_path, nodes=2, **slow) as pool:
        extra = transfer(pool.sockets["node-1"])
        async with running(
            tmp_path / "first.log", model=str(llama), kv_transfer_config=extra
        ) as first:
            assert right(await one_by_one(first, prompts), expected)
            await saved(first, prompts)
        extra = transfer(pool.sockets["node-2"], weigh=True, deadline_s=600.0)
        async with running(
            tmp_path / "second.log", model=str(llama), kv_transfer_config=extra
        ) as second:
            await second.generate([prompts_of("new", 1)[0]], 1)  # what computing takes
            for half in (slice(6), slice(6, 12)):
                answers = await second.generate(prompts[half])
                assert right(answers, expected[half])
                assert all_ended(answers)
            stats = await second.stats()
        assert any(stats.get(f"weighed|verdict={one}") for one in ("cut", "slower", "part")), stats
        came = sum(n for name, n in stats.items() if name.startswith("load_blocks"))
        assert came < 12 * (640 // 32) / 2, stats
        assert stats["load_block_seconds"] > stats["compute_block_seconds"]
        assert not any("failed" in name for name in stats), stats


@on_cpus
async def test_a_latent_cache_is_read_by_other_nodes_too(folder: Path, tmp_path: Path) -> None:
    """vLLM's MLA on CPUs goes on behind a prefix by one token only; so the oracle's first token
    ends the prompt of those that read."""
    model = make_model("deepseek", folder)
    prompts = prompts_of("mla", 2, shared=1600, own=400)
    half_known = [*prompts[0][:1008], *prompts_of("other", 1, shared=0, own=200)[0]]
    async with running(tmp_path / "alone.log", model=str(model), block_size=16) as engine:
        alone = [(await engine.generate([prompt], 9))[0] for prompt in prompts]
        [alone_half] = await engine.generate([half_known])
    async with pool_of(tmp_path) as pool:
        extra = transfer(pool.sockets["node-1"])
        async with running(
            tmp_path / "node-1.log", model=str(model), block_size=16, kv_transfer_config=extra
        ) as engine:
            assert same([(await engine.generate([prompt], 9))[0] for prompt in prompts], alone)
            await saved(engine, prompts, block_tokens=16)
        for node in ("node-2", "node-3"):
            extra = transfer(pool.sockets[node], load_by_layers=node == "node-3")
            async with running(
                tmp_path / f"{node}.log", model=str(model), block_size=16, kv_transfer_config=extra
            ) as engine:
                for prompt, expected in zip(prompts, alone, strict=True):
                    [answer] = await engine.generate([[*prompt, expected["tokens"][0]]], 8)
                    assert answer["cached"] == len(prompt)
                    assert answer["tokens"] == expected["tokens"][1:]
                    assert answer["logprobs"] == expected["logprobs"][1:]
                assert same(await engine.generate([half_known]), [alone_half])


async def test_layers_with_a_sliding_window_are_read_by_other_nodes_too(
    folder: Path, tmp_path: Path
) -> None:
    model = make_model("gemma", folder)
    prompts = prompts_of("window", 2)
    async with running(tmp_path / "alone.log", model=str(model)) as engine:
        new = await one_by_one(engine, prompts)
    async with pool_of(tmp_path, nodes=2) as pool:
        extra = transfer(pool.sockets["node-1"])
        async with running(
            tmp_path / "node-1.log", model=str(model), kv_transfer_config=extra
        ) as engine:
            assert right(await one_by_one(engine, prompts), new)
            await saved(engine, prompts)
        extra = transfer(pool.sockets["node-2"])
        async with running(
            tmp_path / "node-2.log", model=str(model), kv_transfer_config=extra
        ) as engine:
            answers = await one_by_one(engine, prompts)
            assert right(answers, new)  # vLLM's own cache has other hits with such layers
            assert [one["cached"] for one in answers] == [len(p) // 32 * 32 for p in prompts]


async def test_the_server_needs_one_flag_and_shows_what_it_does(
    llama: Path, families: dict[str, list[Prompt]], computed: Computed, tmp_path: Path
) -> None:
    prompts, expected = families["hits"], computed.new["hits"]
    async with pool_of(tmp_path, nodes=2) as pool:
        for node in ("node-1", "node-2"):
            async with Server.running(
                tmp_path / f"{node}.log",
                llama,
                transfer(pool.sockets[node], lookup_s=2.0, save_s=8.0),
            ) as server:
                for prompt, one in zip(prompts, expected, strict=True):
                    assert await server.complete(prompt, 8) == one["tokens"], node
                blocks = len(
                    {tuple(p[: 32 * (at + 1)]) for p in prompts for at in range(len(p) // 32)}
                )
                if node == "node-1":
                    await server.shows("kvcast_save_blocks_total", blocks)
                    assert await server.stored_events(blocks)
                    # What does not reach the pool is not told: others would look for it there.
                    pool.pause(node)
                    await server.complete(families["home"][0], 8)
                    await server.shows("kvcast_save_failures_total", len(families["home"][0]) // 32)
                    pool.resume(node)
                    new = families["switch"][0][:640]
                    await server.complete(new, 8)
                    assert await server.stored_events(blocks + len(new) // 32)
                else:
                    await server.shows("kvcast_load_blocks_total", blocks)
                    await server.shows("kvcast_load_seconds_count", len(prompts))


async def test_decoding_engines_go_on_from_what_another_computes(
    llama: Path, tmp_path: Path
) -> None:
    """All are asked at once: one computes, the others wait for its blocks, as one reader group."""
    [prompt] = prompts_of("handover", 1)
    blocks = (len(prompt) - 1) // 32
    async with pool_of(tmp_path, nodes=3, replicas=0) as pool, contextlib.AsyncExitStack() as stack:
        nodes = list(pool.sockets)
        first, *others = await asyncio.gather(
            *(
                stack.enter_async_context(
                    running(
                        tmp_path / f"{node}.log",
                        model=str(llama),
                        max_num_batched_tokens=256,
                        kv_transfer_config=transfer(
                            pool.sockets[node], await_s=120.0, block_bytes=LAYER_BYTES
                        ),
                    )
                )
                for node in nodes
            )
        )
        before = await egress_bytes(pool)
        handover = {"prefilling": True, "readers": nodes[1:]}
        computed, *decoded = await asyncio.gather(
            first.generate([prompt]),
            *(other.generate([prompt], handover=handover) for other in others),
        )
        for other, answers in zip(others, decoded, strict=True):
            assert right(answers, computed)
            assert answers[0]["cached"] == blocks * 32
            stats = await other.stats()
            assert sum(n for name, n in stats.items() if name.startswith("load_blocks")) == blocks
            assert "awaits_failed" not in stats
        # Two read: their bytes have left homes once, but for what was late.
        assert 0 < await egress_bytes(pool) - before < 1.5 * stats["load_bytes"]
        # One that nobody computes after all is computed here, when it was waited for long enough.
        [alone] = prompts_of("nobody", 1, shared=64, own=8)
    async with (
        pool_of(tmp_path / "second", nodes=1, replicas=0) as pool,
        running(
            tmp_path / "alone.log",
            model=str(llama),
            kv_transfer_config=transfer(pool.sockets["node-1"], await_s=0.5),
        ) as engine,
    ):
        [answer] = await engine.generate([alone], handover={"prefilling": True})
        assert (answer["finish"], answer["cached"]) == ("length", 0)
        assert answer["seconds"] > 0.5
        assert (await engine.stats())["awaits_failed"] == 1

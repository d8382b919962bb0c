"""Arenas on a real memory device: what the kernel makes of memory that was set aside at boot, in
the machines that have RDMA verbs, too.

Oracle: the bytes that were put. Cannot see: a device whose memory is slower than DRAM, or what of
it outlives a power cut.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hostagent_harness import MIB, key_of, running_pool, until
from kvcast.hostagent.options import Options, SsdOptions
from kvcast.hostagent.tiers.kept import KeptOptions, open_kept
from kvcast.hostagent.tiers.ssd.files import SsdFile, open_files
from kvcast.hostagent.tiers.ssd.layout import SsdError, SsdInUseError, cut_of
from kvcast.hostagent.tiers.ssd.mapped import MappedFile, must_be_mapped, open_arena
from kvcast.topologies.machines import DEVICE_MIB, MEMORY_DEVICE

ALIGN = 2 * MIB
CUT = cut_of("node a of cluster b", 20 * MIB, 4096, MIB)
BLOCK = 48 * 1024 + 100


def wipe() -> None:
    """What was there is not to be believed."""
    file = open_arena(MEMORY_DEVICE, ALIGN)
    file.pwrite(bytes(ALIGN), 0)
    file.close()


def opened() -> tuple[SsdFile, bool]:
    (file,), (formatted,) = open_files(
        [MEMORY_DEVICE], [CUT], lambda: 7, direct=False, opened=open_arena
    )
    return file, formatted.found


def test_it_is_used_by_its_mapping_and_found_again() -> None:
    assert must_be_mapped(MEMORY_DEVICE)
    wipe()
    file, found = opened()
    assert isinstance(file, MappedFile)
    assert not found
    # The kernel keeps some of it for itself.
    assert (DEVICE_MIB - 4) * MIB <= file.size_bytes() < DEVICE_MIB * MIB
    assert file.size_bytes() % ALIGN == 0
    data = random.Random(1).randbytes(3 * MIB)
    offset = CUT.blocks_offset + 4096
    assert file.pwritev([memoryview(bytearray(data))], offset) == len(data)
    with pytest.raises(SsdInUseError):
        opened()
    file.close()
    file, found = opened()
    assert found
    room = memoryview(bytearray(len(data)))
    assert file.preadv([room], offset) == len(data)
    assert bytes(room) == data == bytes(file.map(offset, len(data)))
    file.close()
    with pytest.raises(SsdError, match=f"and {DEVICE_MIB * MIB} are to be used"):
        open_arena(MEMORY_DEVICE, DEVICE_MIB * MIB)


def test_a_kept_arena_lies_on_it(tmp_path: Path) -> None:
    wipe()
    data = random.Random(2).randbytes(MIB)
    options = KeptOptions("a", MEMORY_DEVICE, str(tmp_path / "index"), 16 * MIB, MIB)
    for again in (False, True):
        kept = open_kept(options, 5)
        assert kept.arena.memory.nbytes == 16 * MIB
        if again:
            assert bytes(kept.arena.memory[5 * MIB : 6 * MIB]) == data
        kept.arena.memory[5 * MIB : 6 * MIB] = data
        kept.close()


@pytest.mark.timeout(240)
async def test_an_agents_blocks_lie_on_it_and_are_found_by_the_next(tmp_path: Path) -> None:
    wipe()

    def change(options: Options) -> Options:
        arena = replace(options.arena, size_bytes=MIB)
        ssd = SsdOptions(arenas=((MEMORY_DEVICE, 20 * MIB),), slab_bytes=MIB, threads=2)
        return replace(options, arena=arena, ssd=ssd)

    blocks = {key_of(number): random.Random(number).randbytes(BLOCK) for number in range(60)}
    async with running_pool(tmp_path, 1, change) as pool:
        for again in (False, True):
            client, ssd = pool.clients[1], pool.agents[1].ssd
            assert ssd is not None
            (tier,) = ssd.tiers
            if not again:
                for key, data in blocks.items():
                    await client.put(1, {key: data}, ack="local")
                    await until(lambda tier=tier: not tier.is_behind)  # type: ignore[misc]
                assert tier.counters.left_unwritten == 0
            await until(lambda tier=tier: tier.is_ready)  # type: ignore[misc]
            tiers = []
            for key, data in blocks.items():
                (block,) = await client.get(1, [key], deadline_s=30.0)
                if block is not None:
                    with block:
                        assert bytes(block.data) == data
                        tiers.append(block.tier)
            assert tiers.count("arena") >= 30, "several times what DRAM holds"
            assert again or len(tiers) == len(blocks)
            await pool.kill(1)
            await pool.start_agent(1, change)
            await pool.settled()
            await pool.client(1)

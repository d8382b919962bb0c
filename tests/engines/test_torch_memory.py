"""An engine's blocks as opaque bytes, however its layers lie in memory.

Oracle: the tensors: what one engine's blocks hold, another's hold after the way through bytes, and
no other block has changed. Where the engines' Python has a GPU, it is tried, too; else page-locking
is seen through a stand-in for CUDA's runtime, and copies by a GPU are not.
"""

from __future__ import annotations

import subprocess

import pytest
from engines_harness import PYTHON, needs_engines

pytestmark = [needs_engines, pytest.mark.slow, pytest.mark.timeout(300)]

_CHECK = """
import itertools, mmap, random, torch
from kvcast.hostagent.connectors import torch_memory
from kvcast.hostagent.connectors.torch_memory import LayoutError, TorchMemory

system = random.Random(1)
BLOCKS, HEADS, TOKENS, WIDTH = 6, 2, 4, 8


def engine(order, layers, dtype, pad, fill, device):
    # Layers in one allocation, the dimensions (layer, block, head, token, content) in any order.
    shape = (layers, BLOCKS, HEADS, TOKENS, WIDTH)
    strides, step = [0] * 5, 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis] + (pad if axis == order[1] else 0)
    raw = torch.randint(0, 100, (step,), dtype=torch.int32) if fill else torch.zeros(step)
    return list(raw.to(dtype).to(device).as_strided(shape, strides).unbind(0))


def memory(tensors, sizes, blocks=BLOCKS):
    return TorchMemory([tensors], [sizes], blocks=blocks, null_block=0)


DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
SIZES = ([5], [2, 3], [1] * 5)
torch_memory._PIECE_BYTES = 8192  # some parts lie in two pieces of locked pages, or in three
arena = memoryview(mmap.mmap(-1, 1 << 20))
layouts = set()
ORDERS = [tuple(map(int, one)) for one in "01234 01324 02134 10234 10324 12034".split()]
DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn)
for device, order, dtype, pad, sizes in itertools.product(DEVICES, ORDERS, DTYPES, (0, 3), SIZES):
    one, other = (engine(order, 5, dtype, pad, fill, device) for fill in (True, False))
    mine, theirs = memory(one, sizes), memory(other, sizes)
    for each in (mine, theirs):
        each.wait_for(each.mark())
        each.use_arena(arena)
    assert mine.layout == theirs.layout
    layouts.add((order[1:] if 0 in order[:1] else order, dtype, tuple(sizes), mine.layout))
    assert sum(mine.part_bytes) == 5 * HEADS * TOKENS * WIDTH * one[0].element_size()
    source, target = system.sample(range(1, BLOCKS), 2)
    for part, size in enumerate(mine.part_bytes):
        room = arena[7936 + part * 4096 :][:size]  # page-locked by now, or not, or in between
        mine.read(part, source, room)
        mine.settle()
        theirs.write(part, target, room.toreadonly())
    theirs.settle()
    for layer in range(5):
        got, wanted = other[layer].float(), one[layer].float()
        assert torch.equal(got[target], wanted[source])
        got[target] = 0
        assert not got.any(), "another block has changed"

# Two orders in memory, or two types, never have one layout.
texts = {}
for order, dtype, sizes, text in layouts:
    texts.setdefault(text, set()).add((dtype, sizes))
assert all(len(one) == 1 for one in texts.values())

# Blocks that a backend has cut into smaller ones, and layers in allocations of their own.
cut = [torch.arange(12 * 8, dtype=torch.int32).reshape(12, 2, 4).clone() for _ in range(2)]
whole = memory(cut, [2])
room = memoryview(bytearray(whole.part_bytes[0]))
whole.read(0, 4, room)
assert list(room.cast("i"))[:16] == cut[0][8:10].flatten().tolist()
try:
    memory([torch.zeros(7, 2)], [1])
    raise AssertionError("blocks that do not fit")
except LayoutError:
    pass
print("on", *DEVICES, "right")
"""


def test_blocks_go_through_bytes_whatever_the_order_of_layers_in_memory() -> None:
    done = subprocess.run(
        [str(PYTHON), "-c", _CHECK], capture_output=True, timeout=280, check=False
    )
    assert done.stdout.decode().endswith("right\n"), done.stderr.decode()[-3000:]

"""Lookups, of blocks that lie anywhere, beside how long a prefix there is.

Oracle: which blocks lie where, and which homes know all that they have, as drawn here; the homes'
end is the compiled one. Cannot see: homes that lie (`test_courier_property`), sockets.
"""

from __future__ import annotations

import random

import pytest
from asking import OTHER, Asking, Home
from kvcast.bench.fuzz.courier import BLOCKS, HOME, key_of
from kvcast.protocol.messages.questions import ASK_AGENT, COUNTED
from kvcast.protocol.messages.wire import bucket_of

HOMES = ([HOME], [OTHER], [HOME, OTHER], [OTHER, HOME], [1, HOME], [1])
"""Node 1 is who asks."""


def _some(rng: random.Random) -> set[int]:
    most = rng.choice([0.2, 0.7, 0.95, 1.0])
    return {block for block in range(BLOCKS) if rng.random() < most}


@pytest.mark.parametrize("seed", range(6))
def test_what_is_counted_is_there_and_what_is_settled_is_all(seed: int) -> None:
    rng = random.Random(seed)
    asking = Asking()
    settled = 0
    here = set(rng.sample(range(BLOCKS), 3))
    for block in here:
        asking.stand.put(block)
    for _ in range(40):
        homes = rng.choices(HOMES, k=rng.choice([1, 2, 4, 8]))
        asking.live_at(homes)
        held = {HOME: _some(rng), OTHER: _some(rng)}
        knows_all = {node: rng.random() < 0.8 for node in held}
        chain = rng.sample(range(BLOCKS), rng.randrange(1, BLOCKS + 1))
        asking.ask(chain)
        asking.converse({n: Home(sorted(b), knows_all=knows_all[n]) for n, b in held.items()})
        status, more, count = asking.answer()

        others = [homes[bucket_of(key_of(block)) % len(homes)] for block in chain]
        holds = [
            [block in here, *(block in held[node] for node in nodes if node in held)]
            for block, nodes in zip(chain, others, strict=True)
        ]
        prefix = next((n for n, by_node in enumerate(holds) if not any(by_node)), len(chain))
        if status == ASK_AGENT:
            assert not any(holds[0][:2]), "neither here nor at its first home"
            continue
        assert status == COUNTED
        assert count == prefix if not more else 0 < count <= prefix
        settled += not more
    assert settled > 10

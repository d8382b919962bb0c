"""Names in the pool of what an engine holds: namespaces, and keys from its block hashes.

Owns: which facts of an engine part its blocks from those of others, and how an engine's block hash
becomes keys. Must not know: engines' own types.

A layout must say all that decides what the bytes mean: two engines whose layouts differ in one
word never read each other's blocks. The ranks of one engine share a namespace where they hold the
same bytes (`RankFacts.replicas`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvcast.protocol.messages.wire import KEY_BYTES
from kvcast.protocol.namespace_names import MAX_NAME_CHARS

LAYOUT_VERSION: Final = 1
"""Raised whenever the connector puts an engine's bytes into blocks in another way."""
MAX_GROUPS: Final = 1 << 16
_GROUP_SHIFT: Final = 8 * (KEY_BYTES - 2)


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Which part of a model a worker holds, and how many consecutive tensor-parallel ranks hold
    the same bytes (1: each its own)."""

    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline_rank: int = 0
    pipeline_size: int = 1
    replicas: int = 1

    @property
    def shard(self) -> int:
        """Which of the different parts this rank holds."""
        return self.tensor_rank // self.replicas

    @property
    def saves(self) -> bool:
        """Whether this rank saves for those that hold the same."""
        return self.tensor_rank % self.replicas == 0


@dataclass(frozen=True, slots=True)
class NamespaceName:
    """What a namespace stands for, as the pool's controller takes it."""

    tenant: str
    model: str
    version: str
    layout: str


def namespace_name(
    *, tenant: str, model: str, revision: str, version: str, rank: RankFacts, layout: dict[str, str]
) -> NamespaceName:
    """The namespace of one rank's blocks. `layout`: facts by name, of which all decide; long ones
    are known by their hash."""
    facts = {
        **layout,
        "connector": str(LAYOUT_VERSION),
        "tensor": f"{rank.shard}/{rank.tensor_size // rank.replicas}",
        "pipeline": f"{rank.pipeline_rank}/{rank.pipeline_size}",
    }
    words = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(words.encode()).hexdigest()[:32]
    shown = ",".join(
        [f"tensor={facts['tensor']}", f"pipeline={facts['pipeline']}"]
        + [f"{name}={layout[name]}" for name in ("dtype", "block_tokens") if name in layout]
    )
    version = "/".join(part for part in (revision, version) if part) or "-"
    return NamespaceName(
        _short(tenant), _short(model), _short(version), _short(f"{digest} {shown}")
    )


def _short(text: str) -> str:
    """A text that the controller takes; one that is too long ends in its hash."""
    if len(text) <= MAX_NAME_CHARS:
        return text
    return text[: MAX_NAME_CHARS - 33] + "#" + hashlib.sha256(text.encode()).hexdigest()[:32]


def places_of(
    before: bytes, hashes: Sequence[bytes], first: int, groups: int
) -> dict[bytes, tuple[bytes, int]]:
    """Of the keys of consecutive engine blocks, the `first`-th of a prompt and those behind it, the
    key before each and how many are before it, as a client's `prefix`. `before`: the hash of the
    block before the first, b"" where there is none. Each group of layers is a prefix of its own."""
    above = keys_of(before, groups) if before else [b""] * groups
    places: dict[bytes, tuple[bytes, int]] = {}
    for depth, one in enumerate(hashes, first):
        keys = keys_of(one, groups)
        places.update(zip(keys, ((key, depth) for key in above), strict=True))
        above = keys
    return places


def keys_of(block_hash: bytes, groups: int) -> list[bytes]:
    """The keys of one engine block's parts, a group of layers each.

    `block_hash`: the engine's hash of the block and all before it, at least 16 bytes, of which the
    first 16 count. Two different pairs of hash and group meet only where 128 bits of two hashes do,
    but for the 16 bits of the group.
    """
    if len(block_hash) < KEY_BYTES:
        raise ValueError(f"a block hash of {len(block_hash)} bytes is too short for a key")
    if not 0 < groups <= MAX_GROUPS:
        raise ValueError(f"{groups} groups of layers")
    whole = int.from_bytes(block_hash[:KEY_BYTES], "little")
    return [
        (whole ^ (group << _GROUP_SHIFT)).to_bytes(KEY_BYTES, "little") for group in range(groups)
    ]


def key_of(*parts: bytes) -> bytes:
    """The key of a block that an engine names by several parts, whatever their lengths. Two
    different names meet only where 128 bits of two hashes do."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


HASHING_KEY: Final = hashlib.sha256(b"kvcast: how this namespace's engines hash").digest()[
    :KEY_BYTES
]
"""The key of a block that says how a namespace's engines make their hashes (`hashing_facts`)."""


def hashing_facts(algorithm: str, seed: str) -> bytes:
    """What two engines must have in common to give one prefix one hash. The seed itself is not
    told, since some algorithms need it to be secret."""
    known = hashlib.blake2b(seed.encode(), digest_size=16).hexdigest()
    return json.dumps({"algorithm": algorithm, "seed": known}, sort_keys=True).encode()


def group_sizes(page_bytes: list[int], aim_bytes: int) -> list[int]:
    """How many layers go into each group, in order, so that one engine block's bytes of a group
    are about `aim_bytes`. `page_bytes`: bytes of one block, by layer."""
    if not page_bytes:
        return []
    total = sum(page_bytes)
    groups = max(1, min(len(page_bytes), round(total / aim_bytes)))
    sizes: list[int] = []
    filled = ended = 0
    for number, size_bytes in enumerate(page_bytes, 1):
        filled += size_bytes
        left = len(page_bytes) - number
        wanted = total * (len(sizes) + 1) / groups
        if filled >= wanted or left < groups - len(sizes):
            sizes.append(number - ended)
            ended = number
    if ended < len(page_bytes):
        sizes.append(len(page_bytes) - ended)
    return sizes

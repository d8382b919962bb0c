"""The router's own names for the blocks of a prompt.

Owns: how a prompt becomes a chain of 64-bit hashes, of token ids or of text. Must not know: the
engine's own hashes.

An engine names a block by a hash of its own choice (vLLM: sha256 by default, of pickled or CBOR
tuples, seeded by PYTHONHASHSEED). The router needs none of that: an engine's events carry the
block's token ids and its parent, and a prompt's token ids come from the engine's own tokenizer, so
both sides are hashed here, in one way, whatever the engine does.

Two prompts with the same hash are sent to the same place, and that is all: the engine compares
its own hashes before it uses a byte. `seed` is random in a daemon, so that nobody can make such
prompts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import xxhash

Chain = tuple[int, ...]
"""One hash for each whole block of a prompt; each names everything up to the end of its block."""

ROOT = 0
"""The parent of a prompt's first block."""

_encode = msgspec.msgpack.Encoder().encode


def block_hash(
    parent: int, tokens: Sequence[int], extra: Sequence[Any] | None = None, *, seed: int = 0
) -> int:
    """The hash of a block of these token ids (each 0 to 2^32 - 1) behind `parent`; `extra`: what
    else the engine tells prompts apart by (LoRA name, images, cache salt), None = nothing."""
    try:
        content = array("I", tokens).tobytes()
    except (OverflowError, TypeError) as error:
        raise ValueError("token ids are numbers from 0 to 2^32 - 1") from error
    if extra:
        content += b"\0extra" + _encode(extra)
    return xxhash.xxh3_64_intdigest(parent.to_bytes(8, "little") + content, seed)


def token_chain(
    tokens: Sequence[int],
    block_tokens: int,
    *,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    seed: int = 0,
) -> Chain:
    """The chain of a prompt's whole blocks; `lora_name` counts for all of them, `cache_salt` for
    the first, as in vLLM. ValueError if a token id is none."""
    if block_tokens < 1:
        raise ValueError(f"a block of {block_tokens} tokens holds nothing")
    lora = () if lora_name is None else (lora_name,)
    salt = () if cache_salt is None else (cache_salt,)
    chain: list[int] = []
    parent = ROOT
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        extra = (*lora, *salt) if start == 0 else lora
        parent = block_hash(parent, tokens[start : start + block_tokens], extra, seed=seed)
        chain.append(parent)
    return tuple(chain)


def text_chain(pieces: Iterable[bytes], block_bytes: int, *, seed: int = 0) -> Chain:
    """The chain of a text, in blocks of `block_bytes`; a last block that is not whole has no hash.
    Hashes of texts and of tokens do not meet."""
    if block_bytes < 1:
        raise ValueError(f"a block of {block_bytes} bytes holds nothing")
    text = b"".join(pieces)
    chain: list[int] = []
    parent = xxhash.xxh3_64_intdigest(b"text", seed)
    for start in range(0, len(text) - block_bytes + 1, block_bytes):
        piece = text[start : start + block_bytes]
        parent = xxhash.xxh3_64_intdigest(parent.to_bytes(8, "little") + b"t" + piece, seed)
        chain.append(parent)
    return tuple(chain)

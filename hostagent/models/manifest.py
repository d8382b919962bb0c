"""The manifest: which files a folder in the pool is made of, and which blocks each of them.

Owns: the cutting of files into blocks, the blocks' keys, the manifest's form and key, and which
manifests are believed. Must not know: files on a disk, the pool.

A block's key is the BLAKE2b-128 of its bytes. So whoever has a file's keys can check every byte, a
block that two files share is stored once, and a folder loaded twice is the same blocks. The
manifest is a block, too, of which the key follows from the name alone; it is MessagePack, and comes
from whoever loaded the folder: names that lead out of the folder, sizes that do not fit, and
anything else of that kind is refused before a byte is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Annotated, Final

import msgspec
from kvcast.protocol.messages.wire import KEY_BYTES, MAX_BLOCK_BYTES
from msgspec import Meta, Struct

FORMAT: Final = 1
DEFAULT_BLOCK_BYTES: Final = 4 << 20
MIN_BLOCK_BYTES: Final = 64 << 10
MAX_FILES: Final = 65_536
MAX_PATH_BYTES: Final = 1024
PARTIAL: Final = ".kvcast-fetch"
"""The folder in which files are kept while they are fetched; none of a manifest's may be there."""
MANIFEST_BLOCK: Final = b"kvcast folder"
"""What sets the key of a manifest apart from those of blocks (BLAKE2b's `person`)."""


class ManifestError(ValueError):
    """A manifest that is not believed, or a folder that none can be made of; the text says why."""


class FolderFile(Struct, frozen=True, array_like=True):
    """A file: its path in the folder, with "/" between the parts; its size in bytes; the keys of
    its blocks, one after the other, 16 bytes each. All blocks but the last have the manifest's
    `block_bytes`."""

    path: Annotated[str, Meta(min_length=1, max_length=MAX_PATH_BYTES)]
    size_bytes: Annotated[int, Meta(ge=0, lt=1 << 50)]
    keys: bytes
    executable: bool = False


class Manifest(Struct, frozen=True):
    """A folder: `files` by path, ascending."""

    format: int
    block_bytes: Annotated[int, Meta(ge=1, le=MAX_BLOCK_BYTES)]
    files: Annotated[list[FolderFile], Meta(max_length=MAX_FILES)]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)


class Piece(Struct, frozen=True):
    """A block's place: in which of the manifest's files, and where in it, in bytes."""

    file: int
    offset: int
    size_bytes: int
    key: bytes


def key_of(data: bytes | memoryview) -> bytes:
    """The key of a block with these bytes."""
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()


def manifest_key(name: str, version: str) -> bytes:
    """The key of the manifest of that folder."""
    text = f"{len(name.encode())}:{name}{version}".encode()
    return hashlib.blake2b(text, digest_size=KEY_BYTES, person=MANIFEST_BLOCK).digest()


def blocks_in(size_bytes: int, block_bytes: int) -> int:
    """How many blocks a file of that size takes; none if it is empty."""
    return -(-size_bytes // block_bytes)


def pieces(manifest: Manifest) -> Iterator[Piece]:
    """All blocks of a folder, file by file."""
    for number, file in enumerate(manifest.files):
        for at in range(0, len(file.keys), KEY_BYTES):
            offset = at // KEY_BYTES * manifest.block_bytes
            size_bytes = min(manifest.block_bytes, file.size_bytes - offset)
            yield Piece(number, offset, size_bytes, file.keys[at : at + KEY_BYTES])


def identity(data: bytes | memoryview) -> str:
    """32 hexadecimal digits that no other manifest has: they name every byte of a folder."""
    return key_of(data).hex()


def encode(manifest: Manifest) -> bytes:
    """The manifest as a block; ManifestError if it is none that `decode` would believe."""
    data = msgspec.msgpack.encode(manifest)
    if len(data) > MAX_BLOCK_BYTES:
        raise ManifestError("its list of blocks is longer than a block: choose larger blocks")
    decode(data)
    return data


def decode(data: bytes | memoryview) -> Manifest:
    """A manifest that may be followed: no path leads out of the folder or through another file,
    every size has its blocks. ManifestError for any other."""
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ManifestError(f"it cannot be read: {str(error)[:200]}") from error
    if manifest.format != FORMAT:
        raise ManifestError(f"its format is {manifest.format}, and {FORMAT} is understood")
    former: tuple[str, ...] = ()
    for file in manifest.files:
        parts = parts_of(file.path)
        if parts <= former:
            raise ManifestError(f"{file.path!r} comes twice, or its files are not in order")
        if former and parts[: len(former)] == former:
            raise ManifestError(f"{'/'.join(former)!r} is a file and a folder at once")
        former = parts
        if len(file.keys) != KEY_BYTES * blocks_in(file.size_bytes, manifest.block_bytes):
            raise ManifestError(f"the blocks of {file.path!r} are not as many as it takes")
    return manifest


def parts_of(path: str) -> tuple[str, ...]:
    """The parts of a path that may be written; ManifestError for any other."""
    parts = tuple(path.split("/"))
    if PurePosixPath(path).is_absolute() or any(part in ("", ".", "..") for part in parts):
        raise ManifestError(f"{path[:200]!r} is no path inside of a folder")
    if parts[0] == PARTIAL:
        raise ManifestError(f"{path[:200]!r} is where unfinished files are kept")
    if any(ord(char) < 32 or char in "\\\x7f" for char in path) or not path.isprintable():
        raise ManifestError(f"{path[:200]!r} has characters that no file's name should have")
    if len(path.encode()) > MAX_PATH_BYTES or any(len(part.encode()) > 255 for part in parts):
        raise ManifestError(f"{path[:40]!r}…: a name of more than 255 bytes, or a path too long")
    return parts

"""Tokens of the HTTP API: who has one, what it allows, and the file that says so.

Owns: what a token looks like, the file's lines, how one is compared, and that the file is read
again when it changes. Must not know: HTTP.

The file holds no token, only the SHA-256 of each. Tokens are 32 random bytes, so there is nothing
to guess from a hash, and no need for a slow one. One line each:

    NAME ROLE HASH EXPIRES        # EXPIRES: 2027-05-20, or "never"

Every line's hash is compared, each in constant time, whichever matches: how long an answer takes
says nothing about a token. What is wrong with a line is said without a word of it: somebody may
have written a token there.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

log = logging.getLogger("kvcast.controller.http.tokens")

VIEWER: Final = "viewer"
OPERATOR: Final = "operator"
ROLES: Final = (VIEWER, OPERATOR)
PREFIX: Final = "kvcast_"
"""So that scanners for leaked secrets, and people, know what it is."""
MAX_TOKENS: Final = 1024
_MAX_FILE_BYTES: Final = 1 << 18
_NAME: Final = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_HEADER: Final = "# NAME ROLE SHA256 EXPIRES; written by `kvcast tokens`\n"


class TokensError(Exception):
    """The file cannot be used; the text says where and why."""


@dataclass(frozen=True)
class Token:
    """A line of the file: whose, what it allows, the hash, and the last day."""

    name: str
    role: str
    digest: bytes
    expires: datetime.date | None = None

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise TokensError("a name has 1 to 64 letters, digits, dots, dashes, underscores, @")
        if self.role not in ROLES:
            raise TokensError(f"the roles are {' and '.join(ROLES)}")

    @property
    def line(self) -> str:
        expires = "never" if self.expires is None else self.expires.isoformat()
        return f"{self.name} {self.role} {self.digest.hex()} {expires}"


def new_token() -> str:
    """A token that nobody had before."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of_token(token: str) -> bytes:
    """What the file keeps of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def parse(text: str) -> list[Token]:
    """The lines of a file; TokensError names the first that is wrong."""
    tokens: list[Token] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            tokens.append(_parse_line(words))
        except TokensError as error:
            raise TokensError(f"line {number}: {error}") from None
        if len(tokens) > MAX_TOKENS:
            raise TokensError(f"line {number}: more than {MAX_TOKENS} tokens")
    names = [token.name for token in tokens]
    if len(set(names)) != len(names):
        raise TokensError("a name is there twice")
    return tokens


def _parse_line(words: list[str]) -> Token:
    if len(words) != 4:
        raise TokensError(f"{len(words)} words, not NAME ROLE HASH EXPIRES")
    name, role, digest, expires = words
    if _HASH.fullmatch(digest) is None:
        raise TokensError("the third word is no SHA-256 in hexadecimal digits")
    try:
        until = None if expires == "never" else datetime.date.fromisoformat(expires)
    except ValueError:
        raise TokensError("the fourth word is neither a date like 2027-05-20 nor never") from None
    return Token(name, role, bytes.fromhex(digest), until)


class TokensFile:
    """A tokens file in use. TokensError if it cannot be used at the start; a change that cannot be
    used leaves the last good tokens in force."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.reloads = 0
        self.failed_reloads = 0
        self._stamp: tuple[int, ...] = ()
        self._tokens: list[Token] = []
        self._load()

    def __len__(self) -> int:
        return len(self._tokens)

    def who(self, token: str, today: datetime.date) -> Token | None:
        """Whose token this is; None if nobody's, or if its last day is over."""
        digest = digest_of_token(token)
        found: Token | None = None
        for candidate in self._tokens:
            if hmac.compare_digest(candidate.digest, digest):
                found = candidate
        if found is not None and found.expires is not None and today > found.expires:
            return None
        return found

    def refresh(self) -> bool:
        """Read the file again if it changed; whether new tokens are in force."""
        try:
            changed = self._load()
        except TokensError as error:
            self.failed_reloads += 1
            log.warning("tokens not reloaded, the old ones stay in force: %s", error)
            return False
        self.reloads += changed
        return changed

    def _load(self) -> bool:
        try:
            with self.path.open("rb") as file:
                info = os.fstat(file.fileno())
                stamp = (info.st_ino, info.st_mtime_ns, info.st_size, info.st_mode)
                if stamp == self._stamp:
                    return False
                self._stamp = stamp
                if not stat.S_ISREG(info.st_mode):
                    raise TokensError(f"{self.path}: not a file")
                if info.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                    raise TokensError(f"{self.path}: others may read it; chmod 600 it")
                content = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise TokensError(f"{self.path}: {error.strerror}") from error
        if len(content) > _MAX_FILE_BYTES:
            raise TokensError(f"{self.path}: more than {_MAX_FILE_BYTES} bytes")
        try:
            self._tokens = parse(content.decode("ascii"))
        except UnicodeDecodeError:
            raise TokensError(f"{self.path}: not text in ASCII") from None
        except TokensError as error:
            raise TokensError(f"{self.path}: {error}") from None
        return True


def write(path: Path, tokens: Iterable[Token]) -> None:
    """Replace the file as a whole, 0600 from its first byte."""
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.unlink(missing_ok=True)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(_HEADER + "".join(f"{token.line}\n" for token in tokens))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise TokensError(f"{path}: {error.strerror}") from error

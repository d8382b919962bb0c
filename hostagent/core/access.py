"""Access to the local API: which users of this machine get in, and as which tenants.

Owns: the rules. Must not know: requests (`sessions` asks for what a client may use), or how it is
known who a client is (`network.peer_credentials`).

The agent's own user and root get in, and may use every namespace. Others get in by a rule for
their user or one of their groups; a rule may name tenants, and then what they get in for is those
tenants' namespaces and no others. Who is let in by several rules has what all of them allow.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvcast.service.values import TextError

ALL_TENANTS: Final = None
Tenants = frozenset[str] | None
"""Whose namespaces a client may use; None = everybody's."""


@dataclass(frozen=True)
class Peer:
    """Who is at the other end of a Unix socket."""

    uid: int
    gids: frozenset[int]


@dataclass(frozen=True)
class AccessRules:
    """Users and groups beside the agent's own user and root, by number."""

    uids: Mapping[int, Tenants] = field(default_factory=dict)
    gids: Mapping[int, Tenants] = field(default_factory=dict)

    @property
    def lets_others_in(self) -> bool:
        return bool(self.uids or self.gids)


class NotAllowedError(Exception):
    """No rule lets this peer in."""


def tenants_of(rules: AccessRules, peer: Peer) -> Tenants:
    """Whose namespaces the peer may use; NotAllowedError if it may not even connect."""
    if peer.uid in (0, os.getuid()):
        return ALL_TENANTS
    found = [rules.uids[peer.uid]] if peer.uid in rules.uids else []
    found += [tenants for gid, tenants in rules.gids.items() if gid in peer.gids]
    if not found:
        raise NotAllowedError(f"user {peer.uid} is not allowed here")
    allowed: frozenset[str] = frozenset()
    for tenants in found:
        if tenants is ALL_TENANTS:
            return ALL_TENANTS
        allowed |= tenants
    return allowed


def parse_rule(text: str) -> tuple[int, Tenants]:
    """ "1001" or "1001=acme,globex" as a number and tenants; TextError otherwise."""
    number, equals, names = text.partition("=")
    tenants = frozenset(name.strip() for name in names.split(",")) if equals else ALL_TENANTS
    if not number.isascii() or not number.isdigit() or int(number) >= 1 << 32:
        raise TextError(f"{text!r} is not NUMBER or NUMBER=TENANT,…")
    if tenants is not ALL_TENANTS and "" in tenants:
        raise TextError(f"{text!r} names no tenant behind the = or a comma")
    return int(number), tenants

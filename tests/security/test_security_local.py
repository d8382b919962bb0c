"""The agent's Unix socket: who gets in by the kernel's word, and for which tenants' namespaces.

Oracle: the rules as written in a test, and processes of another user where the tests run as root.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hostagent_harness import key_of, running_pool
from kvcast.hostagent.core.access import (
    AccessRules,
    NotAllowedError,
    Peer,
    Tenants,
    parse_rule,
    tenants_of,
)
from kvcast.hostagent.core.sessions import Session
from kvcast.hostagent.options import Options
from kvcast.protocol.messages import local
from kvcast.protocol.messages.control import NamespaceInfo

ACME, GLOBEX = frozenset({"acme"}), frozenset({"globex"})
RULES = AccessRules({1001: ACME, 1002: None}, {2000: GLOBEX, 2001: None})
NOBODY = 65534


@pytest.mark.parametrize(
    ("peer", "tenants"),
    [
        (Peer(0, frozenset({0})), None),
        (Peer(os.getuid(), frozenset()), None),
        (Peer(1001, frozenset({5})), ACME),
        (Peer(1002, frozenset({5})), None),
        (Peer(1003, frozenset({5, 2000})), GLOBEX),
        (Peer(1001, frozenset({2000})), ACME | GLOBEX),
        (Peer(1001, frozenset({2001})), None),
    ],
)
def test_rules_add_up(peer: Peer, tenants: Tenants) -> None:
    assert tenants_of(RULES, peer) == tenants


def test_whom_no_rule_names_is_not_let_in() -> None:
    with pytest.raises(NotAllowedError, match="user 1003 is not allowed here"):
        tenants_of(RULES, Peer(1003, frozenset({5})))
    with pytest.raises(NotAllowedError):
        tenants_of(AccessRules(), Peer(1001, frozenset({0})))


@pytest.mark.parametrize("text", ["", "x", "-1", "1=", "1=a,,b", "4294967296", "1001=a,"])
def test_a_rule_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_rule(text)


def test_a_rule_names_tenants() -> None:
    assert parse_rule("1001") == (1001, None)
    assert parse_rule("1001=acme, globex") == (1001, ACME | GLOBEX)


async def test_the_socket_is_its_owners_alone_unless_others_are_let_in(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 1):
        assert stat.S_IMODE((tmp_path / "1.sock").stat().st_mode) == 0o600


_CONNECT = """
import os, sys
uid, gids, path = int(sys.argv[1]), [int(g) for g in sys.argv[2].split(",")], sys.argv[3]
sys.path[:0] = sys.argv[4].split(":")
from kvcast.hostagent.client import AgentRejectedError, Client, ForbiddenError
os.setgroups(gids); os.setgid(gids[0]); os.setuid(uid)
try:
    with Client(path) as pool:
        for namespace in (1, 2):
            try:
                pool.get(namespace, [bytes(16)], 0.0)
                print("may use", namespace)
            except ForbiddenError:
                print("may not use", namespace)
except AgentRejectedError as error:
    print("rejected:", error)
"""


async def _as(uid: int, gids: str, path: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CONNECT, str(uid), gids, str(path), ":".join(sys.path),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    said, _ = await process.communicate()
    return said.decode().strip().replace("\n", ", ")


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that other users may enter, as pytest's own may not be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_gets_what_its_rule_says(public_folder: Path) -> None:
    def with_rules(options: Options) -> Options:
        rules = AccessRules({NOBODY: frozenset({"t"})}, {2000: GLOBEX})
        return replace(options, local=replace(options.local, access=rules))

    async with running_pool(public_folder, 1, with_rules) as pool:
        pool.controller.namespaces[1] = NamespaceInfo(2, "globex", "m", "2", "l")
        pool.controller.publish()
        await pool.settled()
        path = public_folder / "1.sock"
        assert await _as(NOBODY, "65534", path) == "may use 1, may not use 2"
        assert await _as(65533, "65533,2000", path) == "may not use 1, may use 2"
        assert await _as(65533, "65533", path) == "rejected: user 65533 is not allowed here"
        metrics = pool.agents[1].core.metrics
        assert metrics.local_connections_refused_total == 1
        assert metrics.local_forbidden_total == 2


async def test_a_client_of_one_tenant_does_nothing_in_anothers_namespace(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 1) as pool:
        pool.controller.namespaces[1] = NamespaceInfo(2, "globex", "m", "2", "l")
        pool.controller.publish()
        await pool.settled()
        key = key_of(1)
        await pool.clients[1].put(2, {key: b"globex's"})
        core = pool.agents[1].core
        replies: list[local.AgentReply] = []
        session = Session(core, replies.append, frozenset({"t"}))
        now = asyncio.get_running_loop().time()
        for number, request in enumerate(
            (
                local.Get(1, 2, [key], 1.0),
                local.Prefetch(2, 2, [key], 1.0),
                local.Alloc(3, 2, [key], [10]),
                local.Exists(4, 2, key),
                local.Drop(5, 2, [key]),
                local.Pin(6, 2, [key]),
                local.Unpin(7, 2, [key]),
                local.FindNamespace(8, "globex", "m", "2", "l"),
                local.FindGroup(9, 2, ["node-1"]),
                local.DescribePool(10, 2, [key]),
                local.GetStats(11),
            ),
            1,
        ):
            session.handle(now, request)
            reply = replies.pop()
            assert isinstance(reply, local.Failed)
            assert (reply.request, reply.status) == (number, local.FORBIDDEN)
        assert core.metrics.local_forbidden_total == 11
        assert session.in_flight == 0
        session.handle(now, local.DescribePool(12))
        described = replies.pop()
        assert isinstance(described, local.PoolDescription)
        assert [info.tenant for info in described.namespaces] == ["t"]
        (block,) = await pool.clients[1].get(2, [key])
        assert block is not None
        block.release()

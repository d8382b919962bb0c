"""Namespaces with a secret: without the secret nobody can name a block, and only allowed nodes
have it.

Oracle: hashlib's keyed BLAKE2b, called here as RFC 7693 says it; what an agent's store and its
entry points answer to plain keys.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sqlite3
import stat
from pathlib import Path

import msgspec
import pytest
from hostagent_harness import key_of, running_pool
from kvcast.controller.core.namespaces import (
    MAX_GROUPS_PER_NAMESPACE,
    MAX_NAMESPACES,
    NamespaceError,
    Namespaces,
    SecretMode,
    TenantRules,
)
from kvcast.controller.core.pool import Pool, PoolOptions, SavedState, Send
from kvcast.controller.core.program import Settings
from kvcast.controller.core.residency import SavedResident
from kvcast.controller.store import Store, StoreError
from kvcast.hostagent.client import UnavailableError
from kvcast.protocol.messages import bulk, wire
from kvcast.protocol.messages.bulk import BulkDrop, BulkExists, WantedBlock
from kvcast.protocol.messages.control import (
    NamespaceInfo,
    NamespaceReply,
    NamespaceRequest,
    NamespaceSecret,
    NamespaceSecrets,
    PoolMap,
    Refused,
)
from kvcast.protocol.messages.wire import BlockId
from kvcast.protocol.namespace_secrets import SECRET_BYTES, KeyDerivation
from security_harness import register

SECRET = bytes(range(32))
OTHER = bytes(range(1, 33))
KEY = b"0123456789abcdef"


def test_a_key_is_derived_by_keyed_blake2b() -> None:
    expected = hashlib.blake2b(KEY, digest_size=16, key=SECRET, person=b"kvcast key").digest()
    assert KeyDerivation(SECRET).key(KEY) == expected
    assert KeyDerivation(SECRET).keys([KEY, KEY]) == [expected, expected]


def test_one_prompt_has_unrelated_keys_in_two_namespaces() -> None:
    ours, theirs = KeyDerivation(SECRET), KeyDerivation(OTHER)
    keys = [bytes([n]) * 16 for n in range(256)]
    assert not set(ours.keys(keys)) & set(theirs.keys(keys))
    assert not set(ours.keys(keys)) & set(keys)
    bits = [
        (int.from_bytes(a) ^ int.from_bytes(b)).bit_count()
        for a, b in zip(ours.keys(keys), theirs.keys(keys), strict=True)
    ]
    assert 60 < sum(bits) / len(bits) < 68  # half of 128, as of any two unrelated numbers


@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_a_secret_has_one_length(length: int) -> None:
    with pytest.raises(ValueError, match="a secret has 32 bytes"):
        KeyDerivation(bytes(length))


# --- agents ---------------------------------------------------------------------------------------


async def test_without_the_secret_a_prober_can_address_nothing(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3) as pool:
        controller = pool.controller
        controller.namespaces[0] = NamespaceInfo(1, "t", "m", "1", "l", [], True)
        for node in ("node-1", "node-2"):
            controller.send(node, NamespaceSecrets([NamespaceSecret(1, SECRET)]))
        controller.publish()
        await pool.settled()
        key, pool_key = key_of(1), KeyDerivation(SECRET).key(key_of(1))
        await pool.clients[1].put(1, {key: b"what was asked for"})
        # Who has the secret names it by the engine's key.
        (block,) = await pool.clients[2].get(1, [key], 5.0)
        assert block is not None
        assert bytes(block.data) == b"what was asked for"
        block.release()
        assert await pool.clients[2].exists(1, [key]) == 1
        described = await pool.clients[1].describe(1, [key])
        assert [held.key for held in described.held] == [key]
        # Who guesses the prompt, and so the engine's key, finds nothing under it at any entry
        # point.
        for number in (1, 2):
            core = pool.agents[number].core
            assert core.store.peek(BlockId(1, key)) is None
            assert core.store.peek(BlockId(1, pool_key)) is not None
            assert core.serving.get("node-3", 1, WantedBlock(key)) == bulk.NOT_FOUND
            held = core.serving.exists("node-3", BulkExists(1, key))
            assert isinstance(held, bulk.BulkHeld)
            assert held.bitmap == b"\0"
            assert core.serving.drop("node-3", BulkDrop(1, [key])) == bulk.BulkDone(bulk.DONE, 0)
            now = asyncio.get_running_loop().time()
            read = wire.Frame(wire.OP_READ, 1, key, wanted=1, tag=1)
            core.receive(now, 3, read)
            answers = core.responder.frames_to_send(now + 1.0, 10)
            assert [frame.op for _, frame in answers] == [wire.OP_MISS]
        with pytest.raises(UnavailableError, match="has not sent the secret of namespace 1"):
            await pool.clients[3].get(1, [key])
        with pytest.raises(UnavailableError):
            await pool.clients[3].put(1, {key: b"x"})


async def test_what_was_kept_before_the_secret_is_forgotten(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 2) as pool:
        store = pool.agents[1].core.store
        await pool.clients[1].put(1, {key_of(1): b"before"})
        assert store.peek(BlockId(1, key_of(1))) is not None
        pool.controller.namespaces[0] = NamespaceInfo(1, "t", "m", "1", "l", [], True)
        for node in ("node-1", "node-2"):
            pool.controller.send(node, NamespaceSecrets([NamespaceSecret(1, SECRET)]))
        pool.controller.publish()
        await pool.settled()
        assert store.peek(BlockId(1, key_of(1))) is None
        assert await pool.clients[1].get(1, [key_of(1)], 0.2) == [None]
        # So it is when one secret takes another's place.
        await pool.clients[1].put(1, {key_of(1): b"under the first"})
        assert store.peek(BlockId(1, KeyDerivation(SECRET).key(key_of(1)))) is not None
        pool.controller.send("node-1", NamespaceSecrets([NamespaceSecret(1, OTHER)]))
        pool.controller.publish()
        await pool.settled()
        assert store.peek(BlockId(1, KeyDerivation(SECRET).key(key_of(1)))) is None


# --- the controller -------------------------------------------------------------------------------


class Driver:
    """A controller's core with nodes 1 to 3 registered on connections 1 to 3."""

    def __init__(self, rules: TenantRules, saved: SavedState | None = None) -> None:
        options = PoolOptions(
            Settings(
                enabled=True, lease_ticks=1, heat_threshold=3,  router_mac=None
            ),
            slots=16, read_padding_bytes=0, tenants=rules,
        )  # fmt: skip
        self.pool = Pool(options, saved or SavedState(), 0.0, first_generation=1)
        for number in (1, 2, 3):
            self.pool.received(number, register(f"node-{number}", number), 0.0)
        self.pool.advance(0.0)
        self.told()

    def told(self) -> dict[int, list[msgspec.Struct]]:
        """What is sent now, by connection."""
        sent: dict[int, list[msgspec.Struct]] = {}
        for action in self.pool.published(self.pool.plan()):
            assert isinstance(action, Send)
            sent.setdefault(action.connection, []).append(action.message)
        return sent

    def ask(self, connection: int, tenant: str) -> msgspec.Struct:
        request = NamespaceRequest(1, tenant, "m", "1", "l")
        now = self.pool.received(connection, request, 0.0)
        self.sent = self.told()
        answers = [a.message for a in now if isinstance(a, Send)]
        answers += self.sent.get(connection, [])
        return next(a for a in answers if isinstance(a, (NamespaceReply, Refused)))

    def secrets_of(self, connection: int) -> dict[int, bytes]:
        messages = self.sent.get(connection, [])
        kinds = [type(message) for message in messages]
        if NamespaceSecrets in kinds:
            assert kinds.index(NamespaceSecrets) < kinds.index(PoolMap)
        return {
            s.namespace: s.secret
            for m in messages
            if isinstance(m, NamespaceSecrets)
            for s in m.secrets
        }


def test_one_tenant_has_no_secrets_and_two_have() -> None:
    driver = Driver(TenantRules(secrets=SecretMode.AUTO))
    one = driver.ask(1, "acme")
    assert isinstance(one, NamespaceReply)
    assert not one.info.has_secret
    assert driver.secrets_of(1) == {}
    two = driver.ask(2, "globex")
    assert isinstance(two, NamespaceReply)
    assert two.info.has_secret
    secrets = driver.secrets_of(1)
    assert set(secrets) == {one.info.namespace, two.info.namespace}
    assert len(set(secrets.values())) == 2
    assert {len(secret) for secret in secrets.values()} == {SECRET_BYTES}
    assert driver.pool.namespaces.by_number[one.info.namespace].has_secret


def test_residents_under_plain_keys_leave_the_switch() -> None:
    info = NamespaceInfo(1, "acme", "m", "1", "l")
    block = BlockId(1, KEY)
    saved = SavedState(
        namespaces=(info,), residents=(SavedResident(block, (0,), 5, 7, 100, True),), pins=(block,)
    )
    driver = Driver(TenantRules(secrets=SecretMode.AUTO), saved)
    assert block in driver.pool.tiers.residency.residents
    driver.ask(2, "globex")
    assert driver.pool.tiers.residency.residents == {}
    assert driver.pool.tiers.pins == set()
    assert driver.pool.derived(block).key != KEY


def test_a_secret_goes_to_no_node_but_its_tenants() -> None:
    rules = {"acme": frozenset({"node-1", "node-2"}), "globex": frozenset({"node-3"})}
    driver = Driver(TenantRules(rules, SecretMode.AUTO))
    reply = driver.ask(1, "acme")
    assert isinstance(reply, NamespaceReply)
    assert reply.info.nodes == ["node-1", "node-2"]
    assert set(driver.secrets_of(1)) == set(driver.secrets_of(2)) == {reply.info.namespace}
    assert driver.secrets_of(3) == {}
    refused = driver.ask(3, "acme")
    assert isinstance(refused, Refused)
    assert "not for node-3" in refused.reason
    refused = driver.ask(1, "initech")
    assert isinstance(refused, Refused)
    assert "no tenant 'initech'" in refused.reason


def test_rules_that_changed_hold_for_namespaces_that_were_there_before() -> None:
    saved = SavedState(namespaces=(NamespaceInfo(1, "acme", "m", "1", "l"),))
    rules = TenantRules({"acme": frozenset({"node-2"})}, SecretMode.AUTO)
    pool = Driver(rules, saved).pool
    assert pool.namespaces.by_number[1].nodes == ["node-2"]
    assert pool.namespaces.secrets_for("node-1") == []
    assert [given.namespace for given in pool.namespaces.secrets_for("node-2")] == [1]


def test_secrets_can_be_had_for_one_tenant_and_left_out_for_many() -> None:
    always = Namespaces(
        rules=TenantRules(secrets=SecretMode.ALWAYS), new_secret=lambda: os.urandom(32)
    )
    assert always.namespace("acme", "m", "1", "l", "n")[0].has_secret
    never = Namespaces()
    never.namespace("acme", "m", "1", "l", "n")
    assert not never.namespace("globex", "m", "1", "l", "n")[0].has_secret
    with pytest.raises(NamespaceError):
        Namespaces(rules=TenantRules({"a": frozenset({"x"})})).namespace("a", "m", "1", "l", "y")


def test_secrets_outlive_the_controller_in_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    driver = Driver(TenantRules(secrets=SecretMode.ALWAYS))
    reply = driver.ask(1, "acme")
    assert isinstance(reply, NamespaceReply)
    secrets = dict(driver.pool.namespaces.secrets)
    store = Store(path)
    store.load()
    store.save(driver.pool.saved())
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    store.close()
    store = Store(path)
    again = Driver(TenantRules(secrets=SecretMode.NEVER), store.load())
    store.close()
    assert again.pool.namespaces.secrets == secrets
    assert again.pool.namespaces.by_number[reply.info.namespace].has_secret


def test_a_state_file_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    path.touch(0o644)
    Store(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_state_file_of_the_version_before_is_read(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    Store(path).close()
    with sqlite3.connect(path) as db:
        for table in ("secrets", "settings", "deleted"):
            db.execute(f"DROP TABLE {table}")
        db.execute("INSERT INTO namespaces VALUES (1, 'acme', 'm', '1', 'l', '')")
        db.execute("PRAGMA user_version = 1")
    db.close()
    store = Store(path)
    state = store.load()
    store.close()
    assert [info.tenant for info in state.namespaces] == ["acme"]
    assert state.secrets == ()


def test_a_secret_of_the_wrong_length_in_the_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    Store(path).close()
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO secrets VALUES (1, x'00')")
    db.close()
    store = Store(path)
    with pytest.raises(StoreError, match="unreadable row"):
        store.load()
    store.close()


def test_no_printed_form_shows_a_secret() -> None:
    driver = Driver(TenantRules(secrets=SecretMode.ALWAYS))
    driver.ask(1, "acme")
    (secret,) = driver.pool.namespaces.secrets.values()
    message = NamespaceSecrets([NamespaceSecret(1, secret)])
    state = driver.pool.saved()
    for shown in (
        message,
        message.secrets[0],
        state,
        driver.pool.namespaces,
        KeyDerivation(secret),
    ):
        for form in (repr(secret)[2:-1], secret.hex()):
            assert form not in repr(shown), type(shown)
            assert form not in str(driver.pool.status(0.0))


def test_names_are_bounded() -> None:
    """One node that asks for ever more names does not fill the switch's tables."""
    names = Namespaces()
    for number in range(MAX_NAMESPACES):
        info, _ = names.namespace("t", str(number), "1", "l", "n")
    with pytest.raises(NamespaceError, match="all 128 namespaces are taken"):
        names.namespace("t", "one more", "1", "l", "n")
    assert names.namespace("t", "5", "1", "l", "n")[1] is False
    known = frozenset(f"n{number}" for number in range(MAX_GROUPS_PER_NAMESPACE + 1))
    for node in sorted(known)[:-1]:
        names.group(info.namespace, [node], known)
    full = f"namespace {info.namespace} has all of its 64 groups"
    with pytest.raises(NamespaceError, match=full):
        names.group(info.namespace, [max(known)], known)
    assert len(names.groups) == MAX_GROUPS_PER_NAMESPACE

"""The agents' links with TLS: who gets in, as whom, and what a new certificate changes.

Oracle: the standard library's TLS client, which shows the certificates that a test gives it, and
the links' own counters. Cannot see: whether TLS itself is sound.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from hostagent_harness import MiniController, Pool, key_of, running_pool
from kvcast.controller.agent_links import AgentLink
from kvcast.hostagent.agent import Agent
from kvcast.hostagent.client import AsyncClient
from kvcast.hostagent.options import Options
from kvcast.protocol.messages.bulk import (
    BULK_PROTOCOL_VERSION,
    BulkGet,
    BulkHello,
    CallerMessage,
    WantedBlock,
)
from kvcast.protocol.messages.control import AgentMessage, Refused, Register
from kvcast.protocol.messages.framing import MessageCodec
from kvcast.service.identity import Identity, IdentityError, identity_of_uris
from kvcast.service.tls import Credentials, PeerError, TlsError, expect_peer
from security_harness import Certificates, calling, hang_up, register, until

pytest_plugins = ["security_fixtures"]


class EntryPoint:
    """The controller's entry point for agents, and what came in through it."""

    def __init__(self, credentials: Credentials | None) -> None:
        self.heard: list[AgentMessage] = []
        self.link = AgentLink(
            idle_s=30.0,
            received=lambda _connection, message: self.heard.append(message),
            disconnected=lambda _connection: None,
            credentials=credentials,
        )
        self.address = ("", 0)

    async def __aenter__(self) -> EntryPoint:
        self.address = await self.link.start("127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.link.stop()


async def test_a_node_registers_with_its_own_certificate(shared_certificates: Certificates) -> None:
    async with (
        EntryPoint(shared_certificates.of("controller")) as entry_point,
        calling(entry_point.address, shared_certificates.of("node-1").client()) as node,
    ):
        assert str(expect_peer(node.writer, "controller")) == "controller controller"
        node.say(register("node-1"))
        await until(lambda: entry_point.heard == [register("node-1")])


async def test_a_node_cannot_register_as_another(shared_certificates: Certificates) -> None:
    async with EntryPoint(shared_certificates.of("controller")) as entry_point:
        async with calling(entry_point.address, shared_certificates.of("node-2").client()) as liar:
            liar.say(register("node-1"))
            answers = await liar.answers_unless(lambda: bool(entry_point.heard))
            assert answers is not None, "it was registered"
            (answer,) = answers
            assert isinstance(answer, Refused)
            assert "node node-2's" in answer.reason
        assert entry_point.heard == []
        assert entry_point.link.counts["refused_peers"] == 1


@pytest.mark.parametrize("part", ["operator", "controller"])
async def test_only_nodes_get_into_the_agents_entry_point(
    shared_certificates: Certificates, part: str
) -> None:
    async with EntryPoint(shared_certificates.of("controller")) as entry_point:
        async with calling(entry_point.address, shared_certificates.of(part).client()) as caller:
            caller.say(register("node-1"))
            assert await caller.answers() == []
        assert entry_point.heard == []
        assert entry_point.link.counts["refused_peers"] == 1


async def test_nobody_without_a_certificate_of_the_cluster_gets_in(
    shared_certificates: Certificates,
) -> None:
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
    stranger = shared_certificates.strangers("node-1").client()
    stranger.verify_mode = ssl.CERT_NONE
    async with EntryPoint(shared_certificates.of("controller")) as entry_point:
        for context in (None, anonymous, stranger):
            with contextlib.suppress(OSError):
                async with calling(entry_point.address, context) as caller:
                    caller.say(register("node-1"))
                    if context is None:
                        caller.writer.write(bytes(1 << 16))
                    assert await caller.answers_unless(lambda: bool(entry_point.heard)) == []
        await until(lambda: entry_point.link.connections == 0)
        assert entry_point.heard == []
        assert entry_point.link.counts["handshakes_failed"] == 3


async def test_an_agent_says_nothing_to_what_is_no_controller(
    shared_certificates: Certificates,
) -> None:
    """Whoever has a node's certificate could listen at the controller's address."""
    async with EntryPoint(shared_certificates.of("node-2")) as entry_point:
        with pytest.raises(PeerError, match="node node-2 answers where controller should"):
            async with calling(
                entry_point.address, shared_certificates.of("node-1").client()
            ) as caller:
                expect_peer(caller.writer, "controller")


@contextlib.asynccontextmanager
async def listening(context: ssl.SSLContext) -> AsyncIterator[tuple[tuple[str, int], bytearray]]:
    """A TLS server, and all bytes that it was told."""
    heard = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(4096):
                heard.extend(data)
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[:2], heard


async def test_a_new_certificate_is_shown_without_a_restart(certificates: Certificates) -> None:
    async with EntryPoint(certificates.of("controller")) as entry_point:
        client = certificates.of("node-1").client()
        async with calling(entry_point.address, client) as before:
            certificates.renew("controller")
            async with calling(entry_point.address, client) as after:
                assert after.serial != before.serial
                # What stood before goes on.
                before.say(register("node-1"))
                await until(lambda: len(entry_point.heard) == 1)


async def test_a_new_authority_shuts_out_the_old_ones_nodes(certificates: Certificates) -> None:
    async with EntryPoint(certificates.of("controller")) as entry_point:
        old = certificates.of("node-1").client()
        old.verify_mode = ssl.CERT_NONE
        async with calling(entry_point.address, old) as stays:
            theirs = certificates.strangers_folder / "controller"
            for name in ("ca.pem", "key.pem", "cert.pem"):
                (theirs / name).rename(certificates.folder / "controller" / name)
            new = certificates.strangers("node-2").client()
            async with calling(entry_point.address, new) as caller:
                caller.say(register("node-2", 2))
                await until(lambda: len(entry_point.heard) == 1)
            with contextlib.suppress(OSError):
                async with calling(entry_point.address, old) as caller:
                    caller.say(register("node-1"))
                    assert await caller.answers_unless(lambda: len(entry_point.heard) > 1) == []
            assert len(entry_point.heard) == 1
            stays.say(register("node-1"))
            await until(lambda: len(entry_point.heard) == 2)


def test_files_that_do_not_fit_leave_the_old_certificate_in_force(
    certificates: Certificates,
) -> None:
    credentials = certificates.of("node-1")
    before = credentials.server()
    key = certificates.folder / "node-1" / "key.pem"
    good = key.read_bytes()
    key.write_bytes((certificates.folder / "node-2" / "key.pem").read_bytes())
    assert credentials.server() is before
    assert (credentials.reloads, credentials.failed_reloads) == (0, 1)
    assert credentials.server() is before
    assert credentials.failed_reloads == 1  # the same bad file: counted and said once
    key.unlink()
    assert credentials.server() is before
    key.write_bytes(good)
    key.chmod(0o600)
    assert credentials.server() is not before
    assert credentials.reloads == 1


def test_a_private_key_that_others_may_read_is_refused(certificates: Certificates) -> None:
    key = certificates.folder / "node-1" / "key.pem"
    key.chmod(0o640)
    certificates.of("node-1")  # a group of the operator's own may read it
    key.chmod(0o644)
    with pytest.raises(TlsError, match="others may read this private key"):
        certificates.of("node-1")


@pytest.mark.parametrize(
    ("uris", "complaint"),
    [
        ([], "names 0 parts"),
        (["https://example.net/"], "names 0 parts"),
        (["kvcast://node/a", "kvcast://node/b"], "names 2 parts"),
        (["kvcast://king/a"], "no role"),
        (["kvcast://node/a/b"], "is no name"),
        (["kvcast://node/"], "is no name"),
        (["kvcast:node/a"], "no role"),
    ],
)
def test_a_certificate_that_does_not_name_one_part_is_none(uris: list[str], complaint: str) -> None:
    with pytest.raises(IdentityError, match=complaint):
        identity_of_uris(uris)
    assert identity_of_uris(["kvcast://node/a", "https://x/"]) == Identity("node", "a")


# --- agents ---------------------------------------------------------------------------------------


async def test_agents_put_and_get_over_tls(tmp_path: Path, certificates: Certificates) -> None:
    def with_credentials(options: Options) -> Options:
        return replace(options, credentials=certificates.of(options.agent.node_id))

    controller = certificates.of("controller").server()
    async with running_pool(tmp_path, 2, with_credentials, controller_tls=controller) as pool:
        key = key_of(1, bucket=1)  # node-2's, so the put goes over the bulk link
        await pool.clients[1].put(1, {key: b"x" * 100_000})
        metrics = pool.agents[2].core.metrics
        assert metrics.payload_bytes_received_bulk_put_total == 100_000
        # Nobody hears or says anything there without TLS.
        address = pool.agents[2].bulk_address
        get = BulkGet(1, [WantedBlock(key)])
        codec = MessageCodec[CallerMessage](CallerMessage)
        async with calling(address, None) as caller:
            caller.writer.write(codec.encode(BulkHello(BULK_PROTOCOL_VERSION, "node-1")))
            caller.writer.write(codec.encode(get) + bytes(1 << 16))
            with contextlib.suppress(OSError):
                assert b"x" * 100 not in await caller.reader.read(1000), "in the clear"
        async with calling(address, certificates.of("node-1").client()) as caller:
            assert caller.writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        # A caller that calls itself another node than its certificate does gets nothing.
        for caller, name in (("node-1", "node-2"), ("operator", "node-1")):
            context = certificates.of(caller).client()
            reader, writer = await asyncio.open_connection(*address, ssl=context)
            writer.write(codec.encode(BulkHello(BULK_PROTOCOL_VERSION, name)))
            writer.write(codec.encode(get))
            with contextlib.suppress(OSError):
                assert await reader.read(1) == b"", "it was answered"
            await hang_up(writer)
        assert metrics.bulk_connections_refused_total == 3
        assert metrics.bulk_requests_served_total == 1


async def test_a_put_goes_to_nobody_but_the_node_that_it_is_for(
    tmp_path: Path, certificates: Certificates
) -> None:
    """Node 2's address answers with another part's certificate: no byte of the block is sent."""

    def with_credentials(options: Options) -> Options:
        part = "node-1" if options.agent.node_id == "node-1" else "node-2"
        return replace(options, credentials=certificates.of(part))

    controller = certificates.of("controller").server()
    async with (
        listening(certificates.of("controller").server()) as ((host, port), heard),
        running_pool(tmp_path, 2, with_credentials, controller_tls=controller) as pool,
    ):
        node = pool.controller.nodes["node-2"]
        pool.controller.nodes["node-2"] = type(node)(
            node.index, node.node_id, node.ip, node.mac, node.switch_port, node.udp_port, host, port
        )
        pool.controller.publish()
        await pool.settled()
        client: AsyncClient = pool.clients[1]
        assert await client.drop(1, [key_of(2, bucket=1)]) == 0
        assert pool.agents[1].core.metrics.bulk_wrong_peers_total == 1
        assert bytes(heard) == b""


async def test_an_agent_does_not_register_with_a_node(
    tmp_path: Path, certificates: Certificates
) -> None:
    """Somebody with a node's certificate listens where the controller should."""

    class Impostor(MiniController):
        heard: list[Register] = []  # noqa: RUF012 - one object

        def _register(self, message: Register, writer: asyncio.StreamWriter) -> None:
            self.heard.append(message)

    pool = Pool(tmp_path)
    pool.controller = Impostor()
    pool.controller.tls = certificates.of("node-2").server()
    await pool.controller.start()
    agent = Agent(replace(pool.options(1), credentials=certificates.of("node-1")))
    await agent.start()
    try:
        await until(lambda: bool(agent.core.metrics.control_wrong_peers_total or Impostor.heard))
        assert Impostor.heard == []
        assert not agent.ready.is_set()
    finally:
        await agent.close()
        await pool.controller.stop()
        pool.switch.close()


async def test_no_session_is_resumed(shared_certificates: Certificates) -> None:
    """A resumed session would outlive the authority by which its peer was trusted."""
    async with EntryPoint(shared_certificates.of("controller")) as entry_point:
        context = shared_certificates.of("node-1").client()
        context.options &= ~ssl.OP_NO_TICKET

        def connect(session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool]:
            with (
                socket.create_connection(entry_point.address) as plain,
                context.wrap_socket(plain, session=session) as secure,
            ):
                secure.sendall(MessageCodec[AgentMessage](AgentMessage).encode(register("node-2")))
                with contextlib.suppress(OSError):  # refused: it is node-1's certificate
                    while secure.recv(100):
                        pass
                return secure.session, bool(secure.session_reused)

        session, _ = await asyncio.to_thread(connect, None)
        assert session is None or not session.has_ticket
        _, resumed = await asyncio.to_thread(connect, session)
        assert not resumed

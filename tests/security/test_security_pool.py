"""A whole pool over TLS, as processes: switch, controller and agents with one cluster's files.

Oracle: blocks come back as they were put, the P4Runtime client of grpc, and the daemons' own words.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp
import grpc
import pytest
from controller_harness import Lab
from finsy.proto import p4r, p4r_grpc
from kvcast.cli import controller_api, status
from kvcast.controller.http.tokens import VIEWER, Token, digest_of_token, new_token, write
from kvcast.hostagent.client import AsyncClient, InvalidRequestError
from kvcast.service.commands import CommandError
from kvcast.service.tls import TlsFiles
from kvcast.switchsim.p4runtime.tls import CertificateFiles
from own_address import own_endpoint
from security_harness import Certificates, calling

pytest_plugins = ["security_fixtures"]


async def test_a_pool_works_over_tls_and_tells_nobody_who_may_not_know(
    tmp_path: Path, certificates: Certificates
) -> None:
    folder = certificates.folder
    lab = Lab(tmp_path)
    secret = new_token()
    write(tmp_path / "tokens", [Token("viewer", VIEWER, digest_of_token(secret))])
    sides = [own_endpoint() for _ in range(4)]
    try:
        switch = await lab.start(
            "switchsim",
            "--grpc-addr=127.0.0.1:0",
            "--engine=reference",
            f"--tls={folder}/switch",
            *(f"--port={n + 1}=udp:{sides[2 * n]}:{sides[2 * n + 1]}" for n in range(2)),
        )
        controller = await lab.controller(
            switch.facts["grpc"],
            f"--tls={folder}/controller",
            "--switch-tls",
            f"--tokens={tmp_path / 'tokens'}",
            "--tenant=t=node-1,node-2",
        )
        agents = [
            await lab.start(
                "hostagent",
                f"--node-id=node-{n + 1}",
                f"--controller={controller.facts['agents_addr']}",
                f"--tls={folder}/node-{n + 1}",
                f"--tunnel={sides[2 * n + 1]}:{sides[2 * n]}",
                f"--ip=10.77.0.{n + 1}",
                f"--mac=02:6b:76:00:00:0{n + 1}",
                f"--switch-port={n + 1}",
                f"--socket={tmp_path}/{n + 1}.sock",
                f"--arena-path={tmp_path}/{n + 1}.arena",
                "--arena-bytes=8M",
                "--metrics-addr=127.0.0.1:0",
            )
            for n in range(2)
        ]
        url = f"https://{controller.facts['http_addr']}"
        access = controller_api.access_of(folder / "operator", None)

        def programmed() -> bool:
            nodes = status.fetch_status(url, access)["nodes"]
            return len(nodes) == 2 and all(node["programmed"] for node in nodes)

        while not await asyncio.to_thread(programmed):  # noqa: ASYNC110 - processes
            await asyncio.sleep(0.1)
        blocks = {bytes([n]) * 16: bytes([n]) * 20_000 for n in range(1, 9)}
        async with (
            await AsyncClient.connect(f"{tmp_path}/1.sock") as writer,
            await AsyncClient.connect(f"{tmp_path}/2.sock") as reader,
        ):
            namespace = await writer.namespace("t", "m", "1", "l")
            await writer.put(namespace, blocks)
            for key, block in zip(
                blocks, await reader.get(namespace, list(blocks), 10.0), strict=True
            ):
                assert block is not None
                with block:
                    assert bytes(block.data) == blocks[key]

            # The tenant's namespaces have a secret, and who may pin by the engine's key.
            with pytest.raises(InvalidRequestError, match="no tenant 'other'"):
                await reader.namespace("other", "m", "1", "l")
        (info,) = status.fetch_status(url, access)["namespaces"]
        assert info["has_secret"]
        assert info["nodes"] == ["node-1", "node-2"]
        key = next(iter(blocks))
        assert access.context is not None
        pin = {"namespace": namespace, "key": key.hex(), "engine_key": True, "wait_s": 10}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/pin", json=pin, ssl=access.context) as answer,
        ):
            assert answer.status == 200, await answer.text()
        (resident,) = (await asyncio.to_thread(status.fetch_status, url, access))["residents"]
        assert resident["key"] != key.hex()

        # HTTP: a token reads, nobody else does; the name in the certificate is checked.
        assert status.fetch_status(url, access)["epoch"] > 0
        no_certificate = controller_api.access_of(folder / "node-1", None)
        with pytest.raises(CommandError, match="401"):
            await asyncio.to_thread(status.fetch_status, url, no_certificate)
        with_token = controller_api.Access(secret, no_certificate.context)
        assert (await asyncio.to_thread(status.fetch_status, url, with_token))["epoch"] > 0

        # A node's metrics are for whoever has a certificate of the cluster.
        async def agents_metrics() -> bytes:
            host, _, port = agents[0].facts["metrics"].rpartition(":")
            reader_, writer_ = await asyncio.open_connection(
                host, int(port), ssl=certificates.of("node-2").client()
            )
            writer_.write(b"GET /metrics HTTP/1.0\r\n\r\n")
            said = await reader_.read()
            writer_.close()
            return said

        said = await agents_metrics()
        assert b"kvcast_agent_gets_total" in said
        assert b"kvcast_agent_tls_reloads_total 0.0" in said

        # Renewed certificates are in use without a restart, at the next connection.
        for part in ("controller", "switch", "node-1", "node-2"):
            certificates.renew(part)
        for process in (controller, *agents):
            process.process.send_signal(signal.SIGHUP)
        seen = await asyncio.to_thread(status.fetch_status, url, access)
        assert seen["controller"]["reloads"] == {"certificates": 1, "tokens": 0}
        assert seen["controller"]["failed_reloads"] == {"certificates": 0, "tokens": 0}
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{url}/metrics", ssl=access.context) as answer,
        ):
            shown = await answer.text()
        assert 'kvcast_controller_reloads_total{file="certificates"} 1.0' in shown
        assert 'kvcast_controller_failed_reloads_total{file="tokens"} 0.0' in shown
        said = await agents_metrics()
        assert b"kvcast_agent_tls_reloads_total 1.0" in said
        assert b"kvcast_agent_tls_failed_reloads_total 0.0" in said
        for process in (switch, controller, *agents):
            assert process.process.returncode is None
        await _only_controllers_program(certificates, switch.facts["grpc"])
    finally:
        await lab.close()
    said = b"".join(path.read_bytes() for path in tmp_path.glob("*.log"))
    assert b"Traceback" not in said
    assert secret.encode() not in said


async def _only_controllers_program(certificates: Certificates, address: str) -> None:
    async def answer(part: str) -> str:
        files = TlsFiles.of_folder(certificates.folder / part)
        credentials = grpc.ssl_channel_credentials(
            files.ca.read_bytes(), files.key.read_bytes(), files.cert.read_bytes()
        )
        async with grpc.aio.secure_channel(address, credentials) as channel:
            try:
                await p4r_grpc.P4RuntimeStub(channel).Capabilities(
                    p4r.CapabilitiesRequest(), timeout=10
                )
            except grpc.aio.AioRpcError as error:
                return str(error.code().name)
        return "OK"

    assert await answer("controller") == "OK"
    assert await answer("operator") == "OK"
    assert await answer("node-1") == "PERMISSION_DENIED"


async def test_the_switch_shows_a_new_certificate_without_a_restart(
    certificates: Certificates,
) -> None:
    files = TlsFiles.of_folder(certificates.folder / "switch")
    serving = CertificateFiles(files.cert, files.key, files.ca)
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", serving.credentials())
    await server.start()
    context = certificates.of("controller").client()
    context.set_alpn_protocols(["h2"])

    async def serial() -> str:
        async with calling(("127.0.0.1", port), context) as caller:
            return caller.serial

    try:
        before = await serial()
        assert await serial() == before
        certificates.renew("switch")
        assert await serial() != before
        after = await serial()
        # Half of a pair: the last good one goes on.
        files.key.unlink()
        assert await serial() == after
        assert (serving.reloads, serving.failed_reloads) == (1, 1)
    finally:
        await server.stop(None)

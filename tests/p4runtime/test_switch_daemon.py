"""`kvcast switch` as a process: options, readiness, frames from tunnel to tunnel, statistics, TLS.

Oracle: the sockets at the far ends of the tunnels, and the exit status. Cannot see: interfaces
(test_switchsim_ports has them), speed.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import finsy
import grpc
import pytest
import veth_pairs
from conftest import (
    BLOB_PATH,
    CPU_PORT,
    DEVICE_ID,
    P4INFO_PATH,
    SWITCH_COMMAND,
    Target,
    controller_of,
    load_p4info,
    start_switch_process,
    start_switchsim,
    stop_process,
)
from finsy import P4TableAction, P4TableEntry, P4TableMatch
from finsy.proto import p4r, p4r_grpc
from kvcast.service.options import OptionsError, parse_options
from kvcast.switchsim.daemon import main
from kvcast.switchsim.flags import DaemonOptions, settled
from own_address import own_address, own_port
from veth_pairs import needs_root

on_one_loop = pytest.mark.asyncio(loop_scope="session")


def parse(*arguments: str) -> DaemonOptions:
    return settled(parse_options(DaemonOptions, arguments))


# --- options ------------------------------------------------------------------------------------


def test_the_contracts_flags_are_understood() -> None:
    options = parse(
        *("--grpc-addr", "127.0.0.1:9000", "--device-id", "7", "--cpu-port", "100", "--strict"),
        *("--port", "1=udp:127.0.0.1:7001:127.0.0.1:8001", "--port", "2=if:veth0"),
        *("--loss", "0.25", "--seed", "3", "--port-rate", "1e6", "--queue-depth", "99"),
        *("--stats-json", "/tmp/s.json", "--uplink-rate", "2e6"),
    )
    assert (options.grpc_addr[1], options.device_id, options.cpu_port) == (9000, 7, 100)
    assert [spec.number for spec in options.ports] == [1, 2]
    assert (options.loss, options.seed, options.queue_depth) == (0.25, 3, 99)
    assert options.port_rate_bits_per_s == 1e6
    assert options.uplink_rate_bits_per_s == 2e6
    assert options.strict


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--port", "1=if:a", "--port", "1=if:b"], "port 1 is given twice"),
        (["--port", "255=if:a"], "CPU port"),
        (["--port", "511=if:a"], "drop port"),
        (["--port", "1=tap:a"], "udp and if"),
        (["--cpu-port", "600"], "1 to 511"),
        (["--cpu-port", "511"], "the same"),
        (["--loss", "2"], "loss"),
        (["--queue-depth", "0"], "queue depth"),
        (["--port-rate", "-1"], "port rate"),
        (["--uplink-rate", "0"], "uplink rate"),
        (["--uplink-rate", "nan"], "uplink rate"),
        (["--p4info", "x.txtpb"], "--program"),
        (["--port-quantum", "2"], "quantum"),
        (["--tls-cert", "x"], "--tls-key"),
        (["--tls-ca", "x"], "--tls-cert"),
        (["--grpc-addr", "0.0.0.0:9559"], "--insecure"),
        # A server's certificate alone keeps nobody out.
        (["--grpc-addr", "0.0.0.0:9559", "--tls-cert", "x", "--tls-key", "x"], "--tls-ca"),
        (["--grpc-addr", "127.0.0.1:x"], "HOST:PORT"),
        (["--device-id", "-1"], "64 bits"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str], reason: str) -> None:
    with pytest.raises(OptionsError, match=reason):
        parse(*arguments)


def test_a_wide_open_address_needs_to_be_asked_for() -> None:
    assert parse("--grpc-addr", "0.0.0.0:9559", "--insecure").insecure
    assert parse("--grpc-addr", "[::1]:9559").grpc_host == "::1"


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for word in ("examples:", "N=udp:", "N=if:NAME", "--strict", "ready"):
        assert word in text


def test_a_configuration_file_says_the_same_as_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("no_such_flag = 1\n")
    with pytest.raises(SystemExit) as stopped:
        main(["--config", str(bad)])
    assert stopped.value.code == 2
    assert "no_such_flag" in capsys.readouterr().err


# --- the process --------------------------------------------------------------------------------


def run_to_end(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SWITCH_COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_switch_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    process, target = start_switchsim(tmp_path, "--log-format", "json")
    assert target.address.startswith("127.0.0.1:")
    process.send_signal(number)
    assert process.wait(20) == 0
    assert process.stdout is not None
    process.stdout.close()
    lines = [json.loads(line) for line in (tmp_path / "switch.log").read_text().splitlines()]
    assert lines[-1]["message"] == "stopped"


def test_an_address_in_use_is_a_clear_error(tmp_path: Path) -> None:
    process, target = start_switchsim(tmp_path)
    second = run_to_end("--grpc-addr", target.address)
    assert stop_process(process) == 0
    assert second.returncode == 1
    assert target.address in second.stderr
    assert second.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--program", "/proc/nonexistent", "--p4info", str(P4INFO_PATH)], "/proc/nonexistent"),
        (["--program", str(P4INFO_PATH), "--p4info", str(P4INFO_PATH)], "INVALID_ARGUMENT"),
        (["--program", str(BLOB_PATH), "--p4info", str(BLOB_PATH)], "not a P4Info"),
        (["--port", "1=if:kvt-none"], "kvt-none"),
        (
            ["--tls-cert", "/proc/nonexistent", "--tls-key", "/proc/nonexistent"],
            "/proc/nonexistent",
        ),
    ],
)
def test_what_cannot_be_opened_is_named(arguments: list[str], reason: str) -> None:
    done = run_to_end("--grpc-addr", "127.0.0.1:0", *arguments)
    assert done.returncode == 1
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.fixture
def ends() -> Iterator[list[socket.socket]]:
    """The far ends of two tunnels."""
    sockets = []
    for _ in range(2):
        end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        end.bind(("127.0.0.1", 0))
        end.setblocking(False)
        sockets.append(end)
    yield sockets
    for end in sockets:
        end.close()


def tunnel_arguments(ends: list[socket.socket]) -> tuple[list[str], list[tuple[str, int]]]:
    """(--port arguments, the switch's addresses) of one tunnel to each end."""
    arguments, addresses = [], []
    for number, end in enumerate(ends, start=1):
        local = (own_address(), own_port())
        peer = end.getsockname()
        arguments += ["--port", f"{number}=udp:{local[0]}:{local[1]}:127.0.0.1:{peer[1]}"]
        addresses.append(local)
    return arguments, addresses


async def received(end: socket.socket, most: int = 4000) -> bytes:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(end, most), 60)


def ethernet(dst: int, payload: bytes) -> bytes:
    return dst.to_bytes(6, "big") + bytes(6) + b"\x08\x00" + payload


async def stats_with(target: Target, frames_in: int) -> dict[str, dict[str, dict[str, int]]]:
    """Statistics that already tell of `frames_in` frames."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        stats = target.stats()
        if stats["switch"]["frames_in"] >= frames_in:
            return stats
        await asyncio.sleep(0.1)
    pytest.fail(f"the statistics file never told of {frames_in} frames: {stats}")


@on_one_loop
async def test_frames_cross_the_switch_and_are_counted(
    tmp_path: Path, ends: list[socket.socket]
) -> None:
    arguments, addresses = tunnel_arguments(ends)
    process, target = start_switchsim(tmp_path, *arguments)
    try:
        async with controller_of(target) as controller:
            await controller.switch.insert(
                [
                    P4TableEntry(
                        "forward",
                        match=P4TableMatch(dst=dst),
                        action=P4TableAction("set_port", port=port),
                    )
                    for dst, port in ((1, 1), (2, 2), (9, 9))
                ]
            )
            for number in range(20):
                ends[0].sendto(ethernet(2, b"to two %d" % number), addresses[0])
                ends[1].sendto(ethernet(1, b"to one %d" % number), addresses[1])
            for number in range(20):
                assert await received(ends[1]) == ethernet(2, b"to two %d" % number)
                assert await received(ends[0]) == ethernet(1, b"to one %d" % number)
            ends[0].sendto(ethernet(9, b"no such port"), addresses[0])
            ends[0].sendto(ethernet(77, b"dropped by the program"), addresses[0])
            ends[0].sendto(b"runt", addresses[0])
            ends[0].sendto(ethernet(2, b"last"), addresses[0])
            assert await received(ends[1]) == ethernet(2, b"last")
            stats = await stats_with(target, 43)
    finally:
        assert stop_process(process) == 0
    assert stats["ports"]["1"]["rx_frames"] == 23
    assert stats["ports"]["1"]["rx_runts"] == 1
    assert stats["ports"]["1"]["tx_frames"] == 20
    assert stats["ports"]["2"]["tx_frames"] == 21
    assert stats["loop"]["no_such_port"] == 1
    assert stats["switch"]["frames_in"] == 43
    assert stats["p4runtime"]["pushes"] == 1


@on_one_loop
async def test_a_preloaded_program_serves_without_a_controller(
    tmp_path: Path, ends: list[socket.socket]
) -> None:
    arguments, addresses = tunnel_arguments(ends)
    process, target = start_switchsim(
        tmp_path, *arguments, "--program", str(BLOB_PATH), "--p4info", str(P4INFO_PATH)
    )
    try:
        async with grpc.aio.insecure_channel(target.address) as channel:
            stub = p4r_grpc.P4RuntimeStub(channel)
            request = p4r.GetForwardingPipelineConfigRequest(device_id=1)
            config = (await stub.GetForwardingPipelineConfig(request)).config
            assert config.p4info == load_p4info()
        ends[0].sendto(ethernet(5, b"dropped by default"), addresses[0])
        stats = await stats_with(target, 1)
    finally:
        assert stop_process(process) == 0
    assert stats["switch"]["dropped_ingress"] == 1
    assert stats["pipeline"] is True


@on_one_loop
async def test_losses_are_counted_apart(tmp_path: Path, ends: list[socket.socket]) -> None:
    arguments, addresses = tunnel_arguments(ends)
    process, target = start_switchsim(tmp_path, *arguments, "--loss", "1", "--seed", "4")
    try:
        for _ in range(5):
            ends[0].sendto(ethernet(2, b"lost"), addresses[0])
        deadline_s = time.monotonic() + 60
        while target.stats()["ports"]["1"]["rx_loss"] < 5:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.1)
        assert target.stats()["switch"]["frames_in"] == 0
    finally:
        assert stop_process(process) == 0


# --- interfaces ---------------------------------------------------------------------------------


class TestInterfaces:
    pytestmark = needs_root

    @on_one_loop
    @pytest.mark.parametrize("engine", ["llvm", "reference", "in the place of BMv2"])
    async def test_long_frames_pass_when_the_mtu_was_raised_later_and_drops_are_told_once(
        self, tmp_path: Path, engine: str
    ) -> None:
        with veth_pairs.wires() as wires:
            if engine.startswith("in"):
                ports = [f"-i{n}@{name}" for n, name in enumerate(wires.ours, start=1)]
                stats = tmp_path / "stats.json"
                process, target = start_as_bmv2(
                    *(tmp_path, *ports, "--no-p4", "--device-id", str(DEVICE_ID)),
                    *("--stats-json", str(stats)),
                )
                target = replace(target, stats_path=stats)
            else:
                ports = [f"--port={n}=if:{name}" for n, name in enumerate(wires.ours, start=1)]
                process, target = start_switchsim(tmp_path, "--engine", engine, *ports)
            try:
                async with controller_of(target) as controller:
                    forward = P4TableAction("set_port", port=2)
                    entry = P4TableEntry("forward", match=P4TableMatch(dst=2), action=forward)
                    await controller.switch.insert([entry])
                    veth_pairs.set_mtu(wires, 12_000)
                    for size in (1514, 9014):
                        frame = ethernet(2, bytes(size - 14))
                        wires.far[0].send(frame)
                        assert await received(wires.far[1], 20_000) == frame
                    for _ in range(3):
                        wires.far[0].send(ethernet(2, bytes(11_000)))
                    wires.far[0].send(ethernet(2, b"last"))
                    assert (await received(wires.far[1]))[:18] == ethernet(2, b"last")
                    deadline_s = time.monotonic() + 60
                    while target.stats()["ports"]["1"]["rx_oversize"] < 3:
                        assert time.monotonic() < deadline_s
                        await asyncio.sleep(0.1)
            finally:
                assert stop_process(process) == 0
        told = [
            line
            for line in (tmp_path / "switch.log").read_text().splitlines()
            if "longer than 10240 bytes" in line
        ]
        assert len(told) == 1
        assert f"port 1 (if:{wires.ours[0]}) drops frames" in told[0]
        log = (tmp_path / "switch.log").read_text()
        assert "dropped in all rx_oversize=3" in log


# --- TLS ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ca.pem, and NAME.pem and NAME.key of a server, a client and a stranger."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    for authority in ("ca", "other"):
        openssl(
            *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *(
                "-keyout",
                f"{authority}.key",
                "-out",
                f"{authority}.pem",
                "-subj",
                f"/CN={authority}",
            ),
        )
    (folder / "extensions").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name, authority in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
        openssl(
            *("req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key"),
            *("-out", f"{name}.csr", "-subj", f"/CN={name}"),
        )
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem"),
            *("-CAkey", f"{authority}.key", "-CAcreateserial", "-days", "2"),
            *("-extfile", "extensions", "-out", f"{name}.pem"),
        )
    return folder


@on_one_loop
async def test_mutual_tls_lets_in_whom_the_authority_knows(
    tmp_path: Path, certificates: Path
) -> None:
    process, target = start_switchsim(
        tmp_path,
        *("--tls-cert", str(certificates / "server.pem")),
        *("--tls-key", str(certificates / "server.key")),
        *("--tls-ca", str(certificates / "ca.pem")),
    )

    async def version(name: str | None) -> str:
        """The server's answer to a client with this certificate, or the code of its refusal."""
        credentials = finsy.GRPCCredentialsTLS(
            cacert=certificates / "ca.pem",
            cert=certificates / f"{name}.pem" if name else None,
            private_key=certificates / f"{name}.key" if name else None,
        ).to_client_credentials()
        async with grpc.aio.secure_channel(target.address, credentials) as channel:
            try:
                reply = await p4r_grpc.P4RuntimeStub(channel).Capabilities(
                    p4r.CapabilitiesRequest(), timeout=60
                )
            except grpc.aio.AioRpcError as error:
                return str(error.code())
            return str(reply.p4runtime_api_version)

    try:
        assert (await version("client")).startswith("1.")
        assert await version("stranger") == "StatusCode.UNAVAILABLE"
        assert await version(None) == "StatusCode.UNAVAILABLE"
        async with grpc.aio.insecure_channel(target.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await p4r_grpc.P4RuntimeStub(channel).Capabilities(
                    p4r.CapabilitiesRequest(), timeout=60
                )
    finally:
        assert stop_process(process) == 0


# --- in the place of BMv2 -----------------------------------------------------------------------


def start_as_bmv2(directory: Path, *words: str) -> tuple[subprocess.Popen[str], Target]:
    """A switch started with simple_switch_grpc's flags, on a free port of 127.0.0.1."""
    flags = ["--grpc-server-addr", "127.0.0.1:0", "--cpu-port", str(CPU_PORT)]
    process, address = start_switch_process(directory, *words, *flags)
    return process, Target("switchsim", address)


@on_one_loop
async def test_a_script_for_bmv2_starts_this_switch(tmp_path: Path) -> None:
    log_file = tmp_path / "s1.log"
    process, target = start_as_bmv2(
        tmp_path,
        *("--no-p4", "--device-id", str(DEVICE_ID), "--thrift-port", "9090"),
        *("--log-file", str(log_file), "--log-flush", "--nanolog", "ipc:///tmp/x", "--"),
    )
    try:
        async with controller_of(target) as controller:
            await controller.switch.insert(
                [
                    P4TableEntry(
                        "forward",
                        match=P4TableMatch(dst=1),
                        action=P4TableAction("to_cpu", reason=5),
                    )
                ]
            )
            await controller.send(ethernet(1, b"to the controller"))
            (packet,) = await controller.packets_in(1)
            assert packet.payload == ethernet(1, b"to the controller")
    finally:
        assert stop_process(process) == 0
    log = log_file.read_text()
    assert "without effect here: --thrift-port --nanolog --log-flush" in log
    assert "pipeline committed" in log


@on_one_loop
async def test_a_json_file_alone_runs_and_leaves_p4runtime_waiting(tmp_path: Path) -> None:
    process, target = start_as_bmv2(tmp_path, "--device-id", str(DEVICE_ID), str(BLOB_PATH), "--")
    try:
        async with grpc.aio.insecure_channel(target.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await p4r_grpc.P4RuntimeStub(channel).GetForwardingPipelineConfig(
                    p4r.GetForwardingPipelineConfigRequest(device_id=DEVICE_ID), timeout=60
                )
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        async with controller_of(target) as controller:  # which pushes its pipeline
            assert controller.switch.p4info is not None
    finally:
        assert stop_process(process) == 0
    assert "pipeline committed" in (tmp_path / "switch.log").read_text()

"""`kvcast agent` as a process: flags, the ready line, signals, metrics, and what it leaves behind.

Oracle: the process's own output, its files, and blocks that travel between two daemons.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from hostagent_harness import MiniController, PlainSwitch, ip_of, key_of, mac_of, until
from kvcast.hostagent.client import AsyncClient, Client
from kvcast.hostagent.flags import options_of, parse
from kvcast.hostagent.network.local_server import LocalOptions, SocketInUseError, listen_locally


def command(
    number: int, controller: MiniController, switch: PlainSwitch, folder: Path
) -> list[str]:
    host, port = switch.add_port(number)
    return [
        sys.executable,
        "-W",
        "error",
        "-m",
        "kvcast.hostagent.daemon",
        f"--node-id=node-{number}",
        "--controller={}:{}".format(*controller.address),
        "--transport=tunnel",
        f"--tunnel=127.0.0.1:0:{host}:{port}",
        f"--ip={ip_of(number)}",
        f"--mac={mac_of(number)}",
        f"--switch-port={number}",
        "--arena-bytes=8M",
        f"--arena-path={folder / f'{number}.arena'}",
        f"--socket={folder / f'{number}.sock'}",
        "--metrics-addr=127.0.0.1:0",
        "--hints-addr=127.0.0.1:0",
    ]


async def start(words: list[str]) -> tuple[Process, dict[str, object]]:
    process = await asyncio.create_subprocess_exec(*words, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    line = await process.stdout.readline()
    assert line, (await process.communicate())[1].decode()
    return process, json.loads(line)


@contextlib.asynccontextmanager
async def two_daemons(
    folder: Path,
) -> AsyncIterator[tuple[MiniController, list[Process], list[dict[str, object]]]]:
    controller, switch = MiniController(), PlainSwitch()
    controller.add_namespace(1)
    await controller.start()
    processes: list[Process] = []
    facts: list[dict[str, object]] = []
    try:
        for number in (1, 2):
            process, ready = await start(command(number, controller, switch, folder))
            processes.append(process)
            facts.append(ready)
            host, port = str(ready["tunnel"]).split(":")
            switch.attach(number, mac_of(number), (host, int(port)))
        await until(lambda: len(controller.renewals) == 2)
        yield controller, processes, facts
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.communicate()
        await controller.stop()
        switch.close()


async def test_two_daemons_exchange_blocks_and_stop_cleanly(tmp_path: Path) -> None:
    async with two_daemons(tmp_path) as (controller, processes, facts):
        controller.homes_of = lambda _bucket: ["node-1"]
        controller.publish()
        data = os.urandom(300_000)
        async with await AsyncClient.connect(str(tmp_path / "1.sock")) as first:
            await first.put(1, {key_of(1): data})
        loop = asyncio.get_running_loop()

        def read_with_the_blocking_client() -> tuple[bytes, str, int]:
            with Client(str(tmp_path / "2.sock")) as second:
                (block,) = second.get(1, [key_of(1)], deadline_s=10)
                assert block is not None
                with block:
                    return bytes(block.data), block.tier, second.exists(1, [key_of(1)])

        got, tier, exists = await loop.run_in_executor(None, read_with_the_blocking_client)
        assert got == data
        assert (tier, exists) == ("bulk", 1)

        url = f"http://{facts[0]['metrics']}/metrics"
        text = await loop.run_in_executor(None, lambda: urllib.request.urlopen(url).read())
        assert b"kvcast_agent_payload_bytes_sent_udp_total 65536.0" in text
        rest = f"kvcast_agent_payload_bytes_sent_bulk_get_total {float(len(data) - 65536)}"
        assert rest.encode() in text

        assert os.stat(tmp_path / "1.sock").st_mode & 0o777 == 0o600
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            _out, err = await process.communicate()
            assert process.returncode == 0, err.decode()
            assert b"Traceback" not in err
        assert sorted(controller.left) == ["node-1", "node-2"]
        assert [p.name for p in tmp_path.iterdir()] == []


async def test_a_killed_daemon_leaves_files_that_its_successor_replaces(tmp_path: Path) -> None:
    controller, switch = MiniController(), PlainSwitch()
    await controller.start()
    words = command(1, controller, switch, tmp_path)
    process, _ = await start(words)
    client = await AsyncClient.connect(str(tmp_path / "1.sock"))  # still maps the old arena
    process.kill()
    await process.communicate()
    assert (tmp_path / "1.arena").exists()
    process, ready = await start(words)
    assert ready["event"] == "ready"
    second = await asyncio.create_subprocess_exec(*words, stdout=PIPE, stderr=PIPE)
    _out, err = await second.communicate()
    assert second.returncode == 1
    assert b"belongs to a running agent" in err
    process.send_signal(signal.SIGINT)
    await process.communicate()
    assert process.returncode == 0
    await client.close()
    await controller.stop()
    switch.close()


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        parse(words)
    assert stopped.value.code == 2
    return capsys.readouterr().err


GOOD = [
    "--node-id=n",
    "--ip=10.77.0.1",
    "--mac=02:6b:76:00:00:01",
    "--switch-port=1",
    "--socket=/tmp/x",
    "--tunnel=127.0.0.1:1:127.0.0.1:2",
]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--mac=02:6b", "no MAC address"),
        ("--ip=10.77.0", "no IPv4 address"),
        ("--tunnel=127.0.0.1:1", "LOCALIP:LPORT:PEERIP:PPORT"),
        ("--node-id=a b", "letters, digits"),
        ("--arena-bytes=lots", "no size"),
        ("--arena-bytes=1K", "smaller than a slab"),
        ("--slab-bytes=1000000", "--slab-bytes must be a multiple of 1 KiB"),
        ("--slab-bytes=4K", "8 KiB at least"),
        ("--max-block=2G", "--max-block must be from 1 to 1 GiB"),
        ("--max-block=0", "--max-block must be from 1 to 1 GiB"),
        ("--bulk-addr=0.0.0.0:1", "other agents can connect"),
        ("--switch-port=0", "1 to 32"),
        ("--quota=x=1M", "NAMESPACE=SIZE"),
        ("--client-share=0", "client-share"),
        ("--gather-ms=300", "0 to 255"),
        ("--udp-segments", "goes with --transport udp"),
    ],
)
def test_wrong_flags_are_named(
    wrong: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused([*GOOD, wrong], capsys)


@pytest.mark.parametrize("name", ["nowhere/agent.sock", "x" * 200])
def test_a_socket_that_cannot_be_made_is_named(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    with pytest.raises(SocketInUseError, match=re.escape(path)):
        listen_locally(LocalOptions(path))


def test_missing_flags_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--node-id is required" in refused([], capsys)
    assert "needs --tunnel" in refused(GOOD[:-1], capsys)
    assert "goes with" in refused([*GOOD, "--transport=udp"], capsys)


def test_runs_of_datagrams_are_joined_only_if_asked_for_or_over_loopback() -> None:
    words = [*GOOD[:-1], "--transport=udp"]
    network = options_of(parse(words)).network
    assert not replace(network, ip="10.0.0.1").joins
    assert replace(network, ip="127.0.0.2").joins
    network = options_of(parse([*words, "--udp-segments"])).network
    assert replace(network, ip="10.0.0.1").joins


def test_an_agent_polls_only_if_asked_for() -> None:
    assert not options_of(parse(GOOD)).network.polls
    assert options_of(parse([*GOOD, "--busy-poll"])).network.polls


def test_the_agent_imports_nothing_heavy() -> None:
    """32 agents share two cores in the demo: their start must stay cheap."""
    code = (
        "import sys, kvcast.hostagent.daemon, kvcast.hostagent.client\n"
        "heavy = {'numpy', 'aiohttp', 'matplotlib', 'grpc', 'prometheus_client', 'networkx',"
        " 'finsy', 'rich', 'scapy'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_file_gives_what_the_flags_do_not(tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    config.write_text(
        'node_id = "n"\nip = "10.77.0.1"\nmac = "02:6b:76:00:00:01"\nswitch_port = 4\n'
        'socket = "/tmp/x"\ntunnel = "127.0.0.1:1:127.0.0.1:2"\narena_reserve = false\n'
        'quota = ["1=64M", "2=1G"]\nput_ack = "local"\narena_bytes = "128M"\n'
    )
    flags = parse([f"--config={config}", "--arena-bytes=100M"])
    options = options_of(flags)
    assert options.arena.size_bytes == 100 << 20
    assert options.arena.quotas == {1: 64 << 20, 2: 1 << 30}
    assert not options.arena.reserve
    assert options.agent.writes.put_ack == "local"
    assert options.network.tunnel == (("127.0.0.1", 1), ("127.0.0.1", 2))
    assert options.network.switch_port == 4


async def test_a_hint_brings_what_the_pool_holds_to_this_node(tmp_path: Path) -> None:
    keys = [key_of(number) for number in range(5)]
    async with two_daemons(tmp_path) as (_, _, facts), aiohttp.ClientSession() as session:
        url = f"http://{facts[1]['hints']}/v1/prefetch"

        async def hint(body: object) -> tuple[int, dict[str, object]]:
            async with session.post(url, json=body) as answer:
                return answer.status, await answer.json()

        async with await AsyncClient.connect(str(tmp_path / "1.sock")) as writer:
            await writer.put(1, {key: bytes(key) * 100 for key in keys[:3]}, ack="replicas")
        asked = {"namespace": 1, "keys": [key.hex() for key in keys]}
        assert await hint(asked) == (200, {"held": 3})
        async with await AsyncClient.connect(str(tmp_path / "2.sock")) as reader:
            async with asyncio.timeout(10):
                while await reader.prefetch(1, keys[:3]):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            for block in await reader.get(1, keys[:3]):
                assert block is not None
                assert block.tier == "local"
                block.release()
        for wrong, status in (
            ({"namespace": 9, "keys": [keys[0].hex()]}, 404),
            ({"namespace": 1, "keys": []}, 400),
            ({"namespace": 1, "keys": ["x" * 32]}, 400),
            ({"namespace": 1, "keys": [keys[0].hex()] * 257}, 400),
            ({"namespace": 0, "keys": [keys[0].hex()]}, 400),
            ({"namespace": 1}, 400),
            ([], 400),
        ):
            found, answer = await hint(wrong)
            assert found == status, answer
            assert answer["error"]

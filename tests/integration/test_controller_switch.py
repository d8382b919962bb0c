"""The controller against our own switch, both as processes, with agents that move no data.

Oracle: the switch's tables, read back by an independent P4Runtime client; the messages that the
agents get; what /v1/status counts. Cannot see: that the tables make packets go where they should
(the pool's own integration tests read real blocks).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest_asyncio
from controller_harness import (
    TIMEOUT_S,
    FakeAgent,
    Lab,
    http,
    lab_in,
    metrics_of,
    status,
    tables_of,
    until,
)
from kvcast.protocol.messages.control import (
    Credit,
    GroupReply,
    GroupRequest,
    Leave,
    NamespaceReply,
    NamespaceRequest,
    PoolMap,
    Refused,
    number_of,
)
from kvcast.protocol.messages.ethernet import Encapsulation, Endpoint, parse_ip, parse_mac
from kvcast.protocol.messages.wire import (
    FULL_SEGMENT,
    OP_READ,
    SEGMENT_BYTES,
    BlockId,
    Frame,
    bucket_of,
    encode,
)
from own_address import own_address, own_endpoint, own_port


@pytest_asyncio.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    async with lab_in(tmp_path) as started:
        yield started


async def namespace_of(agent: FakeAgent) -> int:
    await agent.send(NamespaceRequest(1, tenant="t", model="m", version="1", layout="l"))
    return (await agent.wait_for(NamespaceReply)).info.namespace


def all_programmed(seen: dict[str, object], nodes: int) -> bool:
    known = seen["nodes"]
    assert isinstance(known, list)
    ready = [n for n in known if n["programmed"] and n["epoch"] == seen["epoch"]]
    return len(ready) == nodes


async def test_agents_get_a_map_and_the_switch_holds_it(lab: Lab) -> None:
    switch = await lab.switch()
    controller = await lab.controller(switch.facts["grpc"])
    agents = [await lab.agent(controller, n) for n in (1, 2, 3)]
    namespace = await namespace_of(agents[0])
    await agents[0].send(GroupRequest(2, namespace, ["node-1", "node-3"]))
    group = (await agents[0].wait_for(GroupReply)).info.group
    seen = await until(controller, lambda s: all_programmed(s, 3))
    map_ = await agents[2].wait_for(PoolMap, lambda m: m.epoch == seen["epoch"])

    tables = await tables_of(switch.facts["grpc"])
    ports = {node.index: node.switch_port for node in map_.nodes}
    homes = {(b, ports[i]) for b, listed in enumerate(map_.buckets) for i in listed}
    assert set(tables["bucket_home"]) == homes
    assert all(len(listed) == 3 for listed in map_.buckets)
    assert tables["l2_forward"][0x026B76000003,] == ("to_port", 3, 0b100)
    assert tables["l2_forward"][0xFFFFFFFFFFFF,] == ("flood",)
    assert tables["port_guard"] == {
        (n, 0x0A4D0000 + n): ("admit", 1 << (n - 1), 256 + n) for n in (1, 2, 3)
    }
    assert set(tables["namespace_guard"]) == {(n, namespace) for n in (1, 2, 3)}
    assert tables["egress_host"][2,] == ("rewrite", 0x026B76000002, 0x0A4D0002, 19286, 0b10)
    assert tables["reader_group"] == {(namespace, group): ("set_reader_group", 0b101, 1024)}
    assert tables["settings"][()] == ("set_settings", 1, 62500, 3)
    metrics = await metrics_of(controller)
    assert metrics["kvcast_controller_nodes_placed"] == 3
    assert metrics["kvcast_controller_switch_programmed"] == 1
    assert metrics['kvcast_controller_switch_decisions_total{decision="new"}'] == 0
    # What agents count is theirs to export: here it would be sums of whatever is alive.
    assert sum(counters["reads"] for counters in seen["agents"].values()) == 3
    assert not [name for name in metrics if name.startswith("kvcast_controller_agent_total")]
    assert tables["groups"] == {
        (1,): ("1", "2", "3"),
        (257,): ("1", "1#255"),
        (258,): ("2", "2#255"),
        (259,): ("3", "3#255"),
        (1024,): ("1", "1#255", "3"),
    }


async def test_a_killed_controller_comes_back_without_a_write_or_an_epoch(lab: Lab) -> None:
    switch = await lab.switch()
    agents_addr = own_endpoint()
    first = await lab.controller(switch.facts["grpc"], agents=agents_addr)
    agents = [await lab.agent(first, n) for n in (1, 2)]
    namespace = await namespace_of(agents[0])
    block = BlockId(namespace, (7).to_bytes(16, "big"))
    for agent in agents:
        agent.held[block] = (SEGMENT_BYTES + 5, 0xD16E57)
    code, pinned = await http(
        first, "POST", "/v1/pin", {"namespace": namespace, "key": block.key.hex()}
    )
    assert code == 200, pinned
    before = await until(first, lambda s: all_programmed(s, 2))
    tables = await tables_of(switch.facts["grpc"])
    assert len(tables["resident"]) == 2

    await first.kill()
    await agents[0].closed.wait()
    second = await lab.controller(switch.facts["grpc"], agents=agents_addr)
    for agent in agents:
        await agent.close()
        agent.heard.clear()
        await agent.connect(agents_addr)
        assert (await agent.wait_for(PoolMap)).epoch == before["epoch"]
    after = await until(second, lambda s: all_programmed(s, 2))
    assert after["epoch"] == before["epoch"]
    assert after["switch"]["counts"].get("writes", 0) == 0, after["switch"]["counts"]
    assert [r["generation"] for r in after["residents"]] == [pinned["generation"]]
    assert after["namespaces"] == before["namespaces"]
    assert await tables_of(switch.facts["grpc"]) == tables
    await asyncio.sleep(0.5)
    assert (await status(second))["switch"]["counts"].get("writes", 0) == 0


async def test_only_differences_are_written_after_a_restart(lab: Lab) -> None:
    switch = await lab.switch()
    first = await lab.controller(switch.facts["grpc"])
    await lab.agent(first, 1)
    await until(first, lambda s: all_programmed(s, 1))
    assert await first.terminate() == 0
    second = await lab.controller(switch.facts["grpc"], "--heat-threshold=9")
    seen = await until(second, lambda s: s["switch"]["programmed"])
    assert seen["switch"]["counts"]["writes"] == 1
    assert seen["switch"]["counts"]["modify settings"] == 1
    assert (await tables_of(switch.facts["grpc"]))["settings"][()][3] == 9


async def test_a_restarted_switch_is_programmed_again(lab: Lab) -> None:
    grpc = own_endpoint()
    switch = await lab.switch(grpc)
    controller = await lab.controller(grpc)
    agents = [await lab.agent(controller, n) for n in (1, 2)]
    await namespace_of(agents[0])
    before = await until(controller, lambda s: all_programmed(s, 2))
    tables = await tables_of(grpc)
    await switch.kill()
    await until(controller, lambda s: not s["switch"]["connected"])
    await lab.switch(grpc)
    after = await until(controller, lambda s: all_programmed(s, 2))
    assert after["switch"]["counts"]["connects"] >= 2
    assert await tables_of(grpc) == tables
    assert after["epoch"] == before["epoch"], "the pool did not change"


async def test_agents_are_served_while_the_switch_is_away(lab: Lab) -> None:
    controller = await lab.controller(own_endpoint())
    agent = await lab.agent(controller, 1)
    assert await namespace_of(agent) == number_of("t", "m", "1", "l")
    code, body = await http(controller, "GET", "/healthz")
    assert (code, body) == (200, {"ok": True})


async def test_a_silent_agents_buckets_move_and_come_back(lab: Lab) -> None:
    switch = await lab.switch()
    controller = await lab.controller(switch.facts["grpc"])
    one, two = [await lab.agent(controller, n) for n in (1, 2)]
    before = await until(controller, lambda s: all_programmed(s, 2))
    buckets = {n["node_id"]: n["buckets"] for n in before["nodes"]}
    two.renewing = False
    moved = await until(
        controller,
        lambda s: s["nodes"][0]["buckets"] == 1024 and not s["nodes"][1]["programmed"],
    )
    assert moved["epoch"] == before["epoch"] + 1
    assert await one.wait_for(PoolMap, lambda m: m.epoch == moved["epoch"])
    assert {port for _, port in (await tables_of(switch.facts["grpc"]))["bucket_home"]} == {1}
    await two.close()
    await two.connect(controller.facts["agents_addr"], incarnation=2)
    two.renewing = True
    back = await until(controller, lambda s: all_programmed(s, 2))
    assert {n["node_id"]: n["buckets"] for n in back["nodes"]} == buckets
    await two.send(Leave())
    await until(controller, lambda s: s["nodes"][0]["buckets"] == 1024)


async def test_a_controller_that_was_stopped_for_a_while_blames_no_agent(lab: Lab) -> None:
    switch = await lab.switch()
    controller = await lab.controller(switch.facts["grpc"], lease_s=1.5)
    for n in (1, 2):
        await lab.agent(controller, n)
    before = await until(controller, lambda s: all_programmed(s, 2))
    controller.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(3.0)  # two leases
    controller.process.send_signal(signal.SIGCONT)
    after = await until(controller, lambda s: s["controller"]["counts"].get("stalls"))
    assert after["epoch"] == before["epoch"]
    assert all(n["placed"] for n in after["nodes"])


@contextlib.contextmanager
def wired(*numbers: int) -> Iterator[tuple[list[str], Callable[[int, bytes], int]]]:
    """Sockets in the place of hosts: the ports of a switch on these, and what sends it a frame on
    one of them."""
    ports = {n: own_port() for n in numbers}
    with contextlib.ExitStack() as stack:
        wires = {n: stack.enter_context(socket.socket(type=socket.SOCK_DGRAM)) for n in numbers}
        for wire in wires.values():
            wire.bind(("127.0.0.1", 0))
        specs = [
            f"{n}=udp:{own_address()}:{port}:127.0.0.1:{wires[n].getsockname()[1]}"
            for n, port in ports.items()
        ]
        yield specs, lambda n, data: wires[n].sendto(data, (own_address(), ports[n]))


async def test_reads_on_the_wire_make_a_block_resident_and_port_sets_recur(lab: Lab) -> None:
    with wired(1, 2, 3) as (specs, send):
        switch = await lab.switch("127.0.0.1:0", *specs)
        controller = await lab.controller(
            switch.facts["grpc"], "--min-reads=0.1", "--replicas=0", "--heat-threshold=2"
        )
        agents = [await lab.agent(controller, n) for n in (1, 2, 3)]
        namespace = await namespace_of(agents[0])
        seen = await until(controller, lambda s: all_programmed(s, 3))
        map_ = await agents[0].wait_for(PoolMap, lambda m: m.epoch == seen["epoch"])
        home = next(n.switch_port for n in map_.nodes if n.index == map_.buckets[9][0])
        readers = sorted({1, 2, 3} - {home})
        blocks = [BlockId(namespace, ((n << 10) | 9).to_bytes(16, "big")) for n in range(3)]
        assert all(bucket_of(block.key) == 9 for block in blocks)
        for block in blocks:
            agents[home - 1].held[block] = (SEGMENT_BYTES, 0xD16E57)

        async def read_all() -> None:
            for block in blocks:
                for reader in readers:
                    wire = Encapsulation(endpoint(reader), endpoint(home))
                    frame = Frame(OP_READ, block.namespace, block.key, wanted=FULL_SEGMENT)
                    send(reader, wire.wrap(encode(frame)))
                    await asyncio.sleep(0.02)

        async with asyncio.timeout(TIMEOUT_S):
            while len((seen := await status(controller))["residents"]) < 3:
                await read_all()
                await asyncio.sleep(0.3)
        assert {r["digest"] for r in seen["residents"]} == {f"{0xD16E57:016x}"}
        assert seen["decisions"]["new"] >= 3
        assert seen["counts"]["heat_digests"] >= 3
        tables = await tables_of(switch.facts["grpc"])
        assert len(tables["resident"]) == 3
        bits = sum(1 << (reader - 1) for reader in readers)
        assert tables["port_set"] == {(bits,): ("set_group", 2048)}
        code, body = await http(controller, "GET", "/v1/decisions")
        assert code == 200
        assert {d["decision"] for d in body["decisions"]} >= {"admit"}


def endpoint(number: int) -> Endpoint:
    return Endpoint(parse_mac(f"02:6b:76:00:00:{number:02x}"), parse_ip(f"10.77.0.{number}"))


async def test_plain_means_forwarding_only_and_switching_over_writes_the_rest(lab: Lab) -> None:
    switch = await lab.switch()
    plain = await lab.controller(switch.facts["grpc"], "--plain")
    agent = await lab.agent(plain, 1)
    await until(plain, lambda s: all_programmed(s, 1))
    tables = await tables_of(switch.facts["grpc"])
    assert set(tables) == {"l2_forward", "settings", "groups"}
    assert tables["settings"][()][1] == 0
    code, body = await http(plain, "POST", "/v1/pin", {"namespace": 1, "key": "00" * 16})
    assert code == 404, body
    await plain.terminate()
    await agent.close()
    full = await lab.controller(switch.facts["grpc"])
    agent = await lab.agent(full, 1)
    await until(full, lambda s: all_programmed(s, 1))
    assert (await tables_of(switch.facts["grpc"]))["settings"][()][1] == 1


async def test_of_two_controllers_one_works_and_the_other_takes_over(lab: Lab) -> None:
    switch = await lab.switch()
    first = await lab.controller(switch.facts["grpc"], "--election-id=20", state="first")
    backup = await lab.controller(switch.facts["grpc"], "--election-id=10", state="backup")
    await lab.agent(first, 1)
    await until(first, lambda s: all_programmed(s, 1))
    await until(backup, lambda s: s["switch"]["connected"])
    assert not (await status(backup))["switch"]["primary"]
    refused = FakeAgent(2)
    lab.agents.append(refused)
    await refused.connect(backup.facts["agents_addr"])
    assert "election id 20 is primary" in (await refused.wait_for(Refused)).reason
    await refused.closed.wait()
    assert (await status(backup))["switch"]["counts"].get("writes", 0) == 0
    await first.kill()
    await until(backup, lambda s: s["switch"]["primary"])
    await lab.agent(backup, 2)
    await until(backup, lambda s: all_programmed(s, 1))
    tables = await tables_of(switch.facts["grpc"])
    assert set(tables["egress_host"]) == {(2,)}


async def test_a_controller_without_state_waits_for_a_pool_that_the_switch_serves(
    lab: Lab,
) -> None:
    switch = await lab.switch()
    first = await lab.controller(switch.facts["grpc"], state="lost")
    agents = [await lab.agent(first, n) for n in (1, 2)]
    await until(first, lambda s: all_programmed(s, 2))
    tables = await tables_of(switch.facts["grpc"])
    await first.kill()
    second = await lab.controller(switch.facts["grpc"], state="new")
    await agents[1].close()
    await agents[1].connect(second.facts["agents_addr"])
    await until(second, lambda s: s["switch"]["connected"] and s["nodes"])
    assert await tables_of(switch.facts["grpc"]) == tables, "nothing is taken away yet"
    await until(second, lambda s: all_programmed(s, 1))
    assert set((await tables_of(switch.facts["grpc"]))["egress_host"]) == {(2,)}


async def test_a_switch_that_refuses_is_tried_again_and_the_reason_is_shown(lab: Lab) -> None:
    switch = await lab.switch()
    controller = await lab.controller(switch.facts["grpc"], "--device-id=7")
    seen = await until(controller, lambda s: s["switch"]["counts"].get("connection_errors", 0) >= 2)
    assert not seen["switch"]["connected"]
    assert seen["switch"]["last_error"]
    assert (await http(controller, "GET", "/healthz"))[0] == 200
    assert await controller.terminate() == 0


async def test_pins_that_cannot_be_say_why(lab: Lab) -> None:
    switch = await lab.switch()
    controller = await lab.controller(switch.facts["grpc"], "--admit=pin")
    agent = await lab.agent(controller, 1)
    namespace = await namespace_of(agent)

    async def pin(method: str = "POST", **body: object) -> tuple[int, str]:
        code, answer = await http(controller, method, "/v1/pin", body)
        return code, str(answer.get("error"))

    missing = "ab" * 16
    code, reason = await pin(namespace=namespace, key=missing, wait_s=1.0)
    assert (code, "does not hold it" in reason) == (503, True)
    assert (await pin(namespace=999, key=missing))[0] == 404
    assert (await pin("DELETE", namespace=namespace, key="cd" * 16))[0] == 404
    assert (await pin("DELETE", namespace=namespace, key=missing))[0] == 200
    for bad in ({}, {"namespace": 0, "key": missing}, {"namespace": 1, "key": "xyz"}):
        assert (await pin(**bad))[0] == 400
    huge = BlockId(namespace, b"h" * 16)
    agent.held[huge] = (300 * SEGMENT_BYTES, 1)
    code, reason = await pin(namespace=namespace, key=huge.key.hex(), wait_s=1.0)
    assert (code, "needs 300 slots" in reason) == (503, True)


async def test_hostile_bytes_close_the_connection_and_nothing_else(lab: Lab) -> None:
    switch = await lab.switch()
    controller = await lab.controller(switch.facts["grpc"])
    await lab.agent(controller, 1)
    host, port = controller.facts["agents_addr"].rsplit(":", 1)
    attacks = [
        b"\0\0\0\0",
        b"\xff" * 64,
        b"\0\0\0\5hello",
        b"\0\0\0\1\x80",
        b"GET / HTTP/1.1\r\n\r\n",
    ]
    for attack in attacks:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(attack)
        assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
        writer.close()
    counts = (await status(controller))["controller"]["link_counts"]
    assert counts["closed_malformed"] == len(attacks)

    host, port = controller.facts["http_addr"].rsplit(":", 1)
    for attack in (
        b"\0" * 100,
        b"POST /v1/pin HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"\r\n" * 99,
    ):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(attack)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), TIMEOUT_S)
        writer.close()
    for path, body, expected in (
        ("/v1/pin", "[" * 5000, 400),
        ("/v1/pin", "x" * 100_000, 413),
        ("/nothing", "", 404),
    ):
        code, answer = await http(controller, "POST", path, body)
        assert code == expected
        assert "error" in answer
    assert (await http(controller, "GET", "/v1/pin"))[0] == 405

    before = (await status(controller))["controller"]["http_counts"]
    reader, writer = await asyncio.open_connection(host, int(port))
    # "Expect" is answered by many a library before anything else, and its value is no text here.
    writer.write(b"GET /nothing HTTP/1.1\r\nHost: x\r\nExpect: \xff\xfe\r\n\r\n")
    assert (await asyncio.wait_for(reader.readline(), TIMEOUT_S)).split()[1] == b"404"
    writer.close()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"BREW\0 /x\r\n\r\n")
    assert (await asyncio.wait_for(reader.readline(), TIMEOUT_S)).split()[1] == b"400"
    writer.close()
    after = (await status(controller))["controller"]["http_counts"]
    assert after["answers_404"] == before["answers_404"] + 1
    assert after["malformed"] == before["malformed"] + 1
    assert after["connections"] == before["connections"] + 3  # one of them asked just now
    assert "answers_500" not in after
    assert (await http(controller, "GET", "/healthz"))[0] == 200
    assert (await status(controller))["nodes"][0]["connected"]


async def test_switch_hits_reach_the_home_as_credit(lab: Lab) -> None:
    """A resident that was filled by DATA on the wire serves READs; the home hears of each."""
    from kvcast.protocol.messages.wire import CHUNK_BYTES, FLAG_LAST, OP_DATA

    with wired(1, 2) as (specs, send):
        switch = await lab.switch("127.0.0.1:0", *specs)
        controller = await lab.controller(switch.facts["grpc"], "--admit=pin", "--replicas=0")
        agents = [await lab.agent(controller, n) for n in (1, 2)]
        namespace = await namespace_of(agents[0])
        seen = await until(controller, lambda s: all_programmed(s, 2))
        map_ = await agents[0].wait_for(PoolMap, lambda m: m.epoch == seen["epoch"])
        home = next(n.switch_port for n in map_.nodes if n.index == map_.buckets[0][0])
        reader = 3 - home
        block = BlockId(namespace, (1 << 10).to_bytes(16, "big"))
        agents[home - 1].held[block] = (2 * CHUNK_BYTES, 0xD16E57)
        pin = {"namespace": namespace, "key": block.key.hex()}
        code, body = await http(controller, "POST", "/v1/pin", pin)
        assert code == 200, body
        for chunk in (0, 1):
            data = Frame(
                OP_DATA, namespace, block.key, flags=FLAG_LAST * chunk, digest=0xD16E57,
                size=2 * CHUNK_BYTES, chunk=chunk, payload=bytes([chunk]) * CHUNK_BYTES,
            )  # fmt: skip
            wrapped = Encapsulation(endpoint(home), endpoint(reader)).wrap(encode(data))
            send(home, wrapped)
        await until(controller, lambda s: s["fills"].get("filled") == 2)
        read = Frame(OP_READ, namespace, block.key, wanted=FULL_SEGMENT)
        for _ in range(3):
            wrapped = Encapsulation(endpoint(reader), endpoint(home)).wrap(encode(read))
            send(reader, wrapped)
        seen = await until(controller, lambda s: s["residents"][0]["hits"] == 3)
        assert seen["decisions"]["hit"] == 3
        credited = 0
        while credited < 3:
            for _, key, hits in (await agents[home - 1].wait_for(Credit)).hits:
                assert key == block.key
                credited += hits
        assert credited == 3
        assert (await http(controller, "DELETE", "/v1/pin", pin))[0] == 200
        await until(controller, lambda s: not s["residents"] and s["slots"]["free"] == 256)
        assert "resident" not in await tables_of(switch.facts["grpc"])

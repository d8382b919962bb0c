"""The listener that all TCP entry points share: its bounds hold from the start, handshakes
included.

Oracle: what connections that a test makes are told, and the listener's own counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from kvcast.service import listener as module
from kvcast.service.listener import Bounds, Listener, streams
from kvcast.service.tls import Credentials
from security_harness import Certificates, hang_up, is_closed, until

pytest_plugins = ["security_fixtures"]


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(100):
            writer.write(data)
    writer.close()


@contextlib.asynccontextmanager
async def listening(
    bounds: Bounds, credentials: Credentials | None = None
) -> AsyncIterator[tuple[tuple[str, int], Counter[str], Listener]]:
    counts: Counter[str] = Counter()

    def count(name: str) -> None:
        counts[name] += 1

    listener = Listener(streams(_echo), bounds, credentials, count=count)
    address = await listener.start("127.0.0.1", 0)
    try:
        yield address, counts, listener
    finally:
        await listener.close()
        await asyncio.sleep(0)


async def _is_served(address: tuple[str, int]) -> tuple[bool, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(b"x")
        return await reader.read(1) == b"x", writer
    except OSError:
        return False, writer


async def test_connections_beyond_the_bound_are_closed_and_counted() -> None:
    async with listening(Bounds(2, 9)) as (address, counts, listener):
        tries = [await _is_served(address) for _ in range(3)]
        assert [served for served, _ in tries] == [True, True, False]
        assert counts == {"connections": 3, "connections_at_bound": 1}
        await hang_up(tries[0][1])
        await until(lambda: listener.connections == 1)
        tries.append(await _is_served(address))
        assert tries[-1][0]
        for _, writer in tries:
            await hang_up(writer)


async def test_one_address_cannot_take_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening(Bounds(9, 1)) as (address, counts, _):
        tries = [await _is_served(address) for _ in range(2)]
        assert [served for served, _ in tries] == [True, True]  # loopback is many processes
        monkeypatch.setattr(module, "is_loopback", lambda _host: False)
        tries.append(await _is_served(address))
        assert not tries[-1][0]
        assert counts["connections_at_address_bound"] == 1
        for _, writer in tries:
            await hang_up(writer)


async def test_who_dawdles_over_the_handshake_takes_a_place_and_loses_it(
    shared_certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", 0.2)
    credentials = shared_certificates.of("controller")
    async with listening(Bounds(1, 9), credentials) as (address, counts, listener):
        reader, silent = await asyncio.open_connection(*address)
        await until(lambda: counts["connections"] == 1)
        assert listener.connections == 1
        served, other = await _is_served(address)
        assert not served
        assert counts["connections_at_bound"] == 1
        assert await is_closed(reader)
        assert counts["handshakes_failed"] == 1
        assert listener.connections == 0
        for writer in (silent, other):
            await hang_up(writer)


async def test_an_address_that_cannot_be_had_is_an_error() -> None:
    async with listening(Bounds(1, 1)) as (address, _, _):
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{address[1]}"):
            await Listener(streams(_echo), Bounds(1, 1), count=lambda _name: None).start(*address)


class Standing(asyncio.Transport):
    """A connection's, which stays."""

    def is_closing(self) -> bool:
        return False


async def test_one_network_cannot_take_all_places_by_having_many_addresses() -> None:
    async with listening(Bounds(9, 2)) as (_, _, listener):
        for number in (1, 2):
            listener._open[Standing()] = f"2001:db8::{number}"
        assert listener._bound_met("2001:db8::3") == "connections_at_address_bound"
        assert listener._bound_met("2001:db8:0:1::3") is None
        listener._open.clear()


async def test_who_connects_in_the_moment_in_which_a_listener_is_closed_leaves_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """asyncio would accept in the same round of the loop, behind what closes."""
    listener = Listener(streams(_echo), Bounds(9, 9), count=lambda _name: None)
    address = await listener.start("127.0.0.1", 0)
    await asyncio.sleep(0.01)
    with socket.create_connection(address):
        await asyncio.sleep(0)  # what comes next runs before what the selector finds then
        await listener.close()
    await asyncio.sleep(0)
    assert [record.getMessage() for record in caplog.records] == []

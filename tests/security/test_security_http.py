"""The controller's HTTP API: who may do what, how failures are slowed, and what is never said.

Oracle: aiohttp's client against the API on a real socket, with a service of the test's own behind
it. Cannot see: what the controller does for those who are let in (its own tests).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import ssl
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvcast.cli import tokens as tokens_command
from kvcast.controller.http.api import HttpApi, HttpOptions
from kvcast.controller.http.tokens import (
    OPERATOR,
    VIEWER,
    Token,
    TokensError,
    TokensFile,
    digest_of_token,
    new_token,
    parse,
    write,
)
from kvcast.protocol.messages.wire import BlockId
from kvcast.service import http
from kvcast.service.http_limits import FREE_FAILURES, MAX_CLIENTS, Failures, RateLimit, client_of
from kvcast.service.tls import Credentials
from prometheus_client.metrics_core import Metric
from security_harness import Certificates, hang_up, is_closed, until

pytest_plugins = ["security_fixtures"]

PIN = {"namespace": 1, "key": "00" * 16}


class FakeService:
    def __init__(self) -> None:
        self.pinned: list[BlockId] = []

    def health(self) -> str | None:
        return None

    def status(self) -> dict[str, Any]:
        return {"nodes": []}

    def decisions(self) -> list[dict[str, Any]]:
        return []

    def worth(self) -> dict[str, Any]:
        return {"advice": "wait"}

    def metrics(self) -> list[Metric]:
        return []

    async def pin(self, block: BlockId, wait_s: float) -> dict[str, Any]:
        self.pinned.append(block)
        return {"resident": True}

    def unpin(self, block: BlockId) -> bool:
        return True


class Api:
    """A running API, its service, and how long it has slept for whom."""

    def __init__(self, options: HttpOptions, credentials: Credentials | None = None) -> None:
        self.service = FakeService()
        self.slept: list[float] = []
        self.api = HttpApi(self.service, options, credentials, sleep=self._sleep)
        self.url = ""
        self._scheme = "http" if credentials is None else "https"

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Api]:
        host, port = await self.api.start("127.0.0.1", 0)
        self.url = f"{self._scheme}://{host}:{port}"
        try:
            yield self
        finally:
            await self.api.stop()

    async def ask(
        self,
        path: str,
        token: str = "",
        method: str = "GET",
        tls: ssl.SSLContext | bool = True,
    ) -> tuple[int, Any, Any]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        body = PIN if path == "/v1/pin" else None
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.url + path, headers=headers, json=body, ssl=tls) as answer,
        ):
            return answer.status, await answer.read(), answer.headers


@pytest.fixture
def tokens(tmp_path: Path) -> tuple[TokensFile, str, str]:
    """A file, a viewer's token and an operator's."""
    viewer, operator = new_token(), new_token()
    path = tmp_path / "tokens"
    write(
        path,
        [
            Token("viewer", VIEWER, digest_of_token(viewer)),
            Token("alice", OPERATOR, digest_of_token(operator)),
        ],
    )
    return TokensFile(path), viewer, operator


READS = ("/v1/status", "/v1/decisions", "/v1/worth", "/metrics")


async def test_roles_decide_who_may_read_and_who_may_change(
    tokens: tuple[TokensFile, str, str],
) -> None:
    file, viewer, operator = tokens
    async with Api(HttpOptions(tokens=file, authenticated=True)).running() as api:
        for path in READS:
            assert (await api.ask(path))[0] == 401
            assert (await api.ask(path, viewer))[0] == 200
            assert (await api.ask(path, operator))[0] == 200
        for method in ("POST", "DELETE"):
            assert (await api.ask("/v1/pin", "", method))[0] == 401
            assert (await api.ask("/v1/pin", viewer, method))[0] == 403
            assert (await api.ask("/v1/pin", new_token(), method))[0] == 401
            assert (await api.ask("/v1/pin", operator, method))[0] == 200
        assert api.service.pinned == [BlockId(1, bytes(16))]
        assert (await api.ask("/healthz"))[0] == 200
        status, _, headers = await api.ask("/v1/status")
        assert (status, headers["WWW-Authenticate"]) == (401, 'Bearer realm="kvcast"')


async def test_an_operators_certificate_is_as_good_as_a_token(
    shared_certificates: Certificates,
) -> None:
    options = HttpOptions(authenticated=True)
    async with Api(options, shared_certificates.of("controller")).running() as api:
        operator = shared_certificates.of("operator").client()
        assert (await api.ask("/v1/pin", "", "POST", operator))[0] == 200
        # A node's certificate is one of the cluster, and no more than that.
        node = shared_certificates.of("node-1").client()
        assert (await api.ask("/v1/status", "", "GET", node))[0] == 401
        nobody = ssl.create_default_context(cafile=shared_certificates.folder / "ca.pem")
        assert (await api.ask("/v1/status", "", "GET", nobody))[0] == 401
        stranger = shared_certificates.strangers("operator").client()
        stranger.verify_mode = ssl.CERT_NONE
        with pytest.raises(aiohttp.ClientError):
            await api.ask("/healthz", "", "GET", stranger)


async def test_client_certificates_can_be_made_a_must(
    shared_certificates: Certificates, tokens: tuple[TokensFile, str, str]
) -> None:
    file, viewer, _ = tokens
    options = HttpOptions(tokens=file, authenticated=True, client_certificates=True)
    async with Api(options, shared_certificates.of("controller")).running() as api:
        nobody = ssl.create_default_context(cafile=shared_certificates.folder / "ca.pem")
        with pytest.raises(aiohttp.ClientError):
            await api.ask("/v1/status", viewer, "GET", nobody)
        node = shared_certificates.of("node-1").client()
        assert (await api.ask("/v1/status", viewer, "GET", node))[0] == 200


async def test_failed_authentications_are_counted_and_slowed(
    tokens: tuple[TokensFile, str, str],
) -> None:
    file, viewer, _ = tokens
    async with Api(HttpOptions(tokens=file, authenticated=True)).running() as api:
        for _ in range(FREE_FAILURES + 3):
            assert (await api.ask("/v1/status", "wrong"))[0] == 401
        assert api.slept == [0.1, 0.2, 0.4]
        counts = api.api.counts
        assert counts["authentications_failed"] == FREE_FAILURES + 3
        assert counts["authentications_slowed"] == 3
        # Who has a good token is neither slowed nor locked out by another's guesses.
        assert (await api.ask("/v1/status", viewer))[0] == 200
        assert len(api.slept) == 3


async def test_guesses_that_wait_at_once_are_bounded(
    tokens: tuple[TokensFile, str, str],
) -> None:
    file, _, _ = tokens
    api = Api(HttpOptions(tokens=file, authenticated=True))
    asleep = asyncio.Event()

    async def sleep(_seconds: float) -> None:
        await asleep.wait()

    api.api._sleep = sleep
    async with api.running():
        for _ in range(FREE_FAILURES):
            await api.ask("/v1/status", "wrong")
        guesses = [asyncio.create_task(api.ask("/v1/status", "wrong")) for _ in range(40)]
        counts = api.api.counts
        await until(lambda: counts["authentications_failed"] == FREE_FAILURES + 40)
        await until(lambda: sum(guess.done() for guess in guesses) + api.api._slowed == 40)
        assert sum(guess.done() for guess in guesses) == 8
        assert {guess.result()[0] for guess in guesses if guess.done()} == {429}
        asleep.set()
        statuses = [(await guess)[0] for guess in guesses]
        assert statuses.count(401) == 32


async def test_a_client_beyond_its_rate_is_told_when_to_come_back() -> None:
    async with Api(HttpOptions(rate_per_s=0.5)).running() as api:
        assert (await api.ask("/healthz"))[0] == 200
        status, _, headers = await api.ask("/healthz")
        assert status == 429
        assert int(headers["Retry-After"]) in (1, 2)
        assert api.api.counts["rate_limited"] == 1


async def test_a_body_beyond_the_bound_is_refused() -> None:
    async with Api(HttpOptions()).running() as api, aiohttp.ClientSession() as session:
        async with session.post(f"{api.url}/v1/pin", data=b"x" * 20_000) as answer:
            assert answer.status == 413
        assert api.service.pinned == []


@pytest.mark.parametrize("said", [b"", b"GET /healthz HTTP/1.1\r\nX: "])
async def test_a_connection_that_asks_for_nothing_is_closed(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "FIRST_REQUEST_TIMEOUT_S", 0.2)
    async with Api(HttpOptions()).running() as api:
        host, port = api.url.removeprefix("http://").split(":")
        reader, silent = await asyncio.open_connection(host, int(port))
        _, asks = await asyncio.open_connection(host, int(port))
        silent.write(said)
        asks.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await is_closed(reader)
        assert api.api.counts["connections_silent"] == 1
        await until(lambda: api.api.counts["requests"] == 1)
        assert not asks.transport.is_closing()
        for writer in (silent, asks):
            await hang_up(writer)


def test_the_rate_limit_forgets_the_oldest_clients_first() -> None:
    limit = RateLimit(1.0)
    assert [limit.wait_s("a", 0.0) for _ in range(3)] == [0.0, 0.0, 1.0]
    assert limit.wait_s("b", 0.0) == 0.0
    assert limit.wait_s("a", 0.5) == 0.5
    assert limit.wait_s("a", 1.0) == 0.0
    for number in range(2 * MAX_CLIENTS):
        limit.wait_s(str(number), 1.0)
    assert len(limit) == MAX_CLIENTS


def test_failures_are_bounded_and_forgiven() -> None:
    failures = Failures()
    delays = [failures.failed("a", 0.0) for _ in range(20)]
    assert delays[:FREE_FAILURES] == [0.0] * FREE_FAILURES
    assert max(delays) == 3.0
    assert failures.failed("a", 400.0) == 0.0
    failures.succeeded("a")
    assert len(failures) == 0
    for number in range(2 * MAX_CLIENTS):
        failures.failed(str(number), 0.0)
    assert len(failures) == MAX_CLIENTS


def test_who_has_one_ipv6_address_has_its_whole_network() -> None:
    assert client_of("2001:db8::1") == client_of("2001:db8::ffff:1")
    assert client_of("2001:db8::1") != client_of("2001:db8:0:1::1")
    assert client_of("::ffff:10.0.0.1") == client_of("10.0.0.1")
    assert client_of("fe80::1%eth0") == client_of("fe80::2")


# --- the file -------------------------------------------------------------------------------------


def test_a_token_is_shown_once_and_kept_as_a_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tokens"
    assert tokens_command.main(["add", str(path), "alice", "--role", "operator"]) == 0
    secret = capsys.readouterr().out.strip()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret not in path.read_text()
    assert len(base64.urlsafe_b64decode(secret.removeprefix("kvcast_") + "=")) == 32
    assert new_token() != new_token()
    today = datetime.datetime.now(datetime.UTC).date()
    found = TokensFile(path).who(secret, today)
    assert found is not None
    assert (found.name, found.role) == ("alice", OPERATOR)
    assert TokensFile(path).who(secret[:-1], today) is None
    assert TokensFile(path).who(secret, today + datetime.timedelta(days=366)) is None
    assert tokens_command.main(["add", str(path), "alice"]) == 1
    assert tokens_command.main(["list", str(path)]) == 0
    assert secret not in capsys.readouterr().out
    assert tokens_command.main(["remove", str(path), "alice"]) == 0
    assert TokensFile(path).who(secret, today) is None
    assert tokens_command.main(["remove", str(path), "alice"]) == 1


def test_a_removed_token_is_useless_at_once(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    secret = new_token()
    token = Token("a", VIEWER, digest_of_token(secret))
    write(path, [token])
    file = TokensFile(path)
    today = datetime.date(2027, 1, 1)
    assert file.who(secret, today) == token
    write(path, [])
    assert file.refresh()
    assert file.who(secret, today) is None


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    write(path, [Token("a", VIEWER, bytes(32))])
    file = TokensFile(path)
    path.chmod(0o644)
    with pytest.raises(TokensError, match="others may read it; chmod 600"):
        TokensFile(path)
    assert not file.refresh()
    assert (file.failed_reloads, len(file)) == (1, 1)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a viewer", "line 1: 2 words"),
        ("\n\na king " + "0" * 64 + " never", "line 3: the roles are"),
        ("a viewer xyz never", "no SHA-256"),
        ("a viewer " + "0" * 64 + " soon", "neither a date"),
        ("a/b viewer " + "0" * 64 + " never", "a name has"),
        ("a viewer " + "0" * 64 + " never\n" + "a viewer " + "1" * 64 + " never", "there twice"),
    ],
)
def test_a_line_that_is_none_is_named(text: str, complaint: str) -> None:
    with pytest.raises(TokensError, match=complaint):
        parse(text)

"""Nothing secret is ever logged: tokens, private keys and secrets pass while every logger is heard.

Oracle: the records of all loggers at their most talkative, searched for every secret in the forms
in which one could be printed. Cannot see: what a core dump or a debugger would show.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import urllib.parse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hostagent_harness import key_of, running_pool
from kvcast.controller.http.api import HttpOptions
from kvcast.controller.http.tokens import (
    OPERATOR,
    Token,
    TokensFile,
    digest_of_token,
    new_token,
    write,
)
from kvcast.hostagent.options import Options
from kvcast.protocol.messages.control import NamespaceInfo, NamespaceSecret, NamespaceSecrets
from kvcast.service.logs import JsonFormatter, TextFormatter
from kvcast.service.tls import Credentials
from security_harness import Certificates, calling, register
from test_security_http import Api
from test_security_links import EntryPoint

pytest_plugins = ["security_fixtures"]

SECRET = bytes(range(100, 132))


class Everything(logging.Handler):
    """Keeps every record, as both formatters write it."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        for formatter in (JsonFormatter(), TextFormatter()):
            self.lines.append(formatter.format(record))


@pytest.fixture
def everything() -> Iterator[Everything]:
    handler = Everything()
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


def forms_of(secret: bytes) -> set[str]:
    """How bytes could show up in a line of text."""
    encoded = base64.b64encode(secret).decode()
    return {
        secret.hex(),
        secret.hex(" "),
        encoded,
        base64.urlsafe_b64encode(secret).decode(),
        repr(secret)[2:-1],
        secret.decode("latin-1"),
        urllib.parse.quote(secret),
        str(list(secret)),
        str(tuple(secret)),
    }


async def test_no_secret_is_in_any_log(
    tmp_path: Path,
    certificates: Certificates,
    everything: Everything,
    capfd: pytest.CaptureFixture[str],
) -> None:
    good, bad = new_token(), new_token()
    path = tmp_path / "tokens"
    write(path, [Token("alice", OPERATOR, digest_of_token(good))])

    # HTTP: good and bad tokens, in good and bad places.
    options = HttpOptions(tokens=TokensFile(path), authenticated=True)
    async with Api(options).running() as api:
        assert (await api.ask("/v1/status", good))[0] == 200
        for _ in range(6):
            assert (await api.ask("/v1/status", bad))[0] == 401
        assert (await api.ask("/nowhere", bad))[0] == 404
        host, port = api.url.removeprefix("http://").split(":")
        for garbage in (f"GET /v1/status HTTP/1.1\r\nAuthorization Bearer {good}\r\n\r\n",
                        f"{good}\r\n\r\n"):  # fmt: skip
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(garbage.encode())
            writer.write_eof()
            await reader.read()
            writer.close()
        for line in (f"{good} is no line", f"alice {good} {'0' * 64} never", f"{good}/ a b c"):
            path.write_text(f"{line}\n")
            assert (await api.ask("/v1/status", good))[0] == 200

    # Agents and certificates: a node that lies, a key that does not fit, secrets that change.
    def with_credentials(options: Options) -> Options:
        return replace(options, credentials=certificates.of(options.agent.node_id))

    async with (
        EntryPoint(certificates.of("controller")) as entry_point,
        calling(entry_point.address, certificates.of("node-2").client()) as liar,
    ):
        liar.say(register("node-1"))
        await liar.answers()
    controller = certificates.of("controller").server()
    async with running_pool(tmp_path, 2, with_credentials, controller_tls=controller) as pool:
        pool.controller.namespaces[0] = NamespaceInfo(1, "t", "m", "1", "l", [], True)
        for node in ("node-1", "node-2"):
            pool.controller.send(node, NamespaceSecrets([NamespaceSecret(1, SECRET)]))
        pool.controller.publish()
        await pool.settled()
        await pool.clients[1].put(1, {key_of(1): b"x" * 3000})
        # A message that makes no sense to the agent, with a secret in it.
        pool.controller.send("node-2", NamespaceSecrets([NamespaceSecret(1, SECRET[:31])]))
        await asyncio.sleep(0.1)
    keys = [p.read_bytes() for p in sorted(certificates.folder.rglob("*key.pem"))]
    bad_pair = Credentials.of_folder(certificates.folder / "node-1")
    (certificates.folder / "node-1" / "key.pem").write_bytes(keys[0])
    bad_pair.refresh()

    said = "\n".join(everything.lines) + "".join(capfd.readouterr())
    assert "registers, but this certificate" in said  # it does listen
    for token in (good, bad):
        assert token not in said
        assert digest_of_token(token).hex() not in said
        assert token.removeprefix("kvcast_") not in said
    for form in forms_of(SECRET):
        assert form not in said
    for pem in keys:
        body = pem.split(b"\n")[1].decode()
        assert len(body) > 40
        assert body not in said

"""The controller's HTTP API, as commands of operators use it.

Owns: where it is and who asks, as options, and a question and its answer. Must not know: what is
asked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Final, Protocol

from kvcast.cli.status import TOKEN_VARIABLE, Access, access_of
from kvcast.service.commands import CommandError, add_log_level

_TIMEOUT_S: Final = 10.0


class ControllerApi(Protocol):
    """Asks the controller; CommandError if it does not answer, or says why not."""

    def __call__(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Awaitable[dict[str, Any]]: ...


def add_api_options(parser: argparse.ArgumentParser) -> None:
    """Where the controller is, and who asks."""
    parser.add_argument(
        "--http",
        default="http://127.0.0.1:9601",
        metavar="URL",
        help="the controller's HTTP address (kvcast controller --http-addr)",
    )
    parser.add_argument(
        "--tls", type=Path, metavar="DIR", help="folder with an operator's certificate"
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"file with an operator's token (kvcast tokens add); else ${TOKEN_VARIABLE}",
    )
    add_log_level(parser)


def check_api_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Complete the address, or end with what is wrong with it."""
    if "://" not in options.http:
        options.http = f"http://{options.http}"
    if not options.http.startswith(("http://", "https://")):
        parser.error("--http must be an http:// or https:// address")


def controller_api(options: argparse.Namespace) -> ControllerApi:
    """What asks the controller that the options name."""
    access = access_of(options.tls, options.token_file)

    async def ask(method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return await asyncio.to_thread(_ask, options.http, access, method, path, body)

    return ask


def _ask(
    url: str, access: Access, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The controller's answer; CommandError if it is none, or says why not."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url.rstrip('/')}{path}", data=data, method=method)
    request.add_header("Content-Type", "application/json")
    if access.token:
        request.add_unredirected_header("Authorization", f"Bearer {access.token}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=access.context) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        raise CommandError(f"{url}: {_reason(error)}") from error
    except urllib.error.URLError as error:
        raise CommandError(f"{url}: no controller answers: {error.reason}") from error
    except (OSError, ValueError) as error:
        raise CommandError(f"{url}: {error}") from error
    if not isinstance(found, dict):
        raise CommandError(f"{url}: this is no kvcast controller")
    return found


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        said = json.load(error)
        return str(said["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"the controller answers {error.code} {error.reason}"

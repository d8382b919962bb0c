"""`kvcast namespace`: what an operator says of tenants' namespaces, over the controller's HTTP API.

Owns: the command line. Must not know: what a setting does (`NamespaceSettings` says it).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from kvcast.cli.controller_api import add_api_options, controller_api, run_for_operator
from kvcast.protocol.messages.control import MEDIA, POLICIES, QUOTA_TIERS, TIERS
from kvcast.protocol.namespace_names import is_name
from kvcast.service.commands import EXIT_OK, build_subcommands
from kvcast.service.values import number, parse_name, parse_size, whole_number

_PATH = "/v1/namespaces"
_NAMES = {
    "tenant": "whose blocks they are",
    "model": "what they are computed with",
    "version": "which version of the model",
    "layout": "how the bytes of a block are laid out",
}
_NUMBER = "the namespace's number (kvcast namespace list)"

_DESCRIPTION = """\
Namespaces: whose blocks they are, of which model, version and layout. A new version of a model is a
new namespace; the old one's space is free as soon as it is deleted.
"""

_EXAMPLES = """\
examples:
  kvcast namespace list
  kvcast namespace make acme llama-3-70b 2 fp8-tp4 --policy s3fifo --quota dram=40GiB
  kvcast namespace set 51234 --weight 2 --bytes-per-s 2GiB --operations-per-s 0
  kvcast namespace delete 51234"""


def _quota(text: str) -> tuple[str, int]:
    return _of_tier(text, QUOTA_TIERS)


def _share(text: str) -> tuple[str, int]:
    return _of_tier(text, TIERS)


def _of_tier(text: str, tiers: Sequence[str]) -> tuple[str, int]:
    tier, separator, size = text.partition("=")
    if not separator or tier not in tiers:
        raise argparse.ArgumentTypeError(f"{text!r} is not TIER=SIZE, of {', '.join(tiers)}")
    try:
        return tier, parse_size(size)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _media(text: str) -> list[str]:
    media = [] if text == "all" else text.split(",")
    if wrong := [medium for medium in media if medium not in MEDIA]:
        raise argparse.ArgumentTypeError(f"no medium {wrong[0]!r}: all, or of {', '.join(MEDIA)}")
    return media


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def build_parser() -> argparse.ArgumentParser:
    """The parser of `kvcast namespace`."""
    common = argparse.ArgumentParser(add_help=False)
    add_api_options(common)
    parser, command = build_subcommands("kvcast namespace", _DESCRIPTION, _EXAMPLES, common)
    listing = command("list", "show all namespaces and what was said of them")
    listing.add_argument("--json", action="store_true", help="the controller's answer as it is")
    make = command("make", "make a namespace; one that is there keeps what is not said")
    for name, what in _NAMES.items():
        make.add_argument(name, type=parse_name, metavar=name.upper(), help=what)
    change = command("set", "change what is said of a namespace; the rest stays")
    change.add_argument("namespace", type=whole_number(1, 0xFFFF), metavar="NUMBER", help=_NUMBER)
    for one in (make, change):
        _add_settings(one)
    delete = command("delete", "drop all blocks of a namespace everywhere, and forget it")
    delete.add_argument("namespace", type=whole_number(1, 0xFFFF), metavar="NUMBER", help=_NUMBER)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", choices=POLICIES, help="what is evicted where room is wanted")
    parser.add_argument(
        "--quota",
        type=_quota,
        action="append",
        metavar="TIER=SIZE",
        help=f"bytes of a tier, on each node ({', '.join(TIERS)}), of the switch's memory (switch, "
        "where a block takes whole segments of 64 KiB) or of the object store (cold: of all nodes "
        "together); 0 = no limit",
    )
    parser.add_argument(
        "--assured",
        type=_share,
        action="append",
        metavar="TIER=SIZE",
        help="bytes on each node, of a tier, that other namespaces cannot take from it",
    )
    parser.add_argument(
        "--operations-per-s",
        type=number(0),
        metavar="N",
        help="keys got and put, on each node; 0 = no limit",
    )
    parser.add_argument(
        "--bytes-per-s", type=_size, metavar="SIZE", help="got and put, on each node; 0 = no limit"
    )
    parser.add_argument(
        "--weight",
        type=number(0.01, 100),
        metavar="N",
        help="share of what transfers wait for, as against other namespaces; 0.01 to 100",
    )
    parser.add_argument(
        "--ttl",
        type=number(0),
        metavar="SECONDS",
        help="how long a block lives (0 = on and on): since it was stored, or, with the policy "
        "ttl, since it was used",
    )
    parser.add_argument(
        "--media",
        type=_media,
        metavar="LIST",
        help=f"what blocks may lie on besides dram: all, or some of {','.join(MEDIA)}",
    )
    for thing, what in (
        ("gathering", "whether homes may hold answers for joiners"),
        ("residence", "whether blocks may enter the switch's memory"),
    ):
        parser.add_argument(
            f"--{thing}",
            choices=("on", "off", "auto"),
            help=f"{what}; auto: as the controller sees that it pays",
        )


def _settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What was said, as the API has it."""
    said = {
        "policy": options.policy,
        "quota_bytes": dict(options.quota) if options.quota else None,
        "assured_bytes": dict(options.assured) if options.assured else None,
        "operations_per_s": options.operations_per_s,
        "bytes_per_s": options.bytes_per_s,
        "weight": options.weight,
        "ttl_s": options.ttl,
        "media": options.media,
        **{
            thing: said if (said := getattr(options, thing)) != "auto" else ""
            for thing in ("gathering", "residence")
        },
    }
    return {name: value for name, value in said.items() if value is not None}


def main(argv: Sequence[str] | None = None) -> int:
    """Do it; 1 with a line of why if it cannot be done."""

    def wrong(options: argparse.Namespace) -> str:
        if options.command == "set" and not _settings_of(options):
            return "nothing is said of the namespace: --policy, --quota, …"
        return ""

    return run_for_operator(build_parser(), argv, _run, wrong=wrong)


async def _run(options: argparse.Namespace) -> int:
    api = controller_api(options)

    async def ask(method: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return await api(method, _PATH, body)

    if options.command == "list":
        answer = await ask("GET")
        if options.json:
            sys.stdout.write(json.dumps(answer, indent=2) + "\n")
        else:
            for info in answer["namespaces"]:
                print(_line(info))
        return EXIT_OK
    if options.command == "delete":
        await ask("DELETE", {"namespace": options.namespace})
        print(f"namespace {options.namespace} is deleted")
        return EXIT_OK
    settings = _settings_of(options)
    if options.command == "make":
        info = await ask("POST", {name: getattr(options, name) for name in _NAMES})
        number_ = info["namespace"]
    else:
        number_ = options.namespace
    if settings:
        info = await ask("PATCH", {"namespace": number_, "settings": settings})
    print(_line(info))
    return EXIT_OK


def _line(info: dict[str, Any]) -> str:
    """A namespace in one line: what it is, and what differs from nothing said."""
    names = [str(info[name]) for name in _NAMES]
    # What an older controller has made may be called otherwise.
    parts = " ".join(name if is_name(name) else repr(name) for name in names)
    said = []
    for name, value in info["settings"].items():
        if isinstance(value, dict):
            said += [f"{name}.{key}={one}" for key, one in value.items()]
        elif isinstance(value, list) and value:
            said.append(f"{name}={','.join(map(str, value))}")
        elif value and not (name == "weight" and value == 1):
            is_whole = isinstance(value, float) and value.is_integer()
            said.append(f"{name}={int(value) if is_whole else value}")
    return f"{info['namespace']:>5}  {parts}" + (f"  {' '.join(said)}" if said else "")

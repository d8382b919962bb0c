"""`kvcast certs`: a cluster's certificates, in one command.

Owns: the command line, and telling what goes where. Must not know: what stands in a certificate
(`kvcast.service.authority`).
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcast.service.commands import EXIT_OK, CommandError, build_subcommands, failed
from kvcast.service.identity import (
    CONTROLLER,
    MAX_PART_DAYS,
    NODE,
    OPERATOR,
    PART_DAYS,
    SWITCH,
    Identity,
    IdentityError,
)
from kvcast.service.values import TextError, parse_node_id, whole_number

if TYPE_CHECKING:
    from kvcast.service.authority import Issued, Part

_DESCRIPTION = """\
Certificates for a cluster: an authority of its own, and one certificate for each part, which says
what the part is (controller, node NAME, switch, operator). With them every link between the parts
is encrypted, and nobody can register as a node that it is not.

  kvcast certs init   makes the authority and the first certificates
  kvcast certs add    makes a certificate for one more node or operator
  kvcast certs renew  makes new certificates in place of those that end soon
  kvcast certs show   lists what there is, and until when

Each part's folder is copied to where the part runs, and named there by --tls. A folder that is
copied again is taken into use without a restart. The authority's key (ca-key.pem) is needed by
these commands only: keep it where no part runs. Who has it can be any part.
"""

_EXAMPLES = """\
examples:
  kvcast certs init certs --controller 10.0.0.1 --node node-1=10.0.0.11 --node node-2=10.0.0.12
  kvcast certs init certs --controller ctl.example.net --controller 10.0.0.1 \\
      --switch 10.0.0.2 --node node-1 --operator alice

  then, on each machine, with the folder that is its own:
  kvcast controller --tls certs/controller --agents-addr 10.0.0.1:9600 --http-addr 10.0.0.1:9601 …
  kvcast agent --tls certs/node-1 --node-id node-1 --controller 10.0.0.1:9600 …
  kvcast switch --tls certs/switch --grpc-addr 10.0.0.2:9559 …
  kvcast status --tls certs/operator --http https://10.0.0.1:9601

  every few months:
  kvcast certs renew certs        new certificates for those that end within 60 days"""


def _node(text: str) -> tuple[str, tuple[str, ...]]:
    """ "NAME" or "NAME=ADDR[,ADDR]" """
    name, equals, hosts = text.partition("=")
    parse_node_id(name)
    if equals and not hosts:
        raise TextError(f"{text!r}: no address behind the =")
    return name, tuple(host.strip() for host in hosts.split(",")) if hosts else ()


def build_parser() -> argparse.ArgumentParser:
    """The parser of `kvcast certs`."""
    folder = argparse.ArgumentParser(add_help=False)
    folder.add_argument("folder", type=Path, metavar="DIR", help="the authority's folder")
    parser, command = build_subcommands("kvcast certs", _DESCRIPTION, _EXAMPLES, folder)

    def lasting(one: argparse.ArgumentParser) -> None:
        one.add_argument(
            "--days",
            type=int,
            default=PART_DAYS,
            metavar="DAYS",
            help=f"how long the new certificates last, 1 to {MAX_PART_DAYS} days (default: "
            "%(default)s days)",
        )

    def parts(one: argparse.ArgumentParser) -> None:
        one.add_argument(
            "--node",
            type=_node,
            action="append",
            default=[],
            metavar="NAME[=ADDR]",
            help="a node, as its agent's --node-id names it, and where it runs (repeatable)",
        )
        one.add_argument(
            "--operator",
            action="append",
            default=[],
            metavar="NAME",
            help="somebody who may use the controller's HTTP API (repeatable)",
        )

    init = command("init", "make an authority and the cluster's certificates")
    init.add_argument(
        "--controller",
        action="append",
        required=True,
        metavar="HOST",
        help="host name or address of the controller (repeatable: other names of the same one)",
    )
    init.add_argument(
        "--switch",
        action="append",
        default=[],
        metavar="HOST",
        help="host name or address of the switch's P4Runtime server; default: the controller's",
    )
    parts(init)
    lasting(init)

    parts(add := command("add", "make certificates for further nodes and operators"))
    lasting(add)

    renew = command("renew", "make new certificates in place of those that end soon")
    renew.add_argument(
        "--within",
        type=whole_number(0, 36500),
        default=60,
        metavar="DAYS",
        help="renew those that end within so many days, up to 36500 (default: %(default)s days)",
    )
    renew.add_argument("--all", action="store_true", help="renew every certificate")
    lasting(renew)

    command("show", "list the certificates and when they end")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Do it; 1 with a line of why if it cannot be done."""
    options = build_parser().parse_args(argv)
    from kvcast.service.authority import AuthorityError

    try:
        return {"init": _init, "add": _add, "renew": _renew, "show": _show}[options.command](
            options
        )
    except (AuthorityError, CommandError, IdentityError) as error:
        return failed(error, "kvcast certs")


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)


def _parts(options: argparse.Namespace) -> list[Part]:
    from kvcast.service.authority import Part

    nodes = [Part(Identity(NODE, name), hosts) for name, hosts in options.node]
    return nodes + [Part(Identity(OPERATOR, name)) for name in options.operator]


def _init(options: argparse.Namespace) -> int:
    from kvcast.service.authority import Authority, Part, check_parts

    if not options.operator:
        options.operator = ["operator"]
    local = ("localhost", "127.0.0.1", "::1")
    controller = (*options.controller, *local)
    parts = [
        Part(Identity(CONTROLLER, CONTROLLER), controller),
        Part(Identity(SWITCH, SWITCH), (*options.switch, *local) if options.switch else controller),
        *_parts(options),
    ]
    check_parts(parts, options.days)
    authority = Authority.create(options.folder, now=_now())
    issued = [authority.issue(part, days=options.days, now=_now()) for part in parts]
    print(f"made an authority and {len(issued)} certificates in {options.folder}:\n")
    _list(issued)
    host = options.controller[0]
    print(
        f"\nCopy each folder to where its part runs, and name it there:\n"
        f"  kvcast controller --tls {CONTROLLER} …\n"
        f"  kvcast switch     --tls {SWITCH} …\n"
        f"  kvcast agent      --tls NODE --controller {host}:9600 …\n"
        f"  kvcast status     --tls {options.operator[0]} --http https://{host}:9601\n"
        f"\nKeep {options.folder / 'ca-key.pem'} where no part runs: who has it can be any part.\n"
        f"Renew with `kvcast certs renew {options.folder}` before they end, and copy again."
    )
    return EXIT_OK


def _add(options: argparse.Namespace) -> int:
    from kvcast.service.authority import Authority, check_parts

    authority = Authority.open(options.folder)
    parts = _parts(options)
    if not parts:
        raise CommandError("nothing to add: give --node or --operator")
    check_parts([*(each.part for each in authority.issued()), *parts], options.days)
    _list([authority.issue(part, days=options.days, now=_now()) for part in parts])
    return EXIT_OK


def _renew(options: argparse.Namespace) -> int:
    from kvcast.service.authority import Authority

    authority = Authority.open(options.folder)
    until = _now() + datetime.timedelta(days=options.within)
    due = [each for each in authority.issued() if options.all or each.expires <= until]
    if not due:
        print(f"no certificate ends within {options.within} days")
        return EXIT_OK
    _list([authority.issue(each.part, days=options.days, now=_now()) for each in due])
    print("\nCopy them to where they belong; the parts take them into use without a restart.")
    return EXIT_OK


def _show(options: argparse.Namespace) -> int:
    from kvcast.service.authority import issued_in, read_certificate

    ends = read_certificate(options.folder / "ca.pem").not_valid_after_utc
    print(f"authority, until {ends:%Y-%m-%d}")
    _list(issued_in(options.folder))
    return EXIT_OK


def _list(issued: Sequence[Issued]) -> None:
    width = max((len(str(each.folder)) for each in issued), default=0)
    for each in issued:
        hosts = f" at {', '.join(each.part.hosts)}" if each.part.hosts else ""
        print(
            f"  {each.folder!s:{width}}  {each.part.identity}{hosts}, until {each.expires:%Y-%m-%d}"
        )

"""--tls and --insecure, in the words that all daemons share.

Owns: the two flags, and the rule that beyond loopback nothing goes without one of them. Must not
know: how TLS is spoken (`tls`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvcast.service.addresses import is_loopback
from kvcast.service.options import OptionsError, bare, file
from kvcast.service.tls import Credentials, TlsError


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """encryption"""

    tls: Path | None = file(
        "folder with this part's certificate, key and the cluster's authority (cert.pem, key.pem, "
        "ca.pem); `kvcast certs init` makes them. New files are taken into use without a restart",
        metavar="DIR",
    )
    insecure: bool = bare(
        "allow addresses beyond loopback without --tls: anybody who reaches them can read, write "
        "and impersonate"
    )


def refuse_open_addresses(options: TlsOptions, addresses: Iterable[tuple[str, str]]) -> None:
    """OptionsError where an address beyond loopback would be used without TLS.

    `addresses`: (flag, host).
    """
    if options.insecure or options.tls is not None:
        return
    for flag, host in addresses:
        if not is_loopback(host):
            raise OptionsError(
                f"{flag} {host} is not loopback: give --tls DIR (kvcast certs init makes it), or "
                "--insecure if everybody on that network may do everything"
            )


def credentials_of(folder: Path | None) -> Credentials | None:
    """The credentials that --tls names; OptionsError if they cannot be used."""
    if folder is None:
        return None
    try:
        return Credentials.of_folder(folder)
    except TlsError as error:
        raise OptionsError(f"--tls {error}") from error

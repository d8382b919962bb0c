"""TLS of the P4Runtime server: its certificate, renewed without a restart, and whom it lets in.

Owns: reading the files anew for each handshake, and the rule that of a kvcast cluster only
controllers and operators may program the switch, although nodes have certificates of the same
authority. Must not know: RPCs, or how the files are made.

A certificate without a kvcast identity is let in: it was given by an authority that the operator
named, as BMv2's server and others' clients do it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

import grpc
from kvcast.service.identity import CONTROLLER, OPERATOR, SCHEME, IdentityError, identity_of_uris
from kvcast.switchsim.p4runtime.errors import permission_denied

log = logging.getLogger("kvcast.switchsim.p4runtime.service")

_NAMES: Final = "x509_subject_alternative_name"


class CertificateFiles:
    """The server's files. `credentials` looks at them again at every handshake; files that cannot
    be used leave the last good ones in force."""

    def __init__(self, cert: Path, key: Path, ca: Path | None) -> None:
        self.reloads = 0
        self.failed_reloads = 0
        self._paths = (key, cert) if ca is None else (key, cert, ca)
        self._mutual = ca is not None
        self._content = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials whose certificate is the one of the moment."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._renewed, require_client_authentication=self._mutual
        )

    def _read(self) -> tuple[bytes, ...]:
        return tuple(path.read_bytes() for path in self._paths)

    def _configuration(self) -> Any:
        key, certificate, *authority = self._content
        return grpc.ssl_server_certificate_configuration(
            [(key, certificate)], root_certificates=authority[0] if authority else None
        )

    def _renewed(self) -> Any:
        """A new configuration, or None; gRPC calls this in a thread of its own."""
        try:
            content = self._read()
        except OSError as error:
            self.failed_reloads += 1
            log.warning("the P4Runtime server's certificate stays as it is: %s", error)
            return None
        if content == self._content:
            return None
        # gRPC keeps its last configuration where it cannot use this one.
        self._content = content
        self.reloads += 1
        return self._configuration()


def admit(context: Any) -> None:
    """P4RuntimeError if the caller's certificate names a part that may not program switches."""
    names = [name.decode("utf-8", "replace") for name in context.auth_context().get(_NAMES, ())]
    ours = [name for name in names if name.startswith(f"{SCHEME}:")]
    if not ours:
        return
    try:
        caller = identity_of_uris(ours)
    except IdentityError as error:
        raise permission_denied(str(error)) from error
    if caller.role not in (CONTROLLER, OPERATOR):
        raise permission_denied(f"{caller} may not program switches")

"""Identities: what a certificate says about the part that shows it.

Owns: the roles, and how a role and a name are written in a certificate: one URI among the subject's
alternative names, `kvcast://node/node-1`. Must not know: sockets, files, or how a certificate is
checked or made; whoever asks has had the chain verified by TLS already.

The names of an X.509 subject (RFC 5280, 4.2.1.6) that TLS libraries compare with a host are not
enough here: what matters between kvcast's parts is not where a peer runs but what it may do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvcast.protocol.node_ids import NODE_ID_RULE, is_node_id

SCHEME: Final = "kvcast"

CONTROLLER: Final = "controller"
NODE: Final = "node"
OPERATOR: Final = "operator"
SWITCH: Final = "switch"
ROLES: Final = (CONTROLLER, NODE, OPERATOR, SWITCH)

PART_DAYS: Final = 180
"""How long a part's certificate lasts, unless it is asked for otherwise."""
MAX_PART_DAYS: Final = 825


class IdentityError(ValueError):
    """A certificate that names no kvcast part, or more than one."""


@dataclass(frozen=True)
class Identity:
    """A part by role and name: (`node`, `node-1`). All names are as nodes' are."""

    role: str
    name: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise IdentityError(f"{self.role!r} is no role ({', '.join(ROLES)})")
        if not is_node_id(self.name):
            raise IdentityError(f"{self.name[:80]!r} is no name: {NODE_ID_RULE}")

    def __str__(self) -> str:
        return f"{self.role} {self.name}"

    @property
    def uri(self) -> str:
        """As it stands in a certificate."""
        return f"{SCHEME}://{self.role}/{self.name}"


def identity_of_uris(uris: Iterable[str]) -> Identity:
    """The one identity among a certificate's URIs; IdentityError if there is none, or are two."""
    ours = [uri for uri in uris if uri.startswith(f"{SCHEME}:")]
    if len(ours) != 1:
        raise IdentityError(f"the certificate names {len(ours)} parts of kvcast, not one")
    role, _, name = ours[0].removeprefix(f"{SCHEME}://").partition("/")
    return Identity(role, name)


def identity_of(certificate: Mapping[str, Any] | None) -> Identity:
    """The identity in a verified certificate as `getpeercert` of `ssl.SSLSocket` gives it."""
    if not certificate:
        raise IdentityError("the peer showed no certificate")
    names = certificate.get("subjectAltName", ())
    return identity_of_uris(value for kind, value in names if kind == "URI")

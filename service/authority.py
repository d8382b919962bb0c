"""A cluster's certificate authority, and the certificates that it gives to the cluster's parts.

Owns: what stands in them, how long they last, and the files. Must not know: how a part uses them
(`tls`), or the command line (`kvcast.cli.certs`). Specification: RFC 5280; keys are ECDSA on
P-256, which all TLS libraries take, gRPC's among them.

    FOLDER/ca.pem, ca-key.pem             the authority; its key is needed only to make certificates
    FOLDER/controller/{cert,key,ca}.pem   one folder a part, to be copied to where it runs
    FOLDER/node-1/…, switch/…, operator/…

Files are written beside their place and renamed into it, so that a daemon that looks meanwhile
sees the old one or the new one, and are 0600 from the first byte.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from kvcast.service.identity import (
    CONTROLLER,
    MAX_PART_DAYS,
    OPERATOR,
    SWITCH,
    Identity,
    IdentityError,
    identity_of_uris,
)

AUTHORITY_DAYS: Final = 3650
CLOCK_SKEW: Final = datetime.timedelta(minutes=10)
"""Certificates are good from so long before they were made: clocks differ."""

_CERT, _KEY, _CA = "cert.pem", "key.pem", "ca.pem"
_CA_KEY: Final = "ca-key.pem"
_HOST: Final = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}\.?)+")


class AuthorityError(Exception):
    """Certificates cannot be made or read; the text says which and why."""


@dataclass(frozen=True)
class Part:
    """One certificate to be: whose, and the hosts (names or addresses) at which it answers."""

    identity: Identity
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Issued:
    """A certificate that lies in `folder`."""

    part: Part
    folder: Path
    expires: datetime.datetime


class Authority:
    """The authority in a folder: `create` a new one, or `open` one that is there."""

    def __init__(
        self, folder: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
    ) -> None:
        self.folder = folder
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, folder: Path, *, now: datetime.datetime) -> Authority:
        """Make an authority; AuthorityError if the folder holds one already."""
        if (folder / _CA_KEY).exists() or (folder / _CA).exists():
            raise AuthorityError(
                f"{folder} holds an authority already: `kvcast certs renew` makes new certificates"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvcast cluster")])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + datetime.timedelta(days=AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(authority=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .sign(key, hashes.SHA256())
        )
        _make_folder(folder)
        _write(folder / _CA_KEY, _pem_of_key(key))
        _write(folder / _CA, certificate.public_bytes(serialization.Encoding.PEM))
        return cls(folder, certificate, key)

    @classmethod
    def open(cls, folder: Path) -> Authority:
        """The authority that is there."""
        certificate = read_certificate(folder / _CA)
        path = folder / _CA_KEY
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except OSError as error:
            raise AuthorityError(f"{path}: {error.strerror}") from error
        except (ValueError, TypeError) as error:
            raise AuthorityError(f"{path}: not a private key in PEM form") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise AuthorityError(f"{path}: not a key on an elliptic curve")
        if key.public_key() != certificate.public_key():
            raise AuthorityError(f"{path} does not belong to {folder / _CA}")
        return cls(folder, certificate, key)

    def issue(self, part: Part, *, days: int, now: datetime.datetime) -> Issued:
        """Write a new key and certificate for a part into its folder."""
        check_parts([part], days)
        key = ec.generate_private_key(ec.SECP256R1())
        expires = min(
            now + datetime.timedelta(days=days), self._certificate.not_valid_after_utc
        ).replace(microsecond=0)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(part.identity)[:64])])
        hosts = {_general_name(host): host for host in part.hosts}
        names = [x509.UniformResourceIdentifier(part.identity.uri), *hosts]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(expires)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(_purposes(part.identity)), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        folder = self.folder / folder_name(part.identity)
        _make_folder(folder)
        _write(folder / _CA, self._certificate.public_bytes(serialization.Encoding.PEM))
        _write(folder / _KEY, _pem_of_key(key))
        _write(folder / _CERT, certificate.public_bytes(serialization.Encoding.PEM))
        return Issued(Part(part.identity, tuple(hosts.values())), folder, expires)

    def issued(self) -> list[Issued]:
        """The certificates that lie in the authority's folder, by folder name."""
        return issued_in(self.folder)


def folder_name(identity: Identity) -> str:
    """Where a part's files lie: nodes and operators under their names, the others under their
    roles."""
    return identity.role if identity.role in (CONTROLLER, SWITCH) else identity.name


def read_certificate(path: Path) -> x509.Certificate:
    """A certificate file; AuthorityError if it is none."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise AuthorityError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise AuthorityError(f"{path}: not a certificate in PEM form") from error


def read_part(folder: Path) -> Issued:
    """The certificate of a part's folder."""
    path = folder / _CERT
    certificate = read_certificate(path)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        identity = identity_of_uris(names.get_values_for_type(x509.UniformResourceIdentifier))
    except (x509.ExtensionNotFound, IdentityError, ValueError) as error:
        raise AuthorityError(f"{path}: {error}") from error
    hosts = [*names.get_values_for_type(x509.DNSName)]
    hosts += [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return Issued(Part(identity, tuple(hosts)), folder, certificate.not_valid_after_utc)


def issued_in(folder: Path) -> list[Issued]:
    """The certificates that lie in an authority's folder, by folder name."""
    return [read_part(path.parent) for path in sorted(folder.glob(f"*/{_CERT}"))]


def check_parts(parts: Iterable[Part], days: int) -> None:
    """AuthorityError if these could not all be issued: two in one folder, hosts that are none, or
    days beyond the bound. Nothing is written before this has passed."""
    if not 1 <= days <= MAX_PART_DAYS:
        raise AuthorityError(f"{days} days are outside 1..{MAX_PART_DAYS}")
    seen: dict[str, Identity] = {}
    for part in parts:
        folder = folder_name(part.identity)
        if folder in seen:
            raise AuthorityError(f"{seen[folder]} and {part.identity} both need a folder {folder}")
        if folder in ("", ".", ".."):
            raise AuthorityError(f"{part.identity}: {folder!r} cannot be a folder's name")
        seen[folder] = part.identity
        for host in part.hosts:
            _general_name(host)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if _HOST.fullmatch(host) is None:
        raise AuthorityError(f"{host[:80]!r} is neither an address nor a host name")
    return x509.DNSName(host)


def _purposes(identity: Identity) -> list[x509.ObjectIdentifier]:
    server, client = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
    if identity.role == OPERATOR:
        return [client]
    return [server] if identity.role == SWITCH else [server, client]


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise AuthorityError(f"{folder}: {error.strerror}") from error


def _write(path: Path, content: bytes) -> None:
    """Replace a file as a whole."""
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.unlink(missing_ok=True)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise AuthorityError(f"{path}: {error.strerror}") from error

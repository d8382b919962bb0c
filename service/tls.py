"""TLS as every kvcast daemon uses it: a folder of three files, contexts, and their renewal.

Owns: which files make a credential, the settings of a context (TLS 1.3, both sides show a
certificate of the cluster's authority), and when files are read again. Must not know: what a peer
may do (`kvcast.service.identity` names it, each entry point decides), or flags (`tls_options`).

The folder is one that `kvcast certs init` makes (`cert.pem`, `key.pem`, `ca.pem`), or one in the
form that Kubernetes' cert-manager mounts (`tls.crt`, `tls.key`, `ca.crt`).

**Rotation.** Every new connection asks for a context; the files are looked at then, and read again
if they changed. Connections that stand keep the certificate that they were made with. Files that
cannot be used (a key that does not fit because the other file is about to be replaced, too) leave
the last good ones in force; that is counted and logged, and tried again at the next connection.
Sessions are never resumed, so that no connection outlives the trust in who made it.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvcast.service.identity import Identity, IdentityError, identity_of

log = logging.getLogger("kvcast.tls")

HANDSHAKE_TIMEOUT_S: Final = 5.0
_FORMS: Final = (("cert.pem", "key.pem", "ca.pem"), ("tls.crt", "tls.key", "ca.crt"))


class TlsError(Exception):
    """Certificate files that cannot be used; the text says which and why."""


class PeerError(ConnectionError):
    """The peer's certificate is good, but not one that this entry point is for."""


@dataclass(frozen=True)
class TlsFiles:
    """A certificate (with its chain), its private key, and the authority that others must have."""

    cert: Path
    key: Path
    ca: Path

    @classmethod
    def of_folder(cls, folder: Path | str) -> TlsFiles:
        """The files of a folder in either form; TlsError if it is in neither."""
        folder = Path(folder)
        for cert, key, ca in _FORMS:
            if (folder / cert).exists():
                return cls(folder / cert, folder / key, folder / ca)
        raise TlsError(
            f"{folder}: no {_FORMS[0][0]} there; `kvcast certs init` makes folders of certificates"
        )


@dataclass(frozen=True)
class _Contexts:
    """What one reading of the files gives."""

    server: ssl.SSLContext
    lenient_server: ssl.SSLContext
    """For which a client may come without a certificate, but not with a bad one."""
    client: ssl.SSLContext


class Credentials:
    """This process's credential, as files that may change under it.

    TlsError if the files cannot be used at the start. A private key that others may read is
    refused: whoever has it is this node.
    """

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self.reloads = 0
        """How often changed files were taken into use."""
        self.failed_reloads = 0
        self._stamp = self._look()
        self._contexts = self._load()
        self._refused: tuple[object, ...] | None = None

    @classmethod
    def of_folder(cls, folder: Path | str) -> Credentials:
        """See `TlsFiles.of_folder`."""
        return cls(TlsFiles.of_folder(folder))

    def server(self, *, certificate_required: bool = True) -> ssl.SSLContext:
        """A context for one more connection that is made to us."""
        self.refresh()
        return self._contexts.server if certificate_required else self._contexts.lenient_server

    def client(self) -> ssl.SSLContext:
        """A context for one more connection that we make."""
        self.refresh()
        return self._contexts.client

    def refresh(self) -> bool:
        """Read the files again if they changed; whether new ones are in use."""
        try:
            stamp = self._look()
        except TlsError as error:
            self._keep_old(None, error)
            return False
        if stamp == self._stamp:
            return False
        try:
            contexts = self._load()
        except TlsError as error:
            self._keep_old(stamp, error)
            return False
        self._stamp, self._contexts, self._refused = stamp, contexts, None
        self.reloads += 1
        log.info("new certificate in use", extra={"file": str(self.files.cert)})
        return True

    def _keep_old(self, stamp: tuple[object, ...] | None, error: TlsError) -> None:
        if stamp is not None and stamp == self._refused:
            return  # the same bad files as before: said once
        if stamp is not None or self._refused != ():
            self.failed_reloads += 1
            log.warning("certificates not reloaded, the old ones stay in use: %s", error)
        self._refused = () if stamp is None else stamp

    def _look(self) -> tuple[object, ...]:
        """What changes when a file is replaced or rewritten."""
        stamp: list[object] = []
        for path in (self.files.cert, self.files.key, self.files.ca):
            try:
                info = path.stat()
            except OSError as error:
                raise TlsError(f"{path}: {error.strerror}") from error
            stamp.append((info.st_ino, info.st_mtime_ns, info.st_size))
            if path == self.files.key and info.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
                raise TlsError(f"{path}: others may read this private key; chmod 600 it")
        return tuple(stamp)

    def _load(self) -> _Contexts:
        server = self._context(ssl.PROTOCOL_TLS_SERVER)
        server.verify_mode = ssl.CERT_REQUIRED
        lenient = self._context(ssl.PROTOCOL_TLS_SERVER)
        lenient.verify_mode = ssl.CERT_OPTIONAL
        client = self._context(ssl.PROTOCOL_TLS_CLIENT)
        # Who a peer is stands in its certificate's URI (`identity`), not in where it runs.
        client.check_hostname = False
        client.verify_mode = ssl.CERT_REQUIRED
        return _Contexts(server, lenient, client)

    def _no_password(self) -> str:
        """Instead of asking at the terminal, where everything would wait for an answer."""
        raise TlsError(f"{self.files.key}: the key has a password; it must be readable without one")

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.options |= ssl.OP_NO_TICKET
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0
        try:
            context.load_cert_chain(self.files.cert, self.files.key, password=self._no_password)
        except (OSError, ssl.SSLError) as error:
            raise TlsError(f"{self.files.cert} with {self.files.key}: {_why(error)}") from error
        try:
            context.load_verify_locations(self.files.ca)
        except (OSError, ssl.SSLError) as error:
            raise TlsError(f"{self.files.ca}: {_why(error)}") from error
        return context


def _why(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


# --- peers --------------------------------------------------------------------------------------


def peer_of(transport: asyncio.BaseTransport | asyncio.StreamWriter) -> Identity:
    """Who is at the other end of a TLS connection; PeerError if its certificate does not say."""
    try:
        return identity_of(transport.get_extra_info("peercert"))
    except IdentityError as error:
        raise PeerError(str(error)) from error


def expect_peer(
    writer: asyncio.BaseTransport | asyncio.StreamWriter, role: str, name: str | None = None
) -> Identity:
    """The peer, which must have this role, and this name if one is given; PeerError else."""
    peer = peer_of(writer)
    if peer.role != role or (name is not None and peer.name != name):
        wanted = f"{role} {name}" if name is not None else role
        raise PeerError(f"{peer} answers where {wanted} should")
    return peer

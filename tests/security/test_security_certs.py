"""`kvcast certs`, and that no daemon goes beyond loopback without what it makes.

Oracle: the cryptography library's own verification, and the daemons' exit statuses.
"""

from __future__ import annotations

import datetime
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID
from kvcast.cli import certs
from kvcast.controller import flags as controller
from kvcast.hostagent import flags as hostagent
from kvcast.service.authority import read_certificate, read_part
from kvcast.service.options import OptionsError, parse_options
from kvcast.service.tls import Credentials, TlsError
from kvcast.switchsim import flags as switchsim

INIT = ["--controller", "10.0.0.1", "--node", "node-1=10.0.0.11", "--node", "node-2"]


def _make(folder: Path, *flags: str) -> Path:
    assert certs.main(["init", str(folder), *INIT, *flags]) == 0
    return folder


def test_init_makes_what_every_part_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _make(tmp_path / "certs")
    said = capsys.readouterr().out
    authority = read_certificate(folder / "ca.pem")
    for name in ("controller", "switch", "node-1", "node-2", "operator"):
        assert f"{folder / name} " in said
        certificate = read_certificate(folder / name / "cert.pem")
        certificate.verify_directly_issued_by(authority)
        assert (folder / name / "ca.pem").read_bytes() == (folder / "ca.pem").read_bytes()
        Credentials.of_folder(folder / name)
    assert read_part(folder / "node-1").part.identity.uri == "kvcast://node/node-1"
    assert read_part(folder / "node-1").part.hosts == ("10.0.0.11",)
    assert "10.0.0.1" in read_part(folder / "controller").part.hosts


def test_every_file_is_its_owners_alone(tmp_path: Path) -> None:
    folder = _make(tmp_path / "certs")
    for path in folder.rglob("*.pem"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_certificates_last_for_months_and_serve_one_purpose(tmp_path: Path) -> None:
    folder = _make(tmp_path / "certs")
    today = datetime.datetime.now(datetime.UTC)
    part = read_certificate(folder / "node-1" / "cert.pem")
    assert part.not_valid_after_utc - today < datetime.timedelta(days=181)
    assert part.not_valid_before_utc < today
    assert not part.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    operator = read_certificate(folder / "operator" / "cert.pem")
    purposes = operator.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(purposes) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_renew_replaces_what_ends_soon_and_keeps_who_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _make(tmp_path / "certs", "--days", "30")
    before = read_certificate(folder / "node-1" / "cert.pem")
    credentials = Credentials.of_folder(folder / "node-1")
    assert certs.main(["renew", str(folder), "--within", "20"]) == 0
    assert "no certificate ends within" in capsys.readouterr().out
    assert certs.main(["renew", str(folder)]) == 0
    after = read_certificate(folder / "node-1" / "cert.pem")
    assert after.serial_number != before.serial_number
    assert after.public_key() != before.public_key()
    assert read_part(folder / "node-1").part.hosts == ("10.0.0.11",)
    assert credentials.refresh()


def test_add_makes_one_more_node(tmp_path: Path) -> None:
    folder = _make(tmp_path / "certs")
    assert certs.main(["add", str(folder), "--node", "node-3", "--operator", "alice"]) == 0
    assert read_part(folder / "node-3").part.identity.name == "node-3"
    assert read_part(folder / "alice").part.identity.role == "operator"
    assert certs.main(["show", str(folder)]) == 0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--controller", "not a host"], "neither an address nor a host name"),
        (["--controller", "c", "--node", "switch"], "both need a folder switch"),
        (["--controller", "c", "--node", "a", "--operator", "a"], "both need a folder a"),
        (["--controller", "c", "--node", ".."], "cannot be a folder's name"),
        (["--controller", "c", "--days", "5000"], "outside 1..825"),
    ],
)
def test_what_cannot_be_made_leaves_nothing_behind(
    flags: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert certs.main(["init", str(tmp_path / "certs"), *flags]) == 1
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "certs").exists()


def test_an_authority_is_not_made_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _make(tmp_path / "certs")
    key = (folder / "ca-key.pem").read_bytes()
    assert certs.main(["init", str(folder), *INIT]) == 1
    assert "holds an authority already" in capsys.readouterr().err
    assert (folder / "ca-key.pem").read_bytes() == key


# --- beyond loopback ------------------------------------------------------------------------------

_AGENT = [
    "--node-id=node-1", "--ip=10.77.0.1", "--mac=02:6b:76:00:00:01", "--switch-port=1",
    "--socket=/tmp/x.sock", "--transport=udp",
]  # fmt: skip


@pytest.mark.parametrize(
    "address", ["--controller=10.0.0.1:1", "--bulk-addr=10.0.0.1:0", "--metrics-addr=0.0.0.0:1"]
)
def test_an_agent_does_not_leave_loopback_without_tls(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        hostagent.parse([*_AGENT, address])
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert "--tls DIR" in said
    assert "--insecure" in said
    hostagent.parse([*_AGENT, address, "--insecure"])
    config = tmp_path / "agent.toml"
    config.write_text("insecure = true\n")
    hostagent.parse([f"--config={config}", *_AGENT, address])
    folder = _make(tmp_path / "certs")
    flags = hostagent.parse([*_AGENT, address, f"--tls={folder}/node-1"])
    assert hostagent.options_of(flags).credentials is not None


@pytest.mark.parametrize(
    "address", ["--agents-addr=10.0.0.1:0", "--http-addr=0.0.0.0:0", "--switch=10.0.0.1:9559"]
)
def test_a_controller_does_not_leave_loopback_without_tls(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        controller.parse([address])
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert "--tls DIR" in said
    assert "--insecure" in said
    controller.parse([address, "--insecure"])
    folder = _make(tmp_path / "certs")
    options = controller.parse([address, f"--tls={folder}/controller"])
    assert options.authenticates
    assert (options.switch_credentials is not None) == address.startswith("--switch=")
    with pytest.raises(SystemExit):
        controller.parse(["--switch=10.0.0.1:1", f"--tls={folder}/controller", "--no-switch-tls"])


def test_on_loopback_nothing_is_asked_for() -> None:
    assert hostagent.options_of(hostagent.parse(_AGENT)).credentials is None
    assert not controller.parse([]).authenticates


def test_the_switch_takes_a_folder_of_certificates(tmp_path: Path) -> None:
    folder = _make(tmp_path / "certs")

    def parse(*words: str) -> switchsim.DaemonOptions:
        return switchsim.settled(parse_options(switchsim.DaemonOptions, words))

    options = parse("--grpc-addr=0.0.0.0:0", f"--tls={folder}/switch")
    assert options.tls_ca == folder / "switch" / "ca.pem"
    with pytest.raises(OptionsError, match="kvcast certs init"):
        parse("--grpc-addr=0.0.0.0:0", "--tls=/nonexistent")
    with pytest.raises(OptionsError, match="one by one"):
        parse(f"--tls={folder}/switch", "--tls-ca=x")


def test_a_key_that_needs_a_password_is_refused_and_nobody_asked_for_it(tmp_path: Path) -> None:
    path = _make(tmp_path / "certs") / "node-1" / "key.pem"
    key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(TlsError, match="password"):
        Credentials.of_folder(path.parent)

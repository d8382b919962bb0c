"""`kvcast certs`: what it writes and lists.

Oracle: the names that stand in the certificates. That parts trust each other by them, and what is
refused, is test_security_certs.py's.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest
from cryptography import x509
from kvcast.cli import certs

LOCAL = ["127.0.0.1", "::1"]


def addresses(folder: Path) -> list[str]:
    certificate = x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(address) for address in names.get_values_for_type(x509.IPAddress)]


@pytest.mark.parametrize(
    ("flags", "controller"),
    [
        (["--controller=127.0.0.1"], LOCAL),
        (["--controller=10.0.0.1", "--controller=10.0.0.1"], ["10.0.0.1", *LOCAL]),
        (["--controller=0:0:0:0:0:0:0:1"], ["::1", "127.0.0.1"]),
    ],
)
def test_a_name_that_is_given_twice_stands_once(
    flags: list[str], controller: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "certs"
    assert certs.main(["init", str(folder), *flags, "--node=node-1=10.0.0.2,10.0.0.2"]) == 0
    assert addresses(folder / "controller") == controller
    assert addresses(folder / "switch") == controller
    assert addresses(folder / "node-1") == ["10.0.0.2"]
    for line in capsys.readouterr().out.splitlines():
        if " at " in line:
            hosts = line.split(" at ")[1].split(", until")[0].split(", ")
            assert len({canonical(host) for host in hosts}) == len(hosts), line


def canonical(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host

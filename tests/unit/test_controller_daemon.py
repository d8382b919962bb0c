"""The controller's flags: what they become, and what is refused before anything starts.

Oracle: the options that the cores take. Cannot see: the running daemon (integration tests).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kvcast.controller.core.tiers import AdmitMode
from kvcast.controller.daemon import main
from kvcast.controller.flags import ControllerFlags, pool_options
from kvcast.p4.targets import profiles
from kvcast.service.options import parse_options


def test_defaults_suit_the_software_switch() -> None:
    options = pool_options(ControllerFlags())
    assert options.settings.enabled
    assert options.settings.lease_ticks == 62500  # 4 s of 64 µs
    assert options.settings.heat_threshold == 3
    assert options.read_padding_bytes == 0
    assert options.slots == 256
    assert options.admit is AdmitMode.AUTO


def test_bmv2_wants_padded_reads() -> None:
    options = pool_options(parse_options(ControllerFlags, ["--target=bmv2"]))
    assert options.read_padding_bytes == 608


def test_the_device_ports_of_the_deployment_page_are_taken() -> None:
    said = ",".join(map(str, range(0, 64, 2)))
    options = parse_options(ControllerFlags, ["--target=tofino1", f"--device-ports={said}"])
    assert options.device_ports == profiles["tofino1"].device_ports


def test_plain_disables_the_program() -> None:
    assert not pool_options(parse_options(ControllerFlags, ["--plain"])).settings.enabled


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--agents-addr=0.0.0.0:0"], "is not loopback: give --tls DIR"),
        (["--http-addr=10.0.0.1:80"], "is not loopback: give --tls DIR"),
        (["--switch=10.0.0.1:9559"], "is not loopback: give --tls DIR"),
        (["--switch-tls"], "--switch-tls needs --tls"),
        (["--http-client-certs"], "--http-client-certs needs --tls"),
        (["--tls=/proc/nonexistent"], "kvcast certs init"),
        (["--tokens=/proc/nonexistent"], "No such file"),
        (["--http-addr=127.0.0.1"], "is not HOST:PORT"),
        (["--lease=0"], "outside"),
        (["--tick=never"], "not a number"),
        (["--replicas=99"], "outside"),
        (["--admit=sometimes"], "invalid choice"),
        (["--router-mac=ff:ff:ff:ff:ff:ff"], "not a unicast MAC"),
        (["--target=tofino"], "invalid choice"),
        (["--margin=nan"], "outside"),
        (["--device-ports=1,2,x"], "no list of port numbers"),
        (["--device-ports=1,2,2"], "must differ"),
        (["--device-ports=-1,1"], "within 0..511"),
        (["--device-ports=1,512"], "within 0..511"),
        (["--device-ports=1,2"], "2 ports, not 32"),
        (["--target=tofino2"], "needs --device-config"),
        (
            [
                "--target=tofino1",
                "--device-config=x",
                "--device-ports=" + ",".join(str(port) for port in range(112, 144)),
            ],
            "in one pipe",
        ),
    ],
)
def test_bad_flags_end_it_with_their_reason(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(flags)
    assert error.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_state_file_that_cannot_be_had_ends_it_with_its_reason(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        f'state = "{tmp_path}/no/such/folder/s"\nagents_addr = "127.0.0.1:0"\n'
        'http_addr = "127.0.0.1:0"\n'
    )
    # A process of its own: the daemon takes over its process's logging.
    ended = subprocess.run(
        [sys.executable, "-m", "kvcast.controller.daemon", f"--config={config}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    assert "unable to open database file" in ended.stderr
    assert "Traceback" not in ended.stderr

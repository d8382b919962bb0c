"""simple_switch_grpc's command lines, as the tools that start BMv2 write them.

Oracle: behavioral-model's option parser and the command lines of those tools, copied here. Cannot
see: the process (tests/p4runtime/test_switch_daemon.py).
"""

from __future__ import annotations

import pytest
from kvcast.service.options import parse_options
from kvcast.switchsim import bmv2_flags
from kvcast.switchsim.bmv2_flags import Bmv2FlagsError, looks_like_bmv2, translate
from kvcast.switchsim.daemon import bmv2_main
from kvcast.switchsim.flags import DaemonOptions, settled


def options_of(line: str) -> DaemonOptions:
    return settled(parse_options(DaemonOptions, translate(line.split()).argv))


TUTORIALS = (
    "-i 1@s1-eth1 -i 2@s1-eth2 --pcap /tmp/pcaps --nanolog ipc:///tmp/bm-0-log.ipc --device-id 0 "
    "build/basic.json --log-console --thrift-port 9090 -- --grpc-server-addr 0.0.0.0:50051 "
    "--cpu-port 255"
)
P4_UTILS = (
    "-i 1@s1-eth1 --pcap=/tmp/p --thrift-port 9090 --nanolog ipc:///tmp/bm-1.ipc --device-id 1 "
    "--no-p4 --log-file /tmp/s1.log --log-flush -- --grpc-server-addr 127.0.0.1:9559"
)
STRATUM_LIKE = (
    "--device-id 1 --interface 3@veth3 --no-p4 -L warn -- --cpu-port 510 --drop-port 509 "
    "--grpc-server-addr localhost:28000 --grpc-server-ssl --grpc-server-cert c.pem "
    "--grpc-server-key k.pem --grpc-server-cacert a.pem --grpc-server-with-client-auth"
)


@pytest.mark.parametrize("line", [TUTORIALS, P4_UTILS, STRATUM_LIKE, "prog.json"])
def test_what_other_tools_write_is_recognised(line: str) -> None:
    assert looks_like_bmv2(line.split())


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--help",
        "--port 1=if:a --grpc-addr 127.0.0.1:0 --device-id 4",
        "--p4info a.txtpb --program x.json",
        "--stats-json x.json",
    ],
)
def test_our_own_flags_are_not_taken_for_bmv2s(line: str) -> None:
    assert not looks_like_bmv2(line.split())


def test_the_tutorials_command_line() -> None:
    options = options_of(TUTORIALS)
    assert [(spec.number, spec.interface) for spec in options.ports] == [
        (1, "s1-eth1"),
        (2, "s1-eth2"),
    ]
    assert str(options.program) == "build/basic.json"
    assert options.p4info is None
    assert (options.device_id, options.cpu_port, options.drop_port) == (0, 255, 511)
    assert options.grpc_addr == ("0.0.0.0", 50051)
    assert translate(TUTORIALS.split()).ignored == ["--thrift-port", "--nanolog", "--pcap"]


def test_p4_utils_command_line() -> None:
    options = options_of(P4_UTILS)
    assert options.program is None
    assert options.cpu_port is None
    translation = translate(P4_UTILS.split())
    assert translation.log_file == "/tmp/s1.log"
    assert set(translation.ignored) == {"--thrift-port", "--nanolog", "--log-flush", "--pcap"}


def test_tls_and_ports_of_the_target() -> None:
    options = options_of(STRATUM_LIKE)
    assert (options.cpu_port, options.drop_port) == (510, 509)
    assert [str(p) for p in (options.tls_cert, options.tls_key, options.tls_ca)] == [
        "c.pem",
        "k.pem",
        "a.pem",
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--device-id 1", "JSON file, or --no-p4"),
        ("--no-p4 -i s1-eth1", "PORT@INTERFACE"),
        ("--no-p4 -i x@eth1", "PORT@INTERFACE"),
        ("--no-p4 --use-files 3", "--use-files"),
        ("--no-p4 -- --dp-grpc-server-addr 0.0.0.0:5", "--dp-grpc-server-addr"),
        ("--no-p4 -- --priority-queues 4", "--priority-queues"),
        ("--no-p4 -- --grpc-server-ssl", "--grpc-server-cert"),
        ("--no-p4 --frobnicate", "--frobnicate"),
        ("--no-p4 -L loud", "loud"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(line: str, reason: str) -> None:
    with pytest.raises(Bmv2FlagsError, match=reason):
        translate(line.split())


def test_a_refusal_is_an_exit_status_and_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert bmv2_main(["--no-p4", "--use-files", "1"]) == 2
    error = capsys.readouterr().err
    assert "usage: kvcast-simple-switch-grpc" in error
    assert "--use-files" in error


def test_every_option_of_help_is_documented() -> None:
    text = bmv2_flags.build_parser().format_help()
    for word in ("--grpc-server-addr", "-i", "--no-p4", "accepted without effect", "refused"):
        assert word in text

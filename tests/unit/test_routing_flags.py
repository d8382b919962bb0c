"""`kvcast route`'s options: what they become, and what is refused."""

from __future__ import annotations

import math

import pytest
from kvcast.routing.flags import (
    health_options,
    parse,
    parse_engine,
    proxy_options,
    router_options,
)
from kvcast.routing.options import EngineAddress
from kvcast.service.values import TextError


def test_an_engine_is_read_with_all_its_parts() -> None:
    assert parse_engine("a=http://h:1/") == EngineAddress("a", "http://h:1")
    text = "a=https://h:1,events=tcp://h:2,replay=tcp://h:3,agent=http://h:4,namespace=7,slots=9"
    assert parse_engine(text) == EngineAddress(
        "a", "https://h:1", "tcp://h:2", "tcp://h:3", "http://h:4", 7, 9
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "=http://h:1",
        "a=h:1",
        "a=ftp://h:1",
        "a=http://h:x",
        "a=http://h:1?x",
        "a=http://u@h:1",
        "a=http://h:1,events=h:2",
        "a=http://h:1,events=tcp://h",
        "a=http://h:1,replay=tcp://h:2",
        "a=http://h:1,agent=http://h:2",
        "a=http://h:1,namespace=2",
        "a=http://h:1,slots=x",
        "a=http://h:1,namespace=65536,agent=http://h:2",
        "a=http://h:1,what=x",
        "a=http://h:1,slots=1,slots=2",
    ],
)
def test_what_is_no_engine_is_refused(text: str) -> None:
    with pytest.raises(TextError):
        parse_engine(text)


def test_flags_become_options() -> None:
    setup = parse(
        [
            "--engine=a=http://h:1,agent=http://h:2,namespace=3",
            "--prefill-tokens-per-s=4000",
            "--kv-bytes-per-token=64K",
            "--slots=5",
            "--tries=3",
            "--block-tokens=32",
        ]
    )
    router = router_options(setup.flags)
    assert router.costs.prefill_s_per_token == 1 / 4000
    assert router.costs.kv_bytes_per_token == 65536
    assert (router.slots, router.prefetches) == (5, True)
    assert proxy_options(setup.flags).tries == 3
    assert proxy_options(setup.flags).deadline_s == math.inf
    assert health_options(setup.flags).block_tokens == 32
    assert health_options(setup.flags).seed != health_options(setup.flags).seed


def test_a_router_does_not_leave_loopback_without_tls(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--engine=a=http://h:1", "--listen=10.0.0.1:80"]
    with pytest.raises(SystemExit) as end:
        parse(words)
    assert end.value.code == 2
    assert "--insecure" in capsys.readouterr().err
    parse([*words, "--insecure"])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "no --engine"),
        (["--engine=a=http://h:1", "--engine=a=http://h:2"], "one name"),
        (["--engine=a=http://h:1", "--listen=0.0.0.0:80"], "not loopback"),
        (["--engine=a=http://h:1", "--prefill-tokens-per-s=0"], "prefill-tokens-per-s"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_line(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(words)
    assert end.value.code == 2
    assert why in capsys.readouterr().err

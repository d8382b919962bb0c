"""Values as people write them. Oracle: written cases. Cannot see: which flag takes which."""

from __future__ import annotations

import argparse

import pytest
from kvcast.hostagent.flags import AgentFlags
from kvcast.service.options import parse_options
from kvcast.service.values import (
    TextError,
    bit_rate,
    format_amount,
    format_size,
    number,
    parse_name,
    parse_node_id,
    parse_size,
    whole_number,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("0", 0),
        ("64KiB", 65536),
        ("64kb", 65536),
        ("1M", 1 << 20),
        ("1m", 1 << 20),
        ("2 GiB", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("3T", 3 << 40),
        ("12B", 12),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "KiB", "-1", "4 parsecs", "nan", "1e9", "0x10", "\u0661", "1.", "4iB", "9" * 500]
)
def test_what_is_no_size_is_refused_with_examples_of_one(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is no size like 4096, 64KiB or 1\.5GiB"):
        parse_size(text)


def test_a_size_beyond_what_a_file_can_have_is_refused() -> None:
    assert parse_size(str((1 << 63) - 1)) == (1 << 63) - 1
    with pytest.raises(TextError, match="more than"):
        parse_size("8388608T")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1000, "1000 bytes"), (65536, "64 KiB"), (3 << 29, "1536 MiB")],
)
def test_a_size_is_shown_in_its_largest_whole_unit(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3_500_000, "3.3 MiB"),
        (5 << 30, "5.0 GiB"),
        (2000 << 40, "2,000.0 TiB"),
    ],
)
def test_an_amount_is_shown_in_the_largest_unit_that_it_fills(size: int, text: str) -> None:
    assert format_amount(size) == text


@pytest.mark.parametrize("text", ["0.5", "10.1", "nan", "inf", "-inf", "x", ""])
def test_numbers_are_kept_within_their_bounds(text: str) -> None:
    with pytest.raises(TextError, match=r"outside 1 to 10|is not a number"):
        number(1, 10)(text)


def test_a_bound_itself_is_within() -> None:
    assert [number(1, 10)(text) for text in ("1", "2.5", "10")] == [1.0, 2.5, 10.0]
    assert [whole_number(1, 10)(text) for text in ("1", "10")] == [1, 10]
    assert whole_number(0, 2**64 - 1)(str(2**64 - 1)) == 2**64 - 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("0", "outside"), ("11", "outside"), ("1.5", "not an integer"), ("9" * 5000, "not an int")],
)
def test_whole_numbers_are_whole_and_within(text: str, complaint: str) -> None:
    with pytest.raises(TextError, match=complaint):
        whole_number(1, 10)(text)


@pytest.mark.parametrize("text", ["-1", "inf", "nan"])
def test_without_an_upper_bound_a_number_is_still_finite(text: str) -> None:
    with pytest.raises(TextError, match="0 or more"):
        number(0)(text)


@pytest.mark.parametrize("text", ["", "a b", "a/b", "node-1\n", "n" * 65, "knöte"])
def test_what_is_no_nodes_name_is_refused(text: str) -> None:
    with pytest.raises(TextError, match="1 to 64 letters"):
        parse_node_id(text)


def test_an_error_serves_argparse_and_everybody_else() -> None:
    assert issubclass(TextError, ValueError)
    assert issubclass(TextError, argparse.ArgumentTypeError)


def test_a_namespaces_name_is_what_can_be_in_a_line_of_text() -> None:
    for text in ("m", "meta-llama/Llama-3.1-8B", "64 KiB", "模型", '{"dtype":"bf16"}', "x" * 256):
        assert parse_name(text) == text
    for text in ("", "\n", "a\rb", "\x7f", "\u2029", "\udc80", "x" * 257):
        with pytest.raises(TextError, match="is no name: 1 to 256 printable characters"):
            parse_name(text)


def test_a_rate_is_written_out_or_with_a_power_of_ten() -> None:
    for text, rate in (("10000000", 10**7), ("10e6", 10**7), ("2.5e9", 2_500_000_000), ("0", 0)):
        assert bit_rate(0, 10**13)(text) == rate
    for text in ("", "1G", "0.5", "nan", "inf", "1e400"):
        with pytest.raises(TextError, match="is not a rate like 10000000 or 10e6"):
            bit_rate(0, 10**13)(text)
    with pytest.raises(TextError, match="is outside 0 to 1e"):
        bit_rate(0, 10**13)("1e14")


def test_an_agents_links_have_rates_as_a_benches_have() -> None:
    node = ["--node-id=n", "--socket=/s", "--ip=10.0.0.1", "--mac=02:6b:76:00:00:01"]
    words = ["--switch-port=1", "--controller=127.0.0.1:1", "--link-rate=1e9"]
    flags = parse_options(AgentFlags, [*node, *words, "--bulk-link-rate=10000000"])
    assert (flags.link_rate_bits_per_s, flags.bulk_link_rate_bits_per_s) == (10**9, 10**7)

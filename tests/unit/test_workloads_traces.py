"""Traces in Mooncake's form: what is read, and what is refused with line and field.

Oracle: the format's description. Cannot see: traces of other forms.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcast.workloads.generators import WorkloadError, WorkloadOptions
from kvcast.workloads.traces import read_trace, trace_requests

_LINE = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}


def _file(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def test_equal_ids_become_equal_keys_and_times_are_scaled(tmp_path: Path) -> None:
    later = _LINE | {"timestamp": 30_500, "hash_ids": [0, 2]}
    lines = read_trace(_file(tmp_path, _LINE | {"timestamp": 500}, later))
    first, second = trace_requests(lines, WorkloadOptions(nodes=2), time_scale=10)
    assert (first.time_s, second.time_s) == (0.0, 3.0)
    assert first.keys[0] == second.keys[0]
    assert first.keys[1] != second.keys[1]
    assert (first.node, second.node) == (0, 1)


def test_lines_out_of_order_are_sorted_and_blank_and_unknown_parts_are_ignored(
    tmp_path: Path,
) -> None:
    late = _LINE | {"timestamp": 9, "model": "x"}
    lines = read_trace(_file(tmp_path, late, "", _LINE))
    assert [line.timestamp for line in lines] == [0, 9]


def test_requests_without_blocks_are_left_out(tmp_path: Path) -> None:
    lines = read_trace(_file(tmp_path, _LINE, _LINE | {"hash_ids": []}))
    assert len(list(trace_requests(lines, WorkloadOptions()))) == 1


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ({k: v for k, v in _LINE.items() if k != "hash_ids"}, "line 2: .*hash_ids"),
        ({k: v for k, v in _LINE.items() if k != "timestamp"}, "line 2: .*timestamp"),
        (_LINE | {"timestamp": "now"}, "line 2: timestamp: "),
        (_LINE | {"timestamp": -1}, "line 2: timestamp: "),
        (_LINE | {"input_length": 1.5}, "line 2: input_length: "),
        (_LINE | {"output_length": None}, "line 2: output_length: "),
        (_LINE | {"hash_ids": 3}, "line 2: hash_ids: "),
        (_LINE | {"hash_ids": [0, True]}, r"line 2: hash_ids\[.*\]: "),
        (_LINE | {"hash_ids": [-1]}, r"line 2: hash_ids\[.*\]: "),
        ("[]", "line 2: .*object"),
        ("{", "line 2: .*truncated"),
        ('{"timestamp": NaN}', "line 2: "),
        ("\udcff".encode("utf-8", "surrogateescape").decode("latin-1"), "line 2: "),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, line: object, complaint: str) -> None:
    with pytest.raises(WorkloadError, match=complaint):
        read_trace(_file(tmp_path, _LINE, line, _LINE))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_trace_or_a_named_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("traces") / "t.jsonl"
    path.write_bytes(data)
    with pytest.raises(WorkloadError, match=r"t\.jsonl"):
        read_trace(path)


def test_a_missing_file_and_an_endless_line_are_errors(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")
    path = tmp_path / "long.jsonl"
    path.write_bytes(b" " * (5 << 20))
    with pytest.raises(WorkloadError, match="line 1: longer than 4 MiB"):
        read_trace(path)


def test_an_impossible_time_scale_is_refused(tmp_path: Path) -> None:
    lines = read_trace(_file(tmp_path, _LINE))
    with pytest.raises(WorkloadError, match="time scale"):
        list(trace_requests(lines, WorkloadOptions(), time_scale=0))

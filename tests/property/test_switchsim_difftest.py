"""The engines against each other on random packets, table writes and programs.

Oracle: the reference engine. Compiled code runs in its checked flavour, so that an access out of
bounds is counted and fails the test. `python -m kvcast.switchsim.difftest` does this for longer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from kvcast.p4 import artefact
from kvcast.switchsim import loader
from kvcast.switchsim.difftest import programs
from kvcast.switchsim.difftest.compare import Difference, Pair
from kvcast.switchsim.difftest.run import Work, main, run_chunk
from kvcast.switchsim.reference.switch import Switch
from seeds import seeds

STF = Path(__file__).resolve().parents[1] / "stf"
POOL = tuple(sorted((STF / "kvcast").glob("*.stf")))
PROGRAMS = sorted((STF / "programs").glob("*.json"))


@pytest.mark.parametrize("target", ["v1model", "bmv2"])
@pytest.mark.parametrize("chunk", range(3))
def test_engines_agree_on_the_pool(target: str, chunk: int) -> None:
    program = loader.load_file(artefact(target).json)
    work = Work(program, POOL, chunk_packets=300, checked=True)
    assert run_chunk(work, 11, chunk).packets == 300


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
@pytest.mark.parametrize("chunk", range(2))
def test_engines_agree_on_the_test_programs(path: Path, chunk: int) -> None:
    scenario = path.with_suffix(".stf")
    scenarios = (scenario,) if scenario.exists() and chunk else ()
    program = loader.load_file(path)
    work = Work(program, scenarios, chunk_packets=300, checked=True)
    assert run_chunk(work, 5, chunk).packets == 300


@pytest.mark.parametrize("chunk", seeds(30, quick=10))
def test_engines_agree_on_generated_programs(chunk: int) -> None:
    work = Work(None, chunk_packets=40, checked=True)
    run_chunk(work, 1, chunk)


def test_generated_programs_load_and_differ() -> None:
    sources = [json.dumps(programs.generate(random.Random(n))) for n in range(20)]
    assert len(set(sources)) == 20
    assert sources[0] == json.dumps(programs.generate(random.Random(0)))
    for source in sources:
        loader.load(source)


def _pair(name: str = "forwarding") -> Pair:
    program = loader.load_file(STF / "programs" / f"{name}.json")
    return Pair(program, 1, checked=False, cache=True)


def test_comparison_sees_a_frame_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = _pair("replication")
    process = pair.reference.process

    def other(port: int, frame: bytes, now_us: int) -> list[tuple[int, bytes]]:
        return [(p, f + b"!") for p, f in process(port, frame, now_us)] or [(1, b"")]

    monkeypatch.setattr(pair.reference, "process", other)
    with pytest.raises(Difference, match="frame 0000"):
        pair.process(1, bytes(2), 0)


def test_comparison_sees_state_that_differs() -> None:
    pair = _pair("externs")
    pair.compare()
    name = next(iter(pair.reference.registers))
    pair.reference.registers[name].write(1, 1)
    with pytest.raises(Difference, match="0x1 and 0x0"):
        pair.compare()
    pair = _pair()
    pair.reference.stats.frames_in += 1
    with pytest.raises(Difference, match="frames_in"):
        pair.compare()


def test_comparison_sees_a_write_that_only_one_refuses() -> None:
    pair = _pair()
    pair.compiled.set_multicast_group(1, [])
    with pytest.raises(Difference, match="ReplicationError"):
        pair.both("delete", lambda s: s.delete_multicast_group(1))


def test_run_goes_on_where_its_file_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    arguments: Sequence[str] = [
        "--program", str(PROGRAMS[0]), "--chunk", "20", "--seed", "3", "--json", str(out)
    ]  # fmt: skip
    assert main([*arguments, "--packets", "40"]) == 0
    assert json.loads(out.read_text())["chunks"] == 2
    assert main([*arguments, "--packets", "60"]) == 0
    result = json.loads(out.read_text())
    assert (result["chunks"], result["packets"], result["differences"]) == (3, 60, [])
    assert main([*arguments, "--packets", "60", "--seed", "4"]) == 0
    assert json.loads(out.read_text())["seed"] == 4
    assert "0 differences" in capsys.readouterr().out


def test_difference_is_reported_with_its_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Switch, "process", lambda *_: [(1, b"never")])
    out = tmp_path / "out.json"
    arguments = ["--program", str(PROGRAMS[0]), "--chunk", "5", "--packets", "10"]
    assert main([*arguments, "--json", str(out)]) == 1
    found = json.loads(out.read_text())["differences"]
    assert [d["chunk"] for d in found] == [0, 1]
    assert "6e65766572" in found[0]["what"]

"""The engines against each other: the same frames and table writes, everything compared.

    python -m kvcast.switchsim.difftest --packets N --seed S [--json FILE]
        [--program FILE.json] [--stf FILE_OR_FOLDER] [--generated] [--checked]

Work comes in chunks; each is made from (seed, number of the chunk) alone, on two fresh switches: a
random set-up of everything that the control plane can set, then frames, some of them between
further writes. Frames walk the program's parser, with field values that its tables know; where
there are STF scenarios, one of them gives the set-up and, told over and over, half of the frames,
and all of them give frames to damage; a few frames are noise of 0 to 9216 bytes. What is compared:
the frames that leave, after each frame; what each write answers; after each chunk the statistics,
entries with their counters, registers, counters and digests. Meters show in their colours only.

With --json the file is written after every chunk, and a run with the same seed and program goes on
where the file says that the last one stopped. Random programs (--generated) are those of
`difftest.programs`, a new one for each chunk.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvcast.service.reports import write_json
from kvcast.switchsim import loader, stf
from kvcast.switchsim.difftest import programs
from kvcast.switchsim.difftest.compare import Difference, Pair, Unusable
from kvcast.switchsim.difftest.frames import Frames, Pools
from kvcast.switchsim.difftest.writes import Writer
from kvcast.switchsim.ir import Program, ProgramError


@dataclass(frozen=True)
class Work:
    """What is tested."""

    program: Program | None
    """None: a generated one for each chunk."""
    scenarios: tuple[Path, ...] = ()
    chunk_packets: int = 1000
    checked: bool = False


def frames_of(scenario: Path) -> list[tuple[int, bytes]]:
    """(port, frame) of all that goes in, in order."""
    frames: list[tuple[int, bytes]] = []
    for line in scenario.read_text().splitlines():
        words = line.split()
        if words and words[0] == "packet":
            frames.append((int(words[1]), bytes.fromhex("".join(words[2:]))))
    return frames


def setup_of(scenario: Path) -> str:
    """The scenario without what goes in and comes out."""
    lines = [line for line in scenario.read_text().splitlines() if line.split()]
    left_out = ("packet", "expect", "check_counter", "wait", "remove")
    return "\n".join(line for line in lines if line.split()[0] not in left_out)


@dataclass
class ChunkResult:
    packets: int = 0
    frames_out: int = 0
    writes: int = 0
    refused: str = ""


def run_chunk(work: Work, seed: int, number: int) -> ChunkResult:
    """Raises Difference."""
    rng = random.Random(f"{seed}.{number}")
    result = ChunkResult()
    program = work.program
    cache = program is not None
    if program is None:
        source = programs.generate(random.Random(f"{seed}.{number}.program"))
        program = loader.load(json.dumps(source), f"generated {seed}.{number}")
    try:
        pair = Pair(program, seed, checked=work.checked, cache=cache)
    except Unusable as error:
        result.refused = str(error)
        return result
    pools = Pools(rng, program)
    writer = Writer(rng, pair, pools)
    story: list[tuple[int, bytes]] = []
    if work.scenarios:
        scenario = rng.choice(work.scenarios)
        story = frames_of(scenario)
        stf.Scenario(pair.reference).run(setup_of(scenario))
        stf.Scenario(pair.compiled).run(setup_of(scenario))
        if rng.random() < 0.4:
            writer.set_up()
        elif rng.random() < 0.4:
            for name in writer.loose:
                writer.default(name)
    else:
        writer.set_up()
    corpus = [one for path in work.scenarios for one in frames_of(path)]
    frames = Frames(rng, program, pools, story, corpus)
    now_us = rng.randrange(1 << 40)
    writing = rng.choice((0.0, 0.02, 0.2))
    for _ in range(work.chunk_packets):
        if rng.random() < writing:
            writer.write()
            result.writes += 1
        now_us = max(0, now_us + rng.choice((0, 1, 10, 1000, 100_000, -5)))
        result.frames_out += pair.process(*frames.frame(), now_us)
        result.packets += 1
    pair.compare()
    return result


@dataclass
class Progress:
    """What the file says."""

    program: str
    seed: int
    chunk_packets: int
    checked: bool
    chunks: int = 0
    packets: int = 0
    frames_out: int = 0
    writes: int = 0
    refused: int = 0
    seconds: float = 0.0
    differences: list[dict[str, object]] = field(default_factory=list)

    def same_work(self, other: Progress) -> bool:
        mine = (self.program, self.seed, self.chunk_packets, self.checked)
        return mine == (other.program, other.seed, other.chunk_packets, other.checked)


def run(work: Work, progress: Progress, packets: int, save: Callable[[], None]) -> None:
    """Go on until so many packets are compared."""
    reported = time.monotonic()
    while progress.packets < packets:
        started = time.monotonic()
        try:
            result = run_chunk(work, progress.seed, progress.chunks)
            progress.packets += result.packets
            progress.frames_out += result.frames_out
            progress.writes += result.writes
            progress.refused += bool(result.refused)
            if work.program is not None and result.refused:
                raise ProgramError(result.refused)
        except Difference as difference:
            text = str(difference)
            progress.differences.append({"chunk": progress.chunks, "what": text[:4000]})
            progress.packets += work.chunk_packets
            print(f"chunk {progress.chunks}: {text[:2000]}", flush=True)
        progress.chunks += 1
        progress.seconds += time.monotonic() - started
        save()
        if time.monotonic() - reported > 10:
            reported = time.monotonic()
            print(
                f"{progress.packets} packets, {progress.frames_out} frames out, "
                f"{len(progress.differences)} differences, "
                f"{progress.packets / progress.seconds:.0f} packets/s",
                flush=True,
            )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.switchsim.difftest",
        description="Run the compiled engine against the reference engine on random packets.",
    )
    parser.add_argument("--packets", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=1000, help="packets of one set-up")
    parser.add_argument("--first-chunk", type=int, default=0, help="start here, to repeat one")
    parser.add_argument("--program", type=Path, help="a compiled program (BMv2 JSON)")
    parser.add_argument("--stf", type=Path, help="scenarios that give set-ups and frames")
    parser.add_argument("--generated", action="store_true", help="a new program for every chunk")
    parser.add_argument("--checked", action="store_true", help="with bounds checks compiled in")
    parser.add_argument("--json", type=Path, help="write results here, and go on from them")
    options = parser.parse_args(argv)
    if options.generated == (options.program is not None):
        parser.error("give --program or --generated")
    program = None if options.program is None else loader.load_file(options.program)
    scenarios = () if options.stf is None else tuple(stf.find_scenarios(options.stf))
    work = Work(program, scenarios, options.chunk, options.checked)
    name = "generated" if options.program is None else str(options.program.name)
    progress = Progress(name, options.seed, options.chunk, options.checked, options.first_chunk)
    if options.json is not None and options.json.exists():
        old = Progress(**json.loads(options.json.read_text()))
        if old.same_work(progress):
            progress = old

    def save() -> None:
        if options.json is not None:
            write_json(options.json, vars(progress))

    run(work, progress, options.packets, save)
    print(
        f"{progress.packets} packets in {progress.chunks} chunks, {progress.frames_out} frames "
        f"out, {progress.writes} writes, {progress.refused} programs refused, "
        f"{len(progress.differences)} differences, {progress.seconds:.0f} s"
    )
    return 1 if progress.differences else 0

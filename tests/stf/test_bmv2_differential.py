"""Both engines against BMv2 itself, on random frames.

simple_switch_grpc reads frames from a pcap file and writes one per port, so this needs neither
root nor network interfaces; it needs the program, on PATH or as KVCAST_SIMPLE_SWITCH_GRPC. With
KVCAST_STF_SAMPLES=FOLDER (p4c's samples, compiled: NAME.json and NAME.stf) it also runs each of
those programs on frames of its .stf file and mutations of them.

Blind to: table entries (nobody adds any), timing, the order of frames, and
what P4 leaves undefined (BMv2 reads old values from invalid headers, or stops), from which the
generated frames stay away.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kvcast.switchsim import loader
from kvcast.switchsim.engine import EngineName
from kvcast.switchsim.stf import make_switch
from own_address import own_endpoint

PROGRAMS = Path(__file__).resolve().parent / "programs"
PORTS = range(16)
FRAMES = 60
PATIENCE_S = 20.0
"""How long BMv2 may take to give as many frames as we expect, on a loaded machine."""

pytestmark = pytest.mark.bmv2


def header_frame(rng: random.Random) -> bytes:
    """For headers.p4: a known kind, then small numbers."""
    body = bytes(rng.choice([0, 1, 2, 3, 4, 7, 0x80, rng.randrange(256)]) for _ in range(12))
    return bytes([rng.randrange(1, 8)]) + body[: rng.randrange(13)]


def extern_frame(rng: random.Random) -> bytes:
    """For externs.p4: no random, no failing assert, no index out of range, no digest."""
    op = rng.choice([1, 2, 3, 4, 5, 6, 8, 14, 15, 16, 17])
    index = rng.randrange(4) if op in (1, 8) else rng.randrange(256)
    return bytes([op, index]) + rng.randbytes(4 + 5 + rng.randrange(20))


def replication_frame(rng: random.Random) -> bytes:
    return bytes([rng.randrange(15), rng.randrange(256)]) + rng.randbytes(rng.randrange(30))


CASES: dict[str, Callable[[random.Random], bytes]] = {
    "headers": header_frame,
    "externs": extern_frame,
    "replication": replication_frame,
}


def write_pcap(path: Path, frames: list[bytes]) -> None:
    with path.open("wb") as out:
        out.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1))
        for number, frame in enumerate(frames):
            out.write(struct.pack("<IIII", 0, 1000 * number, len(frame), len(frame)) + frame)


def read_pcap(path: Path) -> list[bytes]:
    data = path.read_bytes() if path.exists() else b""
    frames: list[bytes] = []
    at = 24
    while at + 16 <= len(data):
        (length,) = struct.unpack_from("<I", data, at + 8)
        frames.append(data[at + 16 : at + 16 + length])
        at += 16 + length
    return frames


def run_bmv2(
    program: Path, frames: list[bytes], expected: int, folder: Path
) -> dict[int, list[bytes]]:
    """What BMv2 sends on each port for these frames, which come in on port 0."""
    binary = os.environ.get("KVCAST_SIMPLE_SWITCH_GRPC") or shutil.which("simple_switch_grpc")
    if binary is None:
        pytest.skip("needs simple_switch_grpc on PATH, or KVCAST_SIMPLE_SWITCH_GRPC")
    command = [binary, "--use-files", "0", "--thrift-port", "0"]
    for port in PORTS:
        write_pcap(folder / f"p{port}_in.pcap", frames if port == 0 else [])
        command += ["-i", f"{port}@{folder}/p{port}"]
    command += [str(program), "--", "--grpc-server-addr", own_endpoint()]

    def sent() -> dict[int, list[bytes]]:
        return {port: read_pcap(folder / f"p{port}_out.pcap") for port in PORTS}

    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            time.sleep(0.2)
            assert process.poll() is None, f"BMv2 stopped with {process.returncode}"
            if sum(map(len, sent().values())) >= expected:
                break
        time.sleep(0.5)  # for frames that should not come
    finally:
        process.terminate()
        process.wait()
    return sent()


def run_ours(engine: EngineName, program: Path, frames: list[bytes]) -> dict[int, list[bytes]]:
    """What an engine of ours sends on each port for the same frames."""
    switch = make_switch(engine)
    switch.load(loader.load_file(program))
    sent: dict[int, list[bytes]] = {port: [] for port in PORTS}
    for number, frame in enumerate(frames):
        for port, out in switch.process(0, frame, 1000 * number):
            if port in sent:  # what BMv2 sends to a port that is not there is lost
                sent[port].append(out)
    return sent


def in_any_order(sent: dict[int, list[bytes]]) -> dict[int, list[bytes]]:
    """BMv2 recirculates in parallel with what comes in, so the order on a port is its own."""
    return {port: sorted(frames) for port, frames in sent.items()}


def compare(program: Path, frames: list[bytes], folder: Path) -> int:
    """Frames that all three have sent alike."""
    reference = run_ours("reference", program, frames)
    compiled = run_ours("llvm", program, frames)
    assert compiled == reference
    count = sum(map(len, reference.values()))
    theirs = run_bmv2(program, frames, count, folder)
    assert in_any_order(theirs) == in_any_order(reference)
    return count


def seeded() -> random.Random:
    seed = int(os.environ.get("KVCAST_SEED", "20"))
    print(f"repeat with KVCAST_SEED={seed}")
    return random.Random(seed)


@pytest.mark.parametrize("name", CASES)
def test_engines_and_bmv2_send_the_same_frames(name: str, tmp_path: Path) -> None:
    rng = seeded()
    frames = [CASES[name](rng) for _ in range(FRAMES)]
    assert compare(PROGRAMS / f"{name}.json", frames, tmp_path), "a comparison of nothing"


def frames_of(stf: Path, rng: random.Random) -> list[bytes]:
    """The frames that an STF file sends, and as many with bits changed, cut, or made longer."""
    frames = [
        bytes.fromhex("".join(line.split()[2:]).rstrip("$").replace("*", "0"))
        for line in stf.read_text().splitlines()
        if line.lower().startswith("packet ")
    ]
    mutated = []
    for frame in frames or [rng.randbytes(64)]:
        for _ in range(max(1, 30 // len(frames or [b""]))):
            changed = bytearray(frame)
            for _ in range(rng.randrange(4)):
                if changed:
                    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            cut = rng.randrange(len(changed) + 1) if rng.random() < 0.2 else len(changed)
            mutated.append(bytes(changed[:cut]) + rng.randbytes(rng.choice([0, 0, 0, 7, 40])))
    return frames + mutated


SAMPLES = sorted(Path(os.environ.get("KVCAST_STF_SAMPLES", os.devnull)).glob("*.stf"))


BMV2_DIFFERS = {
    "issue1097-2-bmv2": "its ingress and egress run in parallel, and share a register",
    "header-stack-ops-bmv2": "it reads an invalid header, in which it finds old values or none",
    "runtime-index-bmv2": "it aborts on a header stack's index out of bounds",
    "runtime-index-2-bmv2": "it aborts on a header stack's index out of bounds",
}
"""Samples on whose frames BMv2 does no definite thing."""


@pytest.mark.skipif(not SAMPLES, reason="KVCAST_STF_SAMPLES names no folder of compiled samples")
@pytest.mark.parametrize("stf", SAMPLES, ids=lambda path: path.stem)
def test_engines_and_bmv2_do_the_same_with_a_sample(stf: Path, tmp_path: Path) -> None:
    program = stf.with_suffix(".json")
    if not program.exists():
        pytest.skip("p4c refuses the program")
    if stf.stem in BMV2_DIFFERS:
        pytest.xfail(f"BMv2: {BMV2_DIFFERS[stf.stem]}")
    compare(program, frames_of(stf, seeded()), tmp_path)

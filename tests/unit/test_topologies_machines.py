"""The machines runner, as far as it goes without booting: what is missing, what is booted, and how
commands get in and out. `make test-rdma` boots.
"""

from __future__ import annotations

import lzma
import signal
from pathlib import Path

import pytest
from kvcast.topologies import machine_image, machines
from kvcast.topologies.machine_image import ImageError, Kernel, build_image, find_kernel
from kvcast.topologies.machines import Job, MachineNetwork, begin
from kvcast.topologies.network import NetworkError
from kvcast.topologies.star import Star

RELEASE = "6.1.0-test"


def make_kernel(root: Path, vmlinuz: bytes) -> Kernel:
    modules = root / "lib/modules" / RELEASE
    for name in (*machine_image._FIRST_MODULES, "drivers/infiniband/sw/rxe/rdma_rxe"):
        path = modules / f"kernel/{name}.ko"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    (modules / "modules.dep").touch()
    (root / "boot").mkdir()
    (root / f"boot/vmlinuz-{RELEASE}").write_bytes(vmlinuz)
    return Kernel(root / f"boot/vmlinuz-{RELEASE}", modules)


def entries_of(archive: bytes) -> dict[str, bytes]:
    """The files of a cpio archive ("newc"), in their order."""
    entries, at = {}, 0
    while True:
        assert archive[at : at + 6] == b"070701"
        words = [int(archive[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        size, name_size = words[6], words[11]
        name = archive[at + 110 : at + 110 + name_size - 1].decode()
        start = at + 110 + name_size
        start += -start % 4
        if name == "TRAILER!!!":
            return entries
        entries[name] = archive[start : start + size]
        at = start + size
        at += -at % 4


def test_the_newest_kernel_with_soft_roce_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(machine_image.KERNEL_VARIABLE, str(tmp_path))
    assert find_kernel() is None
    kernel = make_kernel(tmp_path, b"")
    assert find_kernel() == kernel
    assert kernel.release == RELEASE


def test_an_image_is_the_kernel_unpacked_and_the_modules_in_their_order(tmp_path: Path) -> None:
    kernel = make_kernel(tmp_path, b"head" + lzma.compress(b"a kernel") + b"tail")
    busybox = tmp_path / "busybox"
    busybox.write_bytes(b"a shell")
    image = build_image(kernel, busybox, tmp_path)
    assert image.kernel.read_bytes() == b"a kernel"
    assert image.modules_root == tmp_path
    entries = entries_of(machine_image._archive(kernel, busybox))
    assert entries["bin/busybox"] == b"a shell"
    assert entries["init"].startswith(b"#!/bin/busybox sh\n")
    modules = [data.decode() for name, data in entries.items() if name.startswith("mod/")]
    assert modules == list(machine_image._FIRST_MODULES)


def test_a_kernel_that_is_packed_in_another_way_is_refused(tmp_path: Path) -> None:
    kernel = make_kernel(tmp_path, b"something else")
    with pytest.raises(ImageError, match="xz"):
        build_image(kernel, tmp_path / "busybox", tmp_path)


def test_what_is_missing_is_named_with_its_package_and_nothing_boots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(machine_image.KERNEL_VARIABLE, str(tmp_path))
    monkeypatch.setattr(machines, "_program", lambda _name: None)
    lacks = "\n".join(machines.missing())
    for package in ("qemu-system-x86", "busybox-static", "kmod", "linux-image"):
        assert package in lacks
    network = MachineNetwork(Star.of(1), tmp_path / "run")
    with pytest.raises(NetworkError, match="qemu-system-x86"):
        network.up()
    network.down()
    assert machines.main(["--missing"]) == 3


def test_each_command_has_a_number_of_its_own(tmp_path: Path) -> None:
    begin(tmp_path, ["echo", "a b"], {"NAME": "it's"})
    begin(tmp_path, ["true"], {})
    assert (tmp_path / "0.sh").read_text() == "export NAME='it'\"'\"'s'\nexec echo 'a b'\n"
    assert (tmp_path / "1.sh").read_text() == "exec true\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.sh", "1.sh"]


def test_a_job_tells_its_output_and_its_status(tmp_path: Path) -> None:
    job = Job(tmp_path, 3)
    assert (job.status(), job.output()) == (None, "")
    (tmp_path / "3.out").write_text("said")
    (tmp_path / "3.status").write_text("7\n")
    done = job.wait(1.0)
    assert (done.status, done.output) == (7, "said")


def test_a_job_that_takes_too_long_is_killed_and_told_with_its_output(tmp_path: Path) -> None:
    job = Job(tmp_path, 0)
    (tmp_path / "0.out").write_text("so far")
    with pytest.raises(NetworkError, match="so far"):
        job.wait(0.01)
    assert (tmp_path / "0.kill").read_text() == str(int(signal.SIGKILL))


@pytest.mark.slow
def test_agents_code_is_compiled_here_for_the_machines_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one run has compiled, the next one only copies: no file of it is written again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    network = MachineNetwork(Star.of(1), tmp_path / "run")
    network.folder = tmp_path / "run"
    network.folder.mkdir()
    network._compile()
    first = {path.name: path.stat().st_ino for path in (tmp_path / "kept").rglob("*.o")}
    assert len(first) >= 5
    copied = list(network.folder.glob("cache/kvcast/native/*.o"))
    assert {path.name for path in copied} == set(first)
    network._compile()
    again = {path.name: path.stat().st_ino for path in (tmp_path / "kept").rglob("*.o")}
    assert again == first

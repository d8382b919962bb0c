"""What a virtual machine boots: Debian's kernel, and a first root file system in memory.

Owns: where the kernel is found, which of its modules are loaded before there is a root file system,
and the archive that loads them. Must not know: what runs in the machine, or how it is started.

The machine's root is this machine's, read-only over virtio-9p, so what is installed here runs
there, and no disk image is made. Two folders are its own (`/tmp`, `/dev/shm`), and the run's folder
is shared for writing.
"""

from __future__ import annotations

import gzip
import lzma
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

KERNEL_VARIABLE: Final = "KVCAST_GUEST_KERNEL"
"""Names a folder that has `boot/vmlinuz-*` and `lib/modules/*`, as `dpkg-deb -x` leaves them."""
SOFT_ROCE: Final = "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko"

_FIRST_MODULES: Final = (
    *("drivers/virtio/virtio_ring", "drivers/virtio/virtio"),
    *("drivers/virtio/virtio_pci_modern_dev", "drivers/virtio/virtio_pci_legacy_dev"),
    *("drivers/virtio/virtio_pci", "fs/netfs/netfs", "fs/fscache/fscache"),
    *("net/9p/9pnet", "fs/9p/9p", "net/9p/9pnet_virtio"),
    *("net/core/failover", "drivers/net/net_failover", "drivers/net/virtio_net"),
)
"""In the order in which they need each other."""

_INIT: Final = """\
#!/bin/busybox sh
B=/bin/busybox
$B mount -t proc proc /proc; $B mount -t sysfs sys /sys; $B mount -t devtmpfs dev /dev
for m in /mod/*.ko; do $B insmod $m; done
O=trans=virtio,version=9p2000.L,msize=262144
$B mount -t 9p -o $O,ro,cache=loose root /newroot
for d in /tmp /run; do $B mount -t tmpfs tmpfs /newroot$d; done
for a in $($B cat /proc/cmdline); do case $a in kvcast.*) eval "${a#kvcast.}";; esac; done
$B mkdir -p /newroot$shared
$B mount -t 9p -o $O shared /newroot$shared
n=0
for d in $(echo $visible | $B tr , ' '); do
  $B mkdir -p /newroot$d
  $B mount -t 9p -o $O,ro,cache=loose visible$n /newroot$d
  n=$((n+1))
done
for d in dev proc sys; do $B mount --move /$d /newroot/$d; done
exec $B switch_root /newroot /bin/sh $script
"""


class ImageError(RuntimeError):
    """There is nothing to boot, and why."""


@dataclass(frozen=True)
class Kernel:
    """A kernel with Soft-RoCE: its compressed image, and the folder of its modules
    (`.../lib/modules/RELEASE`)."""

    vmlinuz: Path
    modules: Path

    @property
    def release(self) -> str:
        return self.modules.name


def find_kernel() -> Kernel | None:
    """The newest kernel with Soft-RoCE that is unpacked where KVCAST_GUEST_KERNEL says, or else
    installed; None if there is none."""
    named = os.environ.get(KERNEL_VARIABLE)
    root = Path(named) if named else Path("/")
    for driver in sorted(root.glob(f"lib/modules/*/{SOFT_ROCE}"), reverse=True):
        modules = root / "lib/modules" / driver.relative_to(root / "lib/modules").parts[0]
        vmlinuz = root / "boot" / f"vmlinuz-{modules.name}"
        if vmlinuz.exists():
            return Kernel(vmlinuz.resolve(), modules.resolve())
    return None


@dataclass(frozen=True)
class Image:
    """What QEMU is given, and where the machine finds its other modules."""

    kernel: Path
    initramfs: Path
    modules_root: Path
    """For `modprobe -d`."""


def build_image(kernel: Kernel, busybox: Path, folder: Path) -> Image:
    """Make the files in `folder`; ImageError if the kernel is not what it should be."""
    vmlinux = folder / "vmlinux"
    vmlinux.write_bytes(_unpacked(kernel.vmlinuz))
    initramfs = folder / "initramfs"
    initramfs.write_bytes(gzip.compress(_archive(kernel, busybox), 1))
    return Image(vmlinux, initramfs, _modules_root(kernel, folder))


def _unpacked(vmlinuz: Path) -> bytes:
    """The kernel itself, which boots three times as fast as if it had to unpack itself."""
    data = vmlinuz.read_bytes()
    start = data.find(b"\xfd7zXZ\x00")
    if start < 0:
        raise ImageError(f"{vmlinuz}: not compressed with xz, as Debian's kernels are")
    return lzma.LZMADecompressor().decompress(data[start:])


def _modules_root(kernel: Kernel, folder: Path) -> Path:
    """A folder with `lib/modules/RELEASE`, where the modules' dependencies are known."""
    if (kernel.modules / "modules.dep").exists():
        return kernel.modules.parents[2]
    place = folder / "modules/lib/modules" / kernel.release
    place.mkdir(parents=True, exist_ok=True)
    for entry in kernel.modules.iterdir():
        link = place / entry.name
        if not link.exists():
            link.symlink_to(entry)
    root = folder / "modules"
    subprocess.run(["/sbin/depmod", "-b", str(root), kernel.release], check=True, timeout=60)
    return root


def _archive(kernel: Kernel, busybox: Path) -> bytes:
    """The first root file system, as a cpio archive ("newc")."""
    entries = [(name, 0o40755, b"") for name in ("bin", "dev", "mod", "newroot", "proc", "sys")]
    entries += [
        ("init", 0o100755, _INIT.encode()),
        ("bin/busybox", 0o100755, busybox.read_bytes()),
    ]
    for number, module in enumerate(_FIRST_MODULES, 10):
        path = kernel.modules / f"kernel/{module}.ko"
        try:
            entries.append((f"mod/{number}-{path.name}", 0o100644, path.read_bytes()))
        except OSError as error:
            raise ImageError(f"{path}: {error.strerror}") from error
    entries.append(("TRAILER!!!", 0, b""))
    archive = bytearray()
    for inode, (name, mode, data) in enumerate(entries, 1):
        encoded = name.encode() + b"\0"
        words = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
        archive += b"070701" + b"".join(b"%08x" % word for word in words) + encoded
        archive += bytes(-len(archive) % 4) + data
        archive += bytes(-len(archive) % 4)
    return bytes(archive)

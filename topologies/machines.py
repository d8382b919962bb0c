"""The machines runner: every node a QEMU virtual machine with Soft-RoCE, so that agents have RDMA
verbs where no network card has them.

Owns: what such machines need of this one, how they are started and ended, and how commands run in
them. Must not know: what is run.

A machine's first network card is a port of the switch: QEMU puts each Ethernet frame in one UDP
datagram, which is what a `udp` port of `kvcast switch` takes. So real RoCE frames go through the
real P4 program, and nothing here needs root. Its second card leads to this machine's loopback (at
`HOST_ADDRESS`), where the controller is: a management network, as racks have them. The machine is
emulated (TCG), so it runs anywhere, and speeds inside compare with nothing outside.

Commands are files in the run's folder, which both sides see: the machine looks for the next one,
and writes what it prints, and its exit status, beside it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvcast.native.jit import PROCESSOR_VARIABLE
from kvcast.topologies.machine_image import (
    KERNEL_VARIABLE,
    Image,
    ImageError,
    build_image,
    find_kernel,
)
from kvcast.topologies.network import NetworkError
from kvcast.topologies.part import die_with_parent
from kvcast.topologies.processes import TunnelNetwork
from kvcast.topologies.star import Host, Star

HOST_ADDRESS: Final = "10.0.2.2"
"""What a machine calls the loopback address 127.0.0.1 of this one."""
MTU_BYTES: Final = 9000
POOL_MTU_BYTES: Final = 4200
"""Of the pool's own frames: chunks of 4 KiB, as RDMA's packets have them."""
RDMA_ADDRESS: Final = "10.77.0.250"
RDMA_MAC: Final = "02:6b:76:00:00:fa"
"""The pool's own, which no machine has."""
DEVICE: Final = "rxe0"
"""The name of a machine's RDMA device."""
MEMORY_MIB: Final = 640
DEVICE_MIB: Final = 64
"""Of memory beyond that, which the kernel takes for persistent memory."""
MEMORY_DEVICE: Final = "/dev/dax0.0"
"""What it makes of it."""
WINDOW_SEGMENTS: Final = 64
"""Of 64 chunks of a KiB: what a reader asks for at once while answers are shared."""
_CACHE: Final = "/tmp/cache"
"""Where a machine has its compiled code."""
_PROCESSOR: Final = "Nehalem"
"""QEMU's name of the machines' processor, and, in small letters, LLVM's."""
BOOT_S: Final = 240.0
LIFE_S: Final = 1800
"""No machine lives longer, whatever becomes of who started it."""
SOCKET: Final = "/tmp/kvcast.sock"
"""Where a machine's agent listens for engines."""
_BUFFER_BYTES: Final = 8 << 20
_PYVERBS: Final = Path("/usr/lib/python3/dist-packages/pyverbs")
_POLL_S: Final = 0.05

_SCRIPT: Final = """\
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp LC_ALL=C.UTF-8
exec > {folder}/log 2>&1
mkdir -p /dev/pts /dev/shm; mount -t devpts devpts /dev/pts; mount -t tmpfs shm /dev/shm
for m in crc32_generic configfs rdma_rxe rdma_ucm veth; do modprobe -d {modules} $m; done
mount -t configfs configfs /sys/kernel/config
for m in nd_e820 dax_pmem device_dax; do modprobe -d {modules} $m; done
(
  cd /sys/bus/nd
  cat /proc/sys/kernel/random/uuid > devices/dax0.0/uuid
  echo ram > devices/dax0.0/mode
  echo 2097152 > devices/dax0.0/align
  echo namespace0.0 > devices/dax0.0/namespace
  echo dax0.0 > drivers/dax_pmem/bind
)
ip link set lo up
ip link set eth0 mtu {mtu} up
ip address add {ip}/24 dev eth0
{neighbours}
ip link set eth1 up && ip address add 10.0.2.15/24 dev eth1
rdma link add {device} type rxe netdev eth0
cp -r {folder}/../cache {cache}; chmod -R go-w {cache}
ulimit -l unlimited
n=0
touch {folder}/ready
while [ ! -e {folder}/off ]; do
  if [ -e {folder}/$n.sh ]; then
    (
      setsid sh {folder}/$n.sh < /dev/null > {folder}/$n.out 2>&1 &
      echo $! > {folder}/$n.pid
      wait $!
      echo $? > {folder}/$n.tmp; mv {folder}/$n.tmp {folder}/$n.status
    ) &
    n=$((n+1))
  else
    for k in {folder}/*.kill; do
      [ -e $k ] || continue
      p=${{k%.kill}}.pid
      [ -s $p ] && kill -$(cat $k) -- -$(cat $p)
      rm $k
    done
    sleep 0.1
  fi
done
sync; echo o > /proc/sysrq-trigger; sleep 20
"""


def missing() -> list[str]:
    """What the runner lacks on this machine: one line each, with Debian's package."""
    lacks = []
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return ["Linux on x86-64: what runs in the machines is what is installed here"]
    for program, package in (
        ("qemu-system-x86_64", "qemu-system-x86"),
        ("busybox", "busybox-static"),
        ("rdma", "iproute2"),
        ("modprobe", "kmod"),
        ("ib_read_bw", "perftest"),
    ):
        if _program(program) is None:
            lacks.append(f"{program} (Debian: {package})")
    if not Path("/etc/libibverbs.d/rxe.driver").exists():
        lacks.append("Soft-RoCE's part in libibverbs (Debian: ibverbs-providers, rdma-core)")
    if not _PYVERBS.is_dir():
        lacks.append("pyverbs (Debian: python3-pyverbs)")
    elif not any(_PYVERBS.glob(f"device.{sys.implementation.cache_tag}*")):
        lacks.append(f"pyverbs for this Python ({sys.implementation.cache_tag}), as Debian's is")
    if find_kernel() is None:
        lacks.append(
            "a kernel with rdma_rxe (Debian: apt-get download linux-image-6.1.0-*-amd64, "
            f"dpkg-deb -x it, and name the folder in {KERNEL_VARIABLE})"
        )
    return lacks


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin")


@dataclass(frozen=True)
class Done:
    """How a command in a machine ended."""

    status: int
    output: str


class Job:
    """A command that runs in a machine."""

    def __init__(self, folder: Path, number: int) -> None:
        self._base = folder / str(number)

    def _file(self, kind: str) -> Path:
        return self._base.with_suffix(f".{kind}")

    @property
    def output_path(self) -> Path:
        return self._file("out")

    def output(self) -> str:
        """What it has printed until now."""
        try:
            return self.output_path.read_text(errors="replace")
        except OSError:
            return ""

    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        try:
            return int(self._file("status").read_text())
        except (OSError, ValueError):
            return None

    def signal(self, number: signal.Signals) -> None:
        """Send it, and what it has started, a signal."""
        temporary = self._file("signal")
        temporary.write_text(str(int(number)))
        temporary.rename(self._file("kill"))

    def wait(self, timeout_s: float) -> Done:
        """Wait for its end; NetworkError, and SIGKILL, where it takes longer."""
        end = time.monotonic() + timeout_s
        while (status := self.status()) is None:
            if time.monotonic() > end:
                self.signal(signal.SIGKILL)
                raise NetworkError(
                    f"a command did not end within {timeout_s:g} s; it printed:\n{self.output()}"
                )
            time.sleep(_POLL_S)
        return Done(status, self.output())


class Machine:
    """One virtual machine. `tunnel`: its end and the switch's end of the link between them."""

    def __init__(
        self,
        host: Host,
        folder: Path,
        tunnel: tuple[tuple[str, int], tuple[str, int]],
        peers: Sequence[Host],
    ) -> None:
        self.host = host
        self.folder = folder
        self._tunnel = tunnel
        self._peers = peers
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, image: Image, *, shared: Path, visible: Sequence[Path]) -> None:
        """Begin to boot. `shared`: the folder that both sides write; `visible`: those that the
        machine reads although they lie where it has a file system of its own."""
        self.folder.mkdir(parents=True)
        script = self.folder / "boot.sh"
        neighbours = f"ip neighbour add {RDMA_ADDRESS} lladdr {RDMA_MAC} dev eth0\n" + "\n".join(
            f"ip neighbour add {peer.ip} lladdr {peer.mac} dev eth0"
            for peer in self._peers
            if peer != self.host
        )
        script.write_text(
            _SCRIPT.format(
                folder=self.folder,
                modules=image.modules_root,
                mtu=MTU_BYTES,
                ip=self.host.ip,
                neighbours=neighbours,
                device=DEVICE,
                cache=_CACHE,
            )
        )
        sock = self._card()
        with (self.folder / "qemu.log").open("wb") as log, sock:
            self._process = subprocess.Popen(
                self._command(image, sock.fileno(), script, shared, visible),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[sock.fileno()],
                preexec_fn=die_with_parent(),
                start_new_session=True,
            )

    def _card(self) -> socket.socket:
        """The network card: a datagram socket with more room than QEMU would ask for."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, buffer, _BUFFER_BYTES)
        sock.setblocking(False)
        sock.bind(self._tunnel[0])
        sock.connect(self._tunnel[1])
        return sock

    def _command(
        self, image: Image, card: int, script: Path, shared: Path, visible: Sequence[Path]
    ) -> list[str]:
        shares = [("root", Path("/"), True), ("shared", shared, False)]
        shares += [(f"visible{n}", folder, True) for n, folder in enumerate(visible)]
        append = [
            *("console=ttyS0", "quiet", "panic=-1", "mitigations=off", "nokaslr", "tsc=reliable"),
            f"memmap={DEVICE_MIB}M!{MEMORY_MIB}M",
            f"kvcast.shared={shared}",
            f"kvcast.script={script}",
            f"kvcast.visible={','.join(map(str, visible))}",
        ]
        return [
            # What is killed with us is `timeout`; so it takes the machine with it.
            *("timeout", "-k", "5", str(LIFE_S), "setpriv", "--pdeathsig", "KILL"),
            *("nice", "-n", "5", "qemu-system-x86_64"),
            *("-name", f"{self.host.node_id},debug-threads=on"),
            *("-M", "pc,usb=off", "-cpu", _PROCESSOR, "-accel", "tcg,thread=multi,tb-size=96"),
            *("-smp", "2", "-m", str(MEMORY_MIB + DEVICE_MIB), "-nodefaults", "-no-user-config"),
            *("-display", "none", "-no-reboot", "-serial", f"file:{self.folder / 'console'}"),
            *("-kernel", str(image.kernel), "-initrd", str(image.initramfs)),
            *("-append", " ".join(append)),
            *("-netdev", f"dgram,id=port,local.type=fd,local.str={card}", "-device"),
            f"virtio-net-pci,netdev=port,mac={self.host.mac},host_mtu={MTU_BYTES},"
            "rx_queue_size=1024,romfile=",
            *("-netdev", "user,id=management,restrict=off", "-device"),
            "virtio-net-pci,netdev=management,romfile=",
            *(word for share in shares for word in _share(*share)),
        ]

    def wait_ready(self, timeout_s: float = BOOT_S) -> None:
        """Wait until commands can run; NetworkError with the log's tail if that takes longer."""
        assert self._process is not None
        end = time.monotonic() + timeout_s
        while not (self.folder / "ready").exists():
            if self._process.poll() is not None or time.monotonic() > end:
                raise NetworkError(f"{self.host.node_id} did not boot:\n{self.logs()}")
            time.sleep(_POLL_S)

    def logs(self) -> str:
        """What QEMU, the kernel and the boot script have said."""
        texts = []
        for name in ("qemu.log", "console", "log"):
            path = self.folder / name
            if path.exists():
                texts.append(path.read_text(errors="replace")[-4096:].strip())
        return "\n".join(filter(None, texts))

    def begin(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Job:
        """Run a command."""
        return begin(self.folder, command, environment or {})

    def run(
        self,
        command: Sequence[str],
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> Done:
        """Run a command, and wait for its end."""
        return self.begin(command, environment).wait(timeout_s)

    def processor_s(self, number: int) -> float:
        """What one of its processors has taken of this machine's so far. Other than the times that
        it counts itself, this has nothing of when others had this machine's processors."""
        assert self._process is not None
        name = f"CPU {number}/TCG"
        for child in _children(self._process.pid):
            for task in Path(f"/proc/{child}/task").iterdir():
                if (task / "comm").read_text().strip() == name:
                    return int((task / "schedstat").read_text().split()[0]) / 1e9
        raise NetworkError(f"{self.host.node_id} has no processor {number}")

    def ask_to_end(self) -> None:
        """Have the machine power itself off."""
        if self.folder.exists():
            (self.folder / "off").touch()

    def end(self, grace_s: float = 5.0) -> None:
        """See it off, or kill it after `grace_s`."""
        if self._process is None:
            return
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def begin(folder: Path, command: Sequence[str], environment: Mapping[str, str]) -> Job:
    """Have the machine of that folder run a command, its next."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    lines.append(f"exec {shlex.join(command)}")
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".new", delete=False) as file:
        file.write("\n".join(lines) + "\n")
    number = 0
    while True:
        try:
            os.link(file.name, folder / f"{number}.sh")  # fails where another has taken the number
            break
        except FileExistsError:
            number += 1
    os.unlink(file.name)
    return Job(folder, number)


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _share(tag: str, folder: Path, read_only: bool) -> list[str]:
    options = f"local,id={tag},path={folder},security_model=none,multidevs=remap"
    if read_only:
        options += ",readonly=on"
    return ["-fsdev", options, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]


class MachineNetwork(TunnelNetwork):
    """A star whose hosts are machines. `folder`: where the run's files lie; None: a temporary one,
    which `down` removes."""

    def __init__(self, star: Star, folder: Path | None = None) -> None:
        super().__init__(star)
        self._given = folder
        self.machines: dict[str, Machine] = {}
        self.folder = Path()

    def up(self) -> None:
        """Boot all machines; NetworkError where something is missing or does not come up."""
        lacks = missing()
        if lacks:
            raise NetworkError("no virtual machines here; missing: " + "; ".join(lacks))
        super().up()
        self.folder = self._given or Path(tempfile.mkdtemp(prefix="kvcast-machines-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        kernel, busybox = find_kernel(), _program("busybox")
        assert kernel is not None
        assert busybox is not None
        try:
            image = build_image(kernel, Path(busybox), self.folder)
        except ImageError as error:
            raise NetworkError(str(error)) from error
        self._link_pyverbs()
        self._compile()
        visible = _hidden(
            Path(sys.prefix), Path(sys.base_prefix), Path(__file__).resolve().parents[1]
        )
        for host in self.star.hosts:
            machine = Machine(
                host,
                self.folder / host.node_id,
                (self.node_side(host), self.switch_side(host)),
                self.star.hosts,
            )
            self.machines[host.node_id] = machine
            machine.start(image, shared=self.folder, visible=visible)
        for machine in self.machines.values():
            machine.wait_ready()

    def _link_pyverbs(self) -> None:
        """A folder on Python's path with pyverbs and nothing else of Debian's."""
        place = self.folder / "python"
        place.mkdir(exist_ok=True)
        (place / "pyverbs").symlink_to(_PYVERBS)

    @property
    def environment(self) -> dict[str, str]:
        """What commands in the machines need: Python finds pyverbs, and code that was compiled
        here for such a machine."""
        return {
            "PYTHONPATH": str(self.folder / "python"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "XDG_CACHE_HOME": _CACHE,
            PROCESSOR_VARIABLE: _PROCESSOR.lower(),
        }

    def _compile(self) -> None:
        """Have this machine compile what runs in the emulated ones, which take a minute for it
        each: kvcast's modules where they lie, since those of an editable installation are not yet;
        and agents' machine code, of which each machine has a copy of its own."""
        package = Path(__file__).parents[1]  # as it is imported, not where links lead
        kept = _kept_cache()
        environment = os.environ | self.environment | {"XDG_CACHE_HOME": str(kept)}
        for words in (["compileall", "-q", str(package)], ["kvcast.hostagent.network.compiled"]):
            words = [sys.executable, "-m", *words]
            done = subprocess.run(words, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise NetworkError(f"compiling for the machines: {done.stdout}{done.stderr}")
        shutil.copytree(kept, self.folder / "cache", dirs_exist_ok=True)

    def prefix(self, part: str) -> list[str]:
        """A node's agent runs in its machine; what carries its words here ends with it."""
        machine = self.machines.get(part)
        if machine is None:
            return []
        variables = [f"--set={name}={value}" for name, value in self.environment.items()]
        inside = f"--inside={machine.folder}"
        return [sys.executable, "-m", "kvcast.topologies.machines", inside, *variables, "--"]

    def agent_flags(self, host: Host) -> list[str]:
        return [
            "--transport=udp",
            f"--controller={HOST_ADDRESS}:{self.agents_address[1]}",
            f"--bulk-addr={host.ip}:0",
            f"--mtu-bytes={POOL_MTU_BYTES}",
            f"--socket={SOCKET}",
            "--arena-path=/dev/shm/kvcast.arena",
            "--rdma=required",
            # Emulated processors are some fifty times slower, so readers are further apart, and
            # silence is no loss for longer.
            *("--gather-max=200", f"--window-shared={WINDOW_SEGMENTS}"),
            *("--rto-initial=10", "--rto-min=5", "--rto-max=10", "--quiet=1"),
        ]

    def _set_address(self, address: str) -> None:
        """Machines reach one address of this machine's loopback only."""
        super()._set_address(address)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.agents_address = ("127.0.0.1", probe.getsockname()[1])

    def down(self) -> None:
        """Power the machines off."""
        for machine in self.machines.values():
            machine.ask_to_end()
        for machine in self.machines.values():
            machine.end()
        self.machines.clear()
        if self._given is None and self.folder != Path():
            shutil.rmtree(self.folder, ignore_errors=True)
        super().down()


def _kept_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or Path.home() / ".cache") / "kvcast" / "machines"


def _hidden(*folders: Path) -> list[Path]:
    """Those folders that lie where a machine has a file system of its own."""
    own = [Path("/tmp"), Path("/run"), Path("/dev/shm")]
    return sorted({f for f in folders if any(f.is_relative_to(place) for place in own)})


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command in one machine that is booted for it: its output and its exit status; 3, with
    a list, where the machine lacks something here."""
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.topologies.machines",
        description="Run a command in a virtual machine with Soft-RoCE, booted for it. It sees "
        "this machine's files, and can write to /tmp/, which is its own.",
    )
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for the command")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--missing", action="store_true", help="say what is missing, and end")
    parser.add_argument("--inside", type=Path, metavar="FOLDER", help="of a machine that runs")
    parser.add_argument("command", nargs="*")
    options = parser.parse_args(argv)
    variables = dict(item.partition("=")[::2] for item in options.set)
    if options.inside is not None:
        return _follow_to_the_end(begin(options.inside, options.command, variables))
    lacks = missing()
    for line in lacks:
        print(f"missing: {line}", file=sys.stderr)
    if lacks or options.missing:
        return 3 if lacks else 0
    network = MachineNetwork(Star.of(1))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the machine is ended
    try:
        network.up()
        machine = network.machines[network.star.hosts[0].node_id]
        command = ["sh", "-c", f'cd {shlex.quote(os.getcwd())} && exec "$@"', "sh"]
        job = machine.begin([*command, *options.command], {**network.environment, **variables})
        return _follow(job, options.limit)
    except NetworkError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        network.down()


def _follow_to_the_end(job: Job) -> int:
    """Print what a command prints, and hand on a signal that asks it to end."""
    signal.signal(signal.SIGTERM, lambda *_: job.signal(signal.SIGTERM))
    return _follow(job, LIFE_S)


def _follow(job: Job, limit_s: float) -> int:
    """Print what a command prints, until it ends."""
    printed = 0
    end = time.monotonic() + limit_s
    while True:
        status = job.status()
        output = job.output()
        sys.stdout.write(output[printed:])
        sys.stdout.flush()
        printed = len(output)
        if status is not None:
            return status
        if time.monotonic() > end:
            job.signal(signal.SIGKILL)
            raise NetworkError(f"the command did not end within {limit_s:g} s")
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())

"""The compiled packet loop: links in virtual time, tunnels, rings, and the change of programs.

Oracles: a link's arithmetic written out in Python (`Link`), the sockets at the far ends, and what
was sent. The program is `native_double`, so nothing here depends on P4. Cannot see: interfaces
(test_switchsim_loop_interfaces), the daemon around it (test_switch_native), speed.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import random
import resource
import select
import socket
import sys
import time
from collections.abc import Iterator

import pytest
from kvcast.native.linux import SockAddrIn
from kvcast.native.subset import Library, ctypes_of
from kvcast.switchsim.llvm.abi import EPOCH_IDLE
from kvcast.switchsim.loop import state
from kvcast.switchsim.loop.ingress import is_peer
from kvcast.switchsim.loop.runner import Emitted, NativeLoop
from kvcast.switchsim.ports.port import MAX_FRAME_BYTES, Port, PortOptions
from kvcast.switchsim.ports.udp_tunnel import UdpTunnelPort
from native_double import Double, frame_to
from port_checks import wait_until

SECOND_NS = 10**9


@contextlib.contextmanager
def loop_of(
    *ports: Port, double: Double | None = None, ring_bytes: int = 4 << 20, frames: int = 1 << 20
) -> Iterator[NativeLoop]:
    """A loop over these ports that runs the double; everything is closed in the end."""
    loop = NativeLoop(ports, ring_bytes=ring_bytes, inject_frames=frames, punt_frames=frames)
    try:
        loop.use((double or Double()).entry)
        yield loop
    finally:
        loop.close()
        for port in ports:
            port.close()


def inside(number: int, **options: object) -> Port:
    return Port(number, PortOptions(**options))  # type: ignore[arg-type]


# --- virtual time: links ------------------------------------------------------------------------


class Link:
    """What a link of a rate does with frames, told in the plainest way: one frame at a time, the
    highest priority first, at most `depth` waiting in each priority."""

    def __init__(self, bits_per_s: float, depth: int) -> None:
        self.ns_per_byte = int(8e9 / bits_per_s)
        self.depth = depth
        self.waiting: list[tuple[int, int, int]] = []  # -priority, order, size
        self.order = 0
        self.free_at = 0.0
        self.out: list[tuple[float, int]] = []
        self.dropped = 0
        self.serving: int | None = None

    def advance(self, now: float) -> None:
        while self.serving is not None and self.free_at <= now:
            self.out.append((self.free_at, self.serving))
            self.serving = None
            if self.waiting:
                self.begin(self.free_at)

    def begin(self, at: float) -> None:
        _, order, size = heapq.heappop(self.waiting)
        self.serving = order
        self.free_at = at + size * self.ns_per_byte

    def arrive(self, now: float, size: int, priority: int) -> None:
        self.advance(now)
        order = self.order
        self.order += 1
        if sum(-p == priority for p, _, _ in self.waiting) >= self.depth:
            self.dropped += 1
            return
        heapq.heappush(self.waiting, (-priority, order, size))
        if self.serving is None:
            self.begin(now)


def test_a_frame_leaves_when_its_last_bit_has_left() -> None:
    with loop_of(inside(1), inside(2, rate_bits_per_s=1e6)) as loop:
        for _ in range(3):
            loop.inject(1, frame_to(2, 125), 1000)
        # 125 bytes at 1 Mb/s take a millisecond.
        left = loop.run_until(SECOND_NS)
        assert [(e.time_ns, e.port) for e in left] == [
            (1_001_000, 2),
            (2_001_000, 2),
            (3_001_000, 2),
        ]
        assert loop.now_ns == SECOND_NS


def test_frames_that_are_not_due_yet_wait_for_the_next_call() -> None:
    with loop_of(inside(1), inside(2, rate_bits_per_s=1e6)) as loop:
        for _ in range(3):
            loop.inject(1, frame_to(2, 125), 0)
        assert len(loop.run_until(2_000_000)) == 2
        assert loop.egress_backlog(2) == 1
        assert loop.run_until(2_999_999) == []
        assert [e.time_ns for e in loop.run_until(3_000_000)] == [3_000_000]


def test_hosts_can_answer_at_the_moment_that_a_frame_reaches_them() -> None:
    """Two hosts play ball over links of a millisecond a frame: no moment is skipped."""
    with loop_of(inside(1, rate_bits_per_s=1e6), inside(2, rate_bits_per_s=1e6)) as loop:
        loop.inject(1, frame_to(2, 125), 0)
        told = []
        for _ in range(6):
            for emitted in loop.run_until(SECOND_NS, first_output=True):
                assert emitted.time_ns == loop.now_ns
                told.append((emitted.time_ns, emitted.port))
                other = 3 - emitted.port
                loop.inject(emitted.port, frame_to(other, 125), loop.now_ns)
        assert told == [(n * 1_000_000, 2 - (n + 1) % 2) for n in range(1, 7)]
        assert loop.counters["processed"] == 6


def test_an_uplink_takes_one_frame_at_a_time_and_links_of_others_are_their_own() -> None:
    """125 bytes at 1 Mb/s take a millisecond; the way out has no rate."""
    with loop_of(
        inside(1, uplink_bits_per_s=1e6), inside(2, uplink_bits_per_s=1e6), inside(3)
    ) as loop:
        for at_ns, source in ((0, 1), (0, 1), (0, 2), (500_000, 3), (5_000_000, 1)):
            loop.inject(source, frame_to(3, 125, label=source), at_ns)
        left = loop.run_until(SECOND_NS)
        told = [(e.time_ns, int.from_bytes(e.frame[15:23], "big")) for e in left]
        assert told[0] == (500_000, 3)
        assert sorted(told[1:3]) == [(1_000_000, 1), (1_000_000, 2)]
        assert told[3:] == [(2_000_000, 1), (6_000_000, 1)]
        assert loop.read_counters(1)["rx_bytes"] == 3 * 125


def test_a_way_in_and_a_way_out_follow_each_other() -> None:
    """A frame is stored before it is forwarded: two links, two times."""
    with loop_of(inside(1, uplink_bits_per_s=1e6), inside(2, rate_bits_per_s=5e5)) as loop:
        for label in range(3):
            loop.inject(1, frame_to(2, 125, label=label), 0)
        left = loop.run_until(SECOND_NS)
        assert [e.time_ns for e in left] == [3_000_000, 5_000_000, 7_000_000]


def test_an_uplink_keeps_no_more_than_its_depth_and_counts_the_rest() -> None:
    with loop_of(inside(1, uplink_bits_per_s=1e6, queue_depth=2), inside(2)) as loop:
        for label in range(5):
            loop.inject(1, frame_to(2, 125, label=label), 0)
        assert [int.from_bytes(e.frame[15:23], "big") for e in loop.run_until(SECOND_NS)] == [0, 1]
        counters = loop.read_counters(1)
        assert (counters["rx_frames"], counters["rx_queue_drops"]) == (2, 3)


def test_frames_on_an_uplink_are_freed_when_the_loop_ends() -> None:
    with loop_of(inside(1, uplink_bits_per_s=1e3), inside(2)) as loop:
        loop.inject(1, frame_to(2, 125), 0)
        assert loop.run_until(1000) == []
    # `loop_of` closes it; the allocator would abort on a frame that is freed twice


def test_frames_that_leave_at_one_moment_are_told_together() -> None:
    ports = [inside(n, rate_bits_per_s=1e6 if n < 3 else 1e5) for n in range(1, 4)]
    with loop_of(*ports, double=Double(flood_ports=3)) as loop:
        loop.inject(1, frame_to(255, 125), 0)
        assert [e.port for e in loop.run_until(SECOND_NS, first_output=True)] == [1, 2]
        assert [e.port for e in loop.run_until(SECOND_NS, first_output=True)] == [3]
        assert loop.now_ns == 10_000_000
        assert loop.run_until(SECOND_NS, first_output=True) == []
        assert loop.now_ns == SECOND_NS


def test_higher_priorities_overtake_but_never_interrupt() -> None:
    with loop_of(inside(1), inside(2, rate_bits_per_s=1e6)) as loop:
        for label, priority in enumerate((0, 0, 3, 7, 3)):
            loop.inject(1, frame_to(2, 125, priority=priority, label=label), 0)
        assert [e.frame[14] for e in loop.run_until(SECOND_NS)] == [0, 7, 3, 3, 0]


def test_each_priority_has_a_queue_of_its_own_depth() -> None:
    with loop_of(inside(1), inside(2, rate_bits_per_s=1e6, queue_depth=2)) as loop:
        for label in range(6):
            loop.inject(1, frame_to(2, 125, label=label), 0)
        loop.inject(1, frame_to(2, 125, priority=1, label=6), 0)
        labels = [int.from_bytes(e.frame[15:23], "big") for e in loop.run_until(SECOND_NS)]
        # One on the wire, two waiting; the rest has no room.
        assert labels == [0, 6, 1, 2]
        assert loop.read_counters(2)["tx_queue_drops"] == 3
        assert loop.read_counters(2)["tx_frames"] == 4


@pytest.mark.parametrize("seed", range(8))
def test_a_link_is_what_the_model_of_it_says(seed: int) -> None:
    rng = random.Random(seed)
    rate = rng.choice((1e6, 1e8, 1e9, 8e9))  # whole nanoseconds a byte
    depth = rng.choice((1, 3, 50))
    model = Link(rate, depth)
    now = 0
    cuts = sorted(rng.sample(range(3000), 20))
    with loop_of(inside(1), inside(2, rate_bits_per_s=rate, queue_depth=depth)) as loop:
        left: list[Emitted] = []
        for number in range(3000):
            size = rng.choice((60, 64, 1500, 9000))
            priority = rng.randrange(8)
            now += int(rng.expovariate(1 / (800 * model.ns_per_byte)))
            model.arrive(now, size, priority)
            assert loop.inject(1, frame_to(2, size, priority=priority, label=number), now)
            if number in cuts:
                left += loop.run_until(now)
        left += loop.run_until(now + 10**13)
        model.advance(float("inf"))
        assert loop.read_counters(2)["tx_queue_drops"] == model.dropped
    assert len(left) == len(model.out)
    for emitted, (at, label) in zip(left, model.out, strict=True):
        assert int.from_bytes(emitted.frame[15:23], "big") == label
        assert emitted.time_ns == at


def test_a_fast_link_loses_no_picoseconds() -> None:
    with loop_of(inside(1), inside(2, rate_bits_per_s=100e9, queue_depth=20_000)) as loop:
        for label in range(10_000):
            loop.inject(1, frame_to(2, 67, label=label), 0)
        # 67 bytes take 5.36 ns each.
        assert loop.run_until(SECOND_NS)[-1].time_ns == 53_600


def test_a_frame_for_several_ports_waits_at_each_for_itself() -> None:
    ports = [inside(1, rate_bits_per_s=1e6), inside(2, rate_bits_per_s=2e6), inside(3)]
    with loop_of(*ports, double=Double(flood_ports=3)) as loop:
        loop.inject(1, frame_to(255, 125), 0)
        left = loop.run_until(SECOND_NS)
        assert [(e.time_ns, e.port) for e in left] == [(0, 3), (500_000, 2), (1_000_000, 1)]


# --- virtual time: losses and traces --------------------------------------------------------------


def trace(seed: int, *, loss: float, slices: int) -> list[tuple[int, int, bytes]]:
    """Everything that left four ports for the same 2,000 arrivals."""
    rng = random.Random(7)
    arrivals = []
    now = 0
    for label in range(2000):
        now += rng.randrange(3000)
        arrivals.append((now, rng.randint(1, 4), rng.choice((1, 2, 3, 4, 255)), label))
    ports = [
        inside(n, rate_bits_per_s=1e9 if n < 4 else None, loss=loss, seed=seed) for n in range(1, 5)
    ]
    left: list[Emitted] = []
    with loop_of(*ports, double=Double(flood_ports=4)) as loop:
        for now, port, to, label in arrivals:
            loop.inject(port, frame_to(to, 64 + label % 900, label=label), now)
        for step in range(1, slices + 1):
            left += loop.run_until(now * step // slices)
        left += loop.run_until(2 * now)
    return [(e.time_ns, e.port, e.frame) for e in left]


def test_the_same_seed_gives_the_same_trace_however_the_run_is_cut() -> None:
    first = trace(1, loss=0.1, slices=1)
    assert first == trace(1, loss=0.1, slices=1)
    assert first == trace(1, loss=0.1, slices=37)
    assert first != trace(2, loss=0.1, slices=1)


def test_losses_have_the_frequency_that_was_asked_for_both_ways() -> None:
    with loop_of(inside(1, loss=0.25, seed=3), inside(2, loss=0.5, seed=3)) as loop:
        for label in range(20_000):
            loop.inject(1, frame_to(2, 64, label=label))
        left = len(loop.run_until(0))
        came, gone = loop.read_counters(1), loop.read_counters(2)
    assert came["rx_loss"] + came["rx_frames"] == 20_000
    assert 4700 < came["rx_loss"] < 5300
    assert gone["tx_loss"] + gone["tx_frames"] == came["rx_frames"]
    assert 7100 < gone["tx_loss"] < 7900
    assert left == gone["tx_frames"]


@pytest.mark.parametrize(("loss", "left"), [(0.0, 100), (1.0, 0)])
def test_no_loss_and_certain_loss(loss: float, left: int) -> None:
    with loop_of(inside(1), inside(2, loss=loss)) as loop:
        for _ in range(100):
            loop.inject(1, frame_to(2))
        assert len(loop.run_until(0)) == left


# --- bounds ---------------------------------------------------------------------------------------


def test_frames_of_impossible_length_are_dropped_and_counted() -> None:
    with loop_of(inside(1), inside(2)) as loop:
        for size in (0, 13, 14, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1):
            assert loop.inject(1, frame_to(2, size))
        assert [len(e.frame) for e in loop.run_until(0)] == [14, MAX_FRAME_BYTES]
        counts = loop.read_counters(1)
        assert (counts["rx_runts"], counts["rx_oversize"], counts["rx_frames"]) == (2, 1, 2)


def test_frames_are_carried_unchanged_whatever_their_length() -> None:
    rng = random.Random(5)
    frames = [frame_to(2, 14) + rng.randbytes(rng.randrange(10_200)) for _ in range(300)]
    with loop_of(inside(1), inside(2, rate_bits_per_s=1e9)) as loop:
        for frame in frames:
            assert loop.inject(1, frame)
        left = [e.frame for e in loop.run_until(10**13)]
    assert sorted(left) == sorted(frames)


def test_a_full_ring_refuses_and_takes_again_when_it_was_emptied() -> None:
    with loop_of(inside(1), inside(2), ring_bytes=4096) as loop:
        taken = sum(loop.inject(1, frame_to(2, 100, label=i)) for i in range(100))
        assert taken == 4096 // 120
        for turn in range(500):  # the ring's end lies anywhere in a frame
            assert loop.run_until(0)[0].frame[:6] == frame_to(2)[:6]
            assert loop.inject(1, frame_to(2, 20 + turn % 300, label=turn))
            (left,) = loop.run_until(0)
            assert left.frame == frame_to(2, 20 + turn % 300, label=turn)
            assert loop.inject(1, frame_to(2, 100))


def test_a_ring_is_bounded_in_frames() -> None:
    with loop_of(inside(1), inside(2), frames=3) as loop:
        assert [loop.inject(1, frame_to(2)) for _ in range(4)] == [True, True, True, False]


def test_what_python_does_not_fetch_is_dropped_and_counted() -> None:
    with loop_of(inside(1), inside(2), frames=5) as loop:
        loop.start()
        for label in range(9):
            wait_until(lambda label=label: loop.inject(1, frame_to(2, label=label)))  # type: ignore[misc]
            loop.wake()
        wait_until(lambda: loop.counters["processed"] == 9)
        assert loop.read_counters(2)["tx_queue_drops"] == 4
        assert len(loop.take()) == 5


def test_frames_without_a_program_or_a_port_are_counted() -> None:
    with loop_of(inside(1), inside(2)) as loop:
        loop.inject(1, frame_to(9))
        loop.inject(7, frame_to(2))
        assert loop.run_until(0) == []
        assert loop.counters["no_such_port"] == 2
        loop.use(None)
        loop.inject(1, frame_to(2))
        assert loop.run_until(0) == []
        assert loop.counters["no_program"] == 1


@pytest.mark.slow
def test_memory_stays_flat_over_two_million_frames() -> None:
    with loop_of(inside(1), inside(2, rate_bits_per_s=1e9, queue_depth=64)) as loop:
        frames = [frame_to(2, size, label=size) for size in range(60, 1560, 3)]

        def move(count: int) -> None:
            for at in range(0, count, 1000):
                for i in range(1000):
                    loop.inject(1, frames[(at + i) % len(frames)], (at + i) * 2000)
                loop.run_until((at + 1000) * 2000)

        move(100_000)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(20):
            move(100_000)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096  # KiB
        assert loop.counters["processed"] == 2_100_000


def test_two_ports_cannot_have_one_number() -> None:
    with pytest.raises(ValueError, match="the same number"):
        NativeLoop([inside(1), inside(1)])


# --- real time: tunnels ---------------------------------------------------------------------------


@pytest.fixture
def peers() -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(2):
            endpoint = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            endpoint.bind(("127.0.0.1", 0))
            endpoint.settimeout(10)
            endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
            made.append(endpoint)
        yield made


def tunnel(number: int, peer: socket.socket | None = None, **options: object) -> UdpTunnelPort:
    address = None if peer is None else peer.getsockname()
    return UdpTunnelPort(number, ("127.0.0.1", 0), address, PortOptions(**options))  # type: ignore[arg-type]


def test_frames_pass_from_tunnel_to_tunnel(peers: list[socket.socket]) -> None:
    one, two = tunnel(1, peers[0]), tunnel(2, peers[1])
    with loop_of(one, two) as loop:
        loop.start()
        for label in range(500):
            sent = frame_to(2, 60 + label * 20, label=label)
            peers[0].sendto(sent, one.local)
            assert peers[1].recv(20_000) == sent
            back = frame_to(1, 60 + label, label=label)
            peers[1].sendto(back, two.local)
            assert peers[0].recv(20_000) == back
        wait_until(lambda: loop.read_counters(1)["tx_frames"] == 500)  # counted once it has gone
        counts = loop.read_counters(1)
        assert (counts["rx_frames"], counts["tx_frames"]) == (500, 500)
        assert counts["rx_bytes"] == sum(60 + label * 20 for label in range(500))


SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104


@pytest.mark.parametrize("joined", [True, False], ids=["joined", "one by one"])
def test_frames_that_come_in_one_piece_are_told_apart_and_leave_in_one(
    peers: list[socket.socket], joined: bool
) -> None:
    """As a host's kernel joins them: all of one length but the last."""
    one, two = tunnel(1, peers[0]), tunnel(2, peers[1])
    if not joined:  # what makes the kernel refuse to split: no checksum to compute
        two._socket.setsockopt(socket.SOL_SOCKET, 11, 1)  # SO_NO_CHECK
    peers[1].setsockopt(SOL_UDP, UDP_GRO, 1)
    sent = [frame_to(2, 1000, label=label) for label in range(50)] + [frame_to(2, 333, label=50)]
    with loop_of(one, two) as loop:
        loop.start()
        size = [(SOL_UDP, UDP_SEGMENT, (1000).to_bytes(2, "little"))]
        peers[0].sendmsg(sent, size, 0, one.local)
        got, messages = b"", 0
        while len(got) < sum(map(len, sent)):
            got += peers[1].recv(65_536)
            messages += 1
        assert got == b"".join(sent)
        assert messages == (1 if joined else 51)
        wait_until(lambda: loop.read_counters(2)["tx_frames"] == 51)
        assert loop.read_counters(1)["rx_frames"] == 51
        assert loop.read_counters(2)["tx_bytes"] == len(got)


def test_only_neighbours_of_one_length_leave_together(peers: list[socket.socket]) -> None:
    rng = random.Random(2)
    sizes = [rng.choice((60, 60, 60, 300, 1066, 9000)) for _ in range(300)]
    with loop_of(inside(1), tunnel(2, peers[1])) as loop:
        loop.start()
        for start in range(0, 300, 100):
            sent = [frame_to(2, size, label=i) for i, size in enumerate(sizes[start : start + 100])]
            for frame in sent:
                loop.inject(1, frame)
            loop.wake()
            assert [peers[1].recv(65_536) for _ in sent] == sent


def test_datagrams_longer_than_any_frame_are_counted(peers: list[socket.socket]) -> None:
    one = tunnel(1, peers[0])
    with loop_of(one, tunnel(2, peers[1])) as loop:
        loop.start()
        peers[0].sendto(frame_to(2, MAX_FRAME_BYTES + 1), one.local)
        peers[0].sendto(frame_to(2, 60_000), one.local)
        peers[0].sendto(b"", one.local)
        peers[0].sendto(frame_to(2), one.local)
        assert peers[1].recv(65_536) == frame_to(2)
        counts = loop.read_counters(1)
        assert (counts["rx_oversize"], counts["rx_runts"], counts["rx_frames"]) == (2, 1, 1)


def test_a_flood_at_one_port_does_not_hold_up_another(peers: list[socket.socket]) -> None:
    """All is there before the loop starts, so its own order decides."""
    flooded, quiet = tunnel(1, peers[0]), tunnel(3, peers[1])
    with loop_of(flooded, inside(2), quiet) as loop:
        peers[0].setsockopt(SOL_UDP, UDP_SEGMENT, 100)
        for start in range(0, 5000, 50):
            message = b"".join(frame_to(2, 100, label=start + i) for i in range(50))
            peers[0].sendto(message, flooded.local)
        for label in range(3):
            peers[1].sendto(frame_to(2, label=10_000 + label), quiet.local)
        loop.start()
        wait_until(lambda: loop.counters["processed"] == 5003)
        order = [int.from_bytes(e.frame[15:23], "big") for e in loop.take()]
    for label in range(3):
        assert order.index(10_000 + label) < 1000
    assert [n for n in order if n < 10_000] == list(range(5000))


def test_frames_of_a_slow_link_leave_together_and_never_too_early(
    peers: list[socket.socket],
) -> None:
    """A quantum of 50 ms holds some fifty frames of a millisecond each."""
    port = tunnel(2, peers[1], rate_bits_per_s=1e6, quantum_s=0.05)
    peers[1].setsockopt(SOL_UDP, UDP_GRO, 1)
    with loop_of(inside(1), port) as loop:
        start_s = time.monotonic()
        for label in range(150):
            loop.inject(1, frame_to(2, 125, label=label))
        loop.start()
        got, arrivals = b"", []
        while len(got) < 150 * 125:
            got += peers[1].recv(65_536)
            arrivals.append((time.monotonic() - start_s, len(got) // 125))
        assert got == b"".join(frame_to(2, 125, label=label) for label in range(150))
        # The n-th frame's last bit leaves after n milliseconds.
        assert all(at_s >= number / 1000 for at_s, number in arrivals)
        assert len(arrivals) < 30


def test_a_tunnel_without_a_peer_learns_it_from_the_first_frame(
    peers: list[socket.socket],
) -> None:
    one, two = tunnel(1), tunnel(2, peers[1])
    with loop_of(one, two) as loop:
        loop.start()
        peers[1].sendto(frame_to(1), two.local)
        wait_until(lambda: loop.read_counters(1)["tx_no_peer"] == 1)
        assert loop.peer(1) is None
        peers[0].sendto(frame_to(2), one.local)
        peers[1].recv(2000)
        assert loop.peer(1) == peers[0].getsockname()
        peers[1].sendto(frame_to(1), two.local)
        assert peers[0].recv(2000) == frame_to(1)
        # Who sends last is the peer, as with a machine that came back at another port.
        peers[1].sendto(frame_to(2), one.local)
        peers[1].recv(2000)
        assert loop.peer(1) == peers[1].getsockname()


def test_a_tunnel_believes_only_its_peer(peers: list[socket.socket]) -> None:
    one = tunnel(1, peers[0])
    with loop_of(one, inside(2)) as loop:
        loop.start()
        peers[1].sendto(frame_to(2, label=1), one.local)  # the kernel drops it
        peers[0].sendto(frame_to(2, label=2), one.local)
        wait_until(lambda: loop.counters["processed"] == 1)
        assert [e.frame for e in loop.take()] == [frame_to(2, label=2)]


@pytest.mark.parametrize(
    ("address", "believed"),
    [("127.8.8.8", True), ("10.0.0.1", True), ("10.0.0.2", False), ("192.0.2.1", False)],
)
def test_a_tunnel_learns_no_distant_peer(address: str, believed: bool) -> None:
    """Bound to 10.0.0.1, it believes that address and loopback ones."""
    loop, port, sender = (ctypes_of(kind)() for kind in (state.Loop, state.Port, SockAddrIn))
    port.local_address = int.from_bytes(socket.inet_aton("10.0.0.1"), sys.byteorder)
    sender.address = int.from_bytes(socket.inet_aton(address), sys.byteorder)
    call = Library(is_peer).call(is_peer)
    assert call(*map(ctypes.addressof, (loop, port, sender))) == believed


def test_a_peer_that_is_gone_is_counted_and_comes_back(peers: list[socket.socket]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as gone:
        gone.bind(("127.0.0.1", 0))
        address = gone.getsockname()
    port = UdpTunnelPort(2, ("127.0.0.1", 0), address)
    with loop_of(tunnel(1, peers[0]), port) as loop:
        loop.start()

        def refused() -> bool:
            loop.inject(1, frame_to(2))
            loop.wake()
            return loop.read_counters(2)["tx_refused"] > 5

        wait_until(refused)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as back:
            back.bind(address)
            back.settimeout(0.1)

            def arrives() -> (
                bool
            ):  # behind those that were meant to be refused, which may come, too
                loop.inject(1, frame_to(2, label=42))
                loop.wake()
                with contextlib.suppress(TimeoutError):
                    return back.recv(2000) == frame_to(2, label=42)
                return False

            wait_until(arrives)


def test_frames_too_long_for_a_datagram_are_counted() -> None:
    # A jumbo frame does not fit a socket whose path has no room: EMSGSIZE.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind(("127.0.0.1", 0))
        port = tunnel(2, peer)
        port._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with loop_of(inside(1), port) as loop:
            loop.start()
            loop.inject(1, frame_to(2, 10_000))
            loop.wake()
            wait_until(lambda: loop.counters["emitted"] == 1)
            wait_until(
                lambda: (
                    sum(loop.read_counters(2)[n] for n in ("tx_too_long", "tx_busy")) == 1
                    or loop.read_counters(2)["tx_frames"] == 1
                )
            )


def test_what_the_kernel_drops_is_counted(peers: list[socket.socket]) -> None:
    port = tunnel(1, peers[0])
    port._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with loop_of(port, inside(2)) as loop:
        for label in range(100):
            peers[0].sendto(frame_to(2, 1000, label=label), port.local)
        loop.start()
        wait_until(
            lambda: loop.read_counters(1)["rx_kernel_drops"] + loop.counters["processed"] == 100
        )
        assert loop.read_counters(1)["rx_kernel_drops"] > 0


def test_a_tunnel_with_a_rate_sends_no_faster(peers: list[socket.socket]) -> None:
    port = tunnel(2, peers[1], rate_bits_per_s=1e6)
    with loop_of(inside(1), port) as loop:
        loop.start()
        start_s = time.monotonic()
        for label in range(100):
            loop.inject(1, frame_to(2, 125, label=label))
        loop.wake()
        labels = [int.from_bytes(peers[1].recv(2000)[15:23], "big") for _ in range(100)]
        # 100 x 125 bytes at 1 Mb/s: the last bit has left after 100 ms, and never before.
        assert time.monotonic() - start_s >= 0.1
        assert labels == list(range(100))


def test_a_tunnel_with_an_uplink_rate_takes_no_more(peers: list[socket.socket]) -> None:
    port = tunnel(1, peers[0], uplink_bits_per_s=1e6)
    with loop_of(port, inside(2)) as loop:
        loop.start()
        start_s = time.monotonic()
        for label in range(100):
            peers[0].sendto(frame_to(2, 125, label=label), port.local)
        wait_until(lambda: loop.counters["processed"] == 100)
        # 100 x 125 bytes at 1 Mb/s: the last bit is here after 100 ms, and never before.
        assert time.monotonic() - start_s >= 0.1
        labels = [int.from_bytes(e.frame[15:23], "big") for e in loop.take()]
        assert labels == list(range(100))


# --- real time: waking, stopping, swapping --------------------------------------------------------


def test_no_wake_up_is_lost() -> None:
    with loop_of(inside(1), inside(2)) as loop:
        loop.start()
        for label in range(3000):
            loop.inject(1, frame_to(2, label=label))
            loop.wake()
            wait = select.select([loop.notify_descriptor], [], [], 20)
            assert wait[0], f"frame {label} woke nobody"
            loop.heed()
            assert [e.frame for e in loop.take()] == [frame_to(2, label=label)]


def test_a_loop_starts_and_stops_many_times() -> None:
    with loop_of(inside(1), inside(2)) as loop:
        for label in range(200):
            loop.start()
            loop.inject(1, frame_to(2, label=label))
            loop.wake()
            loop.stop()
        loop.run_until(0)
        assert loop.counters["processed"] == 200


def test_a_loop_that_is_idle_sleeps_and_says_so_in_the_epoch() -> None:
    double = Double()
    with loop_of(inside(1), inside(2), double=double) as loop:
        loop.start()
        loop.inject(1, frame_to(2))
        loop.wake()
        wait_until(lambda: double.context.frames == 1)
        wait_until(lambda: double.context.epoch == EPOCH_IDLE)
        busy_us = loop.counters["busy_us"]
        time.sleep(0.2)
        assert loop.counters["busy_us"] - busy_us < 100_000
        loop.stop()
        assert double.context.epoch == EPOCH_IDLE


def test_programs_change_while_frames_pass_and_the_old_one_is_left_alone(
    peers: list[socket.socket],
) -> None:
    one, two = tunnel(1, peers[0]), tunnel(2, peers[1])
    doubles = [Double(), Double()]
    retired = [0, 0]
    with loop_of(one, two, double=doubles[0]) as loop:
        loop.start()
        sent = 0
        for turn in range(300):
            for _ in range(10):
                peers[0].sendto(frame_to(2, label=sent), one.local)
                sent += 1
            new, old = doubles[(turn + 1) % 2], doubles[turn % 2]
            retired[(turn + 1) % 2] = new.context.frames
            loop.use(new.entry)
            seen = old.context.frames
            assert old.context.epoch == EPOCH_IDLE
            peers[0].sendto(frame_to(2, label=sent), one.local)
            sent += 1
            wait_until(lambda: new.context.frames > retired[(turn + 1) % 2])  # noqa: B023
            assert old.context.frames == seen
        wait_until(lambda: loop.counters["processed"] == sent)
    assert sum(d.context.frames for d in doubles) == sent


def test_digests_are_announced_without_a_frame_for_python(peers: list[socket.socket]) -> None:
    one = tunnel(1, peers[0])
    with loop_of(one, tunnel(2, peers[1])) as loop:
        loop.start()
        quiet = frame_to(2)
        telling = quiet[:11] + b"\xdd" + quiet[12:]
        peers[0].sendto(quiet, one.local)
        peers[1].recv(2000)
        assert not select.select([loop.notify_descriptor], [], [], 0.05)[0]
        for _ in range(3):
            peers[0].sendto(telling, one.local)
            assert select.select([loop.notify_descriptor], [], [], 20)[0]
            loop.heed()


def test_the_program_hears_the_time_of_the_loop() -> None:
    double = Double()
    with loop_of(inside(1), inside(2), double=double) as loop:
        loop.inject(1, frame_to(2), 5_000_999)
        loop.run_until(6_000_000)
        assert double.context.last_now_us == 5000

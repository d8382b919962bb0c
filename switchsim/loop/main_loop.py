"""The packet loop in compiled code: sleep, receive, process, send, with no Python in between.

Owns: the order of these, time (real or virtual), the change of programs, and the two ways of
waking: Python writes `wake_fd`, the loop writes `notify_fd`. Must not know: P4; how frames are
received and sent.

A turn: sleep until a descriptor is readable; one batch of each port that is; adopt a new program if
one is offered; frames whose time at their port has come, on the way in or out; frames from Python;
everything gathered is sent; news for Python is announced. What Python sets, it sets before it
writes `wake_fd`, and the loop reads `wake_fd` before it looks, so no wake-up is lost.

Between turns the loop increments the program's epoch; while it sleeps, the epoch is NEVER. Code
that replaces what a packet may still read waits for the epoch to change (llvm engine).
"""

from __future__ import annotations

from kvcast.native.linux import (
    CLOCK_MONOTONIC,
    TFD_TIMER_ABSTIME,
    TimeSpec,
    clock_gettime,
    epoll_wait,
    read,
    timerfd_settime,
    write,
)
from kvcast.native.subset import (
    I64,
    U64,
    address_of,
    atomic_load,
    atomic_store,
    full_fence,
    native,
    size_of,
    u64_at,
    unsigned,
)
from kvcast.switchsim.loop.egress import discard_queues, flush, next_release, release_all
from kvcast.switchsim.loop.ingress import (
    accept,
    discard_arriving,
    next_arrived,
    receive,
    take_arrived,
)
from kvcast.switchsim.loop.rings import ring_peek, ring_pop
from kvcast.switchsim.loop.state import NEVER, PORT_NUMBERS, Loop, Record

WAKE = 0xFFFF_FFFF
TIMER = 0xFFFF_FFFE
"""What epoll reports instead of a port's index."""


@native
def read_clock(loop: Loop) -> U64:
    """Nanoseconds since the loop's clock was 0."""
    time = TimeSpec.at(loop.scratch)
    clock_gettime(CLOCK_MONOTONIC, time)
    return time.seconds * 1_000_000_000 + time.nanoseconds - loop.clock_base_ns


@native
def adopt_program(loop: Loop) -> None:
    """Run the program that Python offers from now on."""
    wanted = atomic_load(loop.swap_wanted)
    if wanted == loop.swap_done:
        return
    sleep_epoch(loop)
    loop.process = loop.next_process
    loop.context = loop.next_context
    loop.epoch_address = loop.next_epoch_address
    loop.digests_address = loop.next_digests_address
    loop.digests_seen = 0
    atomic_store(loop.swap_done, wanted)


@native
def offer_program(
    loop: Loop, process: U64, context: U64, epoch_address: U64, digests_address: U64
) -> None:
    """Python has a new program for the loop, or none (zeros)."""
    loop.next_process = process
    loop.next_context = context
    loop.next_epoch_address = epoch_address
    loop.next_digests_address = digests_address
    atomic_store(loop.swap_wanted, loop.swap_wanted + 1)


@native
def next_epoch(loop: Loop) -> None:
    """Nothing read before this is used behind it."""
    if loop.epoch_address != 0:
        loop.epoch += 1
        atomic_store(u64_at(loop.epoch_address)[0], loop.epoch)
        full_fence()


@native
def sleep_epoch(loop: Loop) -> None:
    """Nothing is in use until `next_epoch`."""
    if loop.epoch_address != 0:
        full_fence()
        atomic_store(u64_at(loop.epoch_address)[0], NEVER)


@native
def take_injected(loop: Loop, now_ns: U64) -> U64:
    """Process frames from Python, one batch; returns how many."""
    taken = 0
    while taken < loop.batch:
        address = ring_peek(loop.inject)
        if address == 0:
            break
        accept_injected(loop, Record.at(address), now_ns)
        ring_pop(loop.inject)
        taken += 1
    return taken


@native
def accept_injected(loop: Loop, record: Record, now_ns: U64) -> None:
    index = 0
    if record.port < PORT_NUMBERS:
        index = loop.by_number[record.port]
    if index == 0:
        loop.no_such_port += 1
    else:
        frame = address_of(record) + size_of(Record)
        accept(loop, loop.ports[index - 1], frame, record.length, now_ns)


@native
def announce(loop: Loop) -> None:
    """Tell Python of news, unless it has been told and has not looked yet."""
    if loop.digests_address != 0:
        digests = atomic_load(u64_at(loop.digests_address)[0])
        if digests != loop.digests_seen:
            loop.digests_seen = digests
            loop.news = 1
    if loop.news != 0:
        loop.news = 0
        full_fence()
        if atomic_load(loop.notified) == 0:
            atomic_store(loop.notified, 1)
            u64_at(loop.scratch)[0] = 1
            write(loop.notify_fd, loop.scratch, 8)


@native
def arm_timer(loop: Loop, at_ns: U64) -> None:
    """Let `timer_fd` become readable at that time."""
    if at_ns != loop.timer_ns:
        loop.timer_ns = at_ns
        timer = loop.timer
        time_ns = at_ns + loop.clock_base_ns
        timer.seconds = time_ns // 1_000_000_000
        timer.nanoseconds = time_ns % 1_000_000_000
        timerfd_settime(loop.timer_fd, TFD_TIMER_ABSTIME, timer, 0)


@native
def turn(loop: Loop, timeout_ms: I64) -> I64:
    """Wait that long for something to do (-1: for ever), and do it; how long the next turn may
    wait."""
    events = epoll_wait(loop.epoll_fd, loop.events, loop.max_events, timeout_ms)
    next_epoch(loop)
    now_ns = read_clock(loop)
    worked = 0
    if events > 0:
        for i in range(unsigned(events)):
            which = 0 + loop.events[i].data
            if which == WAKE:
                read(loop.wake_fd, loop.scratch, 8)
            elif which == TIMER:
                read(loop.timer_fd, loop.scratch, 8)
                loop.timer_ns = NEVER
            else:
                worked += receive(loop, loop.ports[which], read_clock(loop))
    adopt_program(loop)
    next_epoch(loop)
    due_ns = take_arrived(loop, now_ns)
    released_ns = release_all(loop, now_ns)
    if released_ns < due_ns:
        due_ns = 0 + released_ns
    injected = take_injected(loop, now_ns)
    flush(loop)
    announce(loop)
    sleep_epoch(loop)
    if injected + worked != 0:
        loop.slices += 1
    idle_ns = read_clock(loop)
    loop.busy_ns += idle_ns - now_ns
    next_ms: I64 = -1
    if injected != 0 or due_ns <= idle_ns:
        next_ms = 0
    elif due_ns != NEVER:
        arm_timer(loop, due_ns)
    return next_ms


@native
def run_loop(loop: Loop) -> None:
    """Move frames until `stop`."""
    timeout_ms: I64 = 0
    while atomic_load(loop.stop) == 0:
        timeout_ms = turn(loop, timeout_ms)


@native
def run_virtual(loop: Loop, until_ns: U64, stop_at_output: U64) -> bool:
    """Process what arrives and leaves up to that time of the virtual clock, in order of time, or
    up to the first moment at which something leaves for Python. The frames in `inject` must be in
    that order too. False: `punt` is half full, empty it first."""
    adopt_program(loop)
    next_epoch(loop)
    done = True
    while True:
        if loop.punt.tail - atomic_load(loop.punt.head) > loop.punt.capacity // 2:
            done = False
            break
        address = ring_peek(loop.inject)
        arrival_ns = NEVER
        if address != 0:
            arrival_ns = Record.at(address).time_ns
        departure_ns = next_release(loop)
        uplink_ns = next_arrived(loop)
        if uplink_ns < departure_ns:
            departure_ns = 0 + uplink_ns
        next_ns = departure_ns if departure_ns < arrival_ns else arrival_ns
        if stop_at_output != 0 and next_ns > loop.now_ns and ring_peek(loop.punt) != 0:
            until_ns = 0 + loop.now_ns
            break
        if departure_ns <= arrival_ns:
            if departure_ns > until_ns or departure_ns == NEVER:
                break
            loop.now_ns = departure_ns
            take_arrived(loop, departure_ns)
            release_all(loop, departure_ns)
        else:
            if arrival_ns > until_ns:
                break
            if arrival_ns > loop.now_ns:
                loop.now_ns = arrival_ns
            accept_injected(loop, Record.at(address), loop.now_ns)
            ring_pop(loop.inject)
        flush(loop)
    if done and until_ns > loop.now_ns:
        loop.now_ns = until_ns
    sleep_epoch(loop)
    return done


@native
def close_loop(loop: Loop) -> None:
    """Free what waits. The loop does not run any more."""
    discard_arriving(loop)
    discard_queues(loop)

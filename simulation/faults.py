"""What can go wrong: every kind of fault, how it is chosen, begun and ended.

Owns: the table `FAULTS`. Must not know: when (`plan.py`), or what must hold all the same
(`model.py`).

**The seam.** What is added to kvcast later joins the simulation at one of three places, and all
else follows: the plan draws it, reports count it, failures shrink by it.

- a kind of fault: an entry in `FAULTS` here;
- a transport: beside `bulk.py` (TCP) and `rdma.py`, which make the calls that a core asks for;
- a tier (a disk): `agent.agent_core`, which makes the core of a new process over what its machine
  still holds, and `SimHost`, which is what outlives a process.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from kvcast.hostagent.core.store import Copy
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.hostagent.tiers.index import Index, buckets_for
from kvcast.hostagent.tiers.ssd.layout import (
    ENTRY_BYTES,
    PAGE_BYTES,
    Entry,
    cut_of,
    open_formatted,
    pack_entry,
)
from kvcast.protocol.messages.shared import index_bytes
from kvcast.protocol.messages.wire import BlockId, digest_of
from kvcast.simulation.agent import SimAgent
from kvcast.simulation.blast import blast
from kvcast.simulation.bulk import Lie
from kvcast.simulation.cluster import Begin, Cluster, FaultKind
from kvcast.simulation.disk import SimDisk
from kvcast.simulation.disk_side import SLAB_BYTES, UNIT_BYTES, owner_of
from kvcast.simulation.hostile import Hostile, HostileKind
from kvcast.simulation.network import LinkFault
from kvcast.simulation.plan import LEAST, Fault, PlanFault

# --- links ------------------------------------------------------------------------------------


def _on_link(kind: str, chance: float, extra_s: float = 0.0, rate: float = 0.0) -> FaultKind:
    """A fault of one direction of one host's cable, or of both."""

    def plan(rng: random.Random, hosts: int) -> tuple[tuple[int, ...], float, float]:
        host = rng.randint(1, hosts)
        directions = rng.choice(((0,), (1,), (0, 1)))
        if kind == "partition":
            directions = (0, 1)
        elif kind == "one_way_partition":
            directions = (rng.randrange(2),)
        how_much = rng.choice((LEAST, 0.3, 1.0))
        return (host, *directions), how_much, rng.uniform(0.2, 3.0)

    def begin(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
        number, *directions = fault.hosts
        if number not in cluster.hosts:
            return None
        links = [cluster.links[number][direction] for direction in directions]
        on = [
            LinkFault(
                kind,
                cluster.world.stream(f"fault/{fault.number}/{direction}"),
                chance=chance if kind.endswith("partition") else chance * fault.amount,
                extra_s=extra_s * fault.amount,
                rate_bits_per_s=rate / fault.amount,
            )
            for direction in directions
        ]
        if kind == "slow_link":
            on = [LinkFault(kind, f.rng, 1.0, 0.0, f.rate_bits_per_s) for f in on]
        elif kind == "delay":
            on = [LinkFault(kind, f.rng, 1.0, f.extra_s) for f in on]
        for link, one in zip(links, on, strict=True):
            link.faults.append(one)

        def end() -> None:
            for link, one in zip(links, on, strict=True):
                link.faults.remove(one)

        return end

    return FaultKind(plan, begin, disturbs=False)


# --- processes and machines -------------------------------------------------------------------


def _one_host(least_s: float, most_s: float) -> PlanFault:
    def plan(rng: random.Random, hosts: int) -> tuple[tuple[int, ...], float, float]:
        return (rng.randint(1, hosts),), rng.random(), rng.uniform(least_s, most_s)

    return plan


def _nobody(least_s: float, most_s: float) -> PlanFault:
    def plan(rng: random.Random, _hosts: int) -> tuple[tuple[int, ...], float, float]:
        return (), rng.random(), rng.uniform(least_s, most_s)

    return plan


def _two_hosts(rng: random.Random, hosts: int) -> tuple[tuple[int, ...], float, float]:
    return tuple(rng.sample(range(1, hosts + 1), 2)), rng.random(), rng.uniform(0.2, 3.0)


DAMAGED: Final = 0.25
IN_THE_MOMENT: Final = 0.6
"""Of agents that are killed, by the fault's amount: those up to this die when compiled code has
just told somebody of something."""
REST_S: Final = 0.5
"""How long an agent that gives way waits for what it was asked."""
TORN: Final = 0.45
"""Of agents that crash, by the fault's amount: those up to the first find their memory damaged,
those up to the second an index at which the process before has died, and all others what that
process had."""


def _kill_agent(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    """An agent is killed; what it kept is whole."""
    process = _process_of(cluster, fault)
    if process is None:
        return None
    number = process.host.number

    def kill() -> None:
        cluster.crash_host(number, machine=False, clients_outlive=True)

    if fault.amount < IN_THE_MOMENT and process.core.ledger is not None:
        process.in_the_moment = kill
    else:
        kill()

    def end() -> None:
        process.in_the_moment = None
        cluster.start_host(number)

    return end


def _upgrade_agent(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    """An agent gives way to another: it ends what was begun, for a while, and then itself."""
    process = _process_of(cluster, fault)
    if process is None:
        return None
    number = process.host.number
    until = cluster.world.now + REST_S

    def rest() -> None:
        if process.dead:
            return
        if cluster.is_asked(number) and cluster.world.now < until:
            cluster.world.after(0.002, rest)
            return
        cluster.world.counts["agents_upgraded"] += 1
        cluster.crash_host(number, machine=False, clients_outlive=True)
        cluster.start_host(number)

    rest()
    return _nothing


def _crash_agent(memory_lost: bool, comes_back: bool = True) -> Begin:
    def begin(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
        host = cluster.hosts.get(fault.hosts[0])
        if host is None or host.process is None:
            return None
        if not comes_back and len(cluster.running()) <= 2:
            return None  # a pool of one host has nobody to read from
        whole = not memory_lost and fault.amount >= TORN
        cluster.crash_host(host.number, machine=memory_lost, clients_outlive=whole)
        rng = cluster.world.stream(f"fault/{fault.number}")
        if memory_lost:
            host.lose_memory(rng)
        elif fault.amount < DAMAGED:
            cluster.world.counts["fault.damaged_memory"] += 1
            host.damage_memory(rng, 1 + int(fault.amount * 200))
        elif fault.amount < TORN:
            cluster.world.counts["fault.torn_index"] += 1
            host.tear_index(rng, 1 + int(fault.amount * 20))
        return (lambda: cluster.start_host(host.number)) if comes_back else None

    return begin


def _stall_agent(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    process = _process_of(cluster, fault)
    if process is None:
        return None
    process.host.stall(fault.for_s)
    cluster.model.postponed(process.host.number, fault.for_s)
    return _nothing


def _fill_arena(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    """Somebody on the host reserves most of its arena, and writes nothing."""
    process = _process_of(cluster, fault)
    if process is None:
        return None
    store = process.core.store
    taken = []
    slab = store.allocator.slab_bytes
    block = cluster.foreign_block(fault.number)
    for _ in range(int(store.allocator.slab_count * (0.5 + 0.5 * fault.amount))):
        try:
            taken.append(store.reserve(block, slab))
        except Exception:
            break

    def end() -> None:
        if not process.dead:
            for copy in taken:
                store.abort(copy)

    return end


# --- the controller and the switch ------------------------------------------------------------


def _crash_controller(disk_lost: bool) -> Begin:
    def begin(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
        controller = cluster.primary_controller()
        if controller is None:
            return None
        controller.crash(disk_lost=disk_lost)
        if disk_lost or len(cluster.controllers) > 1:
            cluster.operator.state_lost()
        return lambda: None if controller.alive else controller.start()

    return begin


def _fail_over(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    """The primary dies while another stands by; it comes back as one that finds the other."""
    controller = cluster.primary_controller()
    if controller is None or len([c for c in cluster.controllers if c.alive]) < 2:
        return None
    controller.crash(disk_lost=False)
    cluster.operator.state_lost()
    return lambda: None if controller.alive else controller.start()


def _cut_control(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    """An agent and the controllers do not hear each other."""
    return cluster.cut("control", frozenset({fault.hosts[0]}))


def _cut_bulk(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    """Two agents do not hear each other over TCP."""
    return cluster.cut("bulk", frozenset(fault.hosts))


def _cut_switch(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    """A controller and the switch do not hear each other."""
    controller = cluster.primary_controller()
    if controller is None or controller.process is None:
        return None
    connection = controller.process.switch
    connection.block()
    return connection.unblock


def _reboot_switch(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    cluster.switch.crash()
    return cluster.switch.boot


def _reprogram_switch(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    if not cluster.switch.up:
        return None
    cluster.switch.reprogram()
    return _nothing


def _spoil_bulk(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    """Bits of blocks flip between two agents where TCP's checksum does not see it."""
    rng = cluster.world.stream(f"fault/{fault.number}")

    def spoil(data: bytes) -> bytes:
        if rng.random() > 0.5:
            return data
        cluster.world.counts["fault.bulk_corruption"] += 1
        damaged = bytearray(data)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        return bytes(damaged)

    cluster.spoilers.append(spoil)
    return lambda: cluster.spoilers.remove(spoil)


def _bulk_deaf(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    """A host offers its bulk port, and nobody listens there."""
    process = _process_of(cluster, fault)
    if process is None:
        return None
    process.bulk.listens = False

    def end() -> None:
        process.bulk.listens = True

    return end


def _bulk_broken(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    """TCP connections between a host and the other agents break in the middle of blocks."""
    if _process_of(cluster, fault) is None:
        return None
    rng = cluster.world.stream(f"fault/{fault.number}")

    def breaks(between: frozenset[int]) -> bool:
        return fault.hosts[0] in between and rng.random() < 0.3

    cluster.breakers.append(breaks)
    return lambda: cluster.breakers.remove(breaks)


def _bulk_liar(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    """A host says wrong sizes and digests of what it sends by TCP, and sends wrong bytes."""
    process = _process_of(cluster, fault)
    if process is None:
        return None
    rng = cluster.world.stream(f"fault/{fault.number}")

    def lie(copy: Copy, data: bytes) -> Lie:
        cluster.world.counts["fault.bulk_lies"] += 1
        way = rng.randrange(4)
        if way == 0:
            return Lie(copy, len(data), copy.digest ^ 1, data)
        if way == 1:
            wrong = bytes([data[0] ^ 1]) + data[1:]
            return Lie(copy, len(data), copy.digest, wrong)
        more = rng.choice((1, 1000, 1 << 20)) if way == 2 else 0
        length = len(data) + more if more else rng.randint(1, len(data))
        wrong = data[:length].ljust(length, b"?") if length != len(data) else bytes(length)
        return Lie(copy, length, copy.digest, wrong)

    process.bulk.served.lie = lie

    def end() -> None:
        process.bulk.served.lie = None

    return end


def _on_card(**wrong: float) -> Begin:
    """Something is wrong with a host's RDMA card (`CardFaults`)."""

    def begin(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
        process = _process_of(cluster, fault)
        if process is None or process.rdma is None:
            return None
        faults = process.rdma.card.faults
        for name, chance in wrong.items():
            setattr(faults, name, chance)

        def end() -> None:
            for name in wrong:
                setattr(faults, name, 0.0)

        return end

    return begin


def _card_gone(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    """A host's card answers nobody, and takes no orders, for a while."""
    process = _process_of(cluster, fault)
    if process is None or process.rdma is None:
        return None
    card = process.rdma.card
    cluster.world.counts["fault.rdma_card_gone"] += 1
    card.go()

    def end() -> None:
        card.faults.gone = False

    return end


def _on_disk(**wrong: float) -> Begin:
    """Something is wrong with a host's disk (`SimDisk`)."""

    def begin(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
        host = cluster.hosts.get(fault.hosts[0])
        if host is None or host.disk is None:
            return None
        disk = host.disk
        for name, value in wrong.items():
            setattr(disk, name, value)

        def end() -> None:
            for name, value in wrong.items():
                setattr(disk, name, type(value)())

        return end

    return begin


def _on_objects(**wrong: float) -> Begin:
    """Something is wrong with the object store (`SimObjects`)."""

    def begin(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
        objects = cluster.objects
        if objects is None:
            return None
        for name, value in wrong.items():
            setattr(objects, name, value)

        def end() -> None:
            for name in wrong:
                setattr(objects, name, 0.0)

        return end

    return begin


def _lose_objects(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    if cluster.objects is None:
        return None
    cluster.objects.lose(fault.amount)
    return _nothing


def _on_arena(**wrong: float) -> Begin:
    """Something is wrong with a host's further arena (`SimDisk`)."""

    def begin(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
        host = cluster.hosts.get(fault.hosts[0])
        if host is None or host.arena is None:
            return None
        arena = host.arena
        for name, value in wrong.items():
            setattr(arena, name, value)

        def end() -> None:
            for name in wrong:
                setattr(arena, name, 0.0)

        return end

    return begin


def _swap_arena(change: Callable[[SimDisk, random.Random], None]) -> Begin:
    """An agent dies, and before the next one starts, somebody does something to its further
    arena."""

    def begin(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
        host = cluster.hosts.get(fault.hosts[0])
        if host is None or host.process is None or host.arena is None:
            return None
        cluster.crash_host(host.number, machine=False, clients_outlive=True)
        change(host.arena, cluster.world.stream(f"fault/{fault.number}"))
        return lambda: cluster.start_host(host.number)

    return begin


def _swap_disk(change: Callable[[SimDisk, random.Random], None]) -> Begin:
    """An agent dies, and before the next one starts, somebody does something to its disk."""

    def begin(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
        host = cluster.hosts.get(fault.hosts[0])
        if host is None or host.process is None or host.disk is None:
            return None
        cluster.crash_host(host.number, machine=False, clients_outlive=True)
        change(host.disk, cluster.world.stream(f"fault/{fault.number}"))
        return lambda: cluster.start_host(host.number)

    return begin


def _truncate(disk: SimDisk, rng: random.Random) -> None:
    disk.truncate(rng.randrange(disk.size_bytes() + 1))


def _make_stale(disk: SimDisk, rng: random.Random) -> None:
    """The end of the file is empty, as after a restore that was not finished."""
    old = disk.picture()
    size = len(old)
    at = rng.randrange(size + 1)
    disk.restore(old[:at] + bytes(size - at))


def _shrink_disk(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    """Somebody cuts the file short while the agent uses it."""
    host = cluster.hosts.get(fault.hosts[0])
    if host is None or host.disk is None:
        return None
    _truncate(host.disk, cluster.world.stream(f"fault/{fault.number}"))
    return _nothing


def _restore_disk(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    """An agent dies, and the next finds its disk as it was a while before."""
    host = cluster.hosts.get(fault.hosts[0])
    if host is None or host.disk is None:
        return None
    picture = host.disk.picture()

    def end() -> None:
        if host.process is not None and host.disk is not None:
            cluster.crash_host(host.number, machine=False, clients_outlive=True)
            host.disk.restore(picture)
            cluster.start_host(host.number)

    return end


ANOTHER: Final = "another cluster"


def _put_another_clusters(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    """An agent dies, and the next finds a file of another cluster's, in which blocks of the same
    names have other bytes: it is refused, and the agent goes on without."""
    process = _process_of(cluster, fault)
    if process is None or process.host.disk is None or not process.host.disk.size_bytes():
        return None
    host, disk = process.host, process.host.disk
    rng = cluster.world.stream(f"fault/{fault.number}")
    other = SimDisk(rng)
    owner = owner_of(host.options.node_id, ANOTHER)
    size_bytes = max(disk.size_bytes(), 2 * SLAB_BYTES)  # this one may have been cut short
    cut = cut_of(owner, size_bytes, UNIT_BYTES, SLAB_BYTES)
    identity = open_formatted(other, cut, 7).identity
    pool = process.core.pool
    blocks = [b for b in cluster.plan.blocks if b.size <= SLAB_BYTES][: cut.slabs]
    for slab, block in enumerate(blocks):
        meaning = pool.meaning_of(block.name[0]) if pool is not None else None
        unit = slab * (SLAB_BYTES // UNIT_BYTES)
        data = rng.randbytes(block.size)
        entry = Entry(
            *(unit, BlockId(*block.name), block.size, digest_of(data), meaning or 0, slab + 1),
            *(host.wall_s, b"", 0),
        )
        other.pwrite(pack_entry(entry, identity), PAGE_BYTES + unit * ENTRY_BYTES)
        other.pwrite(data, cut.blocks_offset + unit * UNIT_BYTES)
    cluster.crash_host(host.number, machine=False)
    disk.restore(other.picture())
    return lambda: cluster.start_host(host.number)


def _put_another_clusters_arena(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    """An agent dies, and the next finds an arena that an agent of another cluster has kept: whole,
    with blocks of the same names and other bytes, in namespaces that mean something else."""
    process = _process_of(cluster, fault)
    if process is None or process.core.pool is None:
        return None
    host, pool = process.host, process.core.pool
    rng = cluster.world.stream(f"fault/{fault.number}")
    cluster.crash_host(host.number, machine=False)
    host.lose_memory(rng)
    arena_bytes = host.options.arena_bytes
    host.index = memoryview(bytearray(index_bytes(buckets_for(arena_bytes))))
    index = Index(host.index, arena_bytes, rng.getrandbits(32) | 1)
    allocator = Allocator(arena_bytes, host.options.slab_bytes)
    for namespace in pool.namespaces:
        meaning = pool.meaning_of(namespace) or 0
        index.state_namespace(namespace, meaning ^ 1, readable=True)
    for block in cluster.plan.blocks:
        offset = allocator.allocate(block.size)
        if offset is not None:
            data = rng.randbytes(block.size)
            host.memory[offset : offset + block.size] = data
            taken = allocator.extent_bytes(block.size)
            index.publish(BlockId(*block.name), offset, block.size, taken, digest_of(data))
    return lambda: cluster.start_host(host.number)


def _set_clock(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    """Somebody sets a machine's wall clock, back or forth; in half of the cases its agent starts
    anew then."""
    host = cluster.hosts.get(fault.hosts[0])
    if host is None:
        return None
    rng = cluster.world.stream(f"fault/{fault.number}")
    host.clock_set_s += rng.choice((-1e8, -500.0, -3.0, 3.0, 500.0, 1e8))
    if host.process is None or fault.amount < 0.5:
        return _nothing
    cluster.crash_host(host.number, machine=False, clients_outlive=True)
    return lambda: cluster.start_host(host.number)


def _blast_plan(rng: random.Random, hosts: int) -> tuple[tuple[int, ...], float, float]:
    return (rng.randint(1, hosts),), rng.random(), rng.uniform(2.6, 3.4)


def _blast(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    """Two tenants ask all they can of one home."""
    process = _process_of(cluster, fault)
    return None if process is None else blast(cluster, process.host, fault.number)


def _put_others(disk: SimDisk, _rng: random.Random) -> None:
    """A file of another cluster lies there: it is refused, and the agent goes on without."""
    other = SimDisk(random.Random(1))
    if disk.size_bytes():
        size_bytes = max(disk.size_bytes(), 2 * SLAB_BYTES)  # this one may have been cut short
        open_formatted(other, cut_of("another cluster", size_bytes, UNIT_BYTES, SLAB_BYTES), 7)
        disk.restore(other.picture())


def _plan_operator(rng: random.Random, _hosts: int) -> tuple[tuple[int, ...], float, float]:
    return (), LEAST, rng.choice((0.0, 0.004, rng.uniform(0.0, 0.3), rng.uniform(0.3, 3.0)))


def _make_namespace(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    rng = cluster.world.stream(f"fault/{fault.number}")
    return _nothing if cluster.operator.make(rng) else None


def _set_namespace(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    rng = cluster.world.stream(f"fault/{fault.number}")
    return _nothing if cluster.operator.change(rng) else None


def _delete_namespace(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    return cluster.operator.delete(cluster.world.stream(f"fault/{fault.number}"))


def _process_of(cluster: Cluster, fault: Fault) -> SimAgent | None:
    host = cluster.hosts.get(fault.hosts[0])
    return None if host is None else host.process


# --- hostile hosts ----------------------------------------------------------------------------


def _hostile(kind: HostileKind) -> Begin:
    def begin(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
        if fault.hosts[0] not in cluster.hosts:
            return None
        hostile = Hostile(cluster, cluster.hosts[fault.hosts[0]], kind, fault.number)
        hostile.begin()
        return hostile.end

    return begin


def _nothing() -> None:
    pass


def _plan_drain(rng: random.Random, hosts: int) -> tuple[tuple[int, ...], float, float]:
    return (rng.randint(1, hosts),), LEAST, rng.uniform(0.2, 5.0)


def _drain_node(cluster: Cluster, fault: Fault) -> Callable[[], None] | None:
    """An operator has a node's blocks handed over, and takes it back later, done or not."""
    return cluster.drain(f"node-{fault.hosts[0]}")


FAULTS: Final[dict[str, FaultKind]] = {
    "loss": _on_link("loss", 0.5),
    "duplication": _on_link("duplication", 0.5),
    "reordering": _on_link("reordering", 0.5, extra_s=0.01),
    "corruption": _on_link("corruption", 0.3),
    "delay": _on_link("delay", 1.0, extra_s=0.1),
    "slow_link": _on_link("slow_link", 1.0, rate=5e6),
    "partition": _on_link("partition", 1.0),
    "one_way_partition": _on_link("one_way_partition", 1.0),
    "agent_crash": FaultKind(_one_host(0.0, 3.0), _crash_agent(memory_lost=False)),
    "host_crash": FaultKind(_one_host(0.5, 4.0), _crash_agent(memory_lost=True)),
    "host_gone": FaultKind(_one_host(0.1, 0.2), _crash_agent(memory_lost=True, comes_back=False)),
    "agent_killed": FaultKind(_one_host(0.05, 2.0), _kill_agent),
    "agent_upgraded": FaultKind(_one_host(0.6, 0.7), _upgrade_agent),
    "agent_stall": FaultKind(_one_host(0.05, 2.5), _stall_agent),
    "arena_full": FaultKind(_one_host(0.2, 3.0), _fill_arena),
    "cold_errors": FaultKind(_nobody(0.5, 3.0), _on_objects(errors=0.5)),
    "cold_lies": FaultKind(_nobody(1.0, 4.0), _on_objects(lies=0.7)),
    "cold_lost": FaultKind(_nobody(0.0, 0.1), _lose_objects),
    "cold_slow": FaultKind(_nobody(0.5, 3.0), _on_objects(slow_s=2.0)),
    "controller_crash": FaultKind(_nobody(0.0, 3.0), _crash_controller(disk_lost=False)),
    "controller_wiped": FaultKind(_nobody(0.0, 3.0), _crash_controller(disk_lost=True)),
    "controller_failover": FaultKind(_nobody(0.5, 3.0), _fail_over),
    "control_cut": FaultKind(_one_host(0.2, 3.5), _cut_control),
    "bulk_cut": FaultKind(_two_hosts, _cut_bulk),
    "bulk_corruption": FaultKind(_nobody(0.5, 3.0), _spoil_bulk),
    "bulk_deaf": FaultKind(_one_host(0.2, 3.0), _bulk_deaf),
    "bulk_broken": FaultKind(_one_host(0.2, 3.0), _bulk_broken),
    "bulk_liar": FaultKind(_one_host(0.5, 4.0), _bulk_liar),
    "node_drained": FaultKind(_plan_drain, _drain_node),
    "rdma_card_gone": FaultKind(_one_host(0.5, 3.0), _card_gone),
    "rdma_errors": FaultKind(_one_host(0.5, 3.0), _on_card(errors=0.1)),
    "rdma_flips": FaultKind(_one_host(0.5, 3.0), _on_card(flips=0.1)),
    "rdma_late": FaultKind(_one_host(0.5, 3.0), _on_card(late=0.3)),
    "rdma_no_windows": FaultKind(_one_host(0.5, 3.0), _on_card(no_windows=1.0)),
    "rdma_strays": FaultKind(_one_host(0.5, 3.0), _on_card(strays=0.3)),
    "rdma_windows_lost": FaultKind(_one_host(0.5, 3.0), _on_card(lost_windows=0.1)),
    "disk_damaged": FaultKind(
        _one_host(0.0, 2.0), _swap_disk(lambda disk, rng: disk.damage(rng.randrange(1, 2000)))
    ),
    "disk_errors": FaultKind(_one_host(0.5, 3.0), _on_disk(read_errors=0.3, write_errors=0.3)),
    "disk_flips": FaultKind(_one_host(0.5, 3.0), _on_disk(wrong_reads=0.5)),
    "disk_full": FaultKind(_one_host(0.5, 3.0), _on_disk(full=True)),
    "disk_lies": FaultKind(_one_host(0.5, 4.0), _on_disk(lies=True)),
    "disk_lost": FaultKind(_one_host(0.0, 2.0), _swap_disk(lambda disk, _rng: disk.lose())),
    "disk_of_others": FaultKind(_one_host(0.0, 2.0), _swap_disk(_put_others)),
    "disk_slow": FaultKind(_one_host(0.5, 3.0), _on_disk(slow_s=2.0)),
    "disk_stale": FaultKind(_one_host(0.0, 2.0), _swap_disk(_make_stale)),
    "disk_truncated": FaultKind(_one_host(0.0, 2.0), _swap_disk(_truncate)),
    "arena_damaged": FaultKind(
        _one_host(0.0, 2.0), _swap_arena(lambda arena, rng: arena.damage(rng.randrange(1, 2000)))
    ),
    "arena_flips": FaultKind(_one_host(0.5, 3.0), _on_arena(wrong_reads=0.5)),
    "arena_lost": FaultKind(
        _one_host(0.0, 2.0), _swap_arena(lambda arena, _rng: arena.restore(b""))
    ),
    "arena_slow": FaultKind(_one_host(0.5, 3.0), _on_arena(slow_s=0.5)),
    "disk_gone": FaultKind(_one_host(0.5, 3.0), _on_disk(read_errors=1.0, write_errors=1.0)),
    "disk_old": FaultKind(_one_host(0.5, 2.0), _restore_disk),
    "disk_shrunk": FaultKind(_one_host(0.0, 0.1), _shrink_disk),
    "disk_of_another_cluster": FaultKind(_one_host(0.0, 2.0), _put_another_clusters),
    "arena_of_another_cluster": FaultKind(_one_host(0.0, 2.0), _put_another_clusters_arena),
    "clock_set": FaultKind(_one_host(0.0, 2.0), _set_clock),
    "namespace_made": FaultKind(_plan_operator, _make_namespace),
    "namespace_set": FaultKind(_plan_operator, _set_namespace),
    "namespace_deleted": FaultKind(_plan_operator, _delete_namespace),
    "tenants_blast": FaultKind(_blast_plan, _blast),
    "switch_cut": FaultKind(_nobody(0.1, 3.0), _cut_switch),
    "switch_reboot": FaultKind(_nobody(0.0, 2.0), _reboot_switch),
    "switch_reprogram": FaultKind(_nobody(0.1, 0.2), _reprogram_switch),
    "hostile_liar": FaultKind(_one_host(0.5, 4.0), _hostile(HostileKind.LIAR)),
    "hostile_forger": FaultKind(_one_host(0.5, 4.0), _hostile(HostileKind.FORGER), disturbs=False),
    "hostile_spoofer": FaultKind(_one_host(0.5, 4.0), _hostile(HostileKind.SPOOFER)),
    "hostile_tenant": FaultKind(_one_host(0.5, 4.0), _hostile(HostileKind.TENANT), disturbs=False),
}
"""Every kind of fault by its name. Beside them, `plan.py` gives hosts skewed clocks,
arenas that are too small, and different bytes of one block; and `client.py` has clients pin what
they found a while ago."""

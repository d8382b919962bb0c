"""The plan of a run: the pool's shape, what its clients do, and what goes wrong, from a seed.

Owns: every choice that is made before a run. Must not know: how anything is carried out.

Clients' actions and faults are numbered, and each is complete in itself; a run may leave any of
them out (`Mask`) and all others stay as they are. That is what makes a failure smaller.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from kvcast.protocol.messages.control import POLICIES, NamespaceSettings, number_of
from kvcast.protocol.messages.local import PutAck
from kvcast.protocol.messages.questions import MAX_MANY
from kvcast.simulation.model import Name, pending_set_of
from kvcast.simulation.model_writes import slot_of
from msgspec.structs import replace as replace_field

_TIERS: Final = ("dram", "ssd")
"""That hosts have."""
CALM_S: Final = 1.2
CHAOS_S: Final = 4.0
FINAL_S: Final = 1.6
"""Lengths of the phases in which clients act; between the last two the pool is left to heal."""

BLAST_BITS_PER_S: Final = 8_000_000
"""What agents believe of their links where tenants blast: less than streams carry."""

TENANTS: Final = ("tenant-1", "tenant-2", "tenant-3")
"""Each has one namespace; that of the first is every host's, the others belong to some."""

NAMESPACES: Final = tuple(number_of(tenant, "model", "1", "layout") for tenant in TENANTS)
"""Their numbers, which a controller that has lost its state gives them again."""

OPEN: Final = NAMESPACES[0]
"""The namespace that every host may use."""

PARTS: Final = {
    number: (tenant, "model", "1", "layout")
    for number, tenant in zip(NAMESPACES, TENANTS, strict=True)
} | {number_of(TENANTS[0], "model", "2", "layout"): (TENANTS[0], "model", "2", "layout")}
"""What each namespace stands for."""

LATER: Final = list(PARTS)[-1]
"""A namespace that an operator makes in the middle of a run, for every host."""

FEATURES: Final = ("arenas", "digests", "kept", "operator")
"""What a run may have beside all else, each in one of `ONE_IN`: hosts with a further arena between
DRAM and the disk, digests that are made while other things happen, clients that outlive
their agents, and an operator who makes, changes and deletes namespaces."""
ONE_IN: Final = 6


class Block(NamedTuple):
    """A block and the copies of it that hosts may compute; all copies of one length."""

    name: Name
    size: int
    copies: tuple[bytes, ...]


@dataclass(frozen=True)
class Op:
    """What clients do at `at` seconds of phase `phase` (0 calm, 1 chaos, 2 final)."""

    number: int
    phase: int
    at: float
    kind: str
    hosts: tuple[int, ...]
    blocks: tuple[int, ...] = ()
    copy: int = 0
    spread_s: float = 0.0
    """The hosts begin within so much time."""
    deadline_s: float = 1.0
    hold_s: float = 0.01
    gather_ms: int = 0
    sheds: bool = True
    """Afterwards hosts that are no home forget the block, so that the next read is a real one."""
    ack: PutAck = ""
    """What several puts wait for; "" = what the agent was started with."""
    leaves_after_s: float | None = None
    """The client goes so long after it has begun to put them; None = it stays."""


_BULK: Final = frozenset({"bulk_broken", "bulk_deaf", "bulk_liar"})
"""Faults of reads by TCP."""
_RDMA: Final = frozenset(
    {
        "rdma_card_gone",
        "rdma_errors",
        "rdma_flips",
        "rdma_late",
        "rdma_no_windows",
        "rdma_windows_lost",
    }
)
"""Faults of RDMA cards."""
_DISK: Final = frozenset(
    {
        "disk_damaged",
        "disk_errors",
        "disk_flips",
        "disk_full",
        "disk_lies",
        "disk_lost",
        "disk_of_others",
        "disk_slow",
        "disk_stale",
        "disk_truncated",
    }
)
"""Faults of disks."""
_COLD: Final = frozenset({"cold_errors", "cold_lies", "cold_lost", "cold_slow"})
"""Faults of the object store."""
_MORE_DISK: Final = frozenset({"disk_gone", "disk_of_another_cluster", "disk_old", "disk_shrunk"})
"""More faults of disks."""
_KEPT: Final = frozenset({"arena_of_another_cluster"})
"""Faults of what outlives an agent in memory."""
_CLOCK: Final = frozenset({"clock_set"})
"""The wall clock of a machine is set."""
_SHARED_WRITES: Final = frozenset(
    {
        "rdma_card_gone",
        "rdma_errors",
        "rdma_flips",
        "rdma_late",
        "rdma_strays",
        "rdma_windows_lost",
    }
)
"""Those of them that shared answers by RDMA have, too, and those that only these have."""
_SCALE: Final = frozenset({"node_drained"})
"""What an operator does to a pool that is well; no fault, but it comes among faults."""
_WEIGHTS: Final = frozenset({"tenants_blast"})
"""Tenants that take all they can get."""
_DEATHS: Final = frozenset({"agent_killed", "agent_upgraded"})
"""Agents that end, and are outlived by their clients."""
_ARENAS: Final = frozenset({"arena_damaged", "arena_flips", "arena_lost", "arena_slow"})
"""Faults of further arenas."""
_OPERATOR: Final = frozenset({"namespace_made", "namespace_set", "namespace_deleted"})
"""What an operator does to namespaces; no faults, either."""
_APART: Final = (
    _BULK | _RDMA | _SHARED_WRITES | _SCALE | _DISK | _MORE_DISK | _COLD | _KEPT | _CLOCK | _WEIGHTS
) | (_OPERATOR | _DEATHS | _ARENAS)
"""Drawn apart, each where it can show; so plans in which it cannot stay as they are."""
MILD: Final = frozenset({"loss", "duplication", "reordering", "corruption", *_SCALE, *_OPERATOR})
"""Faults that, in their smallest amount, no patient get may fail for."""
LEAST: Final = 0.1


@dataclass(frozen=True)
class Fault:
    """What goes wrong from `at` seconds of the chaos phase on, for `for_s`; what `hosts` and
    `amount` mean is up to the kind (`faults.py`)."""

    number: int
    kind: str
    at: float
    for_s: float
    hosts: tuple[int, ...] = ()
    amount: float = 0.0

    @property
    def mild(self) -> bool:
        """Whether a patient get of a block that is there succeeds all the same."""
        return self.kind in MILD and self.amount == LEAST


@dataclass(frozen=True)
class HostPlan:
    arena_slabs: int
    clock_offset_s: float
    clock_rate: float
    mtu_bytes: int


@dataclass(frozen=True)
class Plan:
    """Everything about one run."""

    seed: int
    hosts: tuple[HostPlan, ...]
    rights: dict[int, frozenset[int]]
    blocks: tuple[Block, ...]
    ops: tuple[Op, ...]
    faults: tuple[Fault, ...]
    replicas: int
    slots: int
    coalesce_lease_s: float
    heat_threshold: int
    plain: bool
    admit: bool
    controllers: int
    switch_clock_s: float
    put_ack_local: bool
    lone_reads_by_tcp: bool
    paced: bool
    """Homes send so slowly that answers wait for their turn."""
    latecomers: int
    """Hosts, the last ones, that start only in the chaos phase."""
    pins: tuple[int, ...] = ()
    settings: dict[int, NamespaceSettings] = field(default_factory=dict)
    """What the operator says of each namespace."""
    cards: frozenset[int] = frozenset()
    """Hosts with an RDMA card."""
    cold: bool = False
    """Whether there is an object store below the hosts."""
    disks: frozenset[int] = frozenset()
    """Hosts with a disk below their DRAM."""
    zones: bool = False
    """Whether answers that are shared come by RDMA, at hosts with a card."""
    replicates: bool = False
    """Whether hosts say that their links carry little, so that they give out replicas."""
    bulk_link_bits_per_s: int = 0
    """What agents believe that the link carries by which blocks leave over TCP; 0 = not known."""
    more: tuple[Block, ...] = ()
    """Blocks that nobody puts but with others, several at once."""
    later: tuple[Block, ...] = ()
    """Those of a namespace that is made in the middle of the run."""
    features: frozenset[str] = frozenset()
    """Of `FEATURES`, those that the run has."""

    @property
    def all_blocks(self) -> tuple[Block, ...]:
        """By what `Op.blocks` counts."""
        return self.blocks + self.more + self.later

    def before(self, name: Name) -> tuple[bytes, int]:
        """The key of the block before this one in its prefix (b"" = it is the first), and how many
        are before it: a namespace's blocks are one prefix, as engines tell it."""
        mine = list(dict.fromkeys(b.name for b in self.all_blocks if b.name[0] == name[0]))
        depth = mine.index(name) if name in mine else 0
        return (mine[depth - 1][1] if depth else b""), depth


@dataclass(frozen=True)
class Mask:
    """What a run leaves out. `hosts`: how many there are at most; None = as planned. `features`:
    those that it has; None = those that the seed draws."""

    ops: frozenset[int] = frozenset()
    faults: frozenset[int] = frozenset()
    hosts: int | None = None
    features: frozenset[str] | None = None

    def __str__(self) -> str:
        parts = [f"hosts={self.hosts}"] if self.hosts is not None else []
        parts += [f"o{span}" for span in _spans(self.ops)]
        parts += [f"f{span}" for span in _spans(self.faults)]
        return ",".join(parts)

    @classmethod
    def parse(cls, text: str) -> Mask:
        """The mask that `str` wrote; ValueError if it is none."""
        ops: set[int] = set()
        faults: set[int] = set()
        hosts: int | None = None
        for part in filter(None, text.split(",")):
            found = re.fullmatch(r"(hosts=|o|f)(\d+)(?:-(\d+))?", part)
            if found is None:
                raise ValueError(f"{part!r} is none of hosts=N, oN, oN-M, fN, fN-M")
            first, last = int(found[2]), int(found[3] or found[2])
            if found[1] == "hosts=":
                hosts = first
            else:
                (ops if found[1] == "o" else faults).update(range(first, last + 1))
        return cls(frozenset(ops), frozenset(faults), hosts)


def _spans(numbers: frozenset[int]) -> list[str]:
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return [str(a) if a == b else f"{a}-{b}" for a, b in spans]


PlanFault = Callable[[random.Random, int], tuple[tuple[int, ...], float, float]]
"""(rng, number of hosts) -> (hosts, amount, for_s)."""


@dataclass(frozen=True)
class _Draft:
    """A plan while it is made."""

    seed: int
    rng: random.Random
    count: int
    rights: dict[int, frozenset[int]]
    blocks: list[Block]
    ops: list[Op] = field(default_factory=list)


def features_of(seed: int) -> frozenset[str]:
    """The features that a seed draws, each from a source of its own, so that runs without it stay
    as they are."""
    return frozenset(
        name for name in FEATURES if random.Random(f"{seed}/feature/{name}").randrange(ONE_IN) == 0
    )


def make_plan(seed: int, fault_kinds: dict[str, PlanFault], mask: Mask) -> Plan:
    """The plan of a seed. `fault_kinds`: how faults of each kind are chosen."""
    rng = random.Random(f"{seed}/plan")
    features = features_of(seed) if mask.features is None else mask.features
    planned = rng.choice((3, 3, 4, 4, 5, 6))
    count = planned if mask.hosts is None else min(planned, mask.hosts)
    everything, blast, zones = _everything(seed), _blast(seed), _zones(seed)
    rights = {OPEN: frozenset(range(1, planned + 1))}
    if rng.random() < 0.6 or everything or blast:
        for namespace in NAMESPACES[1 : 3 if everything else rng.choice((2, 3))]:
            some = rng.sample(range(1, planned + 1), rng.randrange(2, planned))
            rights[namespace] = frozenset(some)
    links = random.Random(f"{seed}/links")
    mtus = links.choice(((1500,), (1500,), (9000,), (4200, 9000), (1500, 9000)))
    hosts = tuple(
        HostPlan(
            # Some arenas overflow; a slab is of 64 KiB, and holds copies of one size class.
            arena_slabs=rng.choice((4, 4, 8) if everything else (4, 12, 32, 64)),
            clock_offset_s=rng.uniform(0, 1e5),
            clock_rate=rng.choice((1.0, 1.0, 1.0, 1.002, 0.998, 1.05, 0.95)),
            mtu_bytes=links.choice(mtus),
        )
        for _ in range(planned)
    )[:count]
    blocks = _blocks(seed, rights, everything=everything, zones=zones)
    draft = _Draft(seed, random.Random(f"{seed}/ops"), planned, rights, blocks)
    _draft_ops(draft)
    more = _draft_many(draft) if seed % 10 in (0, 5, 7) else []
    later = _draft_operated(draft, more) if "operator" in features else []
    plain = rng.random() < 0.1
    faults = _faults(seed, planned, fault_kinds, hostile=plain)
    # Nothing but the agents themselves stands against a hostile host on a plain network; what
    # they guard against there takes a meeting of things that chance alone seldom brings about.
    scene = random.Random(f"{seed}/scene")
    alone = renumbered = False
    if plain:
        alone, renumbered = scene.choice(((False, False), (True, False), (False, True)))
    if alone:
        hosts = tuple(replace(host, arena_slabs=scene.choice((2, 3, 4))) for host in hosts)
        faults += _forger(scene, planned, len(faults))
    if renumbered:
        faults += _renumbering(scene, planned, len(faults))
    cards = _cards(seed, planned)
    if zones:
        mtus_of = random.Random(f"{seed}/zones")
        hosts = tuple(replace(host, mtu_bytes=mtus_of.choice((4200, 9000))) for host in hosts)
        faults += _drawn_apart(
            *(seed, "zone faults", planned, fault_kinds, _SHARED_WRITES, len(faults)),
            counts=(0, 1, 2, 3),
            times=(1, 2, 3),
        )
    elif cards:
        faults += _drawn_apart(
            *(seed, "rdma faults", planned, fault_kinds, _RDMA, len(faults)),
            counts=(0, 1, 2, 3),
            times=(1, 2, 3),
        )
    disks = _disks(seed, planned)
    if disks:
        faults += _drawn_apart(
            *(seed, "disk faults", planned, fault_kinds, _DISK, len(faults)),
            counts=(1, 2, 3, 4),
            times=(1, 2),
        )
    cold = seed % 4 == 2  # `_everything` is among them
    if cold:
        faults += _drawn_apart(
            *(seed, "cold faults", planned, fault_kinds, _COLD, len(faults)),
            counts=(1, 2, 3),
            times=(1,),
        )
    if disks and (seed % 7 == 0 or everything):
        faults += _drawn_apart(
            *(seed, "more disk faults", planned, fault_kinds, _MORE_DISK, len(faults)),
            counts=(1, 2),
            times=(1, 2),
        )
    if seed % 9 == 5 or everything:
        faults += _drawn_apart(
            *(seed, "kept arenas", planned, fault_kinds, _KEPT, len(faults)),
            counts=(1,),
            times=(1, 2),
        )
    if (disks and seed % 7 == 0) or everything:
        faults += _drawn_apart(
            *(seed, "clocks", planned, fault_kinds, _CLOCK, len(faults)), counts=(1,), times=(2, 3)
        )
    if blast:
        if not everything and scene.random() < 0.7:
            faults = []  # so that shares can be judged
        faults += _drawn_apart(
            *(seed, "blast", planned, fault_kinds, _WEIGHTS, len(faults)), counts=(1,), times=(1,)
        )
    if "arenas" in features:
        faults += _drawn_apart(
            *(seed, "arenas", planned, fault_kinds, _ARENAS, len(faults)),
            counts=(1, 2),
            times=(1, 2),
        )
    if "kept" in features:
        faults += _drawn_apart(
            *(seed, "kept", planned, fault_kinds, _DEATHS, len(faults)),
            counts=(1, 2, 2),
            times=(2, 3, 4),
        )
    if "operator" in features:
        faults += _drawn_apart(
            *(seed, "operator", planned, fault_kinds, _OPERATOR, len(faults)),
            counts=(2, 3),
            times=(1, 2, 3),
        )
    ticks_wrap_s = (1 << 32) * 64e-6
    return Plan(
        seed=seed,
        hosts=hosts,
        rights=rights,
        blocks=tuple(draft.blocks),
        more=tuple(more),
        later=tuple(later),
        features=features,
        ops=tuple(op for op in draft.ops if op.number not in mask.ops),
        faults=tuple(f for f in faults if f.number not in mask.faults),
        # Mostly so few that some hosts are no homes, and must read from others.
        replicas=min(
            rng.choice((0, 1, 1, 2)), 2 if rng.random() < 0.15 else planned - 2, 0 if alone else 2
        ),
        slots=rng.choice((2, 4, 8)),
        coalesce_lease_s=rng.choice((0.25, 1.0, 4.0)),
        heat_threshold=rng.choice((1, 2, 3)),
        plain=plain,
        admit=rng.random() < 0.75,
        controllers=2 if rng.random() < 0.3 else 1,
        switch_clock_s=rng.choice((10.0, rng.uniform(0, 1e5), ticks_wrap_s - rng.uniform(1, 6))),
        put_ack_local=rng.random() < 0.1,
        lone_reads_by_tcp=bool(cards) or random.Random(f"{seed}/lone").random() < 0.7,
        paced=rng.random() < 0.25,
        latecomers=1 if planned > 3 and rng.random() < 0.2 else 0,
        pins=tuple(rng.sample(range(len(draft.blocks)), 2)) if rng.random() < 0.3 else (),
        settings=_with_arenas(
            seed,
            _settings(seed, rights, cold=cold, everything=everything, blast=blast),
            features,
        ),
        bulk_link_bits_per_s=BLAST_BITS_PER_S if blast else 0,
        cards=cards,
        disks=disks,
        cold=cold,
        zones=zones,
        replicates=seed % 2 == 1 or everything,
    )


def _settings(
    seed: int,
    rights: dict[int, frozenset[int]],
    *,
    cold: bool,
    everything: bool,
    blast: bool,
) -> dict[int, NamespaceSettings]:
    """A policy for each namespace; some have blocks that age, quotas, and rates; with an object
    store, most lie there, too. Where `everything` is in one pool, each has another policy, and most
    have quotas that one or two blocks fill; where tenants `blast`, weights that differ much."""
    rng = random.Random(f"{seed}/settings")
    media = random.Random(f"{seed}/media")
    shares = random.Random(f"{seed}/shares")
    settings = {}
    policies = rng.sample(POLICIES, len(POLICIES)) if everything else []
    weights = [0.5, 4.0] if blast else []
    for namespace in rights:
        policy = policies.pop() if everything else rng.choice(POLICIES)
        ages = policy == "ttl" or rng.random() < (0.6 if everything else 0.1)
        settings[namespace] = NamespaceSettings(
            policy=policy,
            ttl_s=rng.choice((2.0, 4.0, 8.0)) if ages else 0.0,
            quota_bytes=_quotas(rng, everything=everything),
            assured_bytes=(
                {tier: shares.choice((16, 32)) << 10 for tier in _TIERS if shares.random() < 0.4}
                if everything
                else {}
            ),
            operations_per_s=rng.choice((20.0, 200.0)) if rng.random() < 0.1 else 0.0,
            weight=weights.pop() if weights else rng.choice((0.5, 1.0, 1.0, 4.0)),
            media=["dram", "ssd", "switch", "cold"] if cold and media.random() < 0.8 else [],
        )
    return settings


def _with_arenas(
    seed: int, settings: dict[int, NamespaceSettings], features: frozenset[str]
) -> dict[int, NamespaceSettings]:
    """Where there are further arenas, some namespaces have quotas of them."""
    rng = random.Random(f"{seed}/arena quotas")
    if "arenas" not in features:
        return settings
    return {
        namespace: replace_field(said, quota_bytes={**said.quota_bytes, "arena": quota << 10})
        if (quota := rng.choice((0, 0, 16, 32, 64)))
        else said
        for namespace, said in settings.items()
    }


def _quotas(rng: random.Random, *, everything: bool) -> dict[str, int]:
    if not everything:
        return {"dram": rng.choice((2, 6)) << 16} if rng.random() < 0.1 else {}
    return {tier: rng.choice((16, 32, 64)) << 10 for tier in _TIERS if rng.random() < 0.6}


def _blocks(
    seed: int, rights: dict[int, frozenset[int]], *, everything: bool, zones: bool
) -> list[Block]:
    """The blocks of a run, and their copies. In landing zones most have one slot, which they use
    one after the other, and more have several segments."""
    rng = random.Random(f"{seed}/blocks")
    slots = random.Random(f"{seed}/slots")
    most = rng.randrange(10, 21) if everything else rng.randrange(6, 13)
    keys = [rng.randbytes(16) for _ in range(most)]
    if rng.random() < 0.15:
        keys[1] = _colliding(rng, keys[0])
        if rng.random() < 0.5:  # with three, one finds both entries taken
            keys[2] = _colliding(rng, keys[0])
    blocks: list[Block] = []
    for number, key in enumerate(keys):
        namespace = OPEN if number < 4 else rng.choice(list(rights))
        if number == 4 and len(rights) > 1:
            # Two tenants' engines have the same key for blocks of their own.
            namespace, key = NAMESPACES[1], keys[0]
        elif zones and number > 2 and slots.random() < 0.7:
            key = _of_slot(slots, namespace, slot_of(*blocks[0].name))
        size = rng.choice(
            (rng.randrange(1, 1025), rng.randrange(1, 1025), 1024, rng.randrange(1025, 3072),
             rng.randrange(1025, 3072), rng.randrange(3072, 12_000))
        )  # fmt: skip
        if rng.random() < 0.06 or (zones and slots.random() < 0.15):
            size = rng.choice((65_536, 65_537, 64 * 1024 + 5000, rng.randrange(20_000, 140_000)))
        first = rng.randbytes(size)
        copies = [first]
        for _ in range(2 if rng.random() < 0.3 else 0):
            # Another host computes the same block: a few last bits differ, here and there.
            other = bytearray(first)
            for _ in range(rng.randrange(1, 5)):
                other[rng.randrange(size)] ^= 1 << rng.randrange(3)
            if bytes(other) not in copies:
                copies.append(bytes(other))
        blocks.append(Block((namespace, key), size, tuple(copies)))
    return blocks


def _colliding(rng: random.Random, key: bytes) -> bytes:
    """Another key of which the first segment uses the same set of the switch's table."""
    wanted = pending_set_of(OPEN, key, 0)
    while True:
        other = rng.randbytes(16)
        if pending_set_of(OPEN, other, 0) == wanted:
            return other


def _of_slot(rng: random.Random, namespace: int, slot: int) -> bytes:
    """A key of which the first segment has this slot in landing zones."""
    while True:
        key = rng.randbytes(16)
        if slot_of(namespace, key) == slot:
            return key


def _draft_ops(draft: _Draft) -> None:
    rng = draft.rng
    for number, block in enumerate(draft.blocks):
        users = sorted(draft.rights[block.name[0]])
        for copy in range(min(len(block.copies), rng.choice((1, 2, 3)))):
            _add(draft, 0, rng.uniform(0, 0.1), "put", (rng.choice(users),), (number,), copy=copy)
    for phase, length_s, storms in ((0, CALM_S, 8), (1, CHAOS_S, 24), (2, FINAL_S, 8)):
        for _ in range(storms):
            _draft_storm(draft, phase, rng.uniform(0.3 if phase == 0 else 0.0, length_s))
    for _ in range(rng.randrange(2, 16)):
        _draft_other(draft, rng.choice((0, 1, 1, 1, 2)))


def _draft_storm(draft: _Draft, phase: int, at: float) -> None:
    """Several hosts read the same blocks at nearly the same time."""
    rng = draft.rng
    # Few keys are read by many.
    first = min(rng.randrange(len(draft.blocks)), rng.randrange(len(draft.blocks)))
    namespace = draft.blocks[first].name[0]
    others = [n for n, b in enumerate(draft.blocks) if b.name[0] == namespace and n != first]
    blocks = (first, *rng.sample(others, min(len(others), rng.choice((0, 0, 1, 2)))))
    users = sorted(draft.rights[namespace])
    readers = rng.sample(users, rng.choice((len(users), len(users), rng.randint(1, len(users)))))
    _add(
        draft,
        phase,
        at,
        "group_get" if rng.random() < 0.1 else "get",
        tuple(readers),
        blocks,
        spread_s=rng.choice((0.0, 0.0002, 0.002, 0.02)),
        deadline_s=rng.choice((0.1, 1.0, 3.0)) if phase == 1 else 3.0,
        hold_s=rng.choice((0.0, 0.01, 0.3)),
        gather_ms=rng.choice((0, 0, 0, 2, 12)),
        sheds=rng.random() < 0.9,
    )


def _draft_other(draft: _Draft, phase: int) -> None:
    rng = draft.rng
    number = rng.randrange(len(draft.blocks))
    block = draft.blocks[number]
    host = rng.choice(sorted(draft.rights[block.name[0]]))
    at = rng.uniform(0.2, (CALM_S, CHAOS_S, FINAL_S)[phase])
    others = ("half_put", "exists", "prefetch", "drop", "leave_open")
    kind = "put" if rng.random() < 0.6 else rng.choice(others)
    _add(draft, phase, at, kind, (host,), (number,), copy=rng.randrange(len(block.copies)))


def _draft_many(draft: _Draft) -> list[Block]:
    """Hosts put several blocks at once, and others read some of them; drawn apart, after all else,
    and mostly of blocks of their own, so that plans stay as they are otherwise. Most blocks are of
    one size, and a host puts some soon after the others, since what is pushed goes on a connection
    that stands to a home where blocks like it have come. Some are put twice at once, or lie in the
    pool already; and some clients go in the middle."""
    rng = random.Random(f"{draft.seed}/many puts")
    more: list[Block] = []
    size = rng.choice((rng.randrange(1, 1025), 1024, rng.randrange(1025, 6000)))
    for _ in range(rng.randrange(2, 6)):
        namespace = rng.choice(list(draft.rights))
        users = sorted(draft.rights[namespace])
        host, phase = rng.choice(users), rng.choice((0, 1, 1, 1, 2))
        at = rng.uniform(0.2, (CALM_S, CHAOS_S, FINAL_S)[phase])
        for _ in range(rng.choice((1, 3, 4))):
            _draft_batch(draft, rng, more, namespace, host, phase, at, size)
            at += rng.uniform(0.01, 0.3)
    return more


def _draft_operated(draft: _Draft, more: list[Block]) -> list[Block]:
    """Hosts put and read blocks of a namespace that is made meanwhile; and they put those of the
    other namespaces, which may have been deleted, and read them. Drawn apart, as `_draft_many`."""
    rng = random.Random(f"{draft.seed}/operated")
    later = [
        Block((LATER, rng.randbytes(16)), size, (rng.randbytes(size),))
        for size in (rng.choice((rng.randrange(1, 1025), 3000, 9000)) for _ in range(4))
    ]
    there = [*draft.blocks, *more, *later]
    rights = {LATER: draft.rights[OPEN]} | draft.rights
    for _ in range(rng.randrange(20, 40)):
        number = rng.randrange(len(there))
        if rng.random() < 0.3:
            number = rng.randrange(len(there) - len(later), len(there))
        block = there[number]
        users = sorted(rights[block.name[0]])
        phase = rng.choice((1, 1, 1, 2))
        at = rng.uniform(0.0, (CALM_S, CHAOS_S, FINAL_S)[phase])
        copy = rng.randrange(len(block.copies))
        _add(draft, phase, at, "put", (rng.choice(users),), (number,), copy=copy)
        readers = tuple(rng.sample(users, min(len(users), rng.choice((1, 2, 3)))))
        at += rng.choice((0.0, 0.003, 0.02, 0.3))
        _add(draft, phase, at, "get", readers, (number,), deadline_s=3.0, sheds=rng.random() < 0.7)
    return later


def _draft_batch(
    draft: _Draft,
    rng: random.Random,
    more: list[Block],
    namespace: int,
    host: int,
    phase: int,
    at: float,
    size: int,
) -> None:
    there = [*draft.blocks, *more]
    mine = [n for n, block in enumerate(there) if block.name[0] == namespace]
    blocks: list[int] = []
    count = rng.choice((2, 2, 3, 5, 12))
    if rng.random() < 0.04:  # as many as one question takes, small enough for any arena
        count, size = MAX_MANY, rng.randrange(1, 129)
    for _ in range(count):
        if mine and rng.random() < 0.15:
            blocks.append(rng.choice(mine))
        elif blocks and rng.random() < 0.05:
            blocks.append(rng.choice(blocks))
        else:
            length = size if rng.random() < 0.9 else rng.randrange(1, 3 * size)
            copies = tuple(rng.randbytes(length) for _ in range(rng.choice((1, 1, 1, 2))))
            blocks.append(len(draft.blocks) + len(more))
            more.append(Block((namespace, rng.randbytes(16)), length, copies))
    acks: tuple[PutAck, ...] = ("", "", "home", "replicas", "replicas", "local")
    _add(
        *(draft, phase, at, "put_many", (host,), tuple(blocks)),
        copy=rng.randrange(2),
        ack=rng.choice(acks),
        leaves_after_s=rng.choice((0.0, 0.0002, 0.002, 0.02)) if rng.random() < 0.15 else None,
    )
    users = sorted(draft.rights[namespace])
    _add(
        *(draft, phase, at + rng.uniform(0.0, 0.5), "get", tuple(rng.sample(users, 2))),
        tuple(dict.fromkeys(rng.sample(blocks, min(len(blocks), 4)))),
        deadline_s=3.0,
        sheds=rng.random() < 0.9,
    )


def _add(
    draft: _Draft,
    phase: int,
    at: float,
    kind: str,
    hosts: tuple[int, ...],
    blocks: tuple[int, ...],
    *,
    copy: int = 0,
    spread_s: float = 0.0,
    deadline_s: float = 1.0,
    hold_s: float = 0.01,
    gather_ms: int = 0,
    sheds: bool = True,
    ack: PutAck = "",
    leaves_after_s: float | None = None,
) -> None:
    draft.ops.append(
        Op(
            len(draft.ops), phase, at, kind, hosts, blocks, copy, spread_s, deadline_s, hold_s,
            gather_ms, sheds, ack, leaves_after_s,
        )
    )  # fmt: skip


def _faults(seed: int, hosts: int, kinds: dict[str, PlanFault], *, hostile: bool) -> list[Fault]:
    """Some faults of some kinds; few kinds at a time, so that each has runs of its own. With
    `hostile` at least one of them is a hostile host."""
    rng = random.Random(f"{seed}/faults")
    chosen = rng.sample(
        sorted(kinds.keys() - _APART),
        rng.choice((0, 1, 1, 2, 2, 3, 4, 6)),
    )
    if hostile:
        chosen.append(rng.choice([kind for kind in sorted(kinds) if kind.startswith("hostile")]))
    faults: list[Fault] = []
    for kind in chosen:
        for _ in range(rng.choice((1, 1, 2, 3))):
            targets, amount, for_s = kinds[kind](rng, hosts)
            at = rng.uniform(0.0, CHAOS_S - 0.5)
            faults.append(Fault(len(faults), kind, at, for_s, targets, amount))
    # Drawn apart, since they matter only to reads by TCP; and so other plans stay as they were.
    rng = random.Random(f"{seed}/bulk faults")
    for kind in rng.sample(sorted(kinds.keys() & _BULK), rng.choice((0, 0, 0, 1, 1, 2))):
        targets, amount, for_s = kinds[kind](rng, hosts)
        at = rng.uniform(0.0, CHAOS_S - 0.5)
        faults.append(Fault(len(faults), kind, at, for_s, targets, amount))
    rng = random.Random(f"{seed}/scale")
    for kind in sorted(kinds.keys() & _SCALE) if seed % 4 == 1 or _everything(seed) else ():
        for _ in range(rng.choice((1, 2, 3))):
            targets, amount, for_s = kinds[kind](rng, hosts)
            at = rng.uniform(0.0, CHAOS_S - 0.5)
            faults.append(Fault(len(faults), kind, at, for_s, targets, amount))
    return faults


def _everything(seed: int) -> bool:
    """Whether a run has every tier in one pool: disks, an object store, RDMA, replicas, drained
    nodes, small arenas and quotas, and a policy of its own for each namespace."""
    return seed % 16 == 14


def _blast(seed: int) -> bool:
    """Whether a run has tenants that take all they can get."""
    return seed % 14 == 12 or _everything(seed)


def _zones(seed: int) -> bool:
    """Whether a run has shared answers by RDMA."""
    return seed % 30 == 3 or seed % 15 == 11 or seed % 32 == 14


def _cards(seed: int, hosts: int) -> frozenset[int]:
    """Which hosts have an RDMA card: in every fourth run or so most have one, and in others none,
    so that TCP is tried as much as ever."""
    if seed % 6 != 3 and not _zones(seed) and not _everything(seed):
        return frozenset()
    rng = random.Random(f"{seed}/cards")
    return frozenset(n for n in range(1, hosts + 1) if rng.random() < 0.85)


def _disks(seed: int, hosts: int) -> frozenset[int]:
    """Which hosts have a disk: in every third run most have one."""
    if seed % 3 != 1 and not _everything(seed):
        return frozenset()
    rng = random.Random(f"{seed}/disks")
    return frozenset(n for n in range(1, hosts + 1) if rng.random() < 0.8)


def _drawn_apart(
    seed: int,
    name: str,
    hosts: int,
    kinds: dict[str, PlanFault],
    which: frozenset[str],
    number: int,
    *,
    counts: tuple[int, ...],
    times: tuple[int, ...],
) -> list[Fault]:
    """Some of these kinds of faults, each some times, from `number` on; from a source of their own,
    so that plans in which they cannot show stay as they are."""
    rng = random.Random(f"{seed}/{name}")
    faults: list[Fault] = []
    for kind in rng.sample(sorted(kinds.keys() & which), rng.choice(counts)):
        for _ in range(rng.choice(times) if len(times) > 1 else times[0]):
            targets, amount, for_s = kinds[kind](rng, hosts)
            at = rng.uniform(0.0, CHAOS_S - 0.5)
            faults.append(Fault(number + len(faults), kind, at, for_s, targets, amount))
    return faults


def _forger(rng: random.Random, hosts: int, number: int) -> list[Fault]:
    """A host that answers for others nearly all the time."""
    return [Fault(number, "hostile_forger", 0.0, CHAOS_S, (rng.randint(1, hosts),))]


def _renumbering(rng: random.Random, hosts: int, number: int) -> list[Fault]:
    """The controller forgets which node has which number, while one node is not heard, for which
    others wait, and a third answers for everybody."""
    unheard, forger = rng.sample(range(1, hosts + 1), 2)
    at = rng.uniform(0.5, CHAOS_S - 2.0)
    return [
        Fault(number, "partition", at - 0.5, 2.5, (unheard, 0, 1), 1.0),
        Fault(number + 1, "hostile_forger", at - 0.5, 2.5, (forger,)),
        Fault(number + 2, "controller_wiped", at, rng.uniform(0.0, 0.2)),
    ]

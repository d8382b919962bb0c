"""Tiers: what goes into the switch, what leaves it, and that nothing of value is lost by it.

Owns: the life of a resident from heat to eviction: who is asked to describe a block, when it is
admitted, credited, refreshed, kept in DRAM, and evicted; the pins; the log of decisions. Built on
`admission` (values and choice), `residency` (slots) and `requests` (open questions). Must not
know: connections, tables, membership (a callback names a bucket's homes that can be asked).

    heat ──best──▶ asked (Describe) ──held──▶ contender ──choose──▶ resident
                                                                      │ evict
                 DRAM of the home ◀──Kept── asked (Keep), if worth it ┘──▶ slots drain
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvcast.controller.core.admission import (
    BEST_WITH_QUOTA,
    Choice,
    Contender,
    HeatMap,
    Holder,
    Room,
    ValueOptions,
    choose,
)
from kvcast.controller.core.ghosts import Ghosts
from kvcast.controller.core.requests import DESCRIBE_BATCH, OpenRequests, Outgoing
from kvcast.controller.core.residency import Residency, Resident
from kvcast.protocol.bounded_map import BoundedMap
from kvcast.protocol.links.backoff import pause_after
from kvcast.protocol.messages.control import (
    BlockRef,
    Credit,
    Describe,
    Described,
    HotBlock,
    Keep,
    Kept,
)
from kvcast.protocol.messages.wire import (
    MAX_BLOCK_BYTES,
    SEGMENT_BYTES,
    BlockId,
    chunking_of,
    segment_index,
)

REQUEST_TIMEOUT_S = 2.0
DESCRIPTION_AGE_S = 10.0
"""How long a description, or its absence, is believed."""
KEEP_ATTEMPTS = 3
"""Home, home again, next home; then the block is let go."""
DECISIONS_KEPT = 256
MAX_PINS = 1024
WRONG_BAR_S = 2.0
"""How long a block stays out of the switch that came wrong from there: longer than readers take to
say so, and twice as long each time that it happens again, up to `WRONGEST_BAR_S`."""
WRONGEST_BAR_S = 64.0
MAX_BARRED = 1024

Homes = Callable[[BlockId], Sequence[str]]
"""The node ids of a block's homes, the first one first, of those that are connected."""


class AdmitMode(enum.Enum):
    """What may enter the switch: what is worth it, what is pinned, or nothing."""

    AUTO = "auto"
    PIN = "pin"
    OFF = "off"


class PinError(ValueError):
    """The block cannot be pinned; the text says why."""


@dataclass(frozen=True)
class Decision:
    """One decision and its reason, at the core's time `at`."""

    at: float
    verb: str
    block: BlockId
    value: float
    reason: str


@dataclass(frozen=True)
class HeatSample:
    """One heat digest of the switch."""

    block: BlockId
    segment: int
    port_bits: int
    count: int


@dataclass(frozen=True)
class Description:
    """What a home said of a block; `size_bytes` None: it does not hold it."""

    at: float
    size_bytes: int | None
    digest: int


class Tiers:
    """The residents and everything that wants to become one. See the module's text."""

    def __init__(
        self,
        mode: AdmitMode,
        residency: Residency,
        options: ValueOptions,
        homes: Homes,
        *,
        refresh_s: float,
        may_hold: Callable[[int], bool] = lambda _namespace: True,
        may_pin: Callable[[int], bool] = lambda _namespace: True,
        quotas: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        """`may_hold`: whether a namespace's blocks may be in the switch; `may_pin`: or those of
        them that an operator has pinned; `quotas`: in slots, of the namespaces that have one."""
        self._may_hold = may_hold
        self._may_pin = may_pin
        self._quotas = quotas
        self.mode = mode
        self.residency = residency
        self.options = options
        self.heat = HeatMap(options, slots=residency.capacity)
        self.ghosts = Ghosts(residency.capacity)
        self.pins: set[BlockId] = {b for b, r in residency.residents.items() if r.pinned}
        self.decisions: deque[Decision] = deque(maxlen=DECISIONS_KEPT)
        self.counts: Counter[str] = Counter()
        self._homes = homes
        self._requests = OpenRequests()
        self._described: dict[BlockId, Description] = {}
        self._hits: dict[int, int] = {}
        """Slot to its counter's value at the last reading."""
        self._refresh_s = refresh_s
        self._refreshed_at = 0.0
        self._refresh_wanted = False
        self._last_refusal: dict[BlockId, str] = {}
        self._barred = BoundedMap[BlockId, tuple[float, int]](MAX_BARRED)
        """Blocks that came wrong from the switch: until when they stay out of it, and how often
        they came wrong of late."""

    # --- what is heard ----------------------------------------------------------------------

    def heard_heat(self, sample: HeatSample, now: float) -> None:
        """A heat digest; of a resident it means READs that the switch could not serve yet. A READ
        for larger chunks than the switch keeps is one of several segments as it keeps them."""
        chunking, index = chunking_of(sample.segment), segment_index(sample.segment)
        segments = chunking.segment_bytes // SEGMENT_BYTES if index else 1
        self.heat.seen_by_switch(
            sample.block,
            segment=chunking.start_of(index) // SEGMENT_BYTES,
            reads=sample.count * segments,
            fan_out=max(1, sample.port_bits.bit_count()),
            now=now,
        )

    def heard_reports(self, reports: Mapping[BlockId, HotBlock], now: float) -> None:
        """A home's report of what it answered, by block."""
        self.heat.seen_by_home(reports, now)
        for block, report in reports.items():
            if self.ghosts.is_deaf(now):
                break
            self._ghosts_hear(block, report.reads, now)

    def _ghosts_hear(self, block: BlockId, reads: int, now: float) -> None:
        """READs of a block's segments that its home or the switch has answered. (Digests of heat
        tell of READs that the home reports, too.)"""
        if not reads or self.ghosts.is_deaf(now) or not self._may_hold(block.namespace):
            return
        if self.ghosts.listens(now):
            segments = self.heat.segments(block)
            standings = self.heat.standings(block, now)
            self.ghosts.read(block, segments, reads / segments, standings)
            if self.heat.rule is not self.ghosts.rule:
                self.heat.rule = self.ghosts.rule
                self.counts["rule_changes"] += 1

    @property
    def hits_matter(self) -> bool:
        """Whether `resident_hits` must be read: for its base, and while anything is resident."""
        return not self._hits or bool(self.residency.residents)

    def heard_hits(self, hits: Mapping[int, int], now: float) -> Outgoing:
        """Readings of `resident_hits` by slot; the growth is credited to the homes.

        The first reading of a counter is its base. One that fell (the switch restarted) counts
        from zero. Growth goes to the slot's present holder.
        """
        gained: Counter[BlockId] = Counter()
        holders = {s: r.block for r in self.residency.residents.values() for s in r.slots}
        for slot, total in hits.items():
            before = self._hits.get(slot, total)
            self._hits[slot] = total
            if slot in holders:
                gained[holders[slot]] += total - before if total >= before else total
        shares: dict[str, list[tuple[int, bytes, int]]] = {}
        for block, count in gained.items():
            if not count:
                continue
            self.residency.residents[block].hits += count
            self.heat.served(block, count, now)
            self._ghosts_hear(block, count, now)
            self.counts["resident_hits"] += count
            if homes := self._homes(block):
                shares.setdefault(homes[0], []).append((block.namespace, block.key, count))
        return [(node_id, Credit(hits=gains)) for node_id, gains in shares.items()]

    def wrong_digests_seen(self) -> None:
        """The switch refused to fill a cell: some home may hold other bytes than was described."""
        self._refresh_wanted = True

    def found_wrong(self, block: BlockId, digest: int, now: float) -> None:
        """A reader got a block from the switch that has not the digest under which it is kept
        there. Its home may send it wrong, or it was damaged on the way into the switch."""
        resident = self.residency.residents.get(block)
        if resident is None or resident.digest != digest:
            return
        self.counts["residents_wrong"] += 1
        until, times = self._barred.get(block, (now, 0))
        times = 1 if now - until > WRONGEST_BAR_S else times + 1  # or that was long ago
        bar_s = pause_after(times, WRONG_BAR_S, WRONGEST_BAR_S)
        self._barred[block] = now + bar_s, times
        self._evict(resident, f"a reader got it wrong from here: out for {bar_s:g} s", now)

    def found_in_use(
        self, slots: Mapping[int, int], lacking: Collection[BlockId], now: float
    ) -> None:
        """The switch was found to hold other segments in these slots, of these namespaces, than we
        would: what another controller, or we ourselves after the last state that was saved, gave
        them. Whoever has them here gives them up, since until those entries have gone the two would
        fill and serve the same cells. `lacking`: residents that the switch does not hold. They are
        written before anything is deleted, so those go that would exceed a quota with what is
        there."""
        for resident in list(self.residency.residents.values()):
            if not slots.keys().isdisjoint(resident.slots):
                self._evict(resident, "the switch has another block in its slots", now)
        self.residency.foreign(slots)
        taken = self.residency.taken()
        for namespace, most in self._quotas().items():
            new = [
                r
                for block in lacking
                if block.namespace == namespace and (r := self.residency.residents.get(block))
            ]
            for resident in self._least_valuable(new, taken[namespace] - most, now):
                self._evict(resident, "its namespace's quota is taken by what the switch has", now)

    def _is_barred(self, block: BlockId, now: float) -> bool:
        return block in self._barred and now < self._barred[block][0]

    def described(self, message: Described, node_id: str, now: float) -> None:
        """A home's answer to Describe; what follows from it is decided with the next `advance`."""
        request = self._requests.answered(message.request, node_id)
        if request is None or request.attempt is not None:
            self.counts["unexpected_answers"] += 1
            return
        held = {
            BlockId(namespace, key): (size, digest)
            for namespace, key, size, digest in message.blocks
            if 0 < size <= MAX_BLOCK_BYTES and 0 < digest < 1 << 64
        }
        for block in request.blocks:
            size, digest = held.get(block, (None, 0))
            self._described[block] = Description(now, size, digest)
            if size is None:
                continue
            if block in self.heat:
                self.heat.described(block, size, now)
            resident = self.residency.residents.get(block)
            if resident is not None and (resident.digest, resident.size_bytes) != (digest, size):
                self._evict(resident, "its home holds other bytes now", now)

    def kept(self, message: Kept, node_id: str, now: float) -> Outgoing:
        """A home's answer to Keep."""
        request = self._requests.answered(message.request, node_id)
        if request is None or request.attempt is None:
            self.counts["unexpected_answers"] += 1
            return []
        if message.held:
            self.counts["kept"] += 1
            self._finish_leaving(request.blocks[0], f"kept in DRAM by {node_id}", now)
            return []
        return self._keep(request.blocks[0], request.attempt + 1, now)

    # --- what the operator wants ------------------------------------------------------------

    def pin(self, block: BlockId) -> None:
        """Admit this block at the next chance and never evict it; PinError if that cannot be."""
        if self.mode is AdmitMode.OFF:
            raise PinError("admission is off (--admit off)")
        if block not in self.pins and len(self.pins) >= MAX_PINS:
            raise PinError(f"all {MAX_PINS} pins are taken")
        self.pins.add(block)
        if self._is_absent(block):
            del self._described[block]
        if resident := self.residency.residents.get(block):
            resident.pinned, resident.leaving = True, False

    def forget(self, namespaces: Iterable[int], now: float, reason: str) -> None:
        """Have nothing of these namespaces in the switch."""
        gone = frozenset(namespaces)
        self.heat.forget(gone)
        self.ghosts.forget(gone)
        self.pins = {block for block in self.pins if block.namespace not in gone}
        for resident in list(self.residency.residents.values()):
            if resident.block.namespace in gone:
                self._evict(resident, reason, now)

    def let_go(self, namespace: int, reason: str, now: float) -> Outgoing:
        """Have nothing of this namespace in the switch but what is pinned; its heat stays."""
        out: Outgoing = []
        for resident in list(self.residency.residents.values()):
            mine = resident.block.namespace == namespace
            if mine and not resident.pinned and not resident.leaving:
                out += self._let_go(resident, reason, now)
        return out

    def unpin(self, block: BlockId) -> bool:
        """Let the block stand by its value again; whether it was pinned."""
        if block not in self.pins:
            return False
        self.pins.discard(block)
        if resident := self.residency.residents.get(block):
            resident.pinned = False
        return True

    def why_not(self, block: BlockId) -> str:
        """Why a pinned block is not resident, as far as known."""
        if not self._homes(block):
            return "none of its homes is connected"
        description = self._described.get(block)
        if description is None:
            return "its home has not described it yet"
        if description.size_bytes is None:
            return "its home does not hold it"
        if block in self._barred:
            return "a reader got it wrong from the switch"
        return self._last_refusal.get(block, "not decided yet")

    # --- time -------------------------------------------------------------------------------

    def advance(self, now: float) -> Outgoing:
        """Everything that is due: late answers, slots that are free again, this tick's choice."""
        out: Outgoing = []
        self.residency.advance(now)
        for request in self._requests.expired(now):
            self.counts["requests_expired"] += 1
            if request.attempt is not None:
                out += self._keep(request.blocks[0], request.attempt + 1, now)
        out += self._clear(now)
        out += self._keep_to_quotas(now)
        out += self._refresh(now)
        wanted = self._wanted(now)
        out += self._ask(wanted, now)
        out += self._settle(wanted, now)
        return out

    def next_deadline(self) -> float | None:
        times = (self.residency.next_deadline(), self._requests.next_deadline())
        return min((t for t in times if t is not None), default=None)

    def _wanted(self, now: float) -> list[BlockId]:
        """Blocks that should be looked at: pins first, then the most valuable. Those that their
        homes did not hold of late take nobody's place."""
        if self.mode is AdmitMode.OFF:
            return []
        residents = self.residency.residents
        absent = {block for block in self._described if self._is_absent(block)}
        quotas = self._quotas()
        pinned: list[BlockId] = []
        with_quota: Counter[int] = Counter()
        for block in sorted(self.pins):
            if block in residents or block in absent or self._is_barred(block, now):
                continue
            if not self._may_pin(block.namespace):
                continue
            if block.namespace in quotas:
                with_quota[block.namespace] += 1
                if with_quota[block.namespace] > BEST_WITH_QUOTA:
                    continue
            pinned.append(block)
        hot: list[BlockId] = []
        if self.mode is AdmitMode.AUTO:
            without = {*residents, *self.pins, *absent}
            hot = self.heat.best(DESCRIBE_BATCH, now, without=without, quotas=quotas)
        return [
            *pinned[: 3 * DESCRIBE_BATCH],
            *(b for b in hot if self._may_hold(b.namespace) and not self._is_barred(b, now)),
        ]

    def _is_absent(self, block: BlockId) -> bool:
        """Whether its home has said of late that it does not hold it."""
        description = self._described.get(block)
        return description is not None and description.size_bytes is None

    def _ask(self, wanted: Sequence[BlockId], now: float) -> Outgoing:
        """Describe what is wanted and not known, one question a home."""
        for block in [b for b, d in self._described.items() if now - d.at > DESCRIPTION_AGE_S]:
            del self._described[block]
        open_ = self._requests.asked_about()
        return self._describe(
            (b for b in wanted if b not in self._described and b not in open_), now
        )

    def _clear(self, now: float) -> Outgoing:
        """Let go of what this mode does not admit: left by a former controller, or unpinned."""
        out: Outgoing = []
        if self.mode is AdmitMode.AUTO:
            return out
        for resident in list(self.residency.residents.values()):
            if not resident.leaving and not (resident.pinned and self.mode is AdmitMode.PIN):
                resident.pinned = False
                out += self._let_go(resident, f"--admit {self.mode.value}", now)
        return out

    def _keep_to_quotas(self, now: float) -> Outgoing:
        """Let go of what exceeds a quota, which has become smaller."""
        out: Outgoing = []
        staying = self.residency.staying()
        for namespace, most in self._quotas().items():
            if staying[namespace] <= most:
                continue
            own = [
                r
                for r in self.residency.residents.values()
                if r.block.namespace == namespace and not r.leaving
            ]
            for resident in self._least_valuable(own, staying[namespace] - most, now):
                self.counts["evictions_quota"] += 1
                out += self._let_go(resident, f"its namespace's quota is {most} slots", now)
        return out

    def _least_valuable(
        self, residents: Iterable[Resident], slots: int, now: float
    ) -> list[Resident]:
        """Those of least value that have so many slots, pinned ones last; none for 0 or fewer."""
        residents = list(residents)
        looks = self.heat.look_at([r.block for r in residents], now)
        chosen: list[Resident] = []
        for resident in sorted(
            residents,
            key=lambda r: (r.pinned, looks[r.block].value, -looks[r.block].depth, r.block),
        ):
            if slots <= 0:
                break
            chosen.append(resident)
            slots -= len(resident.slots)
        return chosen

    def _rooms(self) -> dict[int, Room]:
        """What each quota leaves its namespace."""
        taken, staying = self.residency.taken(), self.residency.staying()
        return {
            namespace: Room(most, most - taken[namespace], taken[namespace] - staying[namespace])
            for namespace, most in self._quotas().items()
        }

    def _refresh(self, now: float) -> Outgoing:
        """Ask the homes of the residents whether they still hold the same bytes."""
        due = now - self._refreshed_at >= self._refresh_s or (
            self._refresh_wanted and now - self._refreshed_at >= REQUEST_TIMEOUT_S
        )
        if not due or not self.residency.residents:
            return []
        self._refreshed_at, self._refresh_wanted = now, False
        open_ = self._requests.asked_about()
        return self._describe((b for b in self.residency.residents if b not in open_), now)

    def _describe(self, blocks: Iterable[BlockId], now: float) -> Outgoing:
        by_home: dict[str, list[BlockId]] = {}
        for block in blocks:
            if homes := self._homes(block):
                by_home.setdefault(homes[0], []).append(block)
        out: Outgoing = []
        for node_id, wanted in by_home.items():
            for start in range(0, len(wanted), DESCRIBE_BATCH):
                batch = wanted[start : start + DESCRIBE_BATCH]
                request = self._requests.ask(node_id, batch, now + REQUEST_TIMEOUT_S)
                if request is None:
                    self.counts["requests_at_bound"] += 1
                    return out
                refs = [BlockRef(block.namespace, block.key) for block in batch]
                out.append((node_id, Describe(request=request.number, blocks=refs)))
        return out

    def _settle(self, wanted: Sequence[BlockId], now: float) -> Outgoing:
        """Choose among the described, and do it."""
        contenders = [
            Contender(block, d.size_bytes, d.digest, block in self.pins)
            for block in wanted
            if (d := self._described.get(block)) is not None and d.size_bytes is not None
        ]
        holders = [
            Holder(r.block, len(r.slots), r.pinned, r.admitted_at)
            for r in self.residency.residents.values()
            if not r.leaving
        ]
        choice: Choice = choose(
            contenders,
            holders,
            free=self.residency.free,
            coming_free=self.residency.coming_free,
            heat=self.heat,
            options=self.heat.options_under(self.heat.rule),
            now=now,
            rooms=self._rooms(),
        )
        out: Outgoing = []
        for contender, reason in choice.admit:
            self._admit(contender, reason, now)
        for block, reason in choice.evict:
            out += self._let_go(self.residency.residents[block], reason, now)
        refusals: dict[BlockId, str] = {}
        for contender, reason in choice.refused:
            refusals[contender.block] = reason
            if contender.block not in self._last_refusal:
                self._log("refuse", contender.block, reason, now)
        self._last_refusal = refusals
        return out

    def _admit(self, contender: Contender, reason: str, now: float) -> None:
        self.residency.admit(
            contender.block,
            digest=contender.digest,
            size_bytes=contender.size_bytes,
            pinned=contender.pinned,
            now=now,
        )
        self.counts["admissions"] += 1
        self._log("admit", contender.block, reason, now)

    def _let_go(self, resident: Resident, reason: str, now: float) -> Outgoing:
        """Evict, but not before the block lives in DRAM if it is worth that."""
        if self.heat.value(resident.block, now) < self.options.keep_value:
            self._evict(resident, reason, now)
            return []
        resident.leaving = True
        self._log("leave", resident.block, reason, now)
        return self._keep(resident.block, 0, now)

    def _keep(self, block: BlockId, attempt: int, now: float) -> Outgoing:
        """Ask the next home to keep a leaving block; let it go when all were asked."""
        resident = self.residency.residents.get(block)
        if resident is None or not resident.leaving:
            return []
        homes = self._homes(block)
        if attempt >= KEEP_ATTEMPTS or not homes:
            self.counts["keeps_failed"] += 1
            self._finish_leaving(block, "no home would keep it", now)
            return []
        node_id = homes[min(attempt // 2, len(homes) - 1)]
        request = self._requests.ask(node_id, [block], now + REQUEST_TIMEOUT_S, attempt)
        if request is None:
            self.counts["requests_at_bound"] += 1
            self._finish_leaving(block, "too many open requests to have it kept", now)
            return []
        message = Keep(
            request=request.number,
            namespace=block.namespace,
            key=block.key,
            size_bytes=resident.size_bytes,
            digest=resident.digest,
        )
        return [(node_id, message)]

    def _finish_leaving(self, block: BlockId, reason: str, now: float) -> None:
        resident = self.residency.residents.get(block)
        if resident is not None and resident.leaving:
            self._evict(resident, reason, now)

    def _evict(self, resident: Resident, reason: str, now: float) -> None:
        self.residency.evict(resident.block)
        self.counts["evictions"] += 1
        self._log("evict", resident.block, reason, now)

    def _log(self, verb: str, block: BlockId, reason: str, now: float) -> None:
        self.decisions.append(Decision(now, verb, block, self.heat.value(block, now), reason))

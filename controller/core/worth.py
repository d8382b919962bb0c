"""Worth: what the switch has brought to the pool so far, from the pool's own counters.

Owns: the arithmetic from counters to shares, and the advice that follows. Must not know: where
counters come from, or what another switch or load would bring (`kvcast plan` simulates that).

*Remote* are blocks that a node got from elsewhere; of those, *shared* ones came with an answer that
went to other readers, too, *switch* ones from switch memory. *Spared* bytes are what readers
received and no home sent. Everything is since the agents started.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ENOUGH_READS = 1000
"""Remote reads below which no advice is given."""
SHARED_PAYS = 0.05
"""From this share of remote reads on, coalescing is worth having on."""
SWITCH_PAYS = 0.02
"""From this share on, switch memory is."""
_MEMORY_OFF = "`--admit off` where switch memory is wanted for something else"
TO_DO = {
    "wait": "let it run, and ask again",
    "off": "nobody gains: `kvcast controller --plain` has the switch forward alone",
    "coalescing": f"leave joining on; {_MEMORY_OFF}",
    "reader groups": f"leave joining on, and engines naming their groups; {_MEMORY_OFF}",
    "residency": "leave switch memory on (`--admit auto`)",
}
"""By advice; with residency on top, nothing need be changed."""
_TIERS = ("switch", "shared", "home", "bulk")
_RECEIVED = ("payload_bytes_received_udp_total", "payload_bytes_received_bulk_get_total")
_SENT = ("payload_bytes_sent_udp_total", "payload_bytes_sent_bulk_get_total")


def judge(totals: Mapping[str, float], *, groups: int = 0) -> dict[str, Any]:
    """What was brought, and what to do; `totals`: the sums of all agents' counters, `groups`: how
    many reader groups there are. Absent counters count as zero."""
    hits = {tier: totals.get(f"hits_{tier}_total", 0.0) for tier in _TIERS}
    remote = sum(hits.values())
    received = sum(totals.get(name, 0.0) for name in _RECEIVED)
    sent = sum(totals.get(name, 0.0) for name in _SENT)
    shares = {tier: round(count / remote, 4) if remote else 0.0 for tier, count in hits.items()}
    advice, why = _advice(remote, shares, groups)
    return {
        "remote_reads": int(remote),
        "shares": shares,
        "received_bytes": int(received),
        "home_sent_bytes": int(sent),
        "spared_bytes": int(max(0.0, received - sent)),
        "home_egress_over_received": round(sent / received, 4) if received else None,
        "advice": advice,
        "why": why,
        "to_do": TO_DO.get(advice, "leave joining and switch memory on"),
    }


def _advice(remote: float, shares: Mapping[str, float], groups: int) -> tuple[str, str]:
    if remote < ENOUGH_READS:
        return "wait", f"{remote:.0f} remote reads, fewer than {ENOUGH_READS}: too few to judge"
    shared, memory = shares["shared"], shares["switch"]
    said = f"{shared:.1%} of remote reads were shared, {memory:.1%} came from switch memory"
    if shared >= SHARED_PAYS:
        what = "reader groups" if groups else "coalescing"
        return (f"{what} and residency" if memory >= SWITCH_PAYS else what), said
    if memory >= SWITCH_PAYS:
        return "residency", said
    return "off", said

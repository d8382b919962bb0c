"""Who reads the same just now, without having been told of the others.

Owns: by namespace, the nodes that have said lately that they go through its blocks, and how far
each is. They are the namespace's *company*: one reader group, whose nodes come and go while its
number stays, so that what is asked for in its name reaches whoever is there. Must not know: how
groups reach the switch and the agents.

What a node asks for is its own affair; it is told how far the one is that came first, so that it
can listen to what others are at, and read what it has missed afterwards, with all others that have
missed it. Who is through, or has not said anything for `LEASE_S`, is gone. Beyond `MAX_GROUP_NODES`
nodes a namespace, or where all groups are taken, a node reads alone. Nothing of this outlives the
controller: nodes say it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvcast.controller.core.namespaces import MAX_GROUP_NODES, Group, Namespaces
from kvcast.protocol.messages.control import AT_END

LEASE_S: Final = 3.0


@dataclass(slots=True)
class _Member:
    at: int
    heard_at: float


class Companies:
    """See the module's text."""

    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces = namespaces
        self._members: dict[int, dict[str, _Member]] = {}
        """By namespace and node, who came first first."""

    def join(
        self, now: float, namespace: int, node_id: str, at: int
    ) -> tuple[Group | None, int, bool]:
        """A node of a namespace that it may use is there, and so far: its group, None while it is
        alone; how far the first of the others is, or else this one; and whether a group has
        changed."""
        changed = self.advance(now)
        company = self._members.setdefault(namespace, {})
        if at == AT_END:
            company.pop(node_id, None)
            return None, at, self._settle(namespace, company)[1] or changed
        if node_id not in company and len(company) >= MAX_GROUP_NODES:
            return None, at, changed
        member = company.setdefault(node_id, _Member(at, now))
        member.at, member.heard_at = at, now
        first_at = next((one.at for other, one in company.items() if other != node_id), at)
        group, news = self._settle(namespace, company)
        return group, first_at, changed or news

    def advance(self, now: float) -> bool:
        """Forget who is gone; whether a group has changed."""
        changed = False
        for namespace, company in list(self._members.items()):
            gone = [node_id for node_id, one in company.items() if one.heard_at + LEASE_S <= now]
            for node_id in gone:
                del company[node_id]
            if gone:
                changed |= self._settle(namespace, company)[1]
        return changed

    def _settle(self, namespace: int, company: dict[str, _Member]) -> tuple[Group | None, bool]:
        if not company:
            self._members.pop(namespace, None)
        return self._namespaces.company(namespace, tuple(sorted(company)))

    def forget(self, namespace: int) -> None:
        """The namespace was deleted, with its groups."""
        self._members.pop(namespace, None)

    def next_deadline(self) -> float | None:
        """When `advance` has somebody to forget."""
        return min(
            (
                one.heard_at + LEASE_S
                for company in self._members.values()
                for one in company.values()
            ),
            default=None,
        )

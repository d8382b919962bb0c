"""Names: namespaces and reader groups, found or made on request.

Owns: the assignment of namespace numbers (1..65535) to (tenant, model, version, layout), and of
group numbers to sets of nodes in a namespace. Must not know: who asks, or what the switch does
with them. Numbers persist: blocks and reads in flight carry them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcast.protocol.control import GroupInfo, NamespaceInfo

MAX_NAMESPACES = 128
"""Each costs the switch a namespace_guard entry a port."""
MAX_GROUPS = 512
"""Over all namespaces: each holds a multicast group of the switch, from 1024 up."""
MAX_GROUPS_PER_NAMESPACE = 64
MAX_GROUP_NODES = 31


class NameRequestError(ValueError):
    """The namespace or group cannot be had; the text says why."""


@dataclass(frozen=True)
class Group:
    """A reader group; `ordinal` is its place among all groups of all namespaces."""

    namespace: int
    group: int
    nodes: tuple[str, ...]
    ordinal: int

    @property
    def info(self) -> GroupInfo:
        return GroupInfo(namespace=self.namespace, group=self.group, nodes=list(self.nodes))


@dataclass
class Names:
    """All namespaces and groups; `namespaces` by number, `groups` by (namespace, group)."""

    namespaces: dict[int, NamespaceInfo] = field(default_factory=dict)
    groups: dict[tuple[int, int], Group] = field(default_factory=dict)

    def namespace(
        self, tenant: str, model: str, version: str, layout: str
    ) -> tuple[NamespaceInfo, bool]:
        """The namespace that stands for these, and whether it had to be made."""
        wanted = (tenant, model, version, layout)
        for info in self.namespaces.values():
            if (info.tenant, info.model, info.version, info.layout) == wanted:
                return info, False
        if len(self.namespaces) >= MAX_NAMESPACES:
            raise NameRequestError(f"all {MAX_NAMESPACES} namespaces are taken")
        number = max(self.namespaces, default=0) + 1
        if number > 0xFFFF:
            number = next(n for n in range(1, 0x10000) if n not in self.namespaces)
        info = NamespaceInfo(
            namespace=number, tenant=tenant, model=model, version=version, layout=layout
        )
        self.namespaces[number] = info
        return info, True

    def group(
        self, namespace: int, node_ids: list[str], known: frozenset[str]
    ) -> tuple[Group, bool]:
        """The reader group of exactly these nodes, and whether it had to be made."""
        if namespace not in self.namespaces:
            raise NameRequestError(f"namespace {namespace} does not exist")
        nodes = tuple(sorted(set(node_ids)))
        if not 1 <= len(nodes) <= MAX_GROUP_NODES:
            raise NameRequestError(f"a group has 1 to {MAX_GROUP_NODES} nodes, not {len(nodes)}")
        if unknown := [n for n in nodes if n not in known]:
            raise NameRequestError(f"no such node: {', '.join(unknown)[:200]}")
        users = self.namespaces[namespace].nodes
        if users and (strangers := [n for n in nodes if n not in users]):
            raise NameRequestError(f"namespace {namespace} is not for {', '.join(strangers)[:200]}")
        mine = [g for g in self.groups.values() if g.namespace == namespace]
        for group in mine:
            if group.nodes == nodes:
                return group, False
        if len(mine) >= MAX_GROUPS_PER_NAMESPACE:
            raise NameRequestError(
                f"namespace {namespace} has all of its {MAX_GROUPS_PER_NAMESPACE} groups"
            )
        if len(self.groups) >= MAX_GROUPS:
            raise NameRequestError(f"all {MAX_GROUPS} groups are taken")
        used = {g.ordinal for g in self.groups.values()}
        group = Group(
            namespace=namespace,
            group=max((g.group for g in mine), default=0) + 1,
            nodes=nodes,
            ordinal=next(i for i in range(MAX_GROUPS) if i not in used),
        )
        self.groups[namespace, group.group] = group
        return group, True

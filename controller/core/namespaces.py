"""Namespaces and their reader groups, found or made on request.

Owns: the assignment of namespace numbers (1..65535) to (tenant, model, version, layout), of group
numbers to sets of nodes in a namespace, which nodes a tenant's namespaces are for, and which
namespaces have a secret. Must not know: connections, or what the switch does with them. Numbers
persist: blocks and reads in flight carry them, and engines keep them.

A namespace's number follows from what it stands for (`number_of`), not from the order in which
namespaces are made: a controller that has lost its state, or a backup that never had it, gives the
same number to the same namespace again, and not the one that readers still know for another.

With secrets "auto", namespaces have none as long as there is one tenant, whose nodes have nothing
to hide from each other. From the moment that there are two, every namespace has one: those that
had none are given theirs then, and what was kept in them under plain keys is forgotten. Where
tenants are configured (`tenants`), there are several from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import msgspec
from kvcast.protocol.messages.control import (
    GroupInfo,
    NamespaceInfo,
    NamespaceSecret,
    NamespaceSettings,
    number_of,
)
from kvcast.protocol.namespace_names import NAME_RULE, is_name

MAX_NAMESPACES = 128
"""Each costs the switch a namespace_guard entry a port."""
MAX_DELETED = 1024
"""Deleted namespaces that agents are still told of; beyond it, the one deleted first is
forgotten, and its number may be given away."""
MAX_GROUPS = 512
"""Over all namespaces: each holds a multicast group of the switch, from 1024 up."""
MAX_GROUPS_PER_NAMESPACE = 64
MAX_GROUP_NODES = 31


class NamespaceError(ValueError):
    """The namespace or group cannot be had; the text says why."""


class UnprintableError(NamespaceError):
    """A tenant, model, version or layout cannot be called so (`is_name`)."""


class SecretMode(Enum):
    """Which namespaces get a secret when they are made; one that has a secret keeps it."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True)
class TenantRules:
    """`tenants`: who there is, and for which nodes (none = all); empty = whoever asks, for all
    nodes."""

    tenants: Mapping[str, frozenset[str]] = field(default_factory=dict)
    secrets: SecretMode = SecretMode.NEVER


@dataclass(frozen=True)
class Group:
    """A reader group; `ordinal` is its place among all groups of all namespaces; `company`: its
    nodes come and go (`companies.py`)."""

    namespace: int
    group: int
    nodes: tuple[str, ...]
    ordinal: int
    company: bool = False

    @property
    def info(self) -> GroupInfo:
        return GroupInfo(namespace=self.namespace, group=self.group, nodes=list(self.nodes))


@dataclass
class Namespaces:
    """All namespaces, `by_number`; and all groups, by (namespace, group)."""

    by_number: dict[int, NamespaceInfo] = field(default_factory=dict)
    groups: dict[tuple[int, int], Group] = field(default_factory=dict)
    secrets: dict[int, bytes] = field(default_factory=dict, repr=False)
    rules: TenantRules = field(default_factory=TenantRules)
    deleted: dict[int, None] = field(default_factory=dict)
    """Numbers of namespaces that were deleted, in that order. Nobody is given one of them: a node
    that has not heard yet, or was away, would take it for what it was."""
    new_secret: Callable[[], bytes] | None = None
    """Makes a secret that nobody can guess; needed where the rules want secrets."""

    newly_secret: set[int] = field(default_factory=set)
    """Namespaces that were given a secret, until whoever cares for their blocks takes them."""

    def apply_rules(self) -> bool:
        """Bring namespaces made under other rules in line with these; whether any changed."""
        before = dict(self.by_number)
        for number, info in self.by_number.items():
            nodes = self.rules.tenants.get(info.tenant)
            if nodes is not None:
                info = msgspec.structs.replace(info, nodes=sorted(nodes))
            self.by_number[number] = msgspec.structs.replace(
                info, has_secret=number in self.secrets
            )
        self._give_secrets()
        return before != self.by_number

    def _give_secrets(self) -> None:
        tenants = {info.tenant for info in self.by_number.values()}
        mode = self.rules.secrets
        several = len(tenants) > 1 or bool(self.rules.tenants)
        if mode is SecretMode.NEVER or (mode is SecretMode.AUTO and not several):
            return
        assert self.new_secret is not None
        for number, info in self.by_number.items():
            if number not in self.secrets:
                self.secrets[number] = self.new_secret()
                self.newly_secret.add(number)
                self.by_number[number] = msgspec.structs.replace(info, has_secret=True)

    def secrets_for(self, node_id: str) -> list[NamespaceSecret]:
        """The secrets that this node may have: those of the namespaces that it may use."""
        return [
            NamespaceSecret(number, self.secrets[number])
            for number, info in sorted(self.by_number.items())
            if number in self.secrets and (not info.nodes or node_id in info.nodes)
        ]

    def configure(self, namespace: int, settings: NamespaceSettings) -> NamespaceInfo:
        """Change what an operator says of a namespace."""
        info = self.by_number.get(namespace)
        if info is None:
            raise NamespaceError(f"namespace {namespace} does not exist")
        self.by_number[namespace] = info = msgspec.structs.replace(info, settings=settings)
        return info

    def delete(self, namespace: int) -> None:
        """Forget a namespace, its groups and its secret. Who asks for it again makes it anew, under
        another number."""
        if self.by_number.pop(namespace, None) is None:
            raise NamespaceError(f"namespace {namespace} does not exist")
        self.secrets.pop(namespace, None)
        self.newly_secret.discard(namespace)
        self.groups = {key: g for key, g in self.groups.items() if g.namespace != namespace}
        self.deleted[namespace] = None
        if len(self.deleted) > MAX_DELETED:
            del self.deleted[next(iter(self.deleted))]

    def namespace(
        self, tenant: str, model: str, version: str, layout: str, node_id: str | None
    ) -> tuple[NamespaceInfo, bool]:
        """The namespace that stands for these, and whether it had to be made. NamespaceError if
        it is not for the node that asks (None = an operator does, who may make any);
        UnprintableError if it would have to be made, and one of these is no name."""
        nodes = self.rules.tenants.get(tenant)
        if self.rules.tenants and nodes is None:
            raise NamespaceError(f"there is no tenant {tenant[:80]!r}")
        wanted = (tenant, model, version, layout)
        for info in self.by_number.values():
            if (info.tenant, info.model, info.version, info.layout) == wanted:
                if node_id is not None and info.nodes and node_id not in info.nodes:
                    raise NamespaceError(f"tenant {tenant[:80]!r} is not for {node_id}")
                return info, False
        if node_id is not None and nodes and node_id not in nodes:
            raise NamespaceError(f"tenant {tenant[:80]!r} is not for {node_id}")
        for what, name in zip(("tenant", "model", "version", "layout"), wanted, strict=True):
            if not is_name(name):
                raise UnprintableError(f"{what} {name[:80]!r} is no name: {NAME_RULE}")
        if len(self.by_number) >= MAX_NAMESPACES:
            raise NamespaceError(f"all {MAX_NAMESPACES} namespaces are taken")
        number = number_of(*wanted)
        while number in self.by_number or number in self.deleted:
            number = number % 0xFFFF + 1
        self.by_number[number] = NamespaceInfo(
            number, tenant, model, version, layout, sorted(nodes or ())
        )
        self._give_secrets()
        return self.by_number[number], True

    def group(
        self, namespace: int, node_ids: list[str], known: frozenset[str]
    ) -> tuple[Group, bool]:
        """The reader group of exactly these nodes, and whether it had to be made."""
        if namespace not in self.by_number:
            raise NamespaceError(f"namespace {namespace} does not exist")
        nodes = tuple(sorted(set(node_ids)))
        if not 1 <= len(nodes) <= MAX_GROUP_NODES:
            raise NamespaceError(f"a group has 1 to {MAX_GROUP_NODES} nodes, not {len(nodes)}")
        if unknown := [n for n in nodes if n not in known]:
            raise NamespaceError(f"no such node: {', '.join(unknown)[:200]}")
        users = self.by_number[namespace].nodes
        if users and (strangers := [n for n in nodes if n not in users]):
            raise NamespaceError(f"namespace {namespace} is not for {', '.join(strangers)[:200]}")
        for group in self.groups.values():
            if (group.namespace, group.nodes, group.company) == (namespace, nodes, False):
                return group, False
        return self._new_group(namespace, nodes), True

    def company(self, namespace: int, nodes: tuple[str, ...]) -> tuple[Group | None, bool]:
        """The group of a namespace's company, which is of these nodes from now on, and whether
        that is news. Fewer than two need none; nor is there one where all groups are taken."""
        number = next(
            (g.group for g in self.groups.values() if g.company and g.namespace == namespace), 0
        )
        former = self.groups.get((namespace, number))
        if len(nodes) < 2:
            self.groups.pop((namespace, number), None)
            return None, former is not None
        if former is None:
            try:
                return self._new_group(namespace, nodes, company=True), True
            except NamespaceError:
                return None, False
        self.groups[namespace, number] = now = replace(former, nodes=nodes)
        return now, now != former

    def _new_group(self, namespace: int, nodes: tuple[str, ...], *, company: bool = False) -> Group:
        mine = [g for g in self.groups.values() if g.namespace == namespace]
        if len(mine) >= MAX_GROUPS_PER_NAMESPACE:
            raise NamespaceError(
                f"namespace {namespace} has all of its {MAX_GROUPS_PER_NAMESPACE} groups"
            )
        if len(self.groups) >= MAX_GROUPS:
            raise NamespaceError(f"all {MAX_GROUPS} groups are taken")
        used = {g.ordinal for g in self.groups.values()}
        group = Group(
            namespace=namespace,
            group=max((g.group for g in mine), default=0) + 1,
            nodes=nodes,
            ordinal=next(i for i in range(MAX_GROUPS) if i not in used),
            company=company,
        )
        self.groups[namespace, group.group] = group
        return group

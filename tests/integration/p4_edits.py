"""Edits of the compiled program, by the names of its tables, actions and fields: what another
compiler, or another hand, might have produced. For planted bugs and for defences taken out.

A JSON here is BMv2's, as `artefact` finds it and `json.loads` reads it; each edit changes it in
place, and fails where the program has changed so that there is nothing to edit.
"""

from __future__ import annotations

from typing import Any

from kvcast.p4.definitions import Kind

Json = dict[str, Any]


def table(data: Json, name: str) -> Json:
    """A table, by its last name."""
    (found,) = (
        t for p in data["pipelines"] for t in p["tables"] if t["name"].split(".")[-1] == name
    )
    assert isinstance(found, dict)
    return found


def action_id(spec: Json, action: str) -> int:
    """The number of one of a table's actions."""
    (found,) = (
        number
        for number, name in zip(spec["action_ids"], spec["actions"], strict=True)
        if name.split(".")[-1] == action
    )
    return int(found)


def redirect(data: Json, name: str, changes: dict[str, str], kind: Kind | None = None) -> None:
    """Give const entries other actions; only those of `kind`, the first key, if it is given."""
    spec = table(data, name)
    by_id = {action_id(spec, old): action_id(spec, new) for old, new in changes.items()}
    for entry in spec["entries"]:
        if kind is None or int(entry["match_key"][0]["key"], 16) == kind:
            action = entry["action_entry"]
            action["action_id"] = by_id.get(action["action_id"], action["action_id"])


def default(data: Json, name: str, action: str) -> None:
    """Have another action for what no entry matches."""
    spec = table(data, name)
    spec["default_entry"]["action_id"] = action_id(spec, action)


def ignore_key(data: Json, name: str, key: str) -> None:
    """Make a ternary key of a table's const entries match anything."""
    spec = table(data, name)
    at = [k["name"] for k in spec["key"]].index(key)
    for entry in spec["entries"]:
        match = entry["match_key"][at]
        match["key"] = match["mask"] = "0x" + "0" * (len(match["mask"]) - 2)


def never(data: Json, field: str) -> None:
    """Have the one condition that looks at a field come out false."""
    conditions = [c for p in data["pipelines"] for c in p["conditionals"]]
    (found,) = (c for c in conditions if field in str(c["expression"]))
    found["true_next"] = found["false_next"]


def forget(data: Json, action: str, field: str) -> None:
    """Remove the assignments to a field from an action."""
    for spec in data["actions"]:
        if spec["name"].split(".")[-1] == action:
            spec["primitives"] = [
                p
                for p in spec["primitives"]
                if p["op"] != "assign" or field not in str(p["parameters"][0]["value"])
            ]

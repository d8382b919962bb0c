"""Node ids: one rule wherever a node is named.

Oracle: written names. Cannot see: who may register under a name.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from kvcast.protocol.messages.control import NodeId
from kvcast.protocol.node_ids import is_node_id
from kvcast.service.identity import NODE, Identity
from kvcast.service.values import parse_node_id
from kvcast.topologies.star import Host

ENTRIES: dict[str, Callable[[str], object]] = {
    "messages": lambda text: msgspec.convert(text, NodeId),
    "certificates": lambda text: Identity(NODE, text),
    "flags": parse_node_id,
    "topologies": lambda text: Host(text, "10.77.0.1", "02:6b:76:00:00:01", 1),
}


@pytest.mark.parametrize("text", ["n", "node-1", "A.b_c-9", "n" * 64])
def test_a_name_is_a_name_everywhere(text: str) -> None:
    assert is_node_id(text)
    for take in ENTRIES.values():
        take(text)


@pytest.mark.parametrize("entry", sorted(ENTRIES))
@pytest.mark.parametrize(
    "text", ["", "n" * 65, "a b", "a/b", "a\n", "\na", "node-1\n", "ä", "a\x00", "a:b"]
)
def test_what_is_no_name_is_one_nowhere(entry: str, text: str) -> None:
    assert not is_node_id(text)
    with pytest.raises(ValueError, match=r"node id|no name|node's name|String|`str`"):
        ENTRIES[entry](text)

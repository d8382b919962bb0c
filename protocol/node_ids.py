"""Node ids: how a node of the pool is called.

Owns: the one rule. The controller, the agents, certificates, topologies and the messages between
them hold to it; it keeps a name whole in a file name, a URI, a metric's label and a log line.
"""

from __future__ import annotations

import re
from typing import Final

NODE_ID_PATTERN: Final = r"[A-Za-z0-9._-]{1,64}"
NODE_ID_RULE: Final = "1 to 64 letters, digits, dots, dashes and underscores"

_NODE_ID: Final = re.compile(NODE_ID_PATTERN)


def is_node_id(text: str) -> bool:
    """Whether a node may be called so."""
    return _NODE_ID.fullmatch(text) is not None

"""Which RDMA card of this machine has an address.

Owns: what the kernel's files say of that. Must not know: verbs.
"""

from __future__ import annotations

import contextlib
from pathlib import Path


def card_of(ip: str) -> tuple[str, int]:
    """The name of the card that has the address, and the place of its GID."""
    wanted = "0000:0000:0000:0000:0000:ffff:" + "{:02x}{:02x}:{:02x}{:02x}".format(
        *map(int, ip.split("."))
    )
    for entry in Path("/sys/class/infiniband").glob("*/ports/*/gids/*"):
        with contextlib.suppress(OSError):  # an unused place cannot be read
            kind = (entry.parents[1] / "gid_attrs/types" / entry.name).read_text().strip()
            if entry.read_text().strip() == wanted and kind == "RoCE v2":
                return entry.parts[4], int(entry.name)
    raise RuntimeError(f"no RDMA card has {ip}")

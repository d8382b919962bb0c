"""What agents say when they register, with what no test asks about filled in."""

from __future__ import annotations

import msgspec
from kvcast.protocol.messages.control import CONTROL_PROTOCOL_VERSION, Register


def register(number: int, **changes: object) -> Register:
    """The first message of node `number`, with the fields in `changes` changed."""
    message = Register(
        version=CONTROL_PROTOCOL_VERSION,
        node_id=f"node-{number}",
        incarnation=1,
        ip=f"10.77.0.{number}",
        mac=f"02:6b:76:00:00:{number:02x}",
        switch_port=(number - 1) % 32 + 1,
        udp_port=19286,
        bulk_host="127.0.0.1",
        bulk_port=9700,
        arena_bytes=1 << 20,
    )
    return msgspec.structs.replace(message, **changes)

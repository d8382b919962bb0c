"""Controller headers: a PacketOut's metadata to header bits, header bits to a PacketIn's metadata.

Owns: the bit layout of packet_in and packet_out, read from P4Info. Must not know: streams, ports,
who is primary. A frame to or from the CPU port begins with the controller header; fields are laid
out in P4Info order with the first in the highest bits, as BMv2 does it.

Specification: P4Runtime 1.4, "Packet I/O" and "ControllerPacketMetadata".
"""

from __future__ import annotations

from dataclasses import dataclass

from finsy.proto import p4r
from kvcast.switchsim.p4runtime.errors import invalid_argument
from kvcast.switchsim.p4runtime.values import decode_bytes, encode_bytes

PACKET_IN = "packet_in"
PACKET_OUT = "packet_out"


@dataclass(frozen=True, slots=True)
class _Field:
    id: int
    name: str
    width: int
    shift: int  # distance of the field's lowest bit from the header's lowest bit


class ControllerHeader:
    """The layout of one controller header; an absent header has no fields and no bytes."""

    def __init__(self, fields: list[tuple[int, str, int]]) -> None:
        """`fields` are (id, name, width in bits), in order. ValueError when they make no header."""
        bits = sum(width for _, _, width in fields)
        self.size_bytes = (bits + 7) // 8
        shift = self.size_bytes * 8
        self._fields: list[_Field] = []
        self._by_id: dict[int, _Field] = {}
        for field_id, name, width in fields:
            if width <= 0:
                raise ValueError(f"field {name} has no width")
            if field_id in self._by_id:
                raise ValueError(f"field id {field_id} occurs twice")
            shift -= width
            field = _Field(field_id, name, width, shift)
            self._fields.append(field)
            self._by_id[field_id] = field

    def build(self, packet: p4r.PacketOut) -> bytes:
        """The frame that a PacketOut asks to inject: header, then payload.

        Raises P4RuntimeError unless there is exactly one value for each field.
        """
        values: dict[int, int] = {}
        for metadata in packet.metadata:
            field = self._by_id.get(metadata.metadata_id)
            if field is None:
                raise invalid_argument(f"unknown packet_out metadata id {metadata.metadata_id}")
            if field.id in values:
                raise invalid_argument(f"packet_out metadata {field.name} is given twice")
            values[field.id] = decode_bytes(metadata.value, field.width, field.name)
        missing = [field.name for field in self._fields if field.id not in values]
        if missing:
            raise invalid_argument(f"packet_out metadata is missing: {', '.join(missing)}")
        header = 0
        for field in self._fields:
            header |= values[field.id] << field.shift
        return header.to_bytes(self.size_bytes, "big") + packet.payload

    def parse(self, frame: bytes) -> p4r.PacketIn | None:
        """A frame that left through the CPU port, or None where it is shorter than the header."""
        if len(frame) < self.size_bytes:
            return None
        packet = p4r.PacketIn(payload=frame[self.size_bytes :])
        header = int.from_bytes(frame[: self.size_bytes], "big")
        for field in self._fields:
            value = (header >> field.shift) & ((1 << field.width) - 1)
            packet.metadata.add(metadata_id=field.id, value=encode_bytes(value))
        return packet

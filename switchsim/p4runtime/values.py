"""Values as P4Runtime writes them: bytestrings and match fields.

Owns: the conversion between bytestrings and integers and every rule about their form. Must not
know: tables, entries, the switch; a caller says which field and how wide.

Specification: P4Runtime 1.4, "Bytestrings" and "Match Format". Where the reference server
(p4lang/PI) accepts less, so do we.
"""

from __future__ import annotations

from enum import Enum

from finsy.proto import p4r
from kvcast.switchsim import ir
from kvcast.switchsim.p4runtime.errors import invalid_argument

# A bytestring longer than the widest P4 value that p4c accepts (2048 bits) is refused before it
# is converted, whatever its leading zeros.
MAX_BYTESTRING_BYTES = 1024


class MatchKind(Enum):
    """How a table compares one key field."""

    EXACT = "exact"
    LPM = "lpm"
    TERNARY = "ternary"
    RANGE = "range"
    OPTIONAL = "optional"


# Kinds whose entries can overlap, so that a priority must choose.
PRIORITY_KINDS = frozenset({MatchKind.TERNARY, MatchKind.RANGE, MatchKind.OPTIONAL})


def decode_bytes(data: bytes, width: int, what: str) -> int:
    """A bytestring as an unsigned integer of at most `width` bits."""
    if not data:
        raise invalid_argument(f"{what}: an empty bytestring is not a value")
    if len(data) > MAX_BYTESTRING_BYTES:
        raise invalid_argument(f"{what}: bytestring of {len(data)} bytes")
    value = int.from_bytes(data, "big")
    if value.bit_length() > width:
        raise invalid_argument(f"{what}: value does not fit {width} bits")
    return value


def encode_bytes(value: int) -> bytes:
    """An unsigned integer in its shortest form; zero is one zero byte."""
    return value.to_bytes(max(1, (value.bit_length() + 7) // 8), "big")


def decode_match(match: p4r.FieldMatch, kind: MatchKind, width: int, what: str) -> ir.MatchValue:
    """One match field, checked to be in the one form that P4Runtime allows."""
    which = match.WhichOneof("field_match_type")
    if which is None:
        raise invalid_argument(f"{what}: no value")
    if which != kind.value:
        raise invalid_argument(f"{what}: the field is {kind.value}, the value is {which}")
    if kind is MatchKind.EXACT:
        return ir.Exact(decode_bytes(match.exact.value, width, what))
    if kind is MatchKind.OPTIONAL:
        return ir.Ternary(decode_bytes(match.optional.value, width, what), full_mask(width))
    if kind is MatchKind.LPM:
        return _decode_lpm(match.lpm, width, what)
    if kind is MatchKind.TERNARY:
        return _decode_ternary(match.ternary, width, what)
    return _decode_range(match.range, width, what)


def wildcard(kind: MatchKind, width: int) -> ir.MatchValue | None:
    """What stands for a field that an entry leaves out; None where it may not."""
    return ir.anything("ternary" if kind is MatchKind.OPTIONAL else kind.value, width)


def full_mask(width: int) -> int:
    return (1 << width) - 1


def _decode_lpm(lpm: p4r.FieldMatch.LPM, width: int, what: str) -> ir.Lpm:
    value = decode_bytes(lpm.value, width, what)
    length = lpm.prefix_len
    if length == 0:
        raise invalid_argument(f"{what}: leave the field out instead of a prefix length of 0")
    if not 0 < length <= width:
        raise invalid_argument(f"{what}: prefix length {length} of {width} bits")
    if value & full_mask(width - length):
        raise invalid_argument(f"{what}: bits are set behind the prefix")
    return ir.Lpm(value, length)


def _decode_ternary(ternary: p4r.FieldMatch.Ternary, width: int, what: str) -> ir.Ternary:
    value = decode_bytes(ternary.value, width, what)
    mask = decode_bytes(ternary.mask, width, f"{what} mask")
    if mask == 0:
        raise invalid_argument(f"{what}: leave the field out instead of a mask of 0")
    if value & ~mask:
        raise invalid_argument(f"{what}: bits are set outside the mask")
    return ir.Ternary(value, mask)


def _decode_range(bounds: p4r.FieldMatch.Range, width: int, what: str) -> ir.Range:
    low = decode_bytes(bounds.low, width, what)
    high = decode_bytes(bounds.high, width, what)
    if low > high:
        raise invalid_argument(f"{what}: low is above high")
    if low == 0 and high == full_mask(width):
        raise invalid_argument(f"{what}: leave the field out instead of the whole range")
    return ir.Range(low, high)


def encode_match(
    field_id: int, kind: MatchKind, width: int, value: ir.MatchValue
) -> p4r.FieldMatch | None:
    """The inverse of `decode_match`; None for a wildcard, which P4Runtime leaves out."""
    if kind is not MatchKind.EXACT and value == wildcard(kind, width):
        return None
    match = p4r.FieldMatch(field_id=field_id)
    if isinstance(value, ir.Exact):
        match.exact.value = encode_bytes(value.value)
    elif isinstance(value, ir.Lpm):
        match.lpm.value = encode_bytes(value.value)
        match.lpm.prefix_len = value.prefix_len
    elif isinstance(value, ir.Range):
        match.range.low = encode_bytes(value.low)
        match.range.high = encode_bytes(value.high)
    elif kind is MatchKind.OPTIONAL:
        match.optional.value = encode_bytes(value.value)
    else:
        match.ternary.value = encode_bytes(value.value)
        match.ternary.mask = encode_bytes(value.mask)
    return match


def decode_port(port: bytes, what: str, *, max_port: int) -> int:
    """A port in its bytestring form (Replica.port, watch_port)."""
    value = decode_bytes(port, 32, what)
    if value > max_port:
        raise invalid_argument(f"{what}: port {value} is above {max_port}")
    return value

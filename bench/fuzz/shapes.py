"""Spoiling inputs with their structure in mind: trees, framed messages, protobuf messages.

Owns: what is changed, given a random source. Must not know: who reads the result. A changed input
stays well-formed on the levels above the change, so that it gets past the first check.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from kvcast.bench.hostile_bytes import mutate

_INTEGERS: Final = (
    0, 1, -1, 2, 7, 8, 9, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 1023, 1024, 65535, 65536,
    (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
    -(1 << 31), -(1 << 63),
)  # fmt: skip
_FLOATS: Final = (0.0, -0.0, 1e308, -1e308, 1e-308, float("inf"), float("-inf"), float("nan"))
_TEXTS: Final = ("", "\0", "a" * 300, "é", "\ud7ff", "0", "-1", "0x", "true", "../..", "%s%n", "[]")


# --- trees ----------------------------------------------------------------------------------------


def spoil_tree(tree: Any, rng: random.Random) -> Any:
    """A tree of dicts, lists and scalars with one to four places changed."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        tree = _spoil_place(tree, rng)
    return tree


def _spoil_place(tree: Any, rng: random.Random) -> Any:
    parents: list[tuple[Any, Any]] = []
    stack = [tree] if isinstance(tree, (dict, list)) else []
    while stack:
        node = stack.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        for key in keys:
            parents.append((node, key))
            if isinstance(node[key], (dict, list)):
                stack.append(node[key])
    if not parents:
        return _other(tree, rng)
    node, key = rng.choice(parents)
    draw = rng.random()
    if draw < 0.5:
        node[key] = _other(node[key], rng)
    elif draw < 0.65:
        del node[key]
    elif draw < 0.8:  # what stands elsewhere
        other, where = rng.choice(parents)
        moved = list(other) if isinstance(other, dict) else range(len(other))
        if where in moved:
            node[key] = copy.deepcopy(other[where])
    elif isinstance(node, list):
        at = rng.randrange(len(node) + 1)
        node[at:at] = [copy.deepcopy(node[key])] * rng.choice((1, 1, 2, 40))
    else:
        node[rng.choice(("", "x", "id", "name", "type", "value"))] = node.pop(key)
    return tree


def _other(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool) or value is None or rng.random() < 0.15:
        return rng.choice((None, True, False, 0, "", [], {}, 1.5))
    if isinstance(value, int):
        near = value + rng.choice((-1, 1, 2, -value, 1 << rng.randrange(64)))
        return rng.choice((near, rng.choice(_INTEGERS)))
    if isinstance(value, float):
        return rng.choice((value * 2, -value, rng.choice(_FLOATS)))
    if isinstance(value, str):
        number = hex(rng.choice(_INTEGERS))
        return rng.choice((value + "x", value[:-1], rng.choice(_TEXTS), number))
    if isinstance(value, bytes):
        return mutate(value, rng)
    if isinstance(value, list):
        return rng.choice(([], value[::-1], value * 2, value[:1]))
    return rng.choice(({}, {**value, "x": 1}, list(value)))


def spoil_json(data: bytes, rng: random.Random) -> bytes:
    """JSON with its tree changed, or at times its bytes."""
    if rng.random() < 0.15:
        return mutate(data, rng)
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return mutate(data, rng)
    try:
        return json.dumps(spoil_tree(tree, rng)).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return mutate(data, rng)


# --- framed messages ------------------------------------------------------------------------------

_LENGTH: Final = struct.Struct("!I")


def frames_of(data: bytes) -> list[bytes]:
    """The bodies of a stream's frames; what is behind the last whole one is a body, too."""
    bodies: list[bytes] = []
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        end = at + _LENGTH.size + length
        if length > len(data) or end > len(data):
            break
        bodies.append(data[at + _LENGTH.size : end])
        at = end
    if at < len(data):
        bodies.append(data[at:])
    return bodies


def framed(body: bytes) -> bytes:
    """A frame of the streams between kvcast's parts."""
    return _LENGTH.pack(len(body)) + body


def spoil_stream(data: bytes, rng: random.Random, good: Sequence[bytes]) -> bytes:
    """A stream of framed MessagePack with messages changed, repeated, left out, put in (`good`:
    bodies of good ones), or at times with wrong bytes."""
    if rng.random() < 0.1:
        return mutate(data, rng)
    bodies = frames_of(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        draw = rng.random()
        at = rng.randrange(len(bodies)) if bodies else 0
        if not bodies or draw < 0.35:
            bodies.insert(rng.randint(at, len(bodies)), rng.choice(good))
        elif draw < 0.75:
            bodies[at] = _spoil_message(bodies[at], rng)
        elif draw < 0.85:
            bodies.insert(rng.randrange(len(bodies) + 1), bodies[at])
        else:
            del bodies[at]
    return b"".join(framed(body) for body in bodies[:64])


def _spoil_message(body: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.15:
        return mutate(body, rng)
    try:
        return msgspec.msgpack.encode(spoil_tree(msgspec.msgpack.decode(body), rng))
    except (msgspec.MsgspecError, ValueError, OverflowError, TypeError, RecursionError):
        return mutate(body, rng)


# --- protobuf -------------------------------------------------------------------------------------


def spoil_proto(message: Message, rng: random.Random) -> None:
    """Change one to four fields of a message, anywhere in it."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _spoil_field(message, rng)


def _spoil_field(message: Message, rng: random.Random) -> None:
    present = message.ListFields()
    inner: list[Message] = []
    for descriptor, value in present:
        if descriptor.type != FieldDescriptor.TYPE_MESSAGE:
            continue
        inner += value if _repeats(descriptor) else [value]
    inner = [one for one in inner if isinstance(one, Message)]
    if inner and rng.random() < 0.75:
        _spoil_field(rng.choice(inner), rng)
        return
    if present and rng.random() < 0.6:
        chosen: Any = rng.choice(present)[0]
    elif message.DESCRIPTOR.fields:
        chosen = rng.choice(message.DESCRIPTOR.fields)
    else:
        return
    _change(message, chosen, rng)


def _repeats(descriptor: Any) -> bool:
    try:
        return bool(descriptor.is_repeated)
    except AttributeError:  # protobuf before 6.31
        return bool(descriptor.label == FieldDescriptor.LABEL_REPEATED)


def _change(message: Message, descriptor: Any, rng: random.Random) -> None:
    if rng.random() < 0.2:
        message.ClearField(descriptor.name)
        return
    is_message = descriptor.type == FieldDescriptor.TYPE_MESSAGE
    if _repeats(descriptor):
        values = getattr(message, descriptor.name)
        if not hasattr(values, "append"):
            return  # a map
        if len(values) and rng.random() < 0.3:
            del values[rng.randrange(len(values))]
        elif is_message:
            values.add()
            if len(values) > 1:
                values[-1].CopyFrom(values[rng.randrange(len(values))])
        else:
            values.append(_scalar(descriptor, None, rng))
        return
    if is_message:
        getattr(message, descriptor.name).SetInParent()
        return
    setattr(message, descriptor.name, _scalar(descriptor, getattr(message, descriptor.name), rng))


def _scalar(descriptor: Any, value: Any, rng: random.Random) -> Any:
    kind = descriptor.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if descriptor.type == FieldDescriptor.TYPE_BYTES:
            short = rng.randbytes(rng.choice((0, 1, 2, 4, 6, 16, 17, 300)))
            return rng.choice((short, b"\0" + (value or b""), mutate(value or b"\1", rng)))
        return rng.choice((*_TEXTS[1:4], "", "ingress.x"))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice(_FLOATS[:2])
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice([one.number for one in descriptor.enum_type.values])
    low, high = {
        FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
        FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
        FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
        FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    }[kind]
    near = (value or 0) + rng.choice((-1, 1))
    number = near if rng.random() < 0.5 else rng.choice(_INTEGERS)
    return min(max(number, low), high)

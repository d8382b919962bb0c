"""What the stores of entities share: the engine's errors, meter configurations, updates.

Owns: the translation of the engine's errors into P4Runtime's, and of MeterConfig into rates. Must
not know: which entity is being written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

from finsy.proto import p4r, rpc_code
from google.protobuf.message import Message
from kvcast.switchsim.control_plane import tables
from kvcast.switchsim.control_plane.externs import ExternError, Rate
from kvcast.switchsim.engine import ReplicationError
from kvcast.switchsim.p4runtime.errors import (
    P4RuntimeError,
    already_exists,
    invalid_argument,
    not_found,
    out_of_range,
    unimplemented,
)
from kvcast.switchsim.p4runtime.schema import ActionSchema, CounterUnits
from kvcast.switchsim.p4runtime.values import decode_bytes

_Message = TypeVar("_Message", bound=Message)
_Known = TypeVar("_Known")

# The first that fits counts.
_ENGINE_ERRORS: tuple[tuple[type[Exception], int], ...] = (
    (tables.TableFull, rpc_code.RESOURCE_EXHAUSTED),
    (tables.DuplicateEntry, rpc_code.ALREADY_EXISTS),
    (tables.NoSuchEntry, rpc_code.NOT_FOUND),
    (tables.NoSuchMember, rpc_code.NOT_FOUND),
    (tables.ConstTable, rpc_code.PERMISSION_DENIED),
    (tables.StillUsed, rpc_code.FAILED_PRECONDITION),
    (tables.TableError, rpc_code.INVALID_ARGUMENT),
    (ExternError, rpc_code.INVALID_ARGUMENT),
    (ReplicationError, rpc_code.INVALID_ARGUMENT),
)

# BMv2 keeps bursts in 32 bits.
MAX_BURST = (1 << 32) - 1
MAX_RATE = 10**14


@contextlib.contextmanager
def engine_errors() -> Iterator[None]:
    """Turn what the engine refuses into what P4Runtime says."""
    try:
        yield
    except (tables.TableError, ExternError, ReplicationError) as error:
        code = next(code for kind, code in _ENGINE_ERRORS if isinstance(error, kind))
        raise P4RuntimeError(code, str(error)) from error


def check_index(name: str, index: int, size: int) -> int:
    """An index into an array of `size` cells."""
    if index < 0:
        raise invalid_argument(f"{name}: index {index}")
    if index >= size:
        raise out_of_range(f"{name}: index {index} of {size}")
    return index


def check_counter_data(data: p4r.CounterData) -> tuple[int, int]:
    """(packets, bytes)"""
    if data.packet_count < 0 or data.byte_count < 0:
        raise invalid_argument("a counter cannot be negative")
    return data.packet_count, data.byte_count


def counter_data(units: CounterUnits, packets: int, bytes_: int) -> p4r.CounterData:
    """What a counter of these units reports; the engine always counts both."""
    return p4r.CounterData(
        packet_count=packets if units.packets else 0, byte_count=bytes_ if units.bytes else 0
    )


def rates_of(config: p4r.MeterConfig) -> tuple[Rate, Rate]:
    """(committed, peak) rates of a two-rate meter."""
    for name in ("cir", "cburst", "pir", "pburst"):
        value = getattr(config, name)
        if value < 0:
            raise invalid_argument(f"meter {name} {value}")
    if config.eburst:
        raise invalid_argument("meter eburst belongs to single-rate meters")
    if config.cburst > MAX_BURST or config.pburst > MAX_BURST:
        raise unimplemented(f"meter burst above {MAX_BURST}")
    if config.cir > MAX_RATE or config.pir > MAX_RATE:
        raise unimplemented(f"meter rate above {MAX_RATE}")
    if config.cir > config.pir:
        raise invalid_argument("meter cir is above pir")
    return Rate(config.cir / 1e6, config.cburst), Rate(config.pir / 1e6, config.pburst)


def copied(message: _Message) -> _Message:
    kept = type(message)()
    kept.CopyFrom(message)
    return kept


def entity_of(which: str, message: Message) -> p4r.Entity:
    """An entity of the kind that `which` names."""
    entity = p4r.Entity()
    getattr(entity, which).CopyFrom(message)
    return entity


def inserting(which: str, message: Message) -> p4r.Update:
    return p4r.Update(type=p4r.Update.INSERT, entity=entity_of(which, message))


def modifying(which: str, message: Message) -> p4r.Update:
    return p4r.Update(type=p4r.Update.MODIFY, entity=entity_of(which, message))


def present(kind: int, known: _Known | None, exists: str, missing: str) -> _Known | None:
    """What a write of this kind changes, None for what it inserts; an error with one of the two
    messages if that is there, or is not."""
    if kind == p4r.Update.INSERT and known is not None:
        raise already_exists(exists)
    if kind != p4r.Update.INSERT and known is None:
        raise not_found(missing)
    return known


def decode_arguments(action: ActionSchema, message: p4r.Action) -> tuple[int, ...]:
    """The arguments of an action in the program's order; there must be exactly one for each."""
    given: dict[int, int] = {}
    params = {param.id: param for param in action.params}
    for argument in message.params:
        param = params.get(argument.param_id)
        if param is None or argument.param_id in given:
            raise invalid_argument(f"{action.name}: parameter {argument.param_id}")
        width = min(param.width, param.target_width)
        given[param.id] = decode_bytes(argument.value, width, f"{action.name}.{param.name}")
    if len(given) != len(params):
        missing = [param.name for param in action.params if param.id not in given]
        raise invalid_argument(f"{action.name}: missing {', '.join(missing)}")
    return tuple(given[param.id] for param in action.params)

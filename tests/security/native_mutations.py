"""Compiled functions that do not defend: `defence_mutations` has them compiled in the place of
those that do."""

from __future__ import annotations

from kvcast.native.subset import U64, native
from kvcast.protocol.conveyor import Giver, Giving, Reply, Taker
from kvcast.protocol.courier import Asked, Client, Courier, Question
from kvcast.protocol.lane import NativeLane
from kvcast.protocol.placement import Copy


@native
def any_node(_of: Copy, _node: U64) -> bool:
    return True


@native
def any_copy(_to: Copy, _at: U64) -> bool:
    return True


@native
def any_reader(_lane: NativeLane, _namespace: U64, _node: U64) -> bool:
    return True


@native
def any_namespace(_courier: Courier, _q: Question) -> bool:
    return True


@native
def any_message(_at: U64, _length: U64) -> bool:
    return True


@native
def any_share(_who: Client, _bytes_more: U64) -> bool:
    return True


@native
def any_node_asked(_asked: Asked, _source: U64) -> bool:
    return True


@native
def any_reader_of_a_conveyor(_g: Giving, _giver: Giver, _namespace: U64) -> bool:
    return True


@native
def any_reply(_taker: Taker) -> bool:
    return True


@native
def of_any_copy(_landed: Copy, _reply: Reply) -> bool:
    return True


@native
def any_digest(_wanted: U64, _digest: U64) -> bool:
    return True

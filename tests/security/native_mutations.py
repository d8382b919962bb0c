"""Compiled functions that do not defend: `defence_mutations` has them compiled in the place of
those that do."""

from __future__ import annotations

from kvcast.native.subset import U64, native
from kvcast.protocol.conveyor import Giver, Giving, Reply, Taker
from kvcast.protocol.courier import Asked, Client, Courier, Question
from kvcast.protocol.lane import NativeLane
from kvcast.protocol.placement import Copy
from kvcast.protocol.pushing import Push, Pusher, Pushing, Receiver, Room


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
def any_count(_count: U64, _asked: U64) -> bool:
    return True


@native
def of_any_copy(_landed: Copy, _reply: Reply) -> bool:
    return True


@native
def any_digest(_wanted: U64, _digest: U64) -> bool:
    return True


@native
def anybodys_room(room: Room, _client: U64, _ticket: U64) -> bool:
    return room.state != 0


@native
def for_any_block(_room: Room, _q: Question) -> bool:
    return True


@native
def any_pusher(_p: Pushing, _receiver: Receiver, _namespace: U64) -> bool:
    return True


@native
def any_meaning(_courier: Courier, _push: Push) -> bool:
    return True


@native
def anybodys_bucket(_p: Pushing, _push: Push) -> bool:
    return True


@native
def any_bytes(_receiver: Receiver, _digest: U64) -> bool:
    return True


@native
def any_verdict(_p: Pushing, pusher: Pusher) -> bool:
    return pusher.count != 0


@native
def any_header(_receiver: Receiver) -> bool:
    return True

"""Which controller may write: client arbitration, free of I/O.

Owns: the live streams of one device, their election ids, and who is primary. Must not know: gRPC,
queues, pipelines. Every call returns the notifications to send, in order.

Theory. Each stream says an election id; the highest connected one is primary, the others are
backups. A stream without an election id is a backup for ever. As in the reference server
(p4lang/PI), the next highest takes over at once when the primary goes; the specification would
leave the device without a primary until somebody says a higher id than was ever seen.

| event | becomes primary | who is told |
|---|---|---|
| first update, highest id | the sender | everybody |
| first update, lower or no id | nobody | the sender |
| id used by another stream | nobody | nobody; the stream ends, INVALID_ARGUMENT |
| update of a live stream that changes the primary | the highest id | everybody |
| the primary changes its id and stays highest | nobody | everybody |
| any other update of a live stream | nobody | the sender |
| the primary's stream ends | the next highest, if any | everybody |
| a backup's stream ends | nobody | nobody |

Specification: P4Runtime 1.4, "Client Arbitration and Controller Replication".
"""

from __future__ import annotations

from dataclasses import dataclass

from finsy.proto import U128, p4r, rpc_code, rpc_status
from kvcast.switchsim.p4runtime.errors import (
    failed_precondition,
    invalid_argument,
    not_found,
    resource_exhausted,
    unimplemented,
)

MAX_STREAMS = 16

StreamId = int


@dataclass(frozen=True, slots=True)
class Notification:
    """Send `update` to `stream`."""

    stream: StreamId
    update: p4r.MasterArbitrationUpdate


class Arbiter:
    """The arbitration state of one device."""

    def __init__(self, device_id: int, max_streams: int = MAX_STREAMS) -> None:
        self.device_id = device_id
        self._max_streams = max_streams
        self._election_ids: dict[StreamId, int | None] = {}
        self._highest_seen: int | None = None
        self.primary: StreamId | None = None

    @property
    def streams(self) -> int:
        """How many controllers are connected."""
        return len(self._election_ids)

    def is_primary(self, election_id: p4r.Uint128 | None) -> bool:
        """Whether a request that carries this election id comes from the primary."""
        if self.primary is None or election_id is None:
            return False
        return U128.decode(election_id) == self._election_ids[self.primary]

    def update(self, stream: StreamId, request: p4r.MasterArbitrationUpdate) -> list[Notification]:
        """A MasterArbitrationUpdate arrived. A P4RuntimeError means that the stream must end."""
        live = stream in self._election_ids
        if request.device_id != self.device_id:
            if live:
                raise failed_precondition("a stream cannot change its device id")
            raise not_found(f"device {request.device_id} is not here")
        if request.HasField("role") and (request.role.name or request.role.id):
            raise unimplemented("roles other than the default are not supported")
        if request.HasField("role") and request.role.HasField("config"):
            raise invalid_argument("role.config is not supported")
        election_id = U128.decode(request.election_id) if request.HasField("election_id") else None
        if election_id is not None and any(
            other != stream and used == election_id for other, used in self._election_ids.items()
        ):
            # The wording is what clients look for (finsy: "election id .* (used|exists)").
            raise invalid_argument("Election id already exists")
        if not live and len(self._election_ids) >= self._max_streams:
            raise resource_exhausted(f"more than {self._max_streams} controllers")
        before = self._election_ids.get(stream)
        self._election_ids[stream] = election_id
        if self._elect() or (stream == self.primary and election_id != before):
            return self._notify_all()
        return [self._notify(stream)]

    def disconnect(self, stream: StreamId) -> list[Notification]:
        """A stream ended, for whatever reason; unknown streams are fine."""
        if stream not in self._election_ids:
            return []
        was_primary = stream == self.primary
        del self._election_ids[stream]
        self._elect()
        return self._notify_all() if was_primary else []

    def _elect(self) -> bool:
        """Choose the primary; True where that is somebody else than before."""
        before = self.primary
        candidates = [(eid, s) for s, eid in self._election_ids.items() if eid is not None]
        self.primary = max(candidates)[1] if candidates else None
        if candidates:
            highest = max(candidates)[0]
            if self._highest_seen is None or highest > self._highest_seen:
                self._highest_seen = highest
        assert self.primary is None or self._election_ids[self.primary] is not None
        return self.primary != before

    def _notify_all(self) -> list[Notification]:
        """Backups first, the primary last: it is told when nobody else can write any more."""
        order = sorted(self._election_ids, key=lambda s: s == self.primary)
        return [self._notify(stream) for stream in order]

    def _notify(self, stream: StreamId) -> Notification:
        if self.primary is None:
            status = rpc_status.Status(code=rpc_code.NOT_FOUND, message="There is no primary")
            election_id = self._highest_seen
        else:
            election_id = self._election_ids[self.primary]
            if stream == self.primary:
                status = rpc_status.Status(code=rpc_code.OK, message="Is primary")
            else:
                status = rpc_status.Status(code=rpc_code.ALREADY_EXISTS, message="Is backup")
        update = p4r.MasterArbitrationUpdate(device_id=self.device_id, status=status)
        if election_id is not None:
            update.election_id.CopyFrom(U128.encode(election_id))
        return Notification(stream, update)

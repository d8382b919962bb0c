"""Who was primary when a request came, and is not any more before it ends.

Oracle: P4Runtime 1.4: only the primary writes; `arbitration.py`: the new one is told when nobody
else can. Cannot see: gRPC; the service's methods are called with a context that only ends them.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import pytest
from conftest import BLOB_PATH, DEVICE_ID, load_p4info
from finsy.proto import U128, p4r
from kvcast.switchsim.p4runtime.service import P4RuntimeService
from kvcast.switchsim.reference.switch import Switch


class AbortError(Exception):
    pass


class Context:
    """Of one RPC, over a connection without TLS."""

    code: grpc.StatusCode | None = None

    def auth_context(self) -> dict[str, Any]:
        return {}

    def set_trailing_metadata(self, _metadata: Any) -> None:
        pass

    async def abort(self, code: grpc.StatusCode, _message: str) -> None:
        self.code = code
        raise AbortError


def becomes_primary(service: P4RuntimeService, stream: int) -> None:
    """A controller with this election id is there."""
    update = p4r.MasterArbitrationUpdate(device_id=DEVICE_ID)
    update.election_id.CopyFrom(U128.encode(stream))
    service._arbiter.update(stream, update)


def make() -> P4RuntimeService:
    service = P4RuntimeService(
        device_id=DEVICE_ID,
        cpu_port=255,
        drop_port=511,
        packet_out=lambda _frame: True,
        now_us=lambda: 0,
        new_switch=Switch,
    )
    service.load(load_p4info(), BLOB_PATH.read_bytes())
    becomes_primary(service, 1)
    return service


async def test_a_batch_ends_where_another_controller_becomes_primary() -> None:
    service, context = make(), Context()
    info = load_p4info()
    table = next(t for t in info.tables if t.preamble.alias == "forward")
    [action] = [a for a in info.actions if a.preamble.alias == "set_port"]
    request = p4r.WriteRequest(device_id=DEVICE_ID)
    request.election_id.CopyFrom(U128.encode(1))
    for number in range(1, 201):
        update = request.updates.add(type=p4r.Update.INSERT)
        entry = update.entity.table_entry
        entry.table_id = table.preamble.id
        match = entry.match.add(field_id=table.match_fields[0].id)
        match.exact.value = number.to_bytes(1, "big")
        entry.action.action.action_id = action.preamble.id
        entry.action.action.params.add(param_id=action.params[0].id, value=b"\x01")
    writing = asyncio.create_task(service.Write(request, context))
    while not service.counters.writes:  # noqa: ASYNC110
        await asyncio.sleep(0)
    becomes_primary(service, 2)
    pipeline = service._target()
    wanted = p4r.Entity()
    wanted.table_entry.table_id = table.preamble.id
    before = len(list(pipeline.store.read([wanted])))
    assert 0 < before < 200
    with pytest.raises(AbortError):
        await writing
    assert len(list(pipeline.store.read([wanted]))) == before
    assert service.counters.update_errors == 200 - before


async def test_a_program_of_whom_another_has_deposed_meanwhile_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service, context = make(), Context()
    build, may_end = service._build, threading.Event()

    def slowly(config: Any) -> Any:
        may_end.wait()
        return build(config)

    monkeypatch.setattr(service, "_build", slowly)
    request = p4r.SetForwardingPipelineConfigRequest(
        device_id=DEVICE_ID, action=p4r.SetForwardingPipelineConfigRequest.VERIFY_AND_COMMIT
    )
    request.election_id.CopyFrom(U128.encode(1))
    request.config.p4info.CopyFrom(load_p4info())
    request.config.p4_device_config = BLOB_PATH.read_bytes()
    pushes, running = service.counters.pushes, service.switch
    pushing = asyncio.create_task(service.SetForwardingPipelineConfig(request, context))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    becomes_primary(service, 2)
    may_end.set()
    with pytest.raises(AbortError):
        await pushing
    assert context.code == grpc.StatusCode.PERMISSION_DENIED
    assert (service.counters.pushes, service.switch) == (pushes, running)

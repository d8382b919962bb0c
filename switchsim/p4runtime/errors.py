"""The errors that P4Runtime clients see, and how they travel.

Owns: `P4RuntimeError` (one canonical code, one sentence), the p4.v1.Error of one update in a
batch, and the google.rpc.Status that carries them in the trailing metadata
(`grpc-status-details-bin`). Must not know: gRPC contexts, tables, the switch.

Specification: P4Runtime 1.4, "Error Reporting Messages" and "Write RPC / Error Reporting".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from finsy.proto import p4r, rpc_code, rpc_status
from google.protobuf.any_pb2 import Any as PBAny

STATUS_DETAILS_KEY = "grpc-status-details-bin"

ERROR_SPACE = "kvcast-switchsim"

# Gathering errors of a large batch may not exceed what an HTTP/2 header may hold at the client
# (grpc.max_metadata_size; 8 KiB by default, 64 KiB in common P4Runtime clients).
MAX_DETAILS_BYTES = 48 * 1024
MAX_MESSAGE_CHARS = 240


class P4RuntimeError(Exception):
    """A request, or one update of it, was refused. `code` is a google.rpc.Code value."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message[:MAX_MESSAGE_CHARS]

    @property
    def code_name(self) -> str:
        return rpc_code.Code.Name(rpc_code.Code.ValueType(self.code))

    def __str__(self) -> str:
        return f"{self.code_name}: {self.message}"


invalid_argument = partial(P4RuntimeError, rpc_code.INVALID_ARGUMENT)
not_found = partial(P4RuntimeError, rpc_code.NOT_FOUND)
already_exists = partial(P4RuntimeError, rpc_code.ALREADY_EXISTS)
permission_denied = partial(P4RuntimeError, rpc_code.PERMISSION_DENIED)
failed_precondition = partial(P4RuntimeError, rpc_code.FAILED_PRECONDITION)
resource_exhausted = partial(P4RuntimeError, rpc_code.RESOURCE_EXHAUSTED)
out_of_range = partial(P4RuntimeError, rpc_code.OUT_OF_RANGE)
unimplemented = partial(P4RuntimeError, rpc_code.UNIMPLEMENTED)
aborted = partial(P4RuntimeError, rpc_code.ABORTED)


def batch_status(errors: Sequence[P4RuntimeError | None]) -> rpc_status.Status:
    """The status of a batch with at least one error: UNKNOWN, one p4.v1.Error per update.

    Updates that succeeded have an OK of their own, so that a client can match errors to updates
    by position. Where the whole would not fit in a header, the messages are left out first.
    """
    status = _pack(errors, with_messages=True)
    if status.ByteSize() > MAX_DETAILS_BYTES:
        status = _pack(errors, with_messages=False)
    if status.ByteSize() > MAX_DETAILS_BYTES:
        failed = sum(error is not None for error in errors)
        status = rpc_status.Status(
            code=rpc_code.UNKNOWN,
            message=f"{failed} of {len(errors)} updates failed; too many to list",
        )
    return status


def _pack(errors: Sequence[P4RuntimeError | None], *, with_messages: bool) -> rpc_status.Status:
    failed = [index for index, error in enumerate(errors) if error is not None]
    first = errors[failed[0]]
    assert first is not None
    status = rpc_status.Status(
        code=rpc_code.UNKNOWN,
        message=f"{len(failed)} of {len(errors)} updates failed, first #{failed[0]}: {first}",
    )
    for error in errors:
        detail = p4r.Error(canonical_code=rpc_code.OK)
        if error is not None:
            detail = p4r.Error(
                canonical_code=error.code,
                message=error.message if with_messages else "",
                space=ERROR_SPACE,
            )
        packed = PBAny()
        packed.Pack(detail)
        status.details.append(packed)
    return status

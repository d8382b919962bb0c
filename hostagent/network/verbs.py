"""RDMA cards, by pyverbs: the adapter behind `kvcast.protocol.links.rdma.Verbs` for those who let
others read and write.

Owns: one card's objects (protection domain, the arena's registration, completion queue, queue
pairs, memory windows), and waiting for completions without polling: the event loop watches the
completion channel. Must not know: what is said on a connection, or what a block is. (What this node
reads and writes itself, `calling_card` has pairs for.)

The arena is registered at the start, and open to nobody: what another node may reach is bound to a
memory window of type 2, which only one queue pair may use, and which is freed before its memory is
anything else's. A card without such windows is not used.

RoCE version 2 over IPv4 only: the card is the one whose GID is the agent's own address, or one that
is named (`cards`).
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from ipaddress import IPv6Address
from typing import Any, Final

from kvcast.hostagent.network import libverbs
from kvcast.hostagent.network.calling_card import (
    POLLED,
    POLLS,
    PORT_DOWN,
    RETRIES,
    TIMEOUT,
    CallingCard,
)
from kvcast.protocol.links.rdma import (
    MAX_WINDOWS,
    CloseWindow,
    Completed,
    OpenWindow,
    Pair,
    RdmaOptions,
    VerbsError,
    Work,
)
from kvcast.protocol.messages.rdma import Endpoint

log = logging.getLogger(__name__)

_ROCE_V2: Final = 2
"""IBV_GID_TYPE_ROCE_V2 in a GID table."""
_MAX_READS: Final = 16
"""READs in flight for one pair, as far as the card has so many."""


def _import() -> Any:
    """pyverbs' modules, or VerbsError where it is not installed."""
    try:
        import pyverbs.addr
        import pyverbs.cq
        import pyverbs.device
        import pyverbs.enums
        import pyverbs.mr
        import pyverbs.pd
        import pyverbs.qp
    except ImportError as error:
        raise VerbsError(f"pyverbs is not installed ({error})") from error
    return pyverbs


def devices() -> list[str]:
    """The names of all RDMA cards of this machine; VerbsError where there are none."""
    pyverbs = _import()
    try:
        return [device.name.decode() for device in pyverbs.device.get_device_list()]
    except (pyverbs.pyverbs_error.PyverbsError, OSError) as error:  # where there are none
        raise VerbsError(f"no RDMA cards ({error})") from error


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class _CardPair:
    """One half of a queue pair (`kvcast.protocol.links.rdma.Pair`)."""

    def __init__(self, card: Card, completed: Callable[[list[Completed]], None]) -> None:
        self._card = card
        self._completed = completed
        self._psn = secrets.randbits(24)
        self._queue = card.new_queue()
        self._opening: dict[int, tuple[int, int]] = {}
        """Address and key of the windows that are being opened, by token."""
        self._windows: dict[int, Any] = {}
        """Open windows by the token of their order."""
        self._closed = False

    @property
    def endpoint(self) -> Endpoint:
        card = self._card
        return Endpoint(card.gid, self._queue.qp_num, self._psn, card.mtu_bytes, card.max_reads)

    def join(self, remote: Endpoint) -> None:
        self._card.join(self._queue, self._psn, remote)

    def post(self, work: Sequence[Work]) -> None:
        card, queue = self._card, self._queue
        closing = [item for item in work if isinstance(item, CloseWindow)]
        posted = [item for item in work if isinstance(item, OpenWindow)]
        if len(closing) + len(posted) < len(work):
            raise VerbsError("this queue pair has windows only")
        try:
            if posted:
                queue.wr_start()
                try:
                    for item in posted:
                        self._add(queue, item)
                except BaseException:
                    queue.wr_abort()
                    raise
                queue.wr_complete()
        except card.errors as error:
            raise VerbsError(f"posting work: {error}") from error
        for order in closing:
            card.end_window(self._windows.pop(order.window))
        if closing:
            card.soon(lambda: self.done([(order.token, "") for order in closing]))

    def _add(self, queue: Any, order: OpenWindow) -> None:
        card, enums = self._card, self._card.enums
        queue.wr_id = card.numbered(self, order.token)
        queue.wr_flags = enums.IBV_SEND_SIGNALED
        window, key = card.new_window()
        self._windows[order.token] = window
        address, size_bytes = _address_of(order.memory), len(order.memory)
        self._opening[order.token] = (address, key)
        read, write = enums.IBV_ACCESS_REMOTE_READ, enums.IBV_ACCESS_REMOTE_WRITE
        info = card.bind_info(address, size_bytes, write if order.writable else read)
        queue.wr_bind_mw(window, key, info)

    def done(self, results: list[tuple[int, str]]) -> None:
        """What the card says of some of this pair's work."""
        if self._closed:
            return
        completed = []
        for token, problem in results:
            address, key = self._opening.pop(token, (0, 0))
            completed.append(Completed(token, problem, address, key))
        self._completed(completed)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._card.forget(self)
        # Windows before their queue pair: while they live, some drivers wait for them.
        for window in self._windows.values():
            self._card.end_window(window)
        self._windows.clear()
        self._card.end_queue(self._queue)


class Card:
    """One port of one card, open for one arena (`kvcast.protocol.links.rdma.Verbs`).

    `memory`: the arena; `name`: which card, that may then have another address than `ip`; None =
    the one that has it. Raises VerbsError where there is no RDMA for that. `problem` says why the
    card is of no use just now ("" = it is), `changed` is called when that changes.
    """

    def __init__(
        self, ip: str, memory: memoryview, options: RdmaOptions, name: str | None = None
    ) -> None:
        pyverbs = _import()
        self.enums = pyverbs.enums
        self._pyverbs = pyverbs
        self._options = options
        self.errors = (pyverbs.pyverbs_error.PyverbsError, OSError)
        self.ip = ip
        self.problem = ""
        self.changed: Callable[[], None] = lambda: None
        self._open_pairs: set[Pair] = set()
        """Those of `calling`, too."""
        self._number = 0
        self._work: dict[int, tuple[_CardPair, int]] = {}
        """Whose each work request is, and by which token."""
        try:
            self._open(memory, name)
        except self.errors as error:
            raise VerbsError(f"the card {name or f'for {ip}'}: {error}") from error
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._completions)
        try:
            self.calling = CallingCard(self, memory, options.posted, self._calling_entries)
            # What happens after this, the card tells.
            if self._context.query_port(self.port).state != self.enums.IBV_PORT_ACTIVE:
                self.problem = PORT_DOWN
        except VerbsError:
            self._close_parts()
            raise

    def _open(self, memory: memoryview, name: str | None) -> None:
        pyverbs, enums = self._pyverbs, self.enums
        self._context, self.port, self.gid_index = self._find(name)
        self.gid = libverbs.gid_of(self.ip)
        device = self._context.query_device()
        if not device.device_cap_flags & enums.IBV_DEVICE_MEM_WINDOW_TYPE_2B:
            raise VerbsError(f"{self._context.name} has no memory windows of type 2B")
        port = self._context.query_port(self.port)
        self.mtu_bytes = 128 << port.active_mtu
        self.max_transfer_bytes = min(port.max_msg_sz, 1 << 30)
        self.max_reads = max(1, min(_MAX_READS, device.max_qp_rd_atom, 255))
        self._depth = min(MAX_WINDOWS, device.max_qp_wr)
        self._calling_entries = min(self._options.posted * self._options.max_pairs, device.max_cqe)
        self._domain = pyverbs.pd.PD(self._context)
        before = _channels()
        self._channel = pyverbs.cq.CompChannel(self._context)
        # pyverbs does not give the channel's descriptor away.
        (self._descriptor,) = _channels() - before
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_NONBLOCK)
        entries = min(self._depth * self._options.max_pairs, device.max_cqe)
        self._max_pairs = max(1, min(self._options.max_pairs, entries // self._depth))
        self._completion_queue = pyverbs.cq.CQ(self._context, entries, None, self._channel, 0)
        self._completion_queue.req_notify()
        # For windows alone: what this node orders itself goes by `CallingCard`'s registration.
        self._region = pyverbs.mr.MR(
            self._domain,
            len(memory),
            enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_MW_BIND,
            address=_address_of(memory),
        )

    def _find(self, name: str | None) -> tuple[Any, int, int]:
        """The card, open, its port, and the place of the GID; our address becomes its own. Where
        the named card has more than one, and not ours, it is the first."""
        for device in devices():
            if name not in (None, device):
                continue
            context = self._pyverbs.device.Context(name=device)
            found = [
                (str(IPv6Address(entry.gid_str()).ipv4_mapped), entry)
                for entry in context.query_gid_table(1024)
                if entry.gid_type == _ROCE_V2 and IPv6Address(entry.gid_str()).ipv4_mapped
            ]
            ours = [(ip, entry) for ip, entry in found if ip == self.ip]
            for self.ip, entry in ours or (found if name is not None else []):
                return context, entry.port_num, entry.gid_index
            context.close()
        what = "no RDMA card has this address" if name is None else "it has no address of IPv4"
        raise VerbsError(f"{what} by RoCE version 2")

    @property
    def name(self) -> str:
        """The card's."""
        return str(self._context.name)

    def happened(self, problem: str) -> None:
        """The card says that it is of no use, and why; or "", that it is."""
        if problem != self.problem:
            self.problem = problem
            self.changed()

    # --- pairs --------------------------------------------------------------------------------

    @property
    def pairs(self) -> int:
        """Queue pairs that are not closed."""
        return len(self._open_pairs)

    def make_pair(self, completed: Callable[[list[Completed]], None]) -> _CardPair:
        """One more half; VerbsError where there are no more."""
        self._check_room()
        try:
            pair = _CardPair(self, completed)
        except self.errors as error:
            raise VerbsError(f"no queue pair: {error}") from error
        self._open_pairs.add(pair)
        return pair

    def admit(self, pair: Pair) -> None:
        """Count one of `calling`; VerbsError where there are as many as may be."""
        self._check_room()
        self._open_pairs.add(pair)

    def _check_room(self) -> None:
        if self.pairs >= self._max_pairs:
            raise VerbsError(f"all {self._max_pairs} queue pairs are taken")

    def new_queue(self) -> Any:
        qp, enums = self._pyverbs.qp, self.enums
        capacity = qp.QPCap(max_send_wr=self._depth, max_recv_wr=1)
        queue = qp.QPEx(
            self._context,
            qp.QPInitAttrEx(
                qp_type=enums.IBV_QPT_RC,
                scq=self._completion_queue,
                rcq=self._completion_queue,
                cap=capacity,
                pd=self._domain,
                comp_mask=enums.IBV_QP_INIT_ATTR_PD | enums.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                send_ops_flags=enums.IBV_QP_EX_WITH_BIND_MW,
            ),
        )
        queue.to_init(self._attributes())
        return queue

    def _attributes(self) -> Any:
        attributes = self._pyverbs.qp.QPAttr(port_num=self.port)
        attributes.qp_access_flags = (
            self.enums.IBV_ACCESS_REMOTE_READ | self.enums.IBV_ACCESS_REMOTE_WRITE
        )
        return attributes

    def join(self, queue: Any, psn: int, remote: Endpoint) -> None:
        """Connect a half to its other half; VerbsError."""
        addr = self._pyverbs.addr
        attributes = self._attributes()
        attributes.dest_qp_num = remote.queue_pair
        mtu_bytes = min(self.mtu_bytes, remote.mtu_bytes)
        attributes.path_mtu = mtu_bytes.bit_length() - 8
        attributes.rq_psn = remote.psn
        attributes.sq_psn = psn
        attributes.max_dest_rd_atomic = self.max_reads
        attributes.max_rd_atomic = min(self.max_reads, remote.reads)
        attributes.min_rnr_timer = 12
        attributes.timeout = TIMEOUT
        attributes.retry_cnt = RETRIES
        attributes.rnr_retry = RETRIES
        gid = ":".join(remote.gid[i : i + 2].hex() for i in range(0, 16, 2))
        attributes.ah_attr = addr.AHAttr(
            gr=addr.GlobalRoute(dgid=addr.GID(gid), sgid_index=self.gid_index, hop_limit=64),
            is_global=1,
            port_num=self.port,
        )
        try:
            queue.to_rtr(attributes)
            queue.to_rts(attributes)
        except self.errors as error:
            raise VerbsError(f"joining a queue pair: {error}") from error

    def numbered(self, pair: _CardPair, token: int) -> int:
        """The number of a work request."""
        self._number += 1
        self._work[self._number] = (pair, token)
        return self._number

    def forget(self, pair: Pair) -> None:
        """A pair is closed: what the card still says of it concerns nobody."""
        self._open_pairs.discard(pair)
        for number in [n for n, (owner, _) in self._work.items() if owner is pair]:
            del self._work[number]

    def soon(self, action: Callable[[], None]) -> None:
        """Do it when whoever is at work now has done."""
        self._loop.call_soon(action)

    def end_queue(self, queue: Any) -> None:
        try:
            queue.close()
        except self.errors as error:
            log.error("a queue pair cannot be closed: %s", error)

    # --- memory -------------------------------------------------------------------------------

    def bind_info(self, address: int, size_bytes: int, access: int) -> Any:
        return self._pyverbs.mr.MWBindInfo(self._region, address, size_bytes, access)

    def new_window(self) -> tuple[Any, int]:
        """A window that is bound to nothing, and the key that it is to have.

        None is used twice: a window that was bound again would need a key that pyverbs cannot tell
        the driver, and to free one ends it at once, whatever state its queue pair is in."""
        window = self._pyverbs.mr.MW(self._domain, self.enums.IBV_MW_TYPE_2)
        return window, window.rkey & 0xFFFFFF00 | (window.rkey + 1) & 0xFF

    def end_window(self, window: Any) -> None:
        try:
            window.close()
        except self.errors as error:
            log.error("a memory window cannot be closed: %s", error)

    # --- completions --------------------------------------------------------------------------

    def _completions(self) -> None:
        """The completion channel can be read."""
        try:
            self._channel.get_cq_event(self._completion_queue)
        except self.errors:
            return  # there was none
        self._completion_queue.ack_events(1)
        self._completion_queue.req_notify()
        self._poll()

    def _poll(self) -> None:
        for _ in range(POLLS):
            count, completions = self._completion_queue.poll(POLLED)
            if count <= 0:
                return
            by_pair: dict[_CardPair, list[tuple[int, str]]] = {}
            for item in completions:
                owner = self._work.pop(item.wr_id, None)
                if owner is not None:
                    pair, token = owner
                    by_pair.setdefault(pair, []).append((token, self._problem(item.status)))
            for pair, results in by_pair.items():
                pair.done(results)
        self._loop.call_soon(self._poll)

    def _problem(self, status: int) -> str:
        if status == self.enums.IBV_WC_SUCCESS:
            return ""
        return str(self._pyverbs.cq.cqe_status_to_str(status))

    def close(self) -> None:
        """Give everything back."""
        self.calling.close()
        for pair in list(self._open_pairs):
            pair.close()
        self._close_parts()

    def _close_parts(self) -> None:
        self._loop.remove_reader(self._descriptor)
        parts = (self._region, self._completion_queue, self._channel, self._domain, self._context)
        for part in parts:
            try:
                part.close()
            except self.errors as error:
                log.error("%s cannot be closed: %s", type(part).__name__, error)


def _channels() -> set[int]:
    """The descriptors of this process's completion channels."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except OSError:
            pass  # the listing's own
    return found

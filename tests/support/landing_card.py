"""A card for shared answers as compiled code sees it, and a copy that is put together beside it.

Its functions stand where a driver's would. Cannot see: whether real drivers have that layout
(tests/rdma).
"""

from __future__ import annotations

import ctypes
import random
import struct
from collections import deque
from typing import Any

from kvcast.hostagent.network import landing_zone as zone_module
from kvcast.hostagent.network.libverbs import Part, Send
from kvcast.native.subset import ctypes_of
from kvcast.protocol.messages import roce, wire
from kvcast.protocol.messages.wire import BlockId, Frame
from kvcast.protocol.placement import Arrived, Placement
from kvcast.protocol.requester.landing import Landing

CHUNK = roce.SHARED_CHUNKING.chunk_bytes
_ORDERS = 512
_POLL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
_POST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class Card:
    """A queue pair as compiled code sees it."""

    def __init__(self) -> None:
        self.completions: deque[tuple[int, int]] = deque()
        """Status and immediate."""
        self.posted: list[tuple[int, ...]] = []
        self.allowed = 0
        self.refuses = 0
        self.memory = bytearray(roce.ZONE_BYTES)
        self.landing = Landing(memoryview(self.memory))
        self._functions = (_POLL(self.poll), _POST(self.post_send), _POST(self.post_receive))
        self._polled = (ctypes.c_uint32 * (256 * 12))()
        self._sends = (ctypes_of(Send) * _ORDERS)()
        self._parts = (ctypes_of(Part) * _ORDERS)()
        self._receives = (ctypes_of(zone_module.Receive) * _ORDERS)()
        for number in range(_ORDERS):
            self._sends[number].next = ctypes.addressof(self._sends) + 128 * (number + 1)
            self._sends[number].parts = ctypes.addressof(self._parts) + 16 * number
            self._receives[number].next = ctypes.addressof(self._receives) + 32 * (number + 1)
        poll, send, receive = (
            ctypes.cast(function, ctypes.c_void_p).value for function in self._functions
        )
        self.queue: Any = ctypes_of(zone_module.Queue)(
            zone=self.landing.address,
            poll=poll,
            post_send=send,
            post_receive=receive,
            polled=ctypes.addressof(self._polled),
            sends=ctypes.addressof(self._sends),
            parts=ctypes.addressof(self._parts),
            receives=ctypes.addressof(self._receives),
            memory=ctypes.addressof(ctypes.c_char.from_buffer(self.memory)),
        )
        self.address = ctypes.addressof(self.queue)
        self.code = zone_module.compiled()

    def poll(self, _queue: int, most: int, into: int) -> int:
        count = min(most, len(self.completions), 5)
        for number in range(count):
            status, immediate = self.completions.popleft()
            words = [0] * 12
            words[2], words[6] = status, int.from_bytes(immediate.to_bytes(4, "big"), "little")
            ctypes.memmove(into + 48 * number, struct.pack("=12I", *words), 48)
        return count

    def post_send(self, _pair: int, first: int, _refused: int) -> int:
        if self.refuses:
            return self.refuses
        while first:
            order = struct.unpack("=QQQiiI4sQI", ctypes.string_at(first, 52)[:52])
            number, following, parts, _count, _opcode, flags, immediate, address, _key = order
            at, size, _key = struct.unpack("=QII", ctypes.string_at(parts, 16))
            says = int.from_bytes(immediate, "big")
            self.posted.append((number, flags, says, address, at, size))
            first = following
        return 0

    def post_receive(self, _pair: int, first: int, _refused: int) -> int:
        if self.refuses:
            return self.refuses
        while first:
            self.allowed += 1
            first = struct.unpack("=Q", ctypes.string_at(first + 8, 8))[0]
        return 0


HOME, HOME_IP, DIGEST = 3, 0x7F000001, 77
BLOCK = BlockId(7, bytes(range(16)))
SIZE = wire.SEGMENT_BYTES + 2 * roce.SLOT_BYTES + 3 * CHUNK + 1001


class Reader:
    """A copy that is being put together beside a zone."""

    def __init__(self, card: Card, seed: int, placement: Placement | None = None) -> None:
        self.card = card
        self.rng = random.Random(seed)
        self.data = self.rng.randbytes(SIZE)
        self.buffer = bytearray(SIZE)
        self.placement = Placement() if placement is None else placement
        self.placement.know({HOME_IP: HOME})
        self.placement.use_landing(card.code.put_in_place, card.address)
        chunking = roce.SHARED_CHUNKING
        view = memoryview(self.buffer)
        self.number, self.serial, self.missing = self.placement.enter(
            BLOCK, SIZE, DIGEST, view, chunking, [HOME]
        )
        self.arrived: list[Arrived] = []
        self.frames: list[bytes] = []

    def place(self, index: int) -> roce.Place:
        return roce.place_of(*BLOCK, roce.SHARED_CHUNKING.number(index))

    def land(self, index: int, chunks: int) -> None:
        """The card reports these chunks, and has put them in the slot."""
        start = roce.SHARED_CHUNKING.start_of(index)
        place = self.place(index)
        for chunk in range(64):
            if chunks >> chunk & 1:
                at, low = start + chunk * CHUNK, place.address_low(chunk)
                piece = self.data[at : at + CHUNK]
                self.card.memory[low : low + len(piece)] = piece
                self.card.completions.append((0, place.immediate(chunk)))

    def written(self, index: int, **fields: int) -> None:
        """The end of the answer comes."""
        sender = fields.pop("sender", HOME_IP)
        self.placement.place_bytes(
            self.end_of(index, **fields),
            self.arrived.extend,
            lambda _node, data: self.frames.append(data),
            sender=sender,
        )

    def end_of(self, index: int, **fields: int) -> bytes:
        """The frame that says so."""
        return wire.encode(
            Frame(
                wire.OP_WRITTEN,
                *BLOCK,
                roce.SHARED_CHUNKING.number(index),
                wire.FLAG_WRITE | wire.FLAG_SHARED,
                digest=fields.pop("digest", DIGEST),
                size=fields.pop("size", SIZE),
                tag=fields.pop("tag", self.place(index).tag),
            )
        )

    def segment(self, index: int) -> bytes:
        start = roce.SHARED_CHUNKING.start_of(index)
        size = roce.SHARED_CHUNKING.bytes_of(SIZE, index)
        return bytes(self.buffer[start : start + size])

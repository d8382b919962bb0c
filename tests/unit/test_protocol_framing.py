"""Streams of length-prefixed messages: incremental, bounded, and closed at the first lie.

Oracle: messages written out and read back. Cannot see: what the messages mean.
"""

from __future__ import annotations

import msgspec
import pytest
from kvcast.protocol.messages import control
from kvcast.protocol.messages.framing import FramingError, MessageCodec


class Ping(msgspec.Struct, tag="ping"):
    number: int


class Text(msgspec.Struct, tag="text"):
    text: str


def codec(limit: int = 1000) -> MessageCodec[Ping | Text]:
    return MessageCodec(Ping | Text, max_message_bytes=limit)


def test_messages_arrive_whole_however_the_stream_is_cut() -> None:
    sent = [Ping(1), Text("two"), Ping(3)]
    stream = b"".join(codec().encode(message) for message in sent)
    for step in (1, 2, 3, 7, len(stream)):
        reader = codec()
        received = [
            message
            for start in range(0, len(stream), step)
            for message in reader.feed(stream[start : start + step])
        ]
        assert received == sent


def test_length_outside_the_limit_is_refused_before_the_body_comes() -> None:
    for length in (0, 101, 0xFFFFFFFF):
        with pytest.raises(FramingError, match="length"):
            list(codec(100).feed(length.to_bytes(4, "big")))


def test_too_long_a_message_is_not_encoded() -> None:
    with pytest.raises(FramingError, match="exceeds"):
        codec(100).encode(Text("x" * 101))


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"\x00",
        msgspec.msgpack.encode({"type": "pong"}),
        msgspec.msgpack.encode({"type": "ping", "number": "one"}),
        msgspec.msgpack.encode({"number": 1}),
        b"\x91" * 900 + b"\x00",
        msgspec.msgpack.encode({"type": "text", "text": "??"}).replace(b"??", b"\xff\xfe"),
    ],
)
def test_a_body_that_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(FramingError, match="not a message"):
        list(codec().feed(len(body).to_bytes(4, "big") + body))


def test_the_error_quotes_little_of_a_long_message() -> None:
    body = msgspec.msgpack.encode({"type": "x" * 900})
    with pytest.raises(FramingError) as refused:
        codec().decode(body)
    assert len(str(refused.value)) < 300


def test_control_messages_are_checked_as_they_arrive() -> None:
    codec_of_agents: MessageCodec[msgspec.Struct] = MessageCodec(control.AgentMessage)
    renew = control.Renew(
        counters={"reads": 1.0},
        hot=[control.HotBlock(1, bytes(16), 5, 2, 0, 4096, 7)],
        arena_used_bytes=0,
        blocks=0,
        epoch=3,
    )
    assert list(codec_of_agents.feed(codec_of_agents.encode(renew))) == [renew]
    short_key = control.Kept(request=1, namespace=1, key=b"short", held=True)
    with pytest.raises(FramingError, match="key"):
        list(codec_of_agents.feed(codec_of_agents.encode(short_key)))

"""What can be fuzzed: the registry, and the entry points that are functions of bytes.

Owns: the seam (`entry_point`) by which a tier or a transport that is added later joins the fuzzers,
and the readers of files and frames. Must not know: how inputs are found (`engine`). Entry
points with event loops are in `entry_points`, one of the file system in `arena`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

import msgspec
from kvcast.bench.fuzz.engine import Harness, Target
from kvcast.bench.fuzz.shapes import framed, spoil_json, spoil_stream
from kvcast.bench.hostile_bytes import encapsulation, mutate, seed_datagrams
from kvcast.controller import flags as controller_flags
from kvcast.controller.http import tokens
from kvcast.hostagent import flags as agent_flags
from kvcast.p4 import artefact
from kvcast.protocol import placement
from kvcast.protocol.messages import bulk, control, ethernet, framing, local, wire
from kvcast.service import options, values
from kvcast.switchsim import flags as switch_flags
from kvcast.switchsim import loader
from kvcast.switchsim.difftest import programs
from kvcast.switchsim.ir import ProgramError
from kvcast.switchsim.reference.switch import Switch
from kvcast.topologies.star import Star
from kvcast.workloads import traces
from kvcast.workloads.generators import WorkloadError, WorkloadOptions

T = TypeVar("T", bound=Callable[[], Harness])

TARGETS: dict[str, Target] = {}
KEY: Final = bytes(range(16))


def register(target: Target) -> Target:
    """Have an entry point be fuzzed with all others. Whoever adds a tier or a transport calls
    this."""
    if target.name in TARGETS:
        raise ValueError(f"there is a target {target.name} already")
    TARGETS[target.name] = target
    return target


def entry_point(name: str, what: str, *modules: ModuleType) -> Callable[[T], T]:
    """Registers the harness (a class, or what makes one) below it."""

    def of(harness: T) -> T:
        register(Target(name, what, harness, modules))
        return harness

    return of


class FunctionHarness(Harness):
    """An entry point that is a function of bytes: `allowed` are its named errors."""

    def __init__(
        self,
        function: Callable[[bytes], object],
        corpus: Sequence[bytes],
        allowed: tuple[type[BaseException], ...],
        spoil: Callable[[bytes, random.Random], bytes] = mutate,
    ) -> None:
        self._function = function
        self._corpus = list(corpus)
        self._allowed = allowed
        self._spoil = spoil

    def corpus(self) -> list[bytes]:
        return list(self._corpus)

    def spoil(self, data: bytes, rng: random.Random) -> bytes:
        return self._spoil(data, rng)

    def run(self, data: bytes) -> None:
        with contextlib.suppress(*self._allowed):
            self._function(data)


class ChangesHarness(Harness):
    """An input is a row of changes to what an entry point reads, each of `change_bytes`."""

    change_bytes: int

    def corpus(self) -> list[bytes]:
        rng = random.Random(1)
        return [bytes(0), *(rng.randbytes(self.change_bytes * count) for count in (1, 2, 4, 16))]

    def spoil(self, data: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return data + rng.randbytes(self.change_bytes)
        return mutate(data, rng)


class StreamHarness(Harness):
    """An entry point of a stream of framed messages; `good` gives one of each."""

    good: Callable[[], Sequence[msgspec.Struct]]

    def spoil(self, data: bytes, rng: random.Random) -> bytes:
        return spoil_stream(data, rng, bodies_of(type(self).good))


# --- messages, for this and other entry points ----------

ADDRESS: Final[dict[str, Any]] = {
    "ip": "10.77.0.1",
    "mac": "02:6b:76:00:00:01",
    "switch_port": 1,
    "udp_port": 19286,
    "bulk_host": "127.0.0.1",
    "bulk_port": 1,
}


def agent_messages() -> list[control.AgentMessage]:
    """One of each that an agent says."""
    return [
        control.Register(1, "node-1", 7, **ADDRESS, arena_bytes=1 << 20),
        control.Renew({"gets_total": 1.0}, [control.HotBlock(1, KEY, 9, 3, 0, 5000, 77)], 5, 1, 1),
        control.Described(1, [(1, KEY, 5000, 77)]),
        control.Kept(1, 1, KEY, True),
        control.Kept(1 << 40, 1, KEY, True),
        control.HandedOver(3, 2, 9, 1),
        control.NamespaceRequest(3, "t", "m", "1", "l"),
        control.GroupRequest(4, 1, ["node-1"]),
        control.GroupRequest(5, 1, [], 3),
        control.Leave(),
    ]


NAMESPACE = control.NamespaceInfo(1, "t", "m", "1", "l")


def pool_map(namespaces: Sequence[control.NamespaceInfo] = ()) -> control.PoolMap:
    """A map of two nodes."""
    second = ADDRESS | {"ip": "10.77.0.2", "mac": "02:6b:76:00:00:02", "switch_port": 2}
    return control.PoolMap(
        3,
        [control.NodeInfo(1, "node-1", **ADDRESS), control.NodeInfo(2, "node-2", **second)],
        [[1, 2]] * wire.BUCKETS,
        list(namespaces) or [NAMESPACE],
        [control.GroupInfo(1, 1, ["node-1", "node-2"])],
    )


def _settings(policy: str) -> control.NamespaceSettings:
    return control.NamespaceSettings(
        policy, {"dram": 5000}, {"ssd": 2000}, 100.0, 1e6, weight=0.5, ttl_s=2.0, media=["ssd"]
    )


def controller_messages() -> list[control.ControllerMessage]:
    """One of each that a controller says."""
    return [
        control.Registered(control.CONTROL_PROTOCOL_VERSION, 1, 3.0, 0),
        pool_map(),
        control.Refused("no", 1),
        control.NamespaceSecrets([control.NamespaceSecret(1, bytes(32))]),
        control.Describe(1, [control.BlockRef(1, KEY)]),
        control.Credit([(1, KEY, 7)]),
        control.Loads([(1, 90), (2, 10)]),
        control.Replicas([control.Replica(1, KEY, [1, 2])]),
        control.Replicas([]),
        msgspec.structs.replace(pool_map(), settled=1),
        control.Keep(2, 1, KEY, 5000, 77),
        control.NamespaceReply(1, control.NamespaceInfo(2, "t", "m", "2", "l")),
        control.GroupReply(1, control.GroupInfo(1, 2, ["node-1"], 3)),
        *(
            pool_map([msgspec.structs.replace(NAMESPACE, settings=_settings(policy))])
            for policy in control.POLICIES
        ),
        msgspec.structs.replace(
            pool_map([control.NamespaceInfo(2, "t", "m", "2", "l")]), deleted=[1, 9]
        ),
    ]


def client_messages() -> list[local.ClientMessage]:
    """One of each that a client of the local API says."""
    keys = [KEY, KEY[::-1]]
    return [
        local.Hello(local.LOCAL_PROTOCOL_VERSION, "fuzz"),
        local.Get(1, 1, keys, 0.01),
        local.Get(1, 1, keys, 0.01, parents=[b"", KEY], depths=[0, 1]),
        local.Prefetch(2, 1, keys, 0.01),
        local.Prefetch(2, 1, keys, 0.01, parents=[b"", KEY], depths=[0, 1]),
        local.Alloc(3, 1, keys, [100, 5000]),
        local.Alloc(3, 1, keys, [100, 5000], [b"", KEY], [0, 1]),
        local.Commit(4, [1]),
        local.Commit(4, [2], "local", True),
        local.Put(4, 1, keys[:1], 3),
        local.Abort(5, [2]),
        local.Get(6, 1, keys[:1], 0.0, 1, 1, True),
        local.Release([1, 3]),
        local.Exists(7, 1, b"".join(keys)),
        local.Drop(8, 1, keys),
        local.Pin(9, 1, keys),
        local.Unpin(10, 1, keys),
        local.GetStats(11),
        local.FindNamespace(12, "t", "m", "1", "l"),
        local.FindGroup(13, 1, ["node-1"]),
        local.FindGroup(14, 1, [], 7),
        local.DescribePool(15, 1, keys),
        local.Weighed(16, 3, 2, 1, 9e3, 4e3),
    ]


def caller_messages() -> list[bulk.CallerMessage]:
    """One of each that another agent says."""
    return [
        bulk.BulkHello(bulk.BULK_PROTOCOL_VERSION, "node-2"),
        bulk.BulkPut(
            1,
            3,
            bulk.meaning_of(NAMESPACE),
            [
                bulk.PutHeader(KEY, 5, wire.digest_of(b"hello")),
                bulk.PutHeader(KEY[::-1], 5, wire.digest_of(b"hello")),
            ],
        ),
        bulk.BulkPut(
            1,
            3,
            bulk.meaning_of(NAMESPACE),
            [
                bulk.PutHeader(KEY[::-1], 5, wire.digest_of(b"hello")),
                bulk.PutHeader(KEY, 7, wire.digest_of(b"another")),
            ],
            follows=True,
        ),
        bulk.BulkGet(
            1, [bulk.WantedBlock(KEY), bulk.WantedBlock(KEY[::-1], wire.digest_of(b"y" * 3000), 9)]
        ),
        bulk.BulkExists(1, KEY + KEY[::-1]),
        bulk.BulkDrop(1, [KEY]),
    ]


def callee_messages() -> list[bulk.CalleeMessage]:
    """One of each that another agent answers."""
    return [
        bulk.BulkDone(bulk.DONE),
        bulk.BulkGo([bulk.WANTED, bulk.HELD]),
        bulk.BulkTaken([bulk.DONE]),
        bulk.BulkBlocks(
            [
                bulk.BlockHeader(bulk.DONE, 5, wire.digest_of(b"hello")),
                bulk.BlockHeader(bulk.LATER),
            ]
        ),
        bulk.BulkHeld(b"\1"),
    ]


def stream_of(messages: Sequence[msgspec.Struct]) -> bytes:
    """The messages as a stream's bytes."""
    return b"".join(framed(msgspec.msgpack.encode(message)) for message in messages)


@functools.cache
def bodies_of(messages: Callable[[], Sequence[msgspec.Struct]]) -> list[bytes]:
    """What `spoil_stream` takes: the bodies of good messages."""
    return [msgspec.msgpack.encode(message) for message in messages()]


# --- frames and streams ---------------------------------------------------------------------------

_STREAMS: Final[tuple[tuple[Any, Callable[[], Sequence[Any]]], ...]] = (
    (control.AgentMessage, agent_messages),
    (control.ControllerMessage, controller_messages),
    (local.ClientMessage, client_messages),
    (bulk.CallerMessage, caller_messages),
)


@entry_point(
    "codec",
    "frames, datagrams, and the framed messages of all streams",
    wire,
    ethernet,
    framing,
    bulk,
)
class CodecHarness(Harness):
    """Datagrams, Ethernet frames and streams; the first byte says which. What is decoded is encoded
    and decoded again, compiled code must think the same of a frame, and a stream in pieces must
    give what it gives whole."""

    def __init__(self) -> None:
        host, other = Star.of(2).hosts
        self._capsule = encapsulation(host, other)
        self._plain, self._wrapped = placement.Placement(), placement.Placement()
        self._wrapped.unwrap_for(ethernet.Endpoint(bytes(6), 0))  # nothing is for us

    def corpus(self) -> list[bytes]:
        datagrams = seed_datagrams(1, KEY)
        inputs = [b"\0" + datagram for datagram in datagrams]
        inputs += [b"\1" + self._capsule.wrap(datagram) for datagram in datagrams[:3]]
        offer = wire.Offer(**dict.fromkeys(wire.Offer._fields, 1))
        inputs.append(b"\2" + wire.encode_offer(offer))
        for number, (_, messages) in enumerate(_STREAMS):
            inputs.append(bytes([3 + number]) + stream_of(messages()))
        return inputs

    def spoil(self, data: bytes, rng: random.Random) -> bytes:
        kind = data[0] if data else 0
        if rng.random() < 0.02:
            kind = rng.randrange(8)
        if kind < 3:
            return bytes([kind]) + mutate(data[1:], rng)
        messages = _STREAMS[(kind - 3) % len(_STREAMS)][1]
        return bytes([kind]) + spoil_stream(data[1:], rng, bodies_of(messages))

    def run(self, data: bytes) -> None:
        kind, rest = (data[0], data[1:]) if data else (0, b"")
        try:
            if kind == 0:
                self._compare(self._plain, rest, wire.decode)
                self._datagram(rest)
            elif kind == 1:
                self._compare(self._wrapped, rest, ethernet.unwrap)
                self._datagram(bytes(ethernet.unwrap(rest).payload))
            elif kind == 2:
                offer = wire.decode_offer(rest)
                assert wire.decode_offer(wire.encode_offer(offer)) == offer
            else:
                self._stream(_STREAMS[(kind - 3) % len(_STREAMS)][0], rest)
        except (wire.WireError, framing.FramingError):
            pass

    def _compare(
        self, place: placement.Placement, data: bytes, read: Callable[[bytes], object]
    ) -> None:
        """Compiled code must take what Python takes."""
        place.place_bytes(data, lambda _: None, lambda *_: None)
        malformed = 0
        try:
            read(data)
        except wire.WireError:
            malformed = 1
        assert place.take_counts().malformed == malformed, "Python and compiled code disagree"

    def _datagram(self, data: bytes) -> None:
        frame = wire.decode(data)
        again = wire.decode(wire.encode(frame))
        for name in frame.__struct_fields__:
            one, two = getattr(frame, name), getattr(again, name)
            same = bytes(one) == bytes(two) if name == "payload" else one == two
            assert same, f"{name} is {one!r}, and {two!r} when encoded and decoded"

    def _stream(self, types: Any, data: bytes) -> None:
        def heard(pieces: Iterator[bytes]) -> tuple[list[Any], str]:
            codec = framing.MessageCodec[Any](types, max_message_bytes=1 << 20)
            messages: list[Any] = []
            try:
                for piece in pieces:
                    for message in codec.feed(piece):
                        messages.append(message)
            except framing.FramingError as error:
                return messages, str(error)
            return messages, ""

        whole, error = heard(iter([data]))
        pieces, piece_error = heard(data[at : at + 7] for at in range(0, len(data), 7))
        assert error == piece_error, f"whole: {error}; in pieces: {piece_error}"
        assert repr(whole) == repr(pieces)
        for message in whole:
            codec = framing.MessageCodec[Any](types)
            try:
                encoded = codec.encode(message)
            except framing.FramingError:
                continue
            assert repr([message]) == repr(list(codec.feed(encoded)))


# --- BMv2 JSON ------------------------------------------------------------------------------------


_GENERATED_PROGRAMS: Final = 12


@entry_point(
    "json-loader", "BMv2 JSON: the loader, and the reference engine on what it takes", loader
)
class JsonLoaderHarness(Harness):
    """A program is loaded, and if it is taken, runs frames on the reference engine. The inputs to
    begin with are generated, small, and use every construct there is; and kvcast's own program."""

    def corpus(self) -> list[bytes]:
        generated = [
            json.dumps(programs.generate(random.Random(f"fuzz {number}"))).encode()
            for number in range(_GENERATED_PROGRAMS)
        ]
        return [*generated, b"{}", artefact("v1model").json.read_bytes()]

    def spoil(self, data: bytes, rng: random.Random) -> bytes:
        if len(data) > 100_000 and rng.random() < 0.9:  # one of the small ones, mostly
            source = programs.generate(random.Random(rng.getrandbits(32)))
            data = json.dumps(source).encode()
        return spoil_json(data, rng)

    def run(self, data: bytes) -> None:
        try:
            program = loader.load(data)
            switch = Switch()
            switch.load(program)
        except ProgramError:
            return
        for frame in (bytes(64), bytes(range(200)), b""):
            switch.process(1, frame, 1000)


# --- files ----------------------------------------------------------------------------------------


class FileHarness(FunctionHarness):
    """An entry point that reads a file: the function gets its path, the others are as there."""

    def __init__(
        self,
        function: Callable[[Path], object],
        corpus: Sequence[bytes],
        allowed: tuple[type[BaseException], ...],
        spoil: Callable[[bytes, random.Random], bytes],
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvcast-fuzz-")
        path = Path(self._folder.name) / "input"

        def of_bytes(data: bytes) -> None:
            path.write_bytes(data)
            function(path)

        super().__init__(of_bytes, corpus, allowed, spoil)

    def close(self) -> None:
        self._folder.cleanup()


_TRACE: Final = b"".join(
    b'{"timestamp": %d, "input_length": 512, "output_length": 9, "hash_ids": [0, 1, %d]}\n'
    % (n * 100, n)
    for n in range(4)
)


def _spoil_lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    lines[at] = spoil_json(lines[at], rng)
    if rng.random() < 0.2:
        lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    return b"\n".join(lines)


@entry_point("trace", "trace files of requests", traces)
def _trace_harness() -> Harness:
    options = WorkloadOptions(nodes=4)

    def play(path: Path) -> None:
        for request in traces.trace_requests(traces.read_trace(path), options):
            assert request.keys
            assert 0 <= request.node < 4
            assert request.time_s >= 0

    return FileHarness(play, [_TRACE, b"\n\n{}"], (WorkloadError,), _spoil_lines)


_CONFIGS: Final = (
    b'grpc_addr = "127.0.0.1:1"\nport = ["1=udp:127.0.0.1:1:127.0.0.1:2"]\nstrict = true\n',
    b'agents_addr = "127.0.0.1:0"\nlease = 3.0\nplain = true\ntenant = ["a=node-1"]\n',
    b'node_id = "n"\nip = "10.0.0.1"\nmac = "02:00:00:00:00:01"\nswitch_port = 1\n'
    b'socket = "/tmp/x"\ntransport = "udp"\nallow_uid = ["1=a"]\nquota = ["1=5M"]\n',
)


def _read_config(path: Path) -> None:
    words = [f"--config={path}"]
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        for parse in (controller_flags.parse, agent_flags.parse, switch_flags.parse):
            try:
                parse(words)
            except SystemExit as error:
                if error.code not in (0, 2):
                    raise


def _spoil_config(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    if not lines or rng.random() < 0.3:
        return mutate(data, rng)
    at = rng.randrange(len(lines))
    name, equals, value = lines[at].partition(b"=")
    values = (
        b" 1\n", b" -1\n", b" 1e400\n", b" nan\n", b' ""\n', b' "\\u0000"\n', b" []\n", b" [[]]\n",
        b" {}\n", b" true\n", b" 1979-05-27\n", b" 99999999999999999999\n", b' ["", 1, true]\n',
        b' "[::1]:1"\n', b' ":"\n', b' "' + b"9" * 5000 + b'"\n', b' "--help"\n', value,
    )  # fmt: skip
    names = [name, *(line.partition(b"=")[0] for line in b"".join(_CONFIGS).splitlines(True))]
    lines[at] = rng.choice(names) + (equals or b"=") + rng.choice(values)
    return b"".join(lines)


@entry_point(
    "config", "configuration files of the three daemons",
    options, values, controller_flags, agent_flags, switch_flags,
)  # fmt: skip
def _config_harness() -> Harness:
    return FileHarness(_read_config, _CONFIGS, (), _spoil_config)


@entry_point("tokens", "files of HTTP tokens", tokens)
def _tokens_harness() -> Harness:
    token = tokens.Token("alice", tokens.OPERATOR, bytes(32))

    def read(data: bytes) -> None:
        for found in tokens.parse(data.decode("ascii")):
            assert tokens.parse(found.line) == [found]

    good = f"# comment\n{token.line}\nbob viewer {'1' * 64} 2027-05-20\n".encode()
    return FunctionHarness(read, [good], (tokens.TokensError, UnicodeDecodeError))

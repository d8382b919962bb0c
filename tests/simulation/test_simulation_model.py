"""What the model takes for a forgery, and from when on nothing tells one from a copy; and which
READs it takes for repeats.

Oracle: docs/security.md, "What is not stopped": homes are believed, and on a plain network so are
source addresses. Of READs: that who asks again for the same get repeats its READ, and who asks for
another get does not. Cannot see: whether agents keep to that.
"""

from __future__ import annotations

import pytest
from kvcast.protocol.messages import roce, wire
from kvcast.protocol.messages.ethernet import Encapsulation, Endpoint
from kvcast.simulation.model import Model, Name, Rules, ViolationError, bucket_of_key
from kvcast.simulation.model_writes import slot_of
from kvcast.simulation.world import World

NAME: Name = (7, bytes(range(16)))
CONTENT = b"forged bytes"
READER, HOME, FORGER = 1, 2, 3


def _endpoint(host: int) -> Endpoint:
    return Endpoint(bytes((2, 0, 0, 0, 0, host)), 0x0A4D0000 + host, wire.UDP_PORT)


def _data(source: int) -> bytes:
    """The forgery, in a frame to the reader."""
    frame = wire.Frame(
        wire.OP_DATA, *NAME, flags=wire.FLAG_LAST, digest=wire.digest_of(CONTENT),
        size=len(CONTENT), payload=CONTENT,
    )  # fmt: skip
    return Encapsulation(_endpoint(source), _endpoint(READER)).wrap(wire.encode(frame))


class _Pool:
    """A model of three hosts, of which one is about to send a forgery."""

    def __init__(self) -> None:
        hosts = frozenset((READER, HOME, FORGER))
        ip_of_port = {host: _endpoint(host).ip for host in hosts}
        self.model = Model(World(1), Rules({NAME[0]: hosts}, ip_of_port, lease_s=1.0))
        self.home_is(HOME)
        self.model.forged(FORGER, NAME, CONTENT)

    def home_is(self, host: int) -> None:
        buckets: list[list[int]] = [[HOME] for _ in range(1024)]
        buckets[bucket_of_key(NAME[1])] = [host]
        self.model.homes_are(buckets)

    def passes(self, source: int = FORGER) -> None:
        """The network brings the forgery to the reader."""
        frame = _data(source)
        self.model.crossed(FORGER, frame, [(READER, frame)])

    def is_dropped(self) -> None:
        self.model.crossed(FORGER, _data(FORGER), [])

    def reader_has_it(self) -> None:
        """The reader takes it, tells a client, and answers others with it."""
        self.model.got(READER, NAME, CONTENT, "home")
        self.model.sent(READER, _data(READER))

    def is_still_a_forgery(self) -> None:
        with pytest.raises(ViolationError, match=r"^invariant 5: .* what host 3 has forged$"):
            self.model.got(READER, NAME, CONTENT, "home")
        with pytest.raises(ViolationError, match=r"^invariant 5: .* that was forged$"):
            self.model.sent(READER, _data(READER))


def test_a_forgery_of_a_host_that_never_was_a_home_is_never_a_copy() -> None:
    pool = _Pool()
    pool.passes()
    pool.home_is(READER)
    pool.is_still_a_forgery()


def test_a_forgery_counts_as_a_copy_once_who_sent_it_is_a_home() -> None:
    """It waits in the reader's socket while the reader learns of its new home, and asks it."""
    pool = _Pool()
    pool.passes()
    pool.is_still_a_forgery()
    pool.home_is(FORGER)
    pool.reader_has_it()


def test_a_forgery_that_a_new_home_sent_before_it_was_one_may_cross_late() -> None:
    pool = _Pool()
    pool.home_is(FORGER)
    pool.is_still_a_forgery()
    pool.passes()
    pool.reader_has_it()


def test_a_forgery_that_the_network_stopped_stays_one_whoever_is_the_home() -> None:
    pool = _Pool()
    pool.is_dropped()
    pool.home_is(FORGER)
    pool.is_still_a_forgery()


def test_a_forgery_under_a_homes_address_counts_as_a_copy() -> None:
    pool = _Pool()
    pool.passes(source=HOME)
    pool.reader_has_it()


def test_an_answer_to_a_put_is_about_that_block_and_counts_homes_that_have_it() -> None:
    """So answers to blocks that were put together cannot stand at each other's places."""
    model, other = _Pool().model, (NAME[0], bytes(16))
    model.put_begins(NAME, b"its bytes")
    model.put_begins(other, b"another's")
    model.acknowledged(HOME, 1, NAME)
    mine = wire.digest_of(b"its bytes")
    model.put_ended(READER, NAME, True, copies=1, digest=mine)
    with pytest.raises(ViolationError, match=r"^invariant 3: .* 2 copies .* 1 have acknowledged"):
        model.put_ended(READER, NAME, True, copies=2, digest=mine)
    with pytest.raises(ViolationError, match=r"^invariant 1: .* with another's digest"):
        model.put_ended(READER, NAME, True, digest=wire.digest_of(b"another's"))


READ_AGAIN_S = 0.1
"""Longer than a reader waits for an answer."""


@pytest.mark.parametrize(
    ("another_began_s", "is_repeat"), [(None, True), (0.02, True), (0.099, False)]
)
def test_a_read_for_a_get_that_has_just_begun_repeats_none(
    another_began_s: float | None, is_repeat: bool
) -> None:
    """A READ that the switch holds back must say that it is a repeat if it is one: of another get
    it may be the first."""
    world = World(1)
    hosts = {host: _endpoint(host).ip for host in (READER, HOME)}
    model = Model(world, Rules({NAME[0]: frozenset(hosts)}, hosts, lease_s=1.0))
    model.enabled, model.known_mac = lambda: True, lambda _mac: True
    read = wire.encode(wire.Frame(wire.OP_READ, *NAME, wanted=wire.FULL_SEGMENT))
    frame = Encapsulation(_endpoint(READER), _endpoint(HOME)).wrap(read)

    def begins() -> None:
        model.begins(READER, NAME, "get", 10.0, frozenset(), alone=True)

    begins()
    model.crossed(READER, frame, [(HOME, frame)])
    if another_began_s is not None:
        world.at(another_began_s, begins)
    world.run(READ_AGAIN_S)
    if is_repeat:
        with pytest.raises(ViolationError, match=r"^invariant 2: host 1 repeats a READ"):
            model.crossed(READER, frame, [])
    else:
        model.crossed(READER, frame, [])  # and the other is still to be asked for again
        with pytest.raises(ViolationError, match=r"^invariant 2: host 1 repeats a READ"):
            model.crossed(READER, frame, [])


def test_where_the_switch_guards_no_other_address_passes() -> None:
    pool = _Pool()
    pool.model.enabled = lambda: True
    with pytest.raises(ViolationError, match="passed under another's address"):
        pool.passes(source=HOME)
    pool.is_still_a_forgery()


def test_a_block_has_the_slot_of_landing_zones_that_the_product_gives_it() -> None:
    for number in range(50):
        key = wire.digest_of(bytes([number])).to_bytes(16, "big")
        first = roce.place_of(NAME[0], key, roce.SHARED_CHUNKING.number(0))
        assert slot_of(NAME[0], key) == first.slot

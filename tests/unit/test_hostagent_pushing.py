"""Puts that go home in compiled code, case by case: what is taken, what is handed over and why, and
what is booked at both ends.

Oracle: the bytes of blocks, the counters and the stores' books, as written here. Cannot see:
sockets and the wait (`test_hostagent_pushing_pool`), and orders of events that nobody thought of
(`test_pushing_property`).
"""

from __future__ import annotations

import pytest
from kvcast.bench.fuzz.courier import content_of, key_of
from kvcast.bench.fuzz.pushing import HOME, NAMESPACE, PUTTER, Pair
from kvcast.hostagent.core import writes
from kvcast.hostagent.core.courier import CONVEYOR_PAUSE_S, SILENCE_S
from kvcast.hostagent.core.lookups import Lookups
from kvcast.hostagent.core.pushing import STILL_S, Pushes
from kvcast.hostagent.core.writes import ACKS
from kvcast.protocol.courier import BATCHES, MOST_HOMES
from kvcast.protocol.links.bulk import PutCall
from kvcast.protocol.messages import local
from kvcast.protocol.messages.questions import (
    ACK_BY_DEFAULT,
    ACK_HOME,
    ACK_LOCAL,
    ACK_REPLICAS,
    ANSWER,
    MAX_MANY,
    PUT,
    PUT_HOME,
    PUT_QUESTION,
    ROOM,
)
from kvcast.protocol.messages.wire import BlockId, digest_of
from kvcast.protocol.pushing import (
    HAS_IT,
    HAS_IT_NOT,
    LANDED,
    MOST_UNWANTED,
    NODES,
    PUSH,
    PUSHES,
    REASONS,
    ROOMS,
    VERDICT,
)


def block_of(number: int) -> BlockId:
    return BlockId(NAMESPACE, key_of(number))


def reasons(pair: Pair) -> dict[str, int]:
    values = pair.putter.pushes.values()
    found = {why: int(values[f"courier_put_handed_over_{why}_total"]) for why in REASONS}
    return {why: count for why, count in found.items() if count}


def home_has(pair: Pair, number: int) -> bool:
    copy = pair.home.store.peek(block_of(number))
    if copy is None:
        return False
    held = pair.home.memory[copy.offset : copy.offset + copy.size_bytes]
    assert digest_of(held) == copy.digest
    return bool(held == content_of(number))


def push_of(pair: Pair, number: int, *, spoil: bool = False, **other: int) -> bytes:
    """What a node says to push a block."""
    content = content_of(number)
    said = {"number": 7, "meaning": pair.meaning, "size": len(content)} | other
    header = PUSH.pack(
        *(said["number"], key_of(number), said["meaning"], bytes(16), said["size"], 0),
        *(NAMESPACE, said.get("behind", 0), said.get("padding", 0)),
    )
    digest = digest_of(content) ^ spoil
    return header + content[: said["size"]] + digest.to_bytes(8, "little")


def verdict_on(pair: Pair, number: int, **other: int) -> int:
    """What the home says to a block that is pushed."""
    _, status = VERDICT.unpack(pair.brought(push_of(pair, number, **other)))
    return int(status)


def room_ahead(pair: Pair) -> int:
    """The ticket of room that a client was given ahead, for a block that nobody has any more."""
    ticket = pair.room_ahead(0, 2)
    assert ticket
    for side in pair.sides:
        side.store.drop(block_of(2))
    return ticket


@pytest.fixture
def pair() -> Pair:
    """Connected, and with blocks of the size of block 1 (30 KB) expected."""
    made = Pair()
    made.expect(1)
    made.connect()
    return made


def test_a_put_goes_home_by_one_question(pair: Pair) -> None:
    ticket = pair.alloc(0, 2)
    pair.put(0, ticket, 2)
    assert pair.home_took == 0, "not before the home has it"
    pair.move()
    assert pair.home_took == 1
    assert home_has(pair, 2)
    here = pair.putter.store.peek(block_of(2))
    assert here is not None
    assert (here.pins, here.home, here.size_bytes) == (0, False, len(content_of(2)))
    assert here.cell, "it is in the index for everybody"
    sent, received = pair.putter.core.metrics, pair.home.core.metrics
    assert sent.puts_total == sent.by_namespace.of(NAMESPACE).puts == 1
    assert sent.payload_bytes_sent_bulk_put_total == len(content_of(2))
    assert received.payload_bytes_received_bulk_put_total == len(content_of(2))
    reply = pair.handle(0, local.Abort(90, [ticket]))
    assert isinstance(reply, local.Failed), "the ticket is used up"
    pair.end()


def test_the_room_for_the_next_put_comes_with_the_answer(pair: Pair) -> None:
    ticket = room_ahead(pair)
    for _ in range(6):
        pair.write(0, ticket, 2)
        pair.put(0, ticket, 2)
        pair.move()
        assert home_has(pair, 2)
        (ticket,) = pair.guests[0].rooms
        for side in pair.sides:
            side.store.drop(block_of(2))
    assert pair.home_took == 6
    assert pair.putter.core.ahead_bytes > 0
    pair.end()


def test_a_home_hears_which_block_is_before_another(pair: Pair) -> None:
    for number, parent, depth in ((1, b"", 0), (2, key_of(1), 1)):
        size_bytes = len(content_of(number))
        alloc = local.Alloc(80, NAMESPACE, [key_of(number)], [size_bytes], [parent], [depth])
        allocated = pair.handle(0, alloc)
        assert isinstance(allocated, local.Allocated)
        (extent,) = allocated.extents
        pair.guests[0].rooms[extent.ticket] = extent.offset, size_bytes, number
        pair.write(0, extent.ticket, number)
        pair.put(0, extent.ticket, number)
        pair.move()
        for side in pair.sides:
            copy = side.store.peek(block_of(number))
            assert copy is not None
            assert (copy.parent, copy.depth) == (parent, depth)
    pair.end()


def test_a_push_is_booked_once_though_what_hears_of_it_has_the_books_done(pair: Pair) -> None:
    """Who is woken by what has landed may have them done at once."""
    pushes = pair.home.pushes
    pushed, heard = pushes._serving.pushed, []

    def hear(block: BlockId, size_bytes: int) -> None:
        pushed(block, size_bytes)
        heard.append(block)
        pushes.book(pair.now)

    pushes._serving.pushed = hear  # type: ignore[method-assign]
    pair.put(0, pair.alloc(0, 2), 2)
    pair.move()
    assert heard == [block_of(2)]
    assert home_has(pair, 2)
    pair.end()


def test_nobody_is_told_that_a_block_is_not_here_before_the_books_have_it(pair: Pair) -> None:
    """Who put it has been told that it is here, and may tell others."""
    denied = []

    def watch(name: str, pushes: Pushes, lookups: Lookups) -> None:
        book = pushes.book

        def booked(now: float) -> None:
            if pushes.untold:
                denied.append((name, lookups.native.knows_all))
            book(now)

        pushes.book = booked  # type: ignore[method-assign]

    for name, side in (("home", pair.home), ("putter", pair.putter)):
        lookups = side.pushes._courier.lookups
        lookups.prepare(side.core.pool)
        assert lookups.native.knows_all == 1
        watch(name, side.pushes, lookups)
    pair.put(0, pair.alloc(0, 2), 2)
    pair.move()
    assert home_has(pair, 2)
    assert set(denied) == {("home", 0), ("putter", 0)}
    pair.end()


def test_large_blocks_are_pushed_in_pieces(pair: Pair) -> None:
    pair.expect(13)
    ticket = pair.alloc(0, 13)
    pair.put(0, ticket, 13)
    while pair.move(999):
        pass
    assert pair.home_took == 1
    assert home_has(pair, 13)
    pair.end()


def test_what_is_no_put_is_an_offence(pair: Pair) -> None:
    question = PUT_QUESTION.pack(PUT, NAMESPACE, ACK_HOME, 1, key_of(1), 0, 1)
    for wrong in (
        question[:-1],
        question + b"\0",
        question[:8],
        question + bytes(23),
        PUT_QUESTION.pack(PUT, NAMESPACE, ACK_REPLICAS + 1, 1, key_of(1), 0, 1),
        PUT_QUESTION.pack(PUT + 1, NAMESPACE, ACK_HOME, 1, key_of(1), 0, 1),
    ):
        assert not pair.say(0, wrong)
    assert pair.say(0, question)
    assert reasons(pair) == {"no_room": 1}
    pair.end()


def test_a_question_for_too_many_is_an_offence(pair: Pair) -> None:
    question = PUT_QUESTION.pack(PUT, NAMESPACE, ACK_HOME, 1, key_of(1), 0, 1)
    assert not pair.say(0, question + bytes(ROOM.size * MAX_MANY))
    assert pair.say(0, question + bytes(ROOM.size * (MAX_MANY - 1)))
    assert reasons(pair) == {"no_room": MAX_MANY}
    pair.end()


def test_nobody_puts_what_another_was_given_to_write(pair: Pair) -> None:
    ticket = pair.alloc(0, 2)
    pair.put(1, ticket, 2)
    pair.put(1, ticket + 1, 2)
    pair.move()
    assert reasons(pair) == {"no_room": 2}
    assert not home_has(pair, 2)
    assert pair.putter.store.peek(block_of(2)) is None
    pair.put(0, ticket, 2)
    pair.move()
    assert home_has(pair, 2)
    pair.end()


def test_room_for_one_block_is_not_put_as_another(pair: Pair) -> None:
    ticket = pair.alloc(0, 2)
    pair.put(0, ticket, 3)
    pair.move()
    assert reasons(pair) == {"no_room": 1}
    assert pair.home.store.peek(block_of(3)) is None
    pair.end()


def test_room_that_is_given_next_is_not_put_before(pair: Pair) -> None:
    ticket = room_ahead(pair)
    pair.put(0, ticket + 1, 2)
    assert reasons(pair) == {"no_room": 1}
    pair.end()


def test_a_room_that_is_being_put_is_nobodys_to_take(pair: Pair) -> None:
    ticket = pair.alloc(0, 2)
    pair.put(0, ticket, 2)
    pair.move(100)
    for request in (
        local.Abort(91, [ticket]),
        local.Commit(92, [ticket], "local"),
        local.Put(93, NAMESPACE, [key_of(3)], ticket, "local"),
    ):
        reply = pair.handle(0, request)
        assert isinstance(reply, local.Failed)
        assert reply.status == local.INVALID
    pair.put(0, ticket, 2)
    assert reasons(pair) == {"no_room": 1}, "and is put once"
    pair.move()
    assert home_has(pair, 2)
    pair.end()


def test_a_room_ahead_that_is_being_put_is_not_put_by_a_message_too(pair: Pair) -> None:
    ticket = room_ahead(pair)
    pair.write(0, ticket, 2)
    pair.put(0, ticket, 2)
    reply = pair.handle(0, local.Put(93, NAMESPACE, [key_of(1)], ticket, "local"))
    assert isinstance(reply, local.Failed)
    pair.cut()
    assert reasons(pair) == {"cut_off": 1}
    assert isinstance(pair.put_by_a_message(0, ticket, 2), local.Committed)
    assert home_has(pair, 2)
    pair.end()


def test_a_put_is_not_taken_where_it_could_mean_two_things(pair: Pair) -> None:
    ticket = pair.alloc(0, 2)
    pair.meaning ^= 1
    pair.put(0, ticket, 2)
    assert reasons(pair) == {"not_readable": 1}
    pair.meaning ^= 1
    ticket = pair.alloc(1, 3)
    pair.put(1, ticket, 3)
    for twice in (2, 3):
        again = pair.alloc(1, 3)
        pair.put(1, again, 3)
        assert reasons(pair)["here"] == twice - 1, "it is being put"
    pair.move()
    again = pair.alloc(1, 3)
    pair.put(1, again, 3)
    assert reasons(pair)["here"] == 3, "it is here"
    pair.end()


@pytest.mark.parametrize("ack", ACKS)
def test_what_is_waited_for_where_nothing_is_said_is_the_agents_to_say(ack: str) -> None:
    pair = Pair(put_ack=ack)
    pair.expect(1)
    pair.connect()
    ticket = pair.alloc(0, 2)
    pair.put(0, ticket, 2, ack=ACK_BY_DEFAULT)
    assert pair.put_here == (ack == writes.ACK_LOCAL)
    pair.move()
    assert pair.home_took == (ack != writes.ACK_LOCAL)
    assert home_has(pair, 2)
    pair.end()


def test_a_put_that_is_to_be_here_alone_is_answered_at_once_and_goes_home_later(
    pair: Pair,
) -> None:
    pair.cut()
    ticket = pair.alloc(0, 2)
    pair.put(0, ticket, 2, ack=ACK_LOCAL)
    assert (pair.put_here, pair.home_took, reasons(pair)) == (1, 0, {})
    here = pair.putter.store.peek(block_of(2))
    assert here is not None
    assert not here.home
    assert here.digest == digest_of(content_of(2))
    assert home_has(pair, 2), "by a call"
    assert pair.putter.core.metrics.puts_total == 1
    pair.end()


def test_a_put_whose_home_is_this_node_needs_no_other(pair: Pair) -> None:
    pair.cut()
    pair.new_map(home=PUTTER)
    ticket = pair.alloc(0, 2)
    with pytest.raises(AssertionError, match="its home has it not"):
        pair.put(0, ticket, 2)  # which the pair looks for at the other
    here = pair.putter.store.peek(block_of(2))
    assert here is not None
    assert (here.home, here.pins, here.digest) == (True, 0, digest_of(content_of(2)))
    assert reasons(pair) == {}
    metrics = pair.putter.core.metrics
    assert metrics.puts_total == 1
    assert metrics.payload_bytes_sent_bulk_put_total == 0
    assert not pair.putter.core.outbox.calls
    pair.end()


def test_a_put_for_all_homes_is_answered_when_all_have_it(pair: Pair) -> None:
    """The third node is played by hand."""
    other = pair.putter.pushes.pusher_stands(5)
    assert other is not None
    pool = pair.putter.core.pool
    assert pool is not None
    pool._buckets[:] = [(HOME, 5, PUTTER)] * len(pool._buckets)
    pair.putter.pushes.follow(pool)
    ticket = pair.alloc(0, 2)
    number = pair.put(0, ticket, 2, ack=ACK_REPLICAS)
    pair.move()
    assert pair.guests[0].asked, "the other has it not yet"
    said = b""
    while piece := pair.putter.pushes.piece_to_send(other, 1 << 20, pair.now)[0]:
        said += piece
    content = content_of(2)
    assert said[PUSH.size :] == content + digest_of(content).to_bytes(8, "little")
    serial = PUSH.unpack_from(said)[0]
    pair.putter.pushes.heard_verdicts(other, VERDICT.pack(serial, HAS_IT), pair.now)
    ((_, answer),) = pair.putter.courier.take_answers()
    status, _, _, told, _, _, copies, digest = ANSWER.unpack(answer)
    assert (status, told, copies, digest) == (PUT_HOME, number, 3, digest_of(content))
    pair.guests[0].asked.clear()
    pair.putter.book(pair.now)
    assert not pair.putter.core.outbox.calls, "nobody else is to have it"
    pair.end()


def test_a_put_for_all_homes_is_the_agents_where_one_has_it_not(pair: Pair) -> None:
    other = pair.putter.pushes.pusher_stands(5)
    assert other is not None
    pool = pair.putter.core.pool
    assert pool is not None
    pool._buckets[:] = [(HOME, 5)] * len(pool._buckets)
    pair.putter.pushes.follow(pool)
    ticket = pair.alloc(0, 2)
    pair.put(0, ticket, 2, ack=ACK_REPLICAS)
    pair.putter.pushes.pusher_gone(pair.now, other)
    assert pair.guests[0].asked, "the other is still being sent it"
    pair.move()
    assert (pair.handed_over, reasons(pair)) == (1, {"cut_off": 1})
    assert home_has(pair, 2)
    assert pair.putter.store.peek(block_of(2)) is None, "it is the client's room as before"
    pool._buckets[:] = [(HOME,)] * len(pool._buckets)
    assert isinstance(pair.put_by_a_message(0, ticket, 2), local.Committed)
    pair.end()


def test_many_are_put_by_one_question_and_answered_by_one_message(pair: Pair) -> None:
    blocks = [1, 2, 3]
    rooms = [(pair.alloc(0, block), block) for block in blocks]
    pair.put_many(0, rooms)
    pair.move(50_000)
    assert pair.guests[0].asked, "not before all have ended"
    pair.move()
    assert pair.home_took == 3
    assert all(home_has(pair, block) for block in blocks)
    assert pair.putter.pushes.native.batched == 0
    assert not pair.guests[0].rooms
    pair.end()


def test_of_many_those_that_are_not_taken_are_the_agents(pair: Pair) -> None:
    rooms = [(pair.alloc(0, block), block) for block in (1, 5, 2)]
    rooms.insert(1, (12345, 3))
    pair.guests[0].rooms[12345] = (0, 1, 3)  # which it has not
    pair.put_many(0, rooms)
    pair.move()
    assert (pair.home_took, pair.handed_over) == (2, 2)
    assert reasons(pair) == {"no_room": 1, "not_taken": 1}
    del pair.guests[0].rooms[12345]
    pair.end()


def test_one_block_twice_in_a_question_is_there_once(pair: Pair) -> None:
    first, again = pair.alloc(0, 2), pair.alloc(0, 2)
    pair.put_many(0, [(first, 2), (again, 2), (first, 2)], ack=ACK_LOCAL)
    assert pair.put_here >= 1
    assert pair.putter.store.peek(block_of(2)) is not None
    pair.putter.store.check()
    pair.end()


def test_a_client_that_goes_leaves_no_batch_behind(pair: Pair) -> None:
    pair.put_many(0, [(pair.alloc(0, block), block) for block in (1, 2)])
    pair.move(100)
    pair.leave(0)
    pair.move()
    assert home_has(pair, 1)
    assert home_has(pair, 2)
    assert pair.putter.courier._courier.batches_open == 0
    pair.end()


def test_questions_for_many_are_bounded(pair: Pair) -> None:
    for number in range(BATCHES + 1):
        rooms = [(_room_named(pair, 2 * number + at), 0) for at in range(2)]
        (ticket, _), (other, _) = rooms
        question = PUT_QUESTION.pack(
            *(PUT, NAMESPACE, ACK_HOME, 5, _name(2 * number), pair.meaning, ticket)
        )
        pair.say(0, question + ROOM.pack(_name(2 * number + 1), other))
    assert reasons(pair) == {"full": 2}
    pair.move()
    assert reasons(pair) == {"full": 2, "not_taken": 2 * BATCHES}
    assert pair.putter.courier._courier.batches_open == 0
    pair.end()


def test_many_blocks_of_a_new_size_at_once_are_no_reason_to_leave_a_namespace_alone() -> None:
    pair = Pair()
    pair.connect()
    for number in range(100):
        pair.home.pushes.stored(BlockId(NAMESPACE, _name(number)), len(content_of(2)))
    pair.home.prepare(pair.now)
    assert verdict_on(pair, 2) == HAS_IT
    pair.end()


def test_a_home_has_as_many_landing_places_as_come_at_once(pair: Pair) -> None:
    assert verdict_on(pair, 2, behind=40) == HAS_IT
    pair.home.prepare(pair.now)
    free = sum(landing.state == 1 for landing in pair.home.courier._landings)
    assert free >= 41
    pair.end()


def test_without_a_connection_puts_are_the_agents(pair: Pair) -> None:
    pair.cut()
    ticket = pair.alloc(0, 2)
    pair.put(0, ticket, 2)
    assert reasons(pair) == {"no_connection": 1}
    assert pair.putter.pushes.take_wish(pair.now) is None, "it was cut off a moment ago"
    pair.pass_time(CONVEYOR_PAUSE_S * 2)
    pair.put(0, ticket, 2)
    assert pair.putter.pushes.take_wish(pair.now) == HOME
    assert pair.putter.pushes.take_wish(pair.now) is None
    pair.connect()
    pair.put(0, ticket, 2)
    pair.move()
    assert pair.home_took == 1
    pair.end()


def test_while_blocks_are_handed_over_puts_are_the_agents(pair: Pair) -> None:
    pool = pair.putter.core.pool
    assert pool is not None
    pool._settled = 1
    ticket = pair.alloc(0, 2)
    pair.put(0, ticket, 2)
    assert reasons(pair) == {"closed": 1}
    pool._settled = 0
    pair.put(0, ticket, 2)
    pair.move()
    assert pair.home_took == 1
    pair.end()


@pytest.mark.parametrize("homes", [0, MOST_HOMES + 1])
def test_blocks_of_no_home_or_very_many_are_the_agents(pair: Pair, homes: int) -> None:
    pool = pair.putter.core.pool
    assert pool is not None
    pool._buckets[:] = [tuple(range(2, 2 + homes))] * len(pool._buckets)
    pair.putter.pushes.follow(pool)
    ticket = pair.alloc(0, 2)
    pair.put(0, ticket, 2)
    assert reasons(pair) == {"no_home": 1}
    pair.end()


def test_wrong_bytes_are_not_taken_and_put_again_by_a_message(pair: Pair) -> None:
    ticket = pair.alloc(0, 2)
    pair.put(0, ticket, 2)
    pair.move(spoil=1)
    assert reasons(pair) == {"not_taken": 1}
    assert pair.home.pushes.values()["courier_put_wrong_digest_total"] == 1
    assert pair.home.store.peek(block_of(2)) is None
    assert isinstance(pair.put_by_a_message(0, ticket, 2), local.Committed)
    assert home_has(pair, 2)
    pair.end()


def test_a_block_of_other_bytes_than_its_digests_is_not_taken(pair: Pair) -> None:
    assert verdict_on(pair, 2, spoil=True) == HAS_IT_NOT
    assert pair.home.store.peek(block_of(2)) is None
    assert verdict_on(pair, 2) == HAS_IT
    assert home_has(pair, 2)
    pair.end()


def test_what_a_client_writes_while_it_is_pushed_has_its_digest_or_is_not_taken(
    pair: Pair,
) -> None:
    ticket = pair.alloc(0, 2)
    pair.put(0, ticket, 2)
    pair.move(10_000)
    pair.scribble(0, ticket)
    pair.move()
    assert pair.home_took == 0, "half of it had left before"
    assert reasons(pair) == {"not_taken": 1}
    pair.end()


def test_a_block_of_another_meaning_is_not_taken(pair: Pair) -> None:
    assert verdict_on(pair, 2, meaning=pair.meaning ^ 1) == HAS_IT_NOT
    assert verdict_on(pair, 2, meaning=0) == HAS_IT_NOT
    assert pair.home.store.peek(block_of(2)) is None
    assert verdict_on(pair, 2) == HAS_IT
    pair.end()


def test_a_node_pushes_nothing_into_a_namespace_that_it_may_not_use(pair: Pair) -> None:
    pair.new_map(nodes=["node-2"])
    pair.expect(1)
    assert verdict_on(pair, 2) == HAS_IT_NOT
    assert pair.home.store.peek(block_of(2)) is None
    pair.new_map(nodes=["node-1", "node-2"])
    pair.expect(1)
    assert verdict_on(pair, 2) == HAS_IT
    pair.end()


def test_a_block_of_anothers_bucket_is_not_taken(pair: Pair) -> None:
    pair.new_map(home=PUTTER)
    pair.expect(1)
    assert verdict_on(pair, 2) == HAS_IT_NOT
    assert pair.home.store.peek(block_of(2)) is None
    pair.end()


def test_what_is_held_or_of_a_size_that_is_not_expected_is_not_taken(pair: Pair) -> None:
    assert verdict_on(pair, 2) == HAS_IT
    assert verdict_on(pair, 2) == HAS_IT_NOT
    assert verdict_on(pair, 5) == HAS_IT_NOT, "9 KB in places of 30 KB"
    assert verdict_on(pair, 4) == HAS_IT_NOT, "64 KB in places of 30 KB"
    pair.end()


@pytest.mark.parametrize("spoil", [2, 3])
def test_a_verdict_on_nothing_ends_a_connection(pair: Pair, spoil: int) -> None:
    ticket = pair.alloc(0, 2)
    pair.put(0, ticket, 2)
    pair.move(spoil=spoil)
    assert pair.pusher is None
    assert pair.home_took == 0
    assert reasons(pair) == {"cut_off": 1}
    assert pair.alloc(0, 3) > ticket
    pair.end()


def test_a_verdict_before_the_block_has_left_ends_a_connection(pair: Pair) -> None:
    ticket = pair.alloc(0, 2)
    pair.put(0, ticket, 2)
    pair.move(1000)
    pair.heard(VERDICT.pack(0, HAS_IT))
    assert pair.pusher is None
    assert pair.home_took == 0
    assert reasons(pair) == {"cut_off": 1}
    pair.end()


@pytest.mark.parametrize("other", [{"size": 0}, {"padding": 1}], ids=str)
def test_a_header_that_makes_no_sense_ends_a_connection(pair: Pair, other: dict[str, int]) -> None:
    pair.brought(push_of(pair, 2, **other)[: PUSH.size])
    assert pair.pusher is None
    pair.end()


def test_what_is_not_wanted_is_thrown_away_up_to_a_bound(pair: Pair) -> None:
    pair.brought(push_of(pair, 2, size=MOST_UNWANTED)[: PUSH.size])
    assert pair.pusher is not None
    pair.cut()
    pair.connect()
    pair.brought(push_of(pair, 2, size=MOST_UNWANTED + 1)[: PUSH.size])
    assert pair.pusher is None
    pair.end()


def test_a_client_that_goes_has_put_what_it_has_put(pair: Pair) -> None:
    ticket = pair.alloc(0, 2)
    pair.put(0, ticket, 2)
    pair.move(100)
    pair.leave(0)
    held_bytes = pair.putter.store.held_bytes
    assert held_bytes >= len(content_of(2)), "its room stays where it is"
    pair.move()
    assert home_has(pair, 2)
    assert pair.putter.store.peek(block_of(2)) is not None
    assert pair.guests[0].session.may_be_given()[0] == 0, "the next client holds nothing"
    pair.end()


def test_the_room_of_a_client_that_has_gone_is_free_where_its_put_fails(pair: Pair) -> None:
    ticket = pair.alloc(0, 2)
    pair.put(0, ticket, 2)
    pair.move(100)
    pair.leave(0)
    pair.cut()
    assert pair.putter.store.used_bytes == 0
    assert not home_has(pair, 2)
    pair.end()


def test_a_landing_place_that_is_needed_otherwise_is_not_written_any_more(pair: Pair) -> None:
    ticket = pair.alloc(0, 2)
    pair.put(0, ticket, 2)
    pair.move(100)
    pair.home.courier.give_room_back()
    pair.move()
    assert reasons(pair) == {"not_taken": 1}
    assert pair.home.store.used_bytes == pair.home.courier.ready_bytes
    pair.end()


def test_a_namespace_that_is_dropped_meanwhile_keeps_nothing(pair: Pair) -> None:
    ticket = pair.alloc(0, 2)
    pair.put(0, ticket, 2)
    pair.putter.store.drop_namespace(NAMESPACE)
    pair.move()
    assert pair.home_took == 1, "its home has not dropped it"
    assert pair.putter.store.peek(block_of(2)) is None
    assert pair.putter.store.used_bytes == 0
    pair.end()


def test_a_home_that_is_silent_is_left_after_a_while(pair: Pair) -> None:
    ticket = pair.alloc(0, 2)
    pair.put(0, ticket, 2)
    pair.move(100)
    pair.pass_time(SILENCE_S * 0.9)
    assert not reasons(pair)
    pair.pass_time(SILENCE_S * 0.2)
    assert reasons(pair) == {"cut_off": 1}
    assert isinstance(pair.put_by_a_message(0, ticket, 2), local.Committed)
    pair.end()


def test_a_node_that_stops_in_the_middle_keeps_no_landing_place(pair: Pair) -> None:
    pair.brought(push_of(pair, 2)[:1000])
    pair.pass_time(STILL_S * 0.9)
    assert pair.pusher is not None
    pair.pass_time(STILL_S * 0.2)
    assert pair.pusher is None
    pair.end()


def test_puts_without_a_verdict_are_bounded(pair: Pair) -> None:
    for name in range(PUSHES):
        _put_named(pair, name)
    assert pair.putter.pushes.pusher(0).count == PUSHES
    assert not reasons(pair)
    _put_named(pair, PUSHES)
    assert reasons(pair) == {"full": 1}
    pair.move()
    assert reasons(pair) == {"full": 1, "not_taken": PUSHES}, "blocks of 1 KB were not expected"
    pair.end()


def _name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def _room_named(pair: Pair, name: int) -> int:
    """The ticket of a client's room for a small block of that name."""
    reply = pair.handle(0, local.Alloc(9, NAMESPACE, [_name(name)], [1000]))
    assert isinstance(reply, local.Allocated)
    return reply.extents[0].ticket


def _put_named(pair: Pair, name: int) -> None:
    """A client puts a small block of that name."""
    ticket = _room_named(pair, name)
    pair.say(0, PUT_QUESTION.pack(PUT, NAMESPACE, ACK_HOME, 5, _name(name), pair.meaning, ticket))


@pytest.mark.slow
def test_rooms_are_bounded_and_the_rest_is_put_by_messages(pair: Pair) -> None:
    for name in range(ROOMS + 1):
        reply = pair.handle(0, local.Alloc(9, NAMESPACE, [name.to_bytes(16, "big")], [100]))
        assert isinstance(reply, local.Allocated)
        ticket = reply.extents[0].ticket
    question = PUT_QUESTION.pack(
        *(PUT, NAMESPACE, ACK_HOME, 5, ROOMS.to_bytes(16, "big"), pair.meaning, ticket)
    )
    assert pair.say(0, question)
    assert reasons(pair) == {"no_room": 1}
    assert isinstance(pair.handle(0, local.Commit(10, [ticket], "local")), local.Committed)
    pair.leave(0)
    ticket = pair.alloc(1, 2)
    pair.put(1, ticket, 2)
    pair.move()
    assert pair.home_took == 1, "what the others had is free again"
    pair.end()


def test_blocks_that_python_has_not_heard_of_are_bounded(pair: Pair) -> None:
    home = pair.home.pushes
    pair.home.prepare(pair.now)
    home.native.landed_count = LANDED - NODES
    assert VERDICT.unpack(home.brought(pair.receiver, push_of(pair, 2), pair.now))[1] == HAS_IT_NOT
    home.native.landed_count = 0
    assert verdict_on(pair, 2) == HAS_IT
    pair.end()


def test_connections_are_bounded(pair: Pair) -> None:
    for node in range(NODES - 1):
        assert pair.home.pushes.receiver_stands(node) is not None
        assert pair.putter.pushes.pusher_stands(node + 10) is not None
    assert pair.home.pushes.receiver_stands(99) is None
    assert pair.putter.pushes.pusher_stands(99) is None


def test_what_one_home_has_goes_to_the_others(pair: Pair) -> None:
    """As after a push; the map's other homes are told by the bulk link."""
    core = pair.putter.core
    found = pair.putter.store.reserve(block_of(2), len(content_of(2)))
    pair.putter.memory[found.offset : found.offset + found.size_bytes] = content_of(2)
    pool = core.pool
    assert pool is not None
    pool._buckets[:] = [(5, 1, 2)] * len(pool._buckets)
    core.writes.put(pair.now, found, digest_of(content_of(2)), (5,), 0.0)
    (call,) = core.outbox.calls
    assert isinstance(call, PutCall)
    assert call.node == 2
    copy = pair.putter.store.peek(block_of(2))
    assert copy is not None
    assert copy.home, "this node is one of the homes"


def test_what_lands_twice_is_there_once(pair: Pair) -> None:
    """Two nodes push one block before Python has heard of either."""
    home = pair.home.pushes
    other = home.receiver_stands(3)
    assert other is not None
    pair.home.prepare(pair.now)
    said = push_of(pair, 2)
    for receiver in (pair.receiver, other):
        assert VERDICT.unpack(home.brought(receiver, said, pair.now))[1] == HAS_IT
    pair.home.book(pair.now)
    assert home_has(pair, 2)
    assert pair.home.store.counters.duplicates == 1
    pair.home.store.check()
    pair.end()

"""What becomes of each block of a transfer, what is asked again and again, and the bounds.

Oracle: the sentences of the modules. Cannot see: the pool; `tests/integration` has it.
"""

from __future__ import annotations

import threading
import time
from importlib.metadata import entry_points

import pytest
from kvcast.hostagent.connectors.lookup_answers import Found
from kvcast.hostagent.connectors.naming import key_of
from kvcast.hostagent.connectors.options import ConfigurationError, parse_store_options
from kvcast.hostagent.connectors.transfers import BUSY, CAME, DEADLINE, Allowance, Transfer


class Reports(list[Transfer]):
    def done(self, transfer: Transfer) -> None:
        self.append(transfer)


# --- transfers ------------------------------------------------------------------------------------


def test_a_transfer_is_reported_once_with_a_word_for_each_block() -> None:
    reports = Reports()
    transfer = Transfer(3, 30, 1.0, reports.done)
    transfer.settle(1, CAME)
    transfer.settle(2, "corrupt")
    transfer.settle(2, CAME)  # the first word holds
    assert [transfer.is_settled(at) for at in range(3)] == [False, True, True]
    assert not transfer.reported
    transfer.end(DEADLINE)
    transfer.end("unavailable")
    assert reports == [transfer]
    assert list(transfer.outcomes) == [DEADLINE, CAME, "corrupt"]
    assert transfer.came == [False, True, False]


def test_nothing_touches_the_engines_memory_after_the_report() -> None:
    transfer = Transfer(1, 10, 1.0, Reports().done)
    touched: list[int] = []
    assert transfer.copy(lambda: touched.append(1))
    transfer.end(DEADLINE)
    assert not transfer.copy(lambda: touched.append(2))
    transfer.settle(0, CAME)  # too late, too
    assert touched == [1]
    assert transfer.came == [False]


def test_a_report_waits_for_the_copy_that_is_being_made() -> None:
    transfer = Transfer(1, 10, 1.0, Reports().done)
    begun, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def slow() -> None:
        begun.set()
        go_on.wait(10)
        order.append("copied")

    copier = threading.Thread(target=transfer.copy, args=(slow,))
    copier.start()
    assert begun.wait(10)
    ender = threading.Thread(target=lambda: (transfer.end(DEADLINE), order.append("reported")))
    ender.start()
    time.sleep(0.05)
    assert not transfer.reported
    go_on.set()
    copier.join(10)
    ender.join(10)
    assert order == ["copied", "reported"]


def test_who_waits_for_a_report_waits_no_longer_than_it_says() -> None:
    transfer = Transfer(1, 10, 1.0, Reports().done)
    assert not transfer.wait(0.01)
    transfer.end(BUSY)
    assert transfer.wait(0.0)


def test_who_has_waited_for_a_report_finds_what_it_left_behind() -> None:
    """An engine that lets jobs end asks at once for their results, and takes one that is not there
    for a fault of its own."""
    began, go_on = threading.Event(), threading.Event()
    results: list[Transfer] = []

    def done(transfer: Transfer) -> None:
        began.set()
        go_on.wait(10)
        results.append(transfer)

    transfer = Transfer(1, 10, 1.0, done)
    ender = threading.Thread(target=transfer.end, args=(BUSY,))
    ender.start()
    assert began.wait(10)
    assert transfer.reported
    assert not transfer.wait(0.0)
    go_on.set()
    assert transfer.wait(10)
    assert results == [transfer]
    ender.join(10)


def test_an_allowance_bounds_count_and_bytes_and_lets_one_of_any_size_go_alone() -> None:
    allowance = Allowance(2, 100)
    assert allowance.take(500)
    assert not allowance.take(1)
    allowance.give(500)
    assert allowance.take(60)
    assert not allowance.take(50)
    assert allowance.take(40)
    assert not allowance.take(0)  # two are under way
    allowance.give(60)
    assert allowance.take(0)
    assert allowance.count == 2


# --- what is asked again and again ----------------------------------------------------------------


def test_a_block_is_asked_about_once_however_many_requests_ask() -> None:
    found = Found()
    assert found.ask("r", b"a") is None
    assert found.ask("s", b"a") is None
    assert found.ask("r", b"b") is None
    one, other = found.take_questions()
    assert (one.name, other.name) == (b"a", b"b")
    assert found.take_questions() == []
    found.answered(b"a", one.number, True)
    found.answered(b"b", other.number, False)
    assert found.ask("s", b"a") is True
    assert found.ask("r", b"b") is False


def test_each_chains_blocks_are_asked_about_in_order_whoever_asked_first() -> None:
    found = Found()
    for position in (3, 1, 2):  # an engine may look from the end of a window
        found.ask("r", b"r%d" % position, "r", position)
        found.ask("s", b"s%d" % position, "s", position)
    asked = [(one.chain, one.name) for one in found.take_questions()]
    assert asked == [(name, f"{name}{at}".encode()) for name in "rs" for at in (1, 2, 3)]


def test_a_promise_that_was_broken_is_not_repeated_to_who_got_it() -> None:
    found = Found()
    found.ask("r", b"a")
    [question] = found.take_questions()
    found.answered(b"a", question.number, True)
    found.failed([b"a", b"never asked about"])
    found.answered(b"a", question.number, True)
    assert found.ask("r", b"a") is False
    assert found.take_questions() == []
    found.finished("r")
    assert found.ask("s", b"a") is None  # another request asks anew


def test_answers_to_questions_of_requests_that_are_gone_are_dropped() -> None:
    found = Found()
    found.ask("r", b"a")
    found.ask("r", b"b")
    found.finished("r")
    assert found.take_questions() == []
    found.ask("r", b"a")
    [question] = found.take_questions()
    found.finished("r")
    found.answered(b"a", question.number, True)
    assert len(found) == 0
    found.ask("s", b"a")
    found.answered(b"a", question.number, True)  # the answer of a question that nobody waits for
    assert found.ask("s", b"a") is None


def test_what_was_not_there_is_asked_about_anew_for_who_comes_later() -> None:
    found = Found()
    found.ask("r", b"a")
    [question] = found.take_questions()
    found.answered(b"a", question.number, False)
    assert found.ask("s", b"a") is None  # it may have been saved since
    [question] = found.take_questions()
    assert found.ask("r", b"a") is False
    found.answered(b"a", question.number, True)
    assert found.ask("s", b"a") is True
    assert found.ask("r", b"a") is False  # whom nothing is promised twice
    found.finished("r")
    found.finished("s")
    assert len(found) == 0


def test_what_another_request_still_asks_for_is_kept() -> None:
    found = Found()
    found.ask("r", b"a")
    found.ask("s", b"a")
    [question] = found.take_questions()
    found.answered(b"a", question.number, True)
    found.finished("r")
    assert found.ask("s", b"a") is True
    found.finished("s")
    found.finished("s")
    assert len(found) == 0


# --- names and options ----------------------------------------------------------------------------


def test_keys_are_apart_however_a_name_is_cut_into_parts() -> None:
    names = [(b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"abc", b""), (b"", b"abc"), ()]
    keys = [key_of(*name) for name in names]
    assert len(set(keys)) == len(names)
    assert {len(key) for key in keys} == {16}
    assert key_of(b"ab", b"c") == keys[0]


def test_an_option_that_is_not_understood_is_named() -> None:
    assert parse_store_options(None).load_s == 2.0
    assert parse_store_options({"socket": "/a", "load_s": 0.5}).agent_socket == "/a"
    for wrong in ({"deadline": 1}, {"load_s": 0}, {"ack": "all"}, {"waiting_bytes": "much"}):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            parse_store_options(wrong)


def test_vllm_finds_the_tier_where_it_is_installed_and_loading_it_needs_no_vllm() -> None:
    [point] = [one for one in entry_points(group="vllm.general_plugins") if one.name == "kvcast"]
    register = point.load()
    register()  # a vLLM without secondary tiers, or none
    register()

"""The router's decisions: which engine, what is prefetched, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from kvcast.routing.core.costs import CostModel
from kvcast.routing.core.hashing import block_hash, text_chain, token_chain
from kvcast.routing.core.load import EngineLoad
from kvcast.routing.core.router import (
    Choice,
    Place,
    Prompt,
    Reason,
    Refusal,
    Router,
    RouterOptions,
)

BLOCK = 100
COSTS = CostModel(
    prefill_s_per_token=1e-3,
    attention_s_per_token2=0.0,
    kv_bytes_per_token=1000,
    pool_bytes_per_s=1e7,  # a token in 0.1 ms: ten times as fast as computing it
    pool_latency_s=0.001,
    host_bytes_per_s=1e8,
)
OPTIONS = RouterOptions(costs=COSTS, slots=4, max_in_flight=8)


def prompt(*blocks: int) -> Prompt:
    return Prompt(blocks, len(blocks) * BLOCK + 10, BLOCK)


def router_of(*engines: str, options: RouterOptions = OPTIONS) -> Router:
    router = Router(options)
    for engine in engines:
        router.add_engine(engine)
    return router


def chosen(outcome: Choice | Refusal) -> Choice:
    assert isinstance(outcome, Choice), outcome
    return outcome


def refused(outcome: Choice | Refusal) -> Refusal:
    assert isinstance(outcome, Refusal), outcome
    return outcome


# --- where a request goes ---------------------------------------------------------------------


def test_a_request_goes_where_the_longest_prefix_is_held() -> None:
    router = router_of("a", "b", "c")
    router.stored("b", [1, 2])
    router.stored("c", [1, 2, 3])
    choice = chosen(router.route("r", prompt(1, 2, 3, 4), 0.0))
    assert choice.engine == "c"
    assert choice.estimate.engine_tokens == 300
    assert choice.estimate.ttft_s == pytest.approx(0.11)


def test_a_longer_prefix_does_not_outweigh_a_long_queue() -> None:
    router = router_of("a", "b")
    router.stored("a", [1, 2])
    for number in range(3):
        router.route(f"long-{number}", prompt(*range(100, 120)), 0.0, without={"b"})
    assert chosen(router.route("r", prompt(1, 2, 3), 0.0)).engine == "b"


def test_requests_of_one_new_prefix_meet_before_any_event_says_that_it_is_held() -> None:
    router = router_of("a", "b", "c")
    first = chosen(router.route("1", prompt(*range(40)), 0.0))
    second = chosen(router.route("2", prompt(*range(40), 50), 0.1))
    assert second.engine == first.engine
    assert second.estimate.engine_tokens == 4000


def test_what_a_request_would_have_left_is_not_expected_when_it_was_never_computed() -> None:
    router = router_of("a", "b")
    first = chosen(router.route("1", prompt(1, 2, 3), 0.0))
    router.ended("1", 0.1, computed=False)
    (estimate, *_) = [
        one for one in router.estimates(prompt(1, 2, 3), 0.2) if one.engine == first.engine
    ]
    assert estimate.engine_tokens == 0


def test_equal_engines_take_turns() -> None:
    router = router_of("a", "b", "c")
    went = []
    for number in range(6):
        went.append(chosen(router.route(str(number), prompt(number), float(number))).engine)
        router.first_token(str(number), number + 0.11)
        router.ended(str(number), number + 0.12)
    assert went == ["a", "b", "c", "a", "b", "c"]


def test_an_engine_that_is_down_or_has_failed_the_request_is_not_chosen() -> None:
    router = router_of("a", "b", "c")
    router.stored("a", [1, 2])
    router.set_up("a", False)
    assert chosen(router.route("r", prompt(1, 2), 0.0, without={"b"})).engine == "c"
    router.set_up("a", True)
    assert chosen(router.route("s", prompt(1, 2), 0.0)).engine == "a"


def test_an_engine_that_was_cleared_holds_nothing() -> None:
    router = router_of("a", "b")
    router.stored("a", [1, 2])
    router.stored("a", [3], Place.HOST)
    router.cleared("a")
    assert all(not one.engine_tokens for one in router.estimates(prompt(1, 2, 3), 0.0))


def test_the_same_events_give_the_same_choices() -> None:
    def play() -> list[str]:
        router = router_of("a", "b", "c")
        went = []
        for number in range(200):
            now = number * 0.03
            choice = router.route(str(number), prompt(number % 7, number % 11, number), now)
            went.append(choice.engine if isinstance(choice, Choice) else choice.reason.name)
            if number >= 5:
                router.first_token(str(number - 5), now)
            if number >= 9:
                router.ended(str(number - 9), now)
        return went

    assert play() == play()


# --- the pool and the host ---------------------------------------------------------------------


def test_what_the_pool_holds_beyond_is_prefetched_where_that_is_sooner_than_computing_it() -> None:
    router = router_of("a")
    router.stored("a", [1])
    router.pooled([1, 2, 3])
    choice = chosen(router.route("r", prompt(1, 2, 3, 4), 0.0))
    assert choice.prefetch == range(1, 3)
    assert choice.estimate.pool_tokens == 200
    assert choice.estimate.load_s == pytest.approx(0.021)
    assert choice.estimate.ttft_s == pytest.approx(0.021 + 0.110)


def test_a_slow_pool_is_left_alone() -> None:
    slow = replace(OPTIONS, costs=replace(COSTS, pool_bytes_per_s=1e5))
    router = router_of("a", options=slow)
    router.pooled([1, 2, 3])
    choice = chosen(router.route("r", prompt(1, 2, 3), 0.0))
    assert not choice.prefetch
    assert choice.estimate.pool_tokens == 0
    assert choice.estimate.ttft_s == pytest.approx(0.310)


def test_a_link_that_others_wait_for_counts() -> None:
    router = router_of("a", "b", options=replace(OPTIONS, work_weight=0.0))
    router.pooled(range(40))
    router.route("big", prompt(*range(30)), 0.0, without={"b"})
    assert chosen(router.route("r", prompt(*range(30, 35)), 0.0)).engine == "b"
    on_a = router.estimates(prompt(*range(40)), 0.0)[0]
    assert on_a.engine_tokens == 3000, "what is on its way there is as good as held"
    assert on_a.load_s == pytest.approx(0.101), "its own load"
    assert on_a.ttft_s > on_a.load_s + on_a.compute_s, "and the wait for the link"


def test_without_prefetch_a_load_begins_when_the_wait_is_over() -> None:
    def ttft_s(prefetches: bool) -> float:
        router = router_of("a", options=replace(OPTIONS, prefetches=prefetches))
        router.pooled([1, 2, 3, 4, 5])
        router.route("before", prompt(10, 11), 0.0)
        choice = chosen(router.route("r", prompt(1, 2, 3, 4, 5), 0.0))
        assert bool(choice.prefetch) is prefetches
        return choice.estimate.ttft_s

    assert ttft_s(True) == pytest.approx(0.210 + 0.010)
    assert ttft_s(False) == pytest.approx(0.210 + 0.051 + 0.010)


def test_what_the_host_holds_is_nearer_than_the_pool_and_for_that_engine_alone() -> None:
    router = router_of("a", "b")
    router.stored("b", [1])
    router.stored("b", [2, 3], Place.HOST)
    on_a, on_b = router.estimates(prompt(1, 2, 3, 4), 0.0)
    assert (on_a.engine_tokens, on_a.host_tokens) == (0, 0)
    assert (on_b.engine_tokens, on_b.host_tokens) == (100, 200)
    assert on_b.load_s == pytest.approx(0.002)
    assert chosen(router.route("r", prompt(1, 2, 3, 4), 0.0)).engine == "b"


def test_what_an_agent_has_fetched_lies_on_its_engines_host() -> None:
    router = router_of("a", "b")
    router.pooled([1, 2, 3])
    router.fetched("b", [1, 2], now=0.0)
    on_a, on_b = router.estimates(prompt(1, 2, 3), 1.0)
    assert (on_a.host_tokens, on_a.pool_tokens) == (0, 300)
    assert (on_b.host_tokens, on_b.pool_tokens) == (200, 100)
    assert chosen(router.route("r", prompt(1, 2, 3), 1.0)).engine == "b"
    later = router.estimates(prompt(1, 2, 3), OPTIONS.expect_s)[1]
    assert later.host_tokens == 0


def test_a_pool_that_is_said_to_save_all_has_a_prompt_once_it_was_computed() -> None:
    router = router_of("a", "b", options=replace(OPTIONS, pool_saves_all=True))
    router.route("r", prompt(1, 2, 3), 0.0, without={"b"})
    assert router.estimates(prompt(1, 2, 3), 0.1)[1].pool_tokens == 0
    router.first_token("r", 0.3)
    assert router.estimates(prompt(1, 2, 3), 0.3)[1].pool_tokens == 300
    router.unpooled([2, 3])
    assert router.estimates(prompt(1, 2, 3), 0.3)[1].pool_tokens == 100


def test_at_least_one_token_is_computed() -> None:
    router = router_of("a")
    router.stored("a", [1, 2])
    whole = Prompt((1, 2), 2 * BLOCK, BLOCK)
    estimate = chosen(router.route("r", whole, 0.0)).estimate
    assert estimate.engine_tokens == 2 * BLOCK - 1
    assert estimate.compute_s > 0


# --- refusals ----------------------------------------------------------------------------------


def test_what_no_engine_can_ever_meet_is_refused_as_too_long() -> None:
    router = router_of("a", "b")
    refusal = refused(router.route("r", prompt(*range(10)), 0.0, deadline_s=0.5))
    assert refusal.reason is Reason.TOO_LONG
    assert not router.load_of("a").in_flight


def test_what_an_idle_engine_could_meet_is_refused_as_overloaded_with_a_time_to_return() -> None:
    router = router_of("a")
    router.route("before", prompt(*range(20, 40)), 0.0)
    refusal = refused(router.route("r", prompt(1), 0.0, deadline_s=0.5))
    assert refusal.reason is Reason.OVERLOADED
    assert refusal.retry_after_s == pytest.approx(2.01 + 0.11 - 0.5)
    assert isinstance(router.route("r", prompt(1), refusal.retry_after_s, deadline_s=0.51), Choice)


def test_a_deadline_can_send_a_request_elsewhere_than_where_it_is_cheapest() -> None:
    router = router_of("a", "b")
    router.stored("a", range(1, 9))
    router.route("before", prompt(*range(50, 55)), 0.0, without={"b"})
    assert chosen(router.route("r", prompt(*range(1, 9)), 0.0)).engine == "a"
    router.ended("r", 0.0)
    assert isinstance(router.route("s", prompt(*range(1, 9)), 0.0, deadline_s=0.5), Refusal)
    assert chosen(router.route("t", prompt(1, 2, 3), 0.0, deadline_s=0.4)).engine == "b"


def test_no_engine_up_and_all_engines_full_are_told_apart() -> None:
    router = router_of("a")
    for number in range(OPTIONS.max_in_flight):
        router.route(str(number), prompt(number), 0.0)
    assert refused(router.route("more", prompt(1), 0.0)).reason is Reason.FULL
    router.ended("0", 1.0)
    assert isinstance(router.route("more", prompt(1), 1.0), Choice)
    router.set_up("a", False)
    assert refused(router.route("none", prompt(1), 1.0)).reason is Reason.NO_ENGINE
    assert refused(Router(OPTIONS).route("r", prompt(1), 0.0)).reason is Reason.NO_ENGINE


def test_one_request_is_in_flight_once_and_names_are_taken_once() -> None:
    router = router_of("a")
    router.route("r", prompt(1), 0.0)
    with pytest.raises(ValueError, match="in flight"):
        router.route("r", prompt(1), 0.0)
    with pytest.raises(ValueError, match="already"):
        router.add_engine("a")
    router.first_token("unknown", 0.0)
    router.ended("unknown", 0.0)


# --- load --------------------------------------------------------------------------------------


def test_an_engine_that_is_slower_than_the_model_says_is_soon_taken_for_what_it_is() -> None:
    router = router_of("slow", "fast")
    now, went = 0.0, []
    for number in range(300):
        name = str(number)
        choice = chosen(router.route(name, prompt(number), now))
        went.append(choice.engine)
        took = COSTS.compute_s(0, 110)
        now += took * (4 if choice.engine == "slow" else 1)
        router.first_token(name, now)
        router.ended(name, now)
    assert router.load_of("slow").pace > 1.05
    assert router.load_of("fast").pace == pytest.approx(1.0, abs=0.1)
    assert went[-50:].count("fast") > 40


def test_a_queue_gets_shorter_while_time_goes_by_but_not_shorter_than_what_waits() -> None:
    load = EngineLoad(slots=8)
    load.sent("a", work_s=1.0, load_s=0.0, ttft_s=1.0, now=0.0)
    load.sent("b", work_s=1.0, load_s=0.0, ttft_s=2.0, now=0.0)
    assert load.wait_s(0.0) == pytest.approx(2.0)
    assert load.wait_s(0.5) == pytest.approx(1.5)
    assert load.wait_s(50.0) == pytest.approx(1.0), "the head may be late, the second is not begun"
    load.first_token("a", 50.0)
    assert load.wait_s(50.0) > 0.5
    load.ended("b", 51.0)
    assert load.wait_s(51.0) == 0.0
    assert load.decoding == 1


def test_an_engine_whose_slots_are_taken_makes_wait() -> None:
    load = EngineLoad(slots=2)
    for number in range(3):
        load.sent(str(number), work_s=0.0, load_s=0.0, ttft_s=0.01, now=0.0)
        load.first_token(str(number), 0.0)
    assert load.wait_s(0.0) == pytest.approx(load.decode_s)
    load.ended("0", 10.0)
    assert load.wait_s(10.0) == pytest.approx(load.decode_s / 2)
    assert load.decode_s > 5.0, "answers take longer than was assumed"


# --- costs and hashes --------------------------------------------------------------------------


def test_computing_in_two_parts_costs_as_much_as_at_once() -> None:
    costs = CostModel()
    whole = costs.compute_s(0, 10_000)
    assert costs.compute_s(0, 3000) + costs.compute_s(3000, 10_000) == pytest.approx(whole)
    assert costs.compute_s(5, 5) == 0.0
    with pytest.raises(ValueError, match="rate"):
        CostModel(pool_bytes_per_s=0)


def test_a_chain_names_whole_prefixes_and_what_tells_prompts_apart() -> None:
    tokens = list(range(50))
    chain = token_chain(tokens, 16)
    assert len(chain) == 3
    assert token_chain(tokens[:40], 16) == chain[:2]
    assert token_chain([9, *tokens[1:]], 16)[1:] != chain[1:]
    salted = token_chain(tokens, 16, cache_salt="s")
    assert not set(salted) & set(chain)
    adapted = token_chain(tokens, 16, lora_name="l")
    assert not set(adapted) & set(chain + salted)
    assert adapted[1] == block_hash(adapted[0], tokens[16:32], ["l"]), "in every block"
    assert salted[1] == block_hash(salted[0], tokens[16:32]), "in the first block alone"
    assert chain[1] == block_hash(chain[0], tokens[16:32])
    assert token_chain(tokens, 16, seed=1) != chain
    assert token_chain([], 16) == ()


@pytest.mark.parametrize("tokens", [[-1], [2**32], ["a"], [None], [1.5]])
def test_what_is_no_token_id_is_refused(tokens: list[object]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        block_hash(0, tokens)  # type: ignore[arg-type]


def test_texts_are_hashed_by_bytes_and_never_meet_tokens() -> None:
    text = text_chain([b"abcdefgh", b"ijkl"], 4)
    assert text == text_chain([b"abcdefghijkl"], 4)
    assert text[:2] == text_chain([b"abcdefghxxxx"], 4)[:2]
    assert len(text_chain([b"abc"], 4)) == 0
    assert not set(text) & set(token_chain([1633837924] * 3, 1))
    assert math.isfinite(text[0])

"""The workloads' promises: order, seeds, prefixes, who reads together.

Oracle: the descriptions in `kvcast.workloads.generators`. Cannot see: whether a pool gains from
them.
"""

from __future__ import annotations

import itertools

import pytest
from kvcast.workloads.generators import (
    DESCRIPTIONS,
    NAMES,
    Demand,
    Dispatcher,
    Request,
    WorkloadError,
    WorkloadOptions,
    chained,
    generate,
    take,
)


def _some(name: str, count: int = 300, **options: object) -> list[Request]:
    made = WorkloadOptions(**options)  # type: ignore[arg-type]
    return list(itertools.islice(generate(name, made), count))


@pytest.mark.parametrize("name", NAMES)
def test_equal_options_give_equal_requests_and_another_seed_gives_others(name: str) -> None:
    assert _some(name, seed=3) == _some(name, seed=3)
    assert _some(name, seed=3) != _some(name, seed=4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("nodes", [1, 2, 8, 31])
def test_requests_come_in_order_name_real_nodes_and_depend_only_on_earlier_ones(
    name: str, nodes: int
) -> None:
    requests = _some(name, nodes=nodes)
    assert [request.number for request in requests] == list(range(len(requests)))
    assert all(a.time_s <= b.time_s for a, b in itertools.pairwise(requests))
    for request in requests:
        assert 0 <= request.node < nodes
        assert all(0 <= node < nodes for node in request.group)
        assert not request.group or request.group[0] == request.node
        assert request.after is None or request.after < request.number
        assert all(len(key) == 16 for key in request.keys)
        assert len(set(request.keys)) == len(request.keys)
        assert 0 <= request.gather_ms <= 255


@pytest.mark.parametrize("name", NAMES)
def test_a_key_always_stands_behind_the_same_prefix(name: str) -> None:
    parents: dict[bytes, bytes | None] = {}
    for request in _some(name, 500):
        before: bytes | None = None
        for key in request.keys:
            assert parents.setdefault(key, before) == before
            before = key


@pytest.mark.parametrize("name", NAMES)
def test_time_scales_with_the_rate_and_nothing_else_changes(name: str) -> None:
    slow, fast = _some(name, rate_per_s=1.0), _some(name, rate_per_s=4.0)
    for a, b in zip(slow, fast, strict=True):
        assert a.time_s == pytest.approx(4 * b.time_s)
        assert (a.node, a.keys, a.after) == (b.node, b.keys, b.after)


def test_the_ranks_of_an_engine_are_a_group_on_different_hosts() -> None:
    groups = {request.group for request in _some("tp-mla")}
    assert groups == {(0, 1, 2, 3), (4, 5, 6, 7)}


def test_the_samples_of_a_rollout_share_its_prompt_on_different_nodes() -> None:
    requests = _some("rollout", 500)
    for first in [request for request in requests[:400] if request.after is None]:
        samples = [request for request in requests if request.after == first.number]
        assert len({sample.node for sample in samples}) == 8
        assert all(sample.keys[: len(first.keys)] == first.keys for sample in samples)
        assert len({sample.keys for sample in samples}) == 8
        assert all(sample.gather_ms for sample in samples)


def test_sub_agents_continue_from_their_parents_context_elsewhere() -> None:
    requests = _some("fan-out", 500)
    for first in [request for request in requests[:400] if request.after is None]:
        children = [request for request in requests if request.after == first.number]
        assert 2 <= len(children) <= 7
        assert first.node not in {child.node for child in children}
        assert all(child.keys[: len(first.keys)] == first.keys for child in children)


def test_in_a_storm_every_cold_node_wants_every_hot_prefix() -> None:
    requests = _some("storm", 24)
    warm = requests[:3]
    cold = requests[3:]
    assert len({request.node for request in warm}) == 1
    for node in set(range(8)) - {warm[0].node}:
        assert [r.keys for r in cold if r.node == node] == [r.keys for r in warm]


def test_chats_of_different_users_share_nothing_and_grow_turn_by_turn() -> None:
    requests = _some("chat", 400)
    by_number = {request.number: request for request in requests}
    first_turns = [request for request in requests if request.after is None]
    assert len({request.keys[0] for request in first_turns}) == len(first_turns)
    for request in requests:
        if request.after is not None:
            earlier = by_number[request.after].keys
            assert request.keys[: len(earlier)] == earlier
            assert len(request.keys) > len(earlier)
    assert not any(request.group or request.gather_ms for request in requests)


def test_the_mix_has_all_kinds() -> None:
    assert {request.kind for request in _some("mix", 600)} == {
        "chat",
        "tp-mla",
        "fan-out",
        "rollout",
        "storm",
    }


def test_every_workload_says_what_it_means() -> None:
    assert set(DESCRIPTIONS) == set(NAMES)


def test_an_unknown_workload_is_named_with_those_that_exist() -> None:
    with pytest.raises(WorkloadError, match=r"'nap'.*tp-mla.*mix"):
        generate("nap", WorkloadOptions())


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"rate_per_s": 0.0}, {"prefix_blocks": 0}])
def test_impossible_options_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(WorkloadError):
        WorkloadOptions(**wrong)  # type: ignore[arg-type]


def test_round_robin_ignores_prefixes_and_affinity_follows_the_longest() -> None:
    prompt = chained((), "prompt", 3)
    longer, other = chained(prompt, "more", 2), chained((), "other", 3)
    robin = Dispatcher("round-robin", 3)
    assert [robin.node(keys) for keys in (prompt, longer, prompt)] == [0, 1, 2]
    affinity = Dispatcher("affinity", 3)
    assert [affinity.node(keys) for keys in (prompt, other, longer, other)] == [0, 1, 0, 1]


def test_a_shared_first_block_alone_does_not_pull_requests_to_one_node() -> None:
    affinity = Dispatcher("affinity", 4)
    system = chained((), "system prompt", 1)
    prompts = [chained(system, user, 3) for user in range(4)]
    assert [affinity.node(keys) for keys in prompts] == [0, 1, 2, 3]


def test_demand_counts_what_must_come_from_elsewhere() -> None:
    keys = chained((), "p", 2)
    demand = Demand()
    demand.add(Request(0, 0.0, 0, keys, "t"))
    assert (demand.written, demand.remote_reads) == (2, 0)
    demand.add(Request(1, 0.0, 1, keys, "t"))
    demand.add(Request(2, 0.0, 1, keys, "t"))
    demand.add(Request(3, 0.0, 0, keys, "t", group=(0, 2, 3)))
    assert (demand.written, demand.remote_reads) == (2, 6)
    assert demand.distinct_remote == 2


def test_take_stops_at_its_first_bound_but_takes_one() -> None:
    options = WorkloadOptions()
    one, _ = take(generate("mix", options), remote_reads=0, written=0, requests_at_most=0)
    assert len(one) == 1
    many, demand = take(
        generate("mix", options), remote_reads=200, written=10**6, requests_at_most=10**6
    )
    assert 200 <= demand.remote_reads < 400
    assert len(many) == demand.requests

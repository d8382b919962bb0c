"""Which RDMA cards an agent uses, how near they are, and which of them a caller meets.

Oracle: a tree of files like the kernel's, and cards that are names. Cannot see: real cards
(`tests/rdma`), or a machine with several NUMA nodes.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from ipaddress import IPv4Network
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvcast.cli.agent_blocks import described
from kvcast.hostagent.core.agent import AgentCore, AgentOptions
from kvcast.hostagent.core.metrics import added
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.flags import options_of, parse
from kvcast.hostagent.network import cards as module
from kvcast.hostagent.network.cards import Cards, distance_of, node_of_most, open_cards
from kvcast.hostagent.network.interfaces import interface_network
from kvcast.hostagent.network.libverbs import gid_of
from kvcast.hostagent.network.metrics_server import metrics_of
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.protocol.links.rdma import RdmaOptions, VerbsError
from kvcast.protocol.messages.rdma import Endpoint


class Card:
    """What is known of a card."""

    def __init__(self, name: str, ip: str, pairs: int = 0) -> None:
        self.name = name
        self.ip = ip
        self.pairs = pairs
        self.problem = ""
        self.changed: Callable[[], None] = lambda: None
        self.calling = SimpleNamespace(max_transfer_bytes=1 << 20)

    def happened(self, problem: str) -> None:
        self.problem = problem
        self.changed()


@pytest.fixture(autouse=True)
def networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each card's address is in a network of 256."""
    monkeypatch.setattr(
        module, "interface_network", lambda ip: IPv4Network(f"{ip}/24", strict=False)
    )


def cards_of(*some: Card, **distances: int) -> Cards:
    return Cards(some, distances)  # type: ignore[arg-type]


def caller(ip: str) -> Endpoint:
    return Endpoint(gid_of(ip), 1, 1, 4096, 1)


def sysfs(root: Path, numa_nodes: dict[str, str]) -> Path:
    """Two NUMA nodes, numbered 0 and 2, and cards."""
    for node, distances in ((0, "10 21\n"), (2, "21 10\n")):
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "distance").write_text(distances)
    for name, text in numa_nodes.items():
        folder = root / f"class/infiniband/{name}/device"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(text)
    return root


def test_distances_are_the_kernel_s(tmp_path: Path) -> None:
    root = sysfs(tmp_path, {"a": "0\n", "b": "2\n", "c": "-1\n"})
    assert [distance_of(card, 0, root) for card in "abc"] == [10, 21, 10]
    assert [distance_of(card, 2, root) for card in "abc"] == [21, 10, 10]


def test_what_nobody_knows_counts_as_near(tmp_path: Path) -> None:
    root = sysfs(tmp_path, {"a": "0\n", "b": "nonsense\n"})
    assert distance_of("a", None, root) == 10
    assert distance_of("b", 2, root) == 10
    assert distance_of("soft", 2, root) == 10
    assert distance_of("a", 7, root) == 10
    (root / "devices/system/node/node2/distance").write_text("21\n")
    assert distance_of("a", 2, root) == 10


def test_an_arena_is_on_the_node_that_has_most_of_it() -> None:
    assert node_of_most({}) is None
    assert node_of_most({0: 100, 1: 900}) == 1
    assert node_of_most({0: 500, 1: 500}) is None


def test_a_caller_meets_the_card_in_its_network_then_the_nearest_then_the_idlest() -> None:
    a, b, c = Card("a", "10.1.0.1"), Card("b", "10.2.0.1", pairs=3), Card("c", "10.3.0.1", pairs=2)
    cards = cards_of(a, b, c, a=21)
    assert cards.across(caller("10.1.0.9")).name == "a"
    assert cards.across(caller("10.2.0.9")).name == "b"
    assert cards.across(caller("10.9.0.9")).name == "c"
    b.pairs = 1
    assert cards.across(caller("10.9.0.9")).name == "b"
    b.happened("its port is down")
    assert cards.across(caller("10.2.0.9")).name == "c"


def test_a_caller_is_refused_where_no_card_works() -> None:
    a = Card("a", "10.1.0.1")
    cards = cards_of(a)
    a.happened("its port is down")
    with pytest.raises(VerbsError, match="its port is down"):
        cards.make_pair(cards.across(caller("10.1.0.9")), print)


def test_a_card_says_once_that_it_is_left_out_and_that_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    a = Card("a", "10.1.0.1")
    cards = cards_of(a, Card("b", "10.2.0.1"))
    told: list[tuple[str, str]] = []
    cards.changed = lambda link: told.append((link.name, link.problem))
    with caplog.at_level(logging.WARNING):
        a.happened("its port is down")
        a.happened("")
    assert told == [("a", "its port is down"), ("a", "")]
    assert [record.getMessage() for record in caplog.records] == [
        "RDMA card a is left out: its port is down",
        "RDMA card a is back",
    ]


def test_cards_are_named_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    required = ["--node-id=n", "--controller=127.0.0.1:1", "--ip=10.0.0.1", "--socket=s"]
    required += ["--mac=02:00:00:00:00:01", "--switch-port=1", "--transport=udp"]
    words = [*required, "--rdma-device", "mlx5_0", "--rdma-device", "mlx5_bond.1"]
    assert options_of(parse(words)).network.rdma_devices == ("mlx5_0", "mlx5_bond.1")
    assert options_of(parse(required)).network.rdma_devices == ()
    with pytest.raises(SystemExit):
        parse([*required, "--rdma-device", "../mlx5_0"])
    assert "'../mlx5_0' is no name of an RDMA card" in capsys.readouterr().err


def test_cards_are_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def card(ip: str, _memory: Any, _options: Any, name: str | None = None) -> Card:
        if name == "broken":
            raise VerbsError("it has no address")
        return Card(name or "own", ip if name in (None, "a") else "10.2.0.1")

    monkeypatch.setattr(module, "Card", card)
    monkeypatch.setattr(module, "devices", lambda: ["a", "broken", "b"])

    def names(*wanted: str) -> list[str]:
        cards = open_cards("10.1.0.1", wanted, memoryview(b""), RdmaOptions())
        return [link.name for link in cards.links]

    assert names() == ["own"]
    assert names("b", "b", "broken") == ["b"]
    assert names("all") == ["a", "b"]
    with pytest.raises(VerbsError, match="broken: it has no address"):
        names("broken")
    cards = open_cards("10.1.0.1", ["all"], memoryview(b""), RdmaOptions())
    own = cards.card_with("10.1.0.1")
    assert own is not None
    assert own.name == "a"
    assert (
        open_cards("10.1.0.1", ["b"], memoryview(b""), RdmaOptions()).card_with("10.1.0.1") is None
    )


def test_status_and_metrics_show_each_card_and_totals_are_added() -> None:
    a = Card("mlx5_0", "10.1.0.1", pairs=4)
    cards = cards_of(a, Card("mlx5_1", "10.2.0.1"), mlx5_1=21)
    cards.links[0].counters.bytes_read = 3 << 20
    cards.links[0].counters.failures = 2
    a.happened("its port is down")
    memory = memoryview(bytearray(1 << 20))
    store = Store(Allocator(len(memory), 1 << 16))
    core = AgentCore(AgentOptions("node-1"), store, memory, random.Random(1))
    core.cards = cards.values
    numbers = core.card_numbers()
    first, second = (line for line in described(numbers) if line.startswith("RDMA card"))
    assert first.startswith("RDMA card mlx5_0: LEFT OUT, distance 10, pairs 4, ")
    assert "failures 2" in first
    assert "bytes read 3.0 MiB" in first
    assert second.startswith("RDMA card mlx5_1: works, distance 21, pairs 0, ")
    both = added([numbers, numbers])
    assert both['rdma_card_bytes_read_total{card="mlx5_0"}'] == 6 << 20
    assert not [name for name in both if "distance" in name or "works" in name]
    families = {family.name: family for family in metrics_of(core)}
    read = families["kvcast_agent_rdma_card_bytes_read"]
    assert [(s.labels, s.value) for s in read.samples if s.name.endswith("_total")] == [
        ({"card": "mlx5_0"}, 3 << 20),
        ({"card": "mlx5_1"}, 0),
    ]
    works = families["kvcast_agent_rdma_card_works"]
    assert [(s.labels["card"], s.value) for s in works.samples] == [("mlx5_0", 0), ("mlx5_1", 1)]


def test_an_address_s_network_is_its_interface_s() -> None:
    assert interface_network("127.0.0.1") == IPv4Network("127.0.0.0/8")
    assert interface_network("203.0.113.7") == IPv4Network("203.0.113.7/32")

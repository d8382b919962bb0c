"""Namespaces at the controller: made, changed and deleted by an operator, kept, and told to agents.

Oracle: what agents hear (`Driver` of test_controller_pool.py), and what a second controller reads
from the file. Cannot see: HTTP (tests/integration/test_pool_tenants.py).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from kvcast.controller.core.namespaces import (
    MAX_DELETED,
    NamespaceError,
    Namespaces,
    UnprintableError,
)
from kvcast.controller.core.pool import SavedState
from kvcast.controller.store import Store
from kvcast.controller.switch.control_loop import StoreError
from kvcast.protocol.messages.bulk import meaning_of
from kvcast.protocol.messages.control import (
    NamespaceInfo,
    NamespaceReply,
    NamespaceRequest,
    NamespaceSettings,
    PoolMap,
    Refused,
)
from kvcast.protocol.messages.wire import BlockId
from test_controller_pool import Driver, admit, key

SETTINGS = NamespaceSettings(
    policy="s3fifo",
    quota_bytes={"dram": 1 << 30, "ssd": 1 << 40},
    operations_per_s=1000.0,
    bytes_per_s=1e9,
    weight=2.0,
    ttl_s=60.0,
    media=["ssd"],
)


def test_a_change_is_told_to_every_agent_with_the_next_map() -> None:
    driver = Driver()
    driver.join(1, 2)
    number = driver.namespace()
    driver.round()
    driver.take(2, PoolMap)
    driver.pool.configure_namespace(number, SETTINGS, driver.now)
    driver.round()
    (told,) = driver.take(2, PoolMap)
    assert [info.settings for info in told.namespaces] == [SETTINGS]


@pytest.mark.parametrize("kind", ["quota_bytes", "assured_bytes"])
def test_settings_that_no_map_could_say_are_refused(kind: str) -> None:
    most = msgspec.json.decode(f'{{"{kind}": {{"dram": {2**63 - 1}}}}}', type=NamespaceSettings)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(most), type=NamespaceSettings) == most
    for beyond in (2**64, 10**30):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(f'{{"{kind}": {{"dram": {beyond}}}}}', type=NamespaceSettings)


def test_a_share_of_the_switch_cannot_be_assured_and_a_quota_of_it_can_be_had() -> None:
    said = b'{"quota_bytes": {"switch": 65536}}'
    assert msgspec.json.decode(said, type=NamespaceSettings).quota_bytes == {"switch": 65536}
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"assured_bytes": {"switch": 65536}}', type=NamespaceSettings)


def test_what_is_deleted_leaves_the_map_the_switch_and_the_pins_and_is_named() -> None:
    driver = Driver()
    driver.join(1, 2, 3)
    block = BlockId(driver.namespace(), key(5))
    driver.round()
    admit(driver, block)
    driver.pool.tiers.pins.add(block)
    driver.take(2, PoolMap)
    driver.pool.delete_namespace(block.namespace, driver.now)
    driver.round()
    (told,) = driver.take(2, PoolMap)
    assert (told.namespaces, told.deleted) == ([], [block.namespace])
    assert not driver.pool.tiers.pins
    driver.round(1.0)
    assert not driver.pool.tiers.residency.residents
    with pytest.raises(NamespaceError):
        driver.pool.delete_namespace(block.namespace, driver.now)


def test_what_is_made_again_has_another_number_and_means_another() -> None:
    """Before any map has told of the deletion, too: nodes then hear of both at once."""
    driver = Driver()
    driver.join(1, 2)
    former = driver.pool.namespaces.by_number[driver.namespace()]
    driver.round()
    driver.take(2, PoolMap)
    driver.pool.delete_namespace(former.namespace, driver.now)
    number = driver.namespace()
    assert number != former.namespace
    driver.round()
    told = driver.take(2, PoolMap)[-1]
    assert told.deleted == [former.namespace]
    (again,) = told.namespaces
    assert (again.namespace, again.version) == (number, former.version)
    assert meaning_of(again) != meaning_of(former)
    assert driver.namespace() == number


def test_blocks_that_may_not_be_in_the_switch_leave_it_and_stay_out() -> None:
    driver = Driver()
    driver.join(1, 2, 3)
    block = BlockId(driver.namespace(), key(5))
    driver.round()
    admit(driver, block)
    driver.pool.configure_namespace(block.namespace, NamespaceSettings(media=["dram"]), driver.now)
    for _ in range(3):
        driver.round(1.0)
    assert not driver.pool.tiers.residency.residents
    with pytest.raises(AssertionError):
        admit(driver, block)
    assert not driver.pool.tiers.residency.residents


def test_settings_and_deletions_outlive_the_controller(tmp_path: Path) -> None:
    driver = Driver()
    driver.join(1)
    kept, _ = driver.pool.make_namespace("t", "m", "2", "l", driver.now)
    gone, made = driver.pool.make_namespace("t", "m", "3", "l", driver.now)
    assert made
    driver.pool.configure_namespace(kept.namespace, SETTINGS, driver.now)
    driver.pool.delete_namespace(gone.namespace, driver.now)
    store = Store(tmp_path / "state")
    store.save(driver.pool.saved())
    store.close()
    store = Store(tmp_path / "state")
    saved = store.load()
    store.close()
    again = Driver(saved=saved)
    assert again.pool.namespaces.by_number[kept.namespace].settings == SETTINGS
    assert list(again.pool.namespaces.deleted) == [gone.namespace]
    assert saved.deleted == (gone.namespace,)


def test_settings_in_the_file_that_make_no_sense_are_an_error(tmp_path: Path) -> None:
    driver = Driver()
    driver.join(1)
    made, _ = driver.pool.make_namespace("t", "m", "2", "l", driver.now)
    driver.pool.configure_namespace(made.namespace, SETTINGS, driver.now)
    store = Store(tmp_path / "state")
    store.save(driver.pool.saved())
    store._db.execute("UPDATE settings SET settings = '{\"weight\": -1}'")
    with pytest.raises(StoreError):
        store.load()
    store.close()


def test_deleted_namespaces_are_remembered_up_to_a_bound() -> None:
    namespaces = Namespaces()
    for number in range(MAX_DELETED + 100):
        info, _ = namespaces.namespace("t", "m", str(number), "l", None)
        namespaces.delete(info.namespace)
        assert len(namespaces.deleted) <= MAX_DELETED
    assert len(namespaces.deleted) == MAX_DELETED


@pytest.mark.parametrize("place", range(4))
def test_what_cannot_be_in_a_line_of_text_names_no_namespace(place: int) -> None:
    namespaces = Namespaces()
    for wrong in ("", "a\nb", "a\x1b[2J", "a\u2028b", "x" * 257):
        parts = ["t", "m", "1", "l"]
        parts[place] = wrong
        with pytest.raises(UnprintableError, match="is no name: 1 to 256 printable characters"):
            namespaces.namespace(*parts, None)
    assert not namespaces.by_number
    parts = ["t", "m", "1", "l"]
    parts[place] = "Jürgens Modell, 模型 " + "x" * 236
    assert namespaces.namespace(*parts, None)[1]


def test_a_node_that_asks_for_what_is_no_name_is_refused_and_stays() -> None:
    driver = Driver()
    driver.join(1)
    driver.say(1, NamespaceRequest(7, tenant="a\nb", model="m", version="1", layout="l"))
    (refused,) = driver.take(1, Refused)
    assert refused.request == 7
    assert refused.reason.startswith("tenant 'a\\nb' is no name")
    assert driver.namespace()


def test_names_that_an_older_controller_took_are_kept_and_found(tmp_path: Path) -> None:
    old = NamespaceInfo(7, "", "a\nb", "1", "l")
    store = Store(tmp_path / "state")
    store.save(SavedState(namespaces=(old,)))
    store.close()
    store = Store(tmp_path / "state")
    driver = Driver(saved=store.load())
    store.close()
    driver.join(1)
    driver.say(1, NamespaceRequest(7, tenant="", model="a\nb", version="1", layout="l"))
    driver.round()
    assert driver.take(1, NamespaceReply)[-1].info == old


def test_an_empty_file_has_nothing_deleted(tmp_path: Path) -> None:
    store = Store(tmp_path / "state")
    assert store.load() == SavedState()
    store.close()

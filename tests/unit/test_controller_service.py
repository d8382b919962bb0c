"""What the controller's service tells operators.

Oracle: a state file that another controller opens while the first one lives on without it. Cannot
see: agents, a switch, HTTP (the integration tests).
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from kvcast.controller.core.pool import PoolOptions
from kvcast.controller.flags import ControllerFlags, pool_options
from kvcast.controller.http.api import NamespaceBody, SettingsBody
from kvcast.controller.service import ControllerService, ServiceOptions
from kvcast.controller.store import SavedState, Store, StoreError
from kvcast.p4 import artefact
from kvcast.service.http import HttpError

BODY = NamespaceBody("tenant", "model", "1", "layout")


def service_of(store: Store) -> ControllerService:
    program = artefact("v1model")
    assert program.device_config is not None
    nowhere = ("127.0.0.1", 0)
    options = ServiceOptions(
        switch="127.0.0.1:1",
        device_id=1,
        election_id=1,
        p4info=program.p4info,
        p4blob=program.device_config,
        agents_addr=nowhere,
        http_addr=nowhere,
        tick_s=1.0,
    )
    pool: PoolOptions = pool_options(ControllerFlags())
    return ControllerService(options, pool, store)


def left_by(store: Store, path: Path) -> SavedState:
    """What is in the file of a controller that died."""
    store.close()
    after = Store(path)
    state = after.load()
    after.close()
    return state


async def test_what_an_operator_is_told_outlives_the_controller_at_once(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    store = Store(path)
    service = service_of(store)
    kept, _ = service.make_namespace(BODY)
    gone, _ = service.make_namespace(NamespaceBody("tenant", "model", "2", "layout"))
    service.change_namespace(SettingsBody(kept.namespace, {"weight": 3.0}))
    service.delete_namespace(gone.namespace)
    state = left_by(store, path)
    assert [info.namespace for info in state.namespaces] == [kept.namespace]
    assert state.namespaces[0].settings.weight == 3.0
    assert state.deleted == (gone.namespace,)


async def test_a_namespace_of_no_name_is_the_askers_fault(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.sqlite")
    service = service_of(store)
    with pytest.raises(HttpError, match=r"tenant '' is no name") as failed:
        service.make_namespace(NamespaceBody("", "model", "1", "layout"))
    assert failed.value.status == 400
    assert not service.namespaces()
    store.close()


async def test_what_cannot_be_saved_is_said(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.sqlite")
    service = service_of(store)
    full = mock.patch.object(store, "save", side_effect=StoreError("the disk is full"))
    with full, pytest.raises(HttpError, match="in force, but not saved") as failed:
        service.make_namespace(BODY)
    assert failed.value.status == 500
    assert [info.tenant for info in service.namespaces()] == ["tenant"]
    store.close()

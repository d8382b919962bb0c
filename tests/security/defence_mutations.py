"""Defences of docs/security.md, each taken out by a small named change.

A mutation replaces a function by one that does not defend, or edits the compiled P4 program, for
as long as a `with` lasts, and says which tests of which row must then fail. Rows are named by the
words with which they begin in the page's table. The product is imported where a mutation needs it,
and not before: this module is also read by every process that a mutated test starts.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import p4_edits
from p4_edits import Json

TakeOut = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Mutation:
    """One defence taken out."""

    name: str
    breaks: Mapping[str, Sequence[str]]
    """By row, the tests that must fail; one with a case in brackets: that case."""
    take_out: TakeOut
    also: Sequence[str] = ()
    """Tests that the table does not name and that must fail, too."""
    line: str = ""
    """What stands in the line at which they fail."""
    errors: frozenset[str] = frozenset({"AssertionError", "Failed"})
    """How they fail; `Failed` is pytest's, where an expected error does not come."""
    in_daemons: bool = False
    """Whether it is also taken out in processes that the tests start."""

    @property
    def tests(self) -> tuple[str, ...]:
        named = [test for tests in self.breaks.values() for test in tests]
        return tuple(dict.fromkeys([*named, *self.also]))


OUTSIDE = "has files written outside"
OTHER_BYTES = "has other bytes fetched"
LIES = "as a home, sends bytes"
OFFERS = "has readers connect elsewhere"
MUCH = "has a home hold"
AHEAD = "keeps the arena full of rooms"
REACHES = "goes on writing by RDMA"
PAST_SWITCH = "writes by RDMA into a reader's landing zone"
TO_ALL = "writes by RDMA to all who wait"
OTHER_HOME = "as a home of other blocks"
OTHERS_ANSWER = "is written another tenant's shared answer"
WINDOWS = "has a home's memory open to RDMA"

MUTATIONS: dict[str, Mutation] = {}


def mutation(
    name: str,
    breaks: Mapping[str, Sequence[str]],
    *,
    also: Sequence[str] = (),
    line: str = "",
    errors: Sequence[str] = (),
    in_daemons: bool = False,
) -> Callable[[TakeOut], TakeOut]:
    """Register a function that makes the change, as a context manager."""

    def register(take_out: TakeOut) -> TakeOut:
        assert name not in MUTATIONS, name
        kinds = frozenset({"AssertionError", "Failed", *errors})
        MUTATIONS[name] = Mutation(name, breaks, take_out, also, line, kinds, in_daemons)
        return take_out

    return register


def p4_mutation(
    name: str, breaks: Mapping[str, Sequence[str]], *, also: Sequence[str] = (), line: str = ""
) -> Callable[[Callable[[Json], None]], Callable[[Json], None]]:
    """Register an edit of the compiled programs of the software targets."""

    def register(edit: Callable[[Json], None]) -> Callable[[Json], None]:
        mutation(name, breaks, also=also, line=line)(lambda: edited_program(edit))
        return edit

    return register


@contextmanager
def edited_program(edit: Callable[[Json], None]) -> Iterator[None]:
    """Have `kvcast.p4.artefact` find programs that were edited."""
    import kvcast.p4

    package = Path(str(kvcast.p4.files("kvcast.p4")))
    with tempfile.TemporaryDirectory(prefix="kvs-p4-", dir="/tmp") as name:
        for folder in (package / "generated").iterdir():
            copy = Path(name) / "generated" / folder.name
            if not (folder / "kvcast.json").exists():
                copy.parent.mkdir(exist_ok=True)
                copy.symlink_to(folder)
                continue
            copy.mkdir(parents=True)
            for file in folder.iterdir():
                (copy / file.name).symlink_to(file)
            program = json.loads((folder / "kvcast.json").read_bytes())
            before = json.dumps(program)
            edit(program)
            assert json.dumps(program) != before, f"{folder.name}: there was nothing to edit"
            (copy / "kvcast.json").unlink()
            (copy / "kvcast.json").write_text(json.dumps(program))
        with mock.patch.object(kvcast.p4, "files", return_value=name):
            yield


# --- how functions are replaced -------------------------------------------------------------------


def replaced(target: str, new: Any) -> AbstractContextManager[object]:
    """`mock.patch` with a plain object; AttributeError where there is no such name."""
    return mock.patch(target, new)


def around(target: str, make: Callable[[Any], Any]) -> AbstractContextManager[object]:
    """Replace a function or method by what `make` makes of it."""
    home, _, name = target.rpartition(".")
    return mock.patch(target, make(getattr(_found(home), name)))


def recompiled(
    function: str, by: str, module: str = "kvcast.protocol.placement", package: str = ""
) -> AbstractContextManager[object]:
    """Compile a module, or a package of which it is one, with one of its functions replaced by one
    of `native_mutations`."""
    import native_mutations

    compiled = f"{package or module}.compiled"
    return all_of(
        replaced(f"{module}.{function}", getattr(native_mutations, by)),
        replaced(compiled, functools.cache(_found(compiled).__wrapped__)),
    )


def _found(path: str) -> Any:
    names = path.split(".")
    for at in range(len(names), 0, -1):
        try:
            found = importlib.import_module(".".join(names[:at]))
        except ModuleNotFoundError:
            continue
        for name in names[at:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


@contextmanager
def all_of(*changes: AbstractContextManager[object]) -> Iterator[None]:
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        yield


def nothing(*_: Any, **__: Any) -> None:
    return None


def yes(*_: Any, **__: Any) -> bool:
    return True


async def says_nothing(*_: Any, **__: Any) -> None:
    return None


# === tenant against tenant ========================================================================

GUESSES = "reads another's block by guessing"
HAS_SECRET = "has the secret although"
BEFORE_SECRET = "reads what was cached before"
SENT_UNASKED = "is sent blocks of a namespace that it is not for, as their home"
FOREIGN_NODE = "reads a namespace from a node"
SOCKET_TENANT = "uses another's namespace through"
POISONS = "poisons another's block"
DROPS = "evicts another's blocks, by dropping"
FILLS = "evicts another's blocks, by filling"
RATES = "takes more than its share of an agent"
TURNS = "takes more than its share of the ways"
KEPT = "has blocks that were deleted read"
TIMES = "learns from timing"
SHARES_ENTRY = "shares the switch's pending"
NAMES = "uses up the names"
SOCKET_FLOOD = "floods the local socket"

INDEX_TENANTS = "learns from the index"
INDEX_NUMBERS = "finds another namespace's blocks in the index"
REGION = "pins the arena full"
INDEX_FILE = "changes the index"
COMES_BACK = "comes back as another client"
PROBER = "test_without_the_secret_a_prober_can_address_nothing"
ONE_TENANT = "test_a_client_of_one_tenant_does_nothing_in_anothers_namespace"


@mutation("agents use the engine's key as it is", {GUESSES: [PROBER], POISONS: [PROBER]})
def _keys_not_derived() -> AbstractContextManager[object]:
    return replaced(
        "kvcast.hostagent.core.agent.AgentCore.pool_keys", lambda _self, _ns, keys: keys
    )


@mutation(
    "a derived key does not depend on the secret",
    {GUESSES: ["test_one_prompt_has_unrelated_keys_in_two_namespaces"]},
)
def _secret_not_used() -> AbstractContextManager[object]:
    return around(
        "kvcast.protocol.namespace_secrets.KeyDerivation.__init__",
        lambda init: lambda self, _secret: init(self, bytes(32)),
    )


@mutation(
    "a home answers READs by the engine's key, too",
    {GUESSES: [PROBER]},
    line="OP_MISS",
)
def _home_derives() -> AbstractContextManager[object]:
    def derives(lookup: Any) -> Any:
        def derived(self: Any, block: Any) -> Any:
            (key,) = self.pool_keys(block.namespace, [block.key])
            return lookup(self, block) or lookup(self, type(block)(block.namespace, key))

        return derived

    return around("kvcast.hostagent.core.agent.AgentCore._lookup", derives)


def _entry_point_derives(
    name: str, namespace_at: int | None = None
) -> AbstractContextManager[object]:
    """A request at the bulk entry point is served by the engine's keys. `namespace_at`: the
    argument that is the namespace, where the request does not say it."""
    import msgspec
    from kvcast.hostagent.core.agent import AgentCore

    cores: dict[int, AgentCore] = {}
    init = AgentCore.__init__

    def remembers(self: Any, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        cores[id(self.serving)] = self

    def derives(serve: Any) -> Any:
        def served(self: Any, *arguments: Any) -> Any:
            *rest, asked = arguments
            keys = asked.keys if hasattr(asked, "keys") else [asked.key]
            namespace = asked.namespace if namespace_at is None else arguments[namespace_at]
            core = cores[id(self)]
            if isinstance(keys, bytes):
                new: dict[str, Any] = {"keys": core.pool_chain(namespace, keys)}
            else:
                derived = core.pool_keys(namespace, keys)
                new = {"keys": derived} if hasattr(asked, "keys") else {"key": derived[0]}
            return serve(self, *rest, msgspec.structs.replace(asked, **new))

        return served

    return all_of(
        mock.patch.object(AgentCore, "__init__", remembers),
        around(f"kvcast.hostagent.core.serving.Serving.{name}", derives),
    )


@mutation(
    "the bulk entry point serves blocks by the engine's key", {GUESSES: [PROBER]}, line="NOT_FOUND"
)
def _get_derives() -> AbstractContextManager[object]:
    return _entry_point_derives("get", 1)


@mutation(
    "the bulk entry point drops blocks by the engine's key", {DROPS: [PROBER]}, line="BulkDrop"
)
def _drop_derives() -> AbstractContextManager[object]:
    return _entry_point_derives("drop")


@mutation(
    "the bulk entry point says by the engine's key what is there",
    {TIMES: [PROBER]},
    line="held.bitmap ==",
)
def _exists_derives() -> AbstractContextManager[object]:
    return _entry_point_derives("exists")


@mutation(
    "a node without the secret puts under the engine's key", {POISONS: [PROBER]}, line="raises"
)
def _put_without_secret() -> AbstractContextManager[object]:
    def lenient(pool_keys: Any) -> Any:
        def keys_of(self: Any, namespace: int, keys: list[bytes]) -> Any:
            return pool_keys(self, namespace, keys) if namespace in self._secrets else keys

        return keys_of

    return around("kvcast.hostagent.core.agent.AgentCore.pool_keys", lenient)


@mutation(
    "every node is given every secret",
    {HAS_SECRET: ["test_a_secret_goes_to_no_node_but_its_tenants"]},
)
def _secrets_for_all() -> AbstractContextManager[object]:
    def for_all(self: Any, _node_id: str) -> Any:
        from kvcast.protocol.messages.control import NamespaceSecret

        return [NamespaceSecret(number, secret) for number, secret in sorted(self.secrets.items())]

    return replaced("kvcast.controller.core.namespaces.Namespaces.secrets_for", for_all)


FOREIGN_REPLICA = "is given blocks of a namespace that it is not for"
LOUD = "has others hold its blocks"
FILLS_WRONG = "as a home, fills the switch's memory"
SLANDER = "has blocks of others evicted from the switch"
SLOW = "keeps others from joining"


@mutation(
    "who joins waits as long as somebody likes",
    {SLOW: ["test_who_joins_does_not_wait_for_ever_and_who_is_drained_does"]},
)
def _joins_wait_for_ever() -> AbstractContextManager[object]:
    def patient(settle: Any) -> Any:
        return lambda self, _now: settle(self, self._moves_since)

    return around("kvcast.controller.core.pool.Pool._settle", patient)


@mutation(
    "replicas are given to whoever has room",
    {FOREIGN_REPLICA: ["test_who_may_not_use_the_namespace_gets_nothing_and_keeps_nothing"]},
)
def _replicas_for_all() -> AbstractContextManager[object]:
    def lenient(make: Any) -> Any:
        def made(self: Any, options: Any, homes: Any, _may_use: Any) -> None:
            make(self, options, homes, lambda _namespace, _node_id: True)

        return made

    return around("kvcast.controller.core.replicas.HotReplicas.__init__", lenient)


@mutation(
    "a node is believed whatever it says is read",
    {LOUD: ["test_reports_of_blocks_that_a_node_does_not_answer_for_make_nothing_hot"]},
)
def _believed_of_all() -> AbstractContextManager[object]:
    return replaced(
        "kvcast.controller.core.pool.Pool._answers_for", staticmethod(lambda *_of: True)
    )


@mutation(
    "what readers say came wrong from the switch stays there",
    {FILLS_WRONG: ["test_what_readers_get_wrong_from_the_switch_leaves_it_for_longer_each_time"]},
)
def _wrong_residents_stay() -> AbstractContextManager[object]:
    return replaced("kvcast.controller.core.tiers.Tiers.found_wrong", lambda *_: None)


@mutation(
    "anybody's word counts on what came wrong from the switch",
    {SLANDER: ["test_who_may_not_read_a_block_cannot_say_that_it_is_wrong_in_the_switch"]},
)
def _slander_is_believed() -> AbstractContextManager[object]:
    return replaced("kvcast.controller.core.pool.Pool._may_use", lambda *_: True)


@mutation(
    "replicas take what room there is, and more",
    {
        LOUD: [
            "test_no_node_gives_more_of_its_arena_than_its_share",
            "test_a_full_node_displaces_a_small_part_of_what_it_holds_for_replicas",
        ]
    },
)
def _replicas_without_bounds() -> AbstractContextManager[object]:
    def roomy(advance: Any) -> Any:
        def with_room(self: Any, nodes: Any, guard_room: int, now: float) -> Any:
            views = [replace(node, arena_bytes=1 << 60, arena_used_bytes=0) for node in nodes]
            return advance(self, views, guard_room, now)

        return with_room

    return around("kvcast.controller.core.replicas.HotReplicas.advance", roomy)


@mutation(
    "agents keep what they held before the secret",
    {BEFORE_SECRET: ["test_what_was_kept_before_the_secret_is_forgotten"]},
)
def _kept_before_secret() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.store.Store.drop_namespace", lambda _self, _ns, **_: 0)


@mutation(
    "the switch keeps what was resident before the secret",
    {BEFORE_SECRET: ["test_residents_under_plain_keys_leave_the_switch"]},
)
def _resident_before_secret() -> AbstractContextManager[object]:
    return replaced("kvcast.controller.core.tiers.Tiers.forget", nothing)


@p4_mutation(
    "namespace_guard lets every port read every namespace",
    {FOREIGN_NODE: ["test_a_namespace_must_be_allowed_on_the_port"]},
)
def _namespace_guard_open(data: Json) -> None:
    p4_edits.default(data, "namespace_guard", "allow")


@mutation(
    "agents answer READs whatever their namespace",
    {FOREIGN_NODE: ["test_a_read_of_a_namespace_its_sender_may_not_use_is_dropped"]},
)
def _reads_of_all() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.pool.Pool.may_use", yes)


@mutation(
    "compiled code answers READs of any node",
    {FOREIGN_NODE: ["test_compiled_code_answers_no_node_that_a_namespace_is_not_for"]},
)
def _any_reader_compiled() -> AbstractContextManager[object]:
    return recompiled("may_use", "any_reader", "kvcast.protocol.lane")


@mutation(
    "the bulk entry point serves every node every namespace",
    {FOREIGN_NODE: ["test_bulk_requests_in_a_namespace_that_is_not_the_callers_are_refused"]},
)
def _bulk_of_all() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.serving.Serving._may_use", yes)


@mutation(
    "the bulk entry point takes every node's puts in every namespace",
    {FOREIGN_NODE: ["test_bulk_requests_in_a_namespace_that_is_not_the_callers_are_refused"]},
    also=["test_bulk_puts_of_wrong_bytes_or_foreign_blocks_are_refused"],
)
def _puts_of_all() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.serving.Serving._may_put", yes)


@mutation(
    "the local socket does not look at a client's tenants",
    {SOCKET_TENANT: [ONE_TENANT]},
)
def _sessions_of_all() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.sessions.Session._may_use", yes)


@mutation(
    "rooms given ahead are not bounded together",
    {AHEAD: ["test_rooms_given_ahead_are_few"]},
)
def _all_ahead() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.sessions.AHEAD_OF_ARENA", 1)


@mutation(
    "room that was given ahead is for a put of any namespace",
    {AHEAD: ["test_room_that_was_given_ahead_is_for_a_put_of_its_namespace_alone"]},
    line="local.Failed",
)
def _ahead_for_all() -> AbstractContextManager[object]:
    import msgspec

    def puts_anyway(put: Any) -> Any:
        def puts(self: Any, now: float, request: Any) -> None:
            room = self._tickets.get(request.ticket)
            if room is not None:
                namespace = room.block.namespace
                request = msgspec.structs.replace(request, namespace=namespace)
            put(self, now, request)

        return puts

    return around("kvcast.hostagent.core.sessions.Session._put", puts_anyway)


@mutation(
    "clients of some tenants get the index of all",
    {INDEX_TENANTS: ["test_a_client_let_in_for_some_tenants_gets_no_index"]},
    line="_local is None",
)
def _index_for_all() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.sessions.Session.may_share", property(yes))


@mutation(
    "clients may look up every namespace",
    {
        INDEX_TENANTS: ["test_a_namespace_with_a_secret_is_asked_for_and_never_looked_up"],
        INDEX_NUMBERS: ["test_a_namespace_that_is_taken_from_the_node_is_not_looked_up"],
    },
)
def _all_readable() -> AbstractContextManager[object]:
    def readable_anyway(state: Any) -> Any:
        def states(self: Any, namespace: int, meaning: int, *, readable: bool) -> None:
            state(self, namespace, meaning, readable=True)

        return states

    return around("kvcast.hostagent.core.shared_index.SharedIndex.state_namespace", readable_anyway)


@mutation(
    "clients forget what they were told that a number means",
    {
        INDEX_NUMBERS: [
            "test_a_client_does_not_find_another_namespace_under_the_number_that_it_was_told"
        ]
    },
    line="pytest.raises",
)
def _told_nothing() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.client.local_blocks.LocalBlocks.told", nothing)


@mutation(
    "the agent believes everything that a region says",
    {
        REGION: [
            "test_who_pins_beyond_its_share_is_cut_off",
            "test_nonsense_in_a_region_costs_its_client_its_pins_and_nobody_else",
            "test_a_client_that_writes_nonsense_is_cut_off_and_the_others_go_on",
        ]
    },
)
def _regions_believed() -> AbstractContextManager[object]:
    def believes(look: Any) -> Any:
        def looks(self: Any, region: Any) -> None:
            with mock.patch.object(self, "leave"), mock.patch.object(region, "offended"):
                look(self, region)

        return looks

    return around("kvcast.hostagent.core.shared_index.SharedIndex.look", believes)


@mutation(
    "clients get the index to write",
    {INDEX_FILE: ["test_the_index_cannot_be_written_by_clients_and_the_region_not_be_cut"]},
    also=["test_a_read_only_descriptor_of_the_arena_maps_for_reading_only"],
    line="pytest.raises",
)
def _index_writable() -> AbstractContextManager[object]:
    def opens_anyway(open_for_client: Any) -> Any:
        return lambda self, *, read_only=False: open_for_client(self)

    return around("kvcast.hostagent.tiers.arena.ArenaFile.open_for_client", opens_anyway)


@mutation(
    "the length of a region is not sealed",
    {INDEX_FILE: ["test_the_index_cannot_be_written_by_clients_and_the_region_not_be_cut"]},
    line="pytest.raises",
)
def _not_sealed() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.tiers.pin_region.fcntl.fcntl", nothing)


@mutation(
    "whoever says any token is the client that did not come back yet",
    {COMES_BACK: ["test_who_guesses_a_token_is_a_new_client"]},
    in_daemons=True,
)
def _any_token() -> AbstractContextManager[object]:
    def first(self: Any, hello: Any, _tenants: Any) -> Any:
        return next(iter(self._survivors.values()), None) if hello.resume is not None else None

    return replaced("kvcast.hostagent.network.local_server.LocalServer._resumable", first)


COURIER = "kvcast.protocol.courier"
COURIER_LOOKS = "asks the courier for what it may not look up"
COURIER_FORM = "says what is no question on its courier"
COURIER_SHARE = "has the courier give it more than its share"
COURIER_NODE = "answers for buckets that it does not own"
COURIER_DIGEST = "as a home, sends bytes that are not the digest's"


@mutation(
    "the courier takes questions about any namespace",
    {COURIER_LOOKS: ["test_a_namespace_that_means_another_thing_is_not_looked_up"]},
)
def _courier_looks() -> AbstractContextManager[object]:
    return recompiled("may_look_up", "any_namespace", f"{COURIER}.permissions", COURIER)


@mutation(
    "the courier takes messages of any form",
    {COURIER_FORM: ["test_what_is_no_question_is_an_offence"]},
)
def _courier_form() -> AbstractContextManager[object]:
    return recompiled("is_question", "any_message", f"{COURIER}.hearing", COURIER)


@mutation(
    "the courier gives a client what it asks for",
    {COURIER_SHARE: ["test_a_client_is_given_half_of_its_share_at_most"]},
)
def _courier_share() -> AbstractContextManager[object]:
    return recompiled("may_be_given", "any_share", f"{COURIER}.permissions", COURIER)


@mutation(
    "the courier hears every node",
    {COURIER_NODE: ["test_data_of_another_node_or_copy_is_not_taken"]},
)
def _courier_node() -> AbstractContextManager[object]:
    return recompiled("is_asked", "any_node_asked", f"{COURIER}.arrivals", COURIER)


@mutation(
    "the courier does not look at digests",
    {COURIER_DIGEST: ["test_bytes_that_are_not_the_digests_are_handed_over"]},
)
def _courier_digest() -> AbstractContextManager[object]:
    return recompiled("is_right", "any_digest", f"{COURIER}.arrivals", COURIER)


CONVEYOR = "kvcast.protocol.conveyor"
CONVEYOR_ASKS = "asks on a conveyor for what it may not have"
CONVEYOR_BRINGS = "as a home, brings by a conveyor what was not asked for"


@mutation(
    "a conveyor gives every namespace",
    {
        CONVEYOR_ASKS: [
            "test_what_a_node_may_not_use_is_not_given",
            "test_a_home_counts_nothing_that_the_node_may_not_use",
            "test_a_node_learns_nothing_of_who_wants_what_it_may_not_use",
        ]
    },
)
def _conveyor_asks() -> AbstractContextManager[object]:
    return recompiled("may_ask_for", "any_reader_of_a_conveyor", CONVEYOR)


@mutation(
    "a conveyor brings what it likes",
    {CONVEYOR_BRINGS: ["test_a_reply_that_answers_no_request_ends_a_conveyor"]},
)
def _conveyor_brings() -> AbstractContextManager[object]:
    return recompiled("is_reply", "any_reply", f"{COURIER}.conveyed", COURIER)


@mutation(
    "a conveyor brings the end of any copy",
    {CONVEYOR_BRINGS: ["test_the_end_of_another_copy_than_the_one_begun_is_handed_over"]},
)
def _conveyor_copies() -> AbstractContextManager[object]:
    return recompiled("is_of", "of_any_copy", f"{COURIER}.conveyed", COURIER)


LOOKUPS = "kvcast.protocol.lookups"
COUNTS = "as a home, says that it holds more than it was asked about"


@mutation(
    "a home counts as many as it likes",
    {COUNTS: ["test_a_home_that_holds_more_than_it_was_asked_about_is_believed_nothing"]},
)
def _counts() -> AbstractContextManager[object]:
    return recompiled("is_right_count", "any_count", LOOKUPS)


PUSHING = "kvcast.protocol.pushing"
PUT_FORM = "says what is no put on its courier"
PUT_ROOM = "puts what another was given to write"
PUSH_MAY = "pushes what a home is not to take"
PUSH_BYTES = "pushes other bytes than their digest's"
PUSH_VERDICT = "as a home, says of a block what it was not asked"


@mutation(
    "puts of any form are taken",
    {
        PUT_FORM: [
            "test_what_is_no_put_is_an_offence",
            "test_a_question_for_too_many_is_an_offence",
        ]
    },
)
def _put_form() -> AbstractContextManager[object]:
    return recompiled("is_put", "any_message", PUSHING)


@mutation(
    "any room is put for whoever says so",
    {
        PUT_ROOM: [
            "test_nobody_puts_what_another_was_given_to_write",
            "test_room_that_is_given_next_is_not_put_before",
        ]
    },
)
def _put_room() -> AbstractContextManager[object]:
    return recompiled("is_ones_room", "anybodys_room", PUSHING)


@mutation(
    "a room is put as any block",
    {PUT_ROOM: ["test_room_for_one_block_is_not_put_as_another"]},
)
def _put_another() -> AbstractContextManager[object]:
    return recompiled("is_for", "for_any_block", PUSHING)


@mutation(
    "a home takes blocks of every namespace",
    {PUSH_MAY: ["test_a_node_pushes_nothing_into_a_namespace_that_it_may_not_use"]},
)
def _push_namespace() -> AbstractContextManager[object]:
    return recompiled("may_push", "any_pusher", PUSHING)


@mutation(
    "a home takes blocks that mean another thing",
    {PUSH_MAY: ["test_a_block_of_another_meaning_is_not_taken"]},
)
def _push_meaning() -> AbstractContextManager[object]:
    return recompiled("means_the_same", "any_meaning", PUSHING)


@mutation(
    "a home takes blocks of buckets that are not its own",
    {PUSH_MAY: ["test_a_block_of_anothers_bucket_is_not_taken"]},
)
def _push_bucket() -> AbstractContextManager[object]:
    return recompiled("is_ours", "anybodys_bucket", PUSHING)


@mutation(
    "a home does not look at the digest of what is pushed",
    {
        PUSH_BYTES: ["test_a_block_of_other_bytes_than_its_digests_is_not_taken"],
        PUT_ROOM: ["test_what_a_client_writes_while_it_is_pushed_has_its_digest_or_is_not_taken"],
    },
)
def _push_digest() -> AbstractContextManager[object]:
    return recompiled("has_digest", "any_bytes", PUSHING)


@mutation(
    "a header is believed whatever it says",
    {PUSH_MAY: ["test_a_header_that_makes_no_sense_ends_a_connection"]},
)
def _push_header() -> AbstractContextManager[object]:
    return recompiled("is_push", "any_header", PUSHING)


@mutation(
    "a landing place waits for ever",
    {PUSH_BYTES: ["test_a_node_that_stops_in_the_middle_keeps_no_landing_place"]},
)
def _push_stops() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.pushing.Pushes.still", lambda _self, _now: [])


@mutation(
    "a room that is pushed is taken back",
    {PUT_ROOM: ["test_a_room_that_is_being_put_is_nobodys_to_take"]},
)
def _put_taken_back() -> AbstractContextManager[object]:
    return replaced(
        "kvcast.hostagent.core.pushing.Pushes.take_back", lambda _self, _client, _tickets: True
    )


@mutation(
    "a verdict is believed whatever it is on",
    {
        PUSH_VERDICT: [
            "test_a_verdict_on_nothing_ends_a_connection",
            "test_a_verdict_before_the_block_has_left_ends_a_connection",
        ]
    },
)
def _push_verdict() -> AbstractContextManager[object]:
    return recompiled("is_verdict", "any_verdict", PUSHING)


KEPT_BITS = "damages what an agent keeps"
KEPT_BYTES = "has the next agent use bytes again"
KEPT_FILES = "leaves a kept arena of another node"


@mutation(
    "a copy that was kept is believed without its digest",
    {KEPT_BITS: ["test_a_copy_whose_bytes_have_changed_is_never_given_to_anybody"]},
)
def _kept_bytes_believed() -> AbstractContextManager[object]:
    def believes(self: Any, copy: Any) -> bool:
        del self._doubtful[copy]
        return True

    return replaced("kvcast.hostagent.core.recovery.Recovery._is_right", believes)


@mutation(
    "an entry that was kept is believed without its check",
    {KEPT_BITS: ["test_an_entry_with_a_flipped_bit_is_not_another_blocks"]},
)
def _kept_entries_believed() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.tiers.index._check_of", lambda *_: 0)


@mutation(
    "clients look up what is in doubt",
    {KEPT_BITS: ["test_clients_see_nothing_before_every_copy_is_checked"]},
)
def _doubtful_shown() -> AbstractContextManager[object]:
    def shows(state: Any) -> Any:
        def stated(self: Any, pool: Any, namespace: int) -> None:
            with mock.patch.object(self, "recovery", None):
                state(self, pool, namespace)

        return stated

    return around("kvcast.hostagent.core.agent.AgentCore._state_namespace", shows)


@mutation(
    "the next agent knows nothing of what clients hold",
    {
        KEPT_BYTES: [
            "test_what_a_client_was_given_stays_where_it_is_for_the_next_agent",
            "test_a_put_that_was_begun_ends_at_the_next_agent",
        ]
    },
)
def _holders_forgotten() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.sessions.Session.restore", nothing)


@mutation(
    "nobody knows whether clients still map the arena",
    {KEPT_BYTES: ["test_whoever_still_maps_the_arena_keeps_it_and_finds_nothing_new"]},
)
def _maps_unknown() -> AbstractContextManager[object]:
    def opens(open_for_client: Any) -> Any:
        def unlocked(self: Any, *, read_only: bool = False) -> Any:
            with mock.patch.object(self, "locked_by_clients", False):
                return open_for_client(self, read_only=read_only)

        return unlocked

    return around("kvcast.hostagent.tiers.kept.KeptFile.open_for_client", opens)


@mutation(
    "the next agent does not wait until no card writes for the one before",
    {KEPT_BYTES: ["test_nobody_follows_an_agent_whose_memory_a_card_may_still_write[True]"]},
)
def _cards_forgotten() -> AbstractContextManager[object]:
    import msgspec

    def says(say: Any) -> Any:
        def cardless(self: Any, word: Any, fds: list[int] | None = None) -> None:
            say(self, msgspec.structs.replace(word, card=False) if word.card else word, fds)

        return cardless

    return around("kvcast.hostagent.supervisor.Place._say", says)


@mutation(
    "an agent takes over whatever lies there",
    {
        KEPT_FILES: [
            "test_what_another_has_kept_is_refused_by_name_and_stays_as_it_is",
            "test_a_file_that_is_none_of_ours_is_refused_and_not_touched",
        ]
    },
)
def _anything_kept() -> AbstractContextManager[object]:
    def believes(_options: Any, index_fd: int) -> int | None:
        return 7 if os.fstat(index_fd).st_size else None

    return replaced("kvcast.hostagent.tiers.kept._state_of", believes)


@mutation(
    "an agent takes over what others may write",
    {KEPT_FILES: ["test_a_file_that_others_may_write_is_not_believed"]},
)
def _others_files_kept() -> AbstractContextManager[object]:
    def opens(path: str) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    return replaced("kvcast.hostagent.tiers.kept._open", opens)


DISK_BITS = "damages what lies on an agent's disk"
DISK_FILES = "leaves a file of another node"
CLOCK = "sets a node's clock back"
COLD_OBJECTS = "changes objects of"
DISK_READS = "asks a home for blocks on its disk"
DELETED_ON_DISK = "has blocks on disk outlive"


@mutation(
    "bytes from disk are given without their digest",
    {DISK_BITS: ["test_damaged_bytes_are_never_served"]},
)
def _disk_believed() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.ssd.DAMAGED", "")


@mutation(
    "what was stored tomorrow lives on until then",
    {CLOCK: ["test_a_clock_that_was_set_back_makes_nothing_live_longer_than_from_now_on"]},
)
def _tomorrow_believed() -> AbstractContextManager[object]:
    def claims(original: Callable[..., None]) -> Callable[..., None]:
        def claim(self: Any, block: Any) -> None:
            now, self._now = self._now, float("inf")
            original(self, block)
            self._now = now

        return claim

    def begins(original: Callable[..., None]) -> Callable[..., None]:
        def begin(self: Any, copy: Any, state: Any, since: float | None = None) -> None:
            now = self._now
            self._now = now if since is None else max(now, since)
            original(self, copy, state, since)
            self._now = now

        return begin

    return all_of(
        around("kvcast.hostagent.core.ssd.SsdTier._claim", claims),
        around("kvcast.hostagent.core.store.Store._begins", begins),
    )


@mutation(
    "an entry on disk may leave no number for those after it",
    {
        DISK_BITS: [
            "test_an_entry_that_says_it_is_the_last_of_all_keeps_nobody_from_writing_another"
        ]
    },
)
def _any_order() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.tiers.ssd.layout.MAX_ORDER", 2**64)


@mutation(
    "an entry on disk is believed without its check",
    {DISK_BITS: ["test_an_entry_says_again_what_it_was_told_and_nothing_when_any_bit_is_another"]},
)
def _disk_entries_believed() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.tiers.ssd.layout._check", lambda *_: 0)


@mutation(
    "objects are given without their digest",
    {COLD_OBJECTS: ["test_objects_that_are_not_what_they_should_be_are_not_served"]},
)
def _cold_believed() -> AbstractContextManager[object]:
    from kvcast.hostagent.core.cold import HEAD

    def believes(take: Any) -> Any:
        def taken(self: Any, now: float, fetch: Any, data: Any) -> None:
            if len(data) <= HEAD.size:
                take(self, now, fetch, data)
                return
            room = fetch.begin(len(data) - HEAD.size)
            room[:] = data[HEAD.size :]
            fetch.ended(now, "", HEAD.unpack_from(data)[4], now)

        return taken

    return around("kvcast.hostagent.core.cold.ColdTier._take", believes)


@mutation(
    "an agent takes any file for its disk",
    {
        DISK_FILES: [
            "test_a_file_is_made_found_again_and_refused_to_others",
            "test_a_damaged_head_begins_anew_and_a_foreign_one_is_left_alone",
        ]
    },
)
def _any_disk() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.tiers.ssd.layout._identity_of", lambda *_: 7)


@mutation(
    "reads that wait for a disk are not bounded",
    {DISK_READS: ["test_reads_at_once_and_reads_that_wait_are_bounded"]},
)
def _disk_reads_unbounded() -> AbstractContextManager[object]:
    def reads(read: Any) -> Any:
        def unbounded(self: Any, *of: Any) -> bool:
            rules = replace(self.rules, max_reads_waiting=1 << 60)
            with mock.patch.object(self, "rules", rules):
                return bool(read(self, *of))

        return unbounded

    return around("kvcast.hostagent.core.ssd.SsdTier.read", reads)


@mutation(
    "a dropped namespace stays on disk",
    {DELETED_ON_DISK: ["test_a_dropped_namespace_is_gone_from_disk_at_once"]},
)
def _disk_keeps_deleted() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.ssd.SsdTier.drop_namespace", nothing)


@mutation(
    "every user of the machine gets in for all tenants",
    {SOCKET_TENANT: ["test_another_user_gets_what_its_rule_says"]},
)
def _rules_ignored() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.network.local_server.tenants_of", nothing)


@mutation(
    "a manifest's paths are followed wherever they lead",
    {
        OUTSIDE: [
            "test_a_path_that_should_not_be_written_is_refused[a/../b]",
            "test_a_path_that_should_not_be_written_is_refused[/etc/passwd]",
        ]
    },
)
def _paths_followed() -> AbstractContextManager[object]:
    return replaced(
        "kvcast.hostagent.models.manifest.parts_of", lambda path: tuple(path.split("/"))
    )


@mutation(
    "a manifest's sizes and blocks need not fit",
    {OUTSIDE: ["test_a_manifest_that_contradicts_itself_is_refused[wrong1]"]},
)
def _sizes_unchecked() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.models.manifest.blocks_in", lambda _size, _block: 2)


@mutation(
    "a fetched block is written whatever its bytes",
    {OTHER_BYTES: ["test_what_is_missing_or_a_lie_is_told_and_never_written"]},
    in_daemons=True,
)
def _blocks_unchecked() -> AbstractContextManager[object]:
    class Equal(bytes):
        """A key that equals all others."""

        def __eq__(self, _other: object) -> bool:
            return True

        def __ne__(self, _other: object) -> bool:
            return False

        __hash__ = bytes.__hash__

    return replaced("kvcast.hostagent.models.fetching.key_of", lambda _data: Equal())


@mutation(
    "a put that is not its digest's bytes is kept",
    {POISONS: ["test_bulk_puts_of_wrong_bytes_or_foreign_blocks_are_refused"]},
    line="wrong_digest",
)
def _put_not_verified() -> AbstractContextManager[object]:
    def believes(end_put: Any) -> Any:
        def end(self: Any, put: Any, header: Any, copy: Any, _digest: int) -> Any:
            return end_put(self, put, header, copy, header.digest)

        return end

    return around("kvcast.hostagent.core.serving.Serving.end_put", believes)


@mutation(
    "what comes by TCP is taken for what was promised",
    {
        LIES: [
            "test_wrong_bytes_among_right_ones_are_told_apart",
            "test_the_rest_of_a_block_is_checked_with_its_beginning",
        ]
    },
    line="outcomes",
)
def _bulk_not_verified() -> AbstractContextManager[object]:
    def believes(block_came: Any) -> Any:
        def came(self: Any, now: float, _digest: int | None) -> None:
            block_came(self, now, self._promised[0])

        return came

    return around("kvcast.protocol.links.bulk_caller.BulkConnection._block_came", believes)


@mutation(
    "a reader connects to where an offer says",
    {
        OFFERS: [
            "test_an_offer_names_the_bulk_link_and_no_offer_sends_a_reader_elsewhere",
        ]
    },
    line="tier",
)
def _offers_believed() -> AbstractContextManager[object]:
    def believes(take_offer: Any) -> Any:
        def takes(self: Any, now: float, event: Any) -> None:
            take_offer(self, now, event._replace(home=event.offer.port))

        return takes

    return around("kvcast.hostagent.core.reads.Reads._take_offer", believes)


@mutation(
    "a request by TCP may ask for any number of bytes at once",
    {MUCH: ["test_one_request_is_bounded_in_blocks_and_bytes"]},
)
def _bulk_without_bounds() -> AbstractContextManager[object]:
    return replaced("kvcast.protocol.links.bulk_callee.MAX_BULK_BYTES", 1 << 62)


@mutation(
    "a put whose bytes follow may be of any length",
    {MUCH: ["test_a_long_put_that_follows_unasked_breaks_the_rules"]},
    line="closed",
)
def _following_without_bounds() -> AbstractContextManager[object]:
    return replaced("kvcast.protocol.links.bulk_callee.MAX_FOLLOWING_BYTES", 1 << 62)


@mutation(
    "a put's bytes follow to whatever node",
    {SENT_UNASKED: ["test_a_puts_bytes_follow_unasked_only_to_whom_the_namespace_is_for"]},
    line="at_once",
)
def _sent_to_all() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.pool.Pool.may_use", yes)


@mutation(
    "what comes by RDMA is taken for what was promised",
    {LIES: ["test_bytes_that_are_not_the_promised_ones_are_not_taken"]},
    line="WRONG_DIGEST",
)
def _read_not_verified() -> AbstractContextManager[object]:
    def read(self: Any, _now: float, call: Any, *_: Any) -> None:
        self.ended(call, "done")

    return replaced("kvcast.protocol.links.rdma_caller.RdmaCaller.read", read)


@mutation(
    "what was put by RDMA is taken for what was promised",
    {POISONS: ["test_a_bit_that_flips_on_the_way_of_a_put_is_found_by_the_home"]},
    line="WRONG_DIGEST",
)
def _written_not_verified() -> AbstractContextManager[object]:
    return replaced("kvcast.protocol.links.rdma_callee.digest_of", lambda _view: mock.ANY)


@mutation(
    "the windows of a request stay open when it ends",
    {REACHES: ["test_a_put_is_written_and_committed_after_its_window_is_closed"]},
    line="windows",
)
def _windows_left_open() -> AbstractContextManager[object]:
    def ends(close_windows: Any) -> Any:
        def close(self: Any, now: float, request: Any) -> None:
            self._end_request(now, request)

        return close

    return around("kvcast.protocol.links.rdma_callee.RdmaCallee._close_windows", ends)


@mutation(
    "windows have no lease",
    {WINDOWS: ["test_windows_do_not_outlast_their_lease"]},
    line="outcomes",
)
def _without_lease() -> AbstractContextManager[object]:
    return replaced("kvcast.protocol.links.rdma_callee.RdmaCallee._late", nothing)


@mutation(
    "a caller may open any number of requests by RDMA",
    {WINDOWS: ["test_a_caller_has_so_many_requests_open_and_no_more"]},
    line="closed",
)
def _rdma_without_bounds() -> AbstractContextManager[object]:
    return replaced("kvcast.protocol.links.rdma_callee.MAX_RDMA_REQUESTS", 1 << 30)


@mutation(
    "who is no home of a block takes it",
    {POISONS: ["test_bulk_puts_of_wrong_bytes_or_foreign_blocks_are_refused"]},
    line="not_home",
)
def _taken_by_strangers() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.pool.Pool.is_home", yes)


@mutation(
    "a later put takes the place of the block that is held",
    {POISONS: ["test_the_first_copy_of_a_key_stays"]},
    line="block.data",
)
def _last_put_wins() -> AbstractContextManager[object]:
    def forgets(begin_put: Any) -> Any:
        def begin(self: Any, put: Any, header: Any) -> Any:
            from kvcast.protocol.messages.wire import BlockId

            self._store.drop(BlockId(put.namespace, header.key))
            return begin_put(self, put, header)

        return begin

    return around("kvcast.hostagent.core.serving.Serving.begin_put", forgets)


@mutation("clients of one tenant drop another's blocks", {DROPS: [ONE_TENANT]}, line="Failed")
def _drops_of_all() -> AbstractContextManager[object]:
    return _session_forgets_tenants_for("Drop")


def _session_forgets_tenants_for(*kinds: str) -> AbstractContextManager[object]:
    def forgets(handle: Any) -> Any:
        def handles(self: Any, now: float, request: Any) -> None:
            with ExitStack() as stack:
                if type(request).__name__ in kinds:
                    stack.enter_context(mock.patch.object(self, "_tenants", None))
                handle(self, now, request)

        return handles

    return around("kvcast.hostagent.core.sessions.Session.handle", forgets)


@mutation("restricted clients see the counters", {TIMES: [ONE_TENANT]}, line="Failed")
def _counters_for_all() -> AbstractContextManager[object]:
    return _session_forgets_tenants_for("GetStats")


@mutation("restricted clients see all tenants' names", {TIMES: [ONE_TENANT]}, line="described")
def _names_for_all() -> AbstractContextManager[object]:
    def forgets(describe: Any) -> Any:
        def describes(self: Any, request: Any) -> None:
            if request.keys:
                return describe(self, request)
            with mock.patch.object(self, "_tenants", None):
                return describe(self, request)

        return describes

    return around("kvcast.hostagent.core.sessions.Session._describe", forgets)


@mutation(
    "quotas evict whatever is oldest",
    {FILLS: ["test_a_namespace_evicts_only_its_own_blocks_for_its_quota"]},
    line="peek",
)
def _quota_of_all() -> AbstractContextManager[object]:
    def evicts_oldest(self: Any, namespace: int, state: Any, more_bytes: int) -> None:
        quota = self._quotas.get(namespace, self._default_quota)
        if quota and state.used_bytes + more_bytes > quota:
            self._evict(next(iter(self._evictable.values())))

    return replaced("kvcast.hostagent.core.store.Store._respect_quota", evicts_oldest)


@mutation(
    "quotas are not kept", {FILLS: ["test_a_namespace_evicts_only_its_own_blocks_for_its_quota"]}
)
def _no_quota() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.store.Store._respect_quota", nothing)


@mutation(
    "a namespace's rate is not looked at",
    {
        RATES: [
            "test_requests_beyond_a_rate_are_busy_and_counted_until_time_passes",
            "test_bytes_that_were_moved_are_paid_off_before_more_are",
        ]
    },
)
def _no_rates() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.limits.Limits.admit", yes)


@mutation(
    "a namespace with a rate may be looked up",
    {RATES: ["test_a_namespace_with_a_rate_is_asked_for_and_never_looked_up"]},
)
def _rates_looked_past() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.limits.Limits.is_limited", lambda _self, _n: False)


@mutation(
    "whoever came first has his turn first",
    {
        TURNS: [
            "test_flows_that_wait_share_by_weight_and_each_in_its_order",
            "test_a_tenant_that_asks_for_much_does_not_keep_another_waiting",
            "test_a_tenant_that_asks_for_much_by_rdma_does_not_keep_another_waiting",
        ]
    },
)
def _in_order_of_coming() -> AbstractContextManager[object]:
    def first(self: Any, but: Any = ()) -> int | None:
        return next((flow for flow in self._waiting if flow not in but), None)

    return replaced("kvcast.protocol.fair_queue.FairQueue.next_flow", first)


@mutation(
    "all requests of a connection are whoever's came first",
    {TURNS: ["test_requests_that_wait_for_their_namespaces_turn_leave_some_to_others"]},
)
def _requests_of_one() -> AbstractContextManager[object]:
    return replaced("kvcast.protocol.links.rdma_caller.ASSURED", 0)


@mutation(
    "a home answers the namespace that came first",
    {TURNS: ["test_a_namespace_that_asks_for_little_is_answered_before_one_that_asks_for_much"]},
)
def _answers_without_turns() -> AbstractContextManager[object]:
    return replaced(
        "kvcast.protocol.fair_queue.Shares.next_of", lambda _self, flows: next(iter(flows))
    )


@mutation(
    "a home's queue is whoever's filled it",
    {TURNS: ["test_a_tenant_cannot_fill_the_queue_for_others"]},
)
def _queue_without_room() -> AbstractContextManager[object]:
    return replaced(
        "kvcast.protocol.responder.responder.Responder._has_room",
        lambda self, _namespace: self._job_count < self.config.max_jobs,
    )


@mutation(
    "a home's TCP is whoever's has the most connections",
    {TURNS: ["test_who_takes_less_than_its_share_waits_for_nobody"]},
)
def _departures_without_turns() -> AbstractContextManager[object]:
    return replaced("kvcast.protocol.links.departures.Departures.may_send", lambda *_: sys.maxsize)


@mutation(
    "connections to a node are whoever's has taken them",
    {TURNS: ["test_a_namespace_without_a_connection_does_not_wait_for_those_that_others_have"]},
)
def _connections_without_turns() -> AbstractContextManager[object]:
    def next_flow(self: Any, peer: Any) -> int | None:
        free = len(peer.busy) < self.options.connections_per_peer
        return peer.queue.next_flow() if free else None

    return replaced("kvcast.protocol.links.bulk_caller.BulkCaller._next_flow", next_flow)


@mutation(
    "a reader's window is whoever's filled it",
    {TURNS: ["test_a_namespace_that_has_nothing_in_flight_does_not_wait_for_anothers_segments"]},
)
def _windows_without_turns() -> AbstractContextManager[object]:
    return replaced("kvcast.protocol.requester.asking._ASSURED", 0)


@mutation(
    "what was deleted is kept",
    {KEPT: ["test_a_deleted_namespaces_space_is_free_at_once_and_it_is_not_asked_for_again"]},
)
def _deleted_kept() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.store.Store.drop_namespace", lambda _self, _ns, **_: 0)


@mutation(
    "what has outlived its time is kept",
    {KEPT: ["test_blocks_that_outlived_their_time_are_not_served_and_counted_as_expired"]},
)
def _nothing_expires() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.store.Store._outlived", nothing)


@p4_mutation(
    "a pending entry's fingerprint leaves out the namespace",
    {SHARES_ENTRY: ["test_tenants_never_share_an_entry"]},
)
def _fingerprint_without_namespace(data: Json) -> None:
    for action in data["actions"]:
        for primitive in action["primitives"]:
            # The compiler puts the fingerprint's making into the comparison with it, too.
            target = str(primitive["parameters"][0].get("value"))
            if "local_metadata_t._fingerprint" in target or "local_metadata_t._mine" in target:
                _without_field(primitive["parameters"][1], ["kvcast", "namespace"])


def _without_field(part: Any, field: list[str]) -> None:
    """Put 0 in a field's place, wherever it stands in an expression."""
    if isinstance(part, dict):
        if part.get("type") == "field" and part.get("value") == field:
            part["type"], part["value"] = "hexstr", "0x0"
            return
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            _without_field(each, field)


@p4_mutation(
    "a READ joins whatever waits in its entry",
    {
        SHARES_ENTRY: ["test_tenants_never_share_an_entry"],
        OTHERS_ANSWER: ["test_a_tenant_cannot_take_another_s_place"],
    },
)
def _entry_not_matched(data: Json) -> None:
    p4_edits.redirect(data, "coalescing", {"collide": "join", "take_over": "join"})


@mutation(
    "whoever asks is a tenant",
    {NAMES: ["test_a_secret_goes_to_no_node_but_its_tenants"]},
    line="isinstance(refused, Refused)",
)
def _any_tenant() -> AbstractContextManager[object]:
    def lenient(namespace: Any) -> Any:
        def find(self: Any, tenant: str, *rest: str) -> Any:
            if tenant in self.rules.tenants:
                return namespace(self, tenant, *rest)
            from kvcast.controller.core.namespaces import TenantRules

            with mock.patch.object(self, "rules", TenantRules(secrets=self.rules.secrets)):
                return namespace(self, tenant, *rest)

        return find

    return around("kvcast.controller.core.namespaces.Namespaces.namespace", lenient)


@mutation("namespaces are not counted", {NAMES: ["test_names_are_bounded"]}, line="raises")
def _endless_namespaces() -> AbstractContextManager[object]:
    class Uncounted(dict[Any, Any]):
        def __len__(self) -> int:
            return 0

    return around(
        "kvcast.controller.core.namespaces.Namespaces.__init__",
        lambda init: lambda self, *a, **k: init(self, *a, **{"by_number": Uncounted()} | k),
    )


@mutation(
    "a namespace has as many groups as it likes",
    {NAMES: ["test_names_are_bounded"]},
    line="raises",
)
def _endless_groups() -> AbstractContextManager[object]:
    def uncounted(items: Any) -> int:
        return 0 if isinstance(items, list) else len(items)

    return mock.patch("kvcast.controller.core.namespaces.len", uncounted, create=True)


@mutation(
    "a client has as many requests in flight as it likes",
    {SOCKET_FLOOD: ["test_more_requests_than_the_bound_are_busy"]},
)
def _endless_requests() -> AbstractContextManager[object]:
    def uncounted(handle: Any) -> Any:
        def handles(self: Any, now: float, request: Any) -> None:
            self._in_flight = 0
            handle(self, now, request)

        return handles

    return around("kvcast.hostagent.core.sessions.Session.handle", uncounted)


# === host against pool ============================================================================

AS_NODE = "registers as another node"
AS_NODE_IN_BULK = "calls itself another node"
AS_CONTROLLER = "poses as the controller"
AS_NODE_AT_ADDRESS = "poses as a node at its address"
PROGRAMS = "programs the switch"
SPOOFS = "sends from another host's address"
ANSWERS = "answers for buckets"
CONNECTIONS = "floods an entry point with connections"
NONSENSE = "floods an entry point with nonsense"
REQUESTS = "floods the HTTP API"
ROUTER_FLOOD = "floods the router"
PAGE = "gives itself a name that is markup"
STALE = "serves a stale copy"
READS = "floods a home with READs"
ENTRIES = "fills the switch's pending entries"
GROUPS = "has the switch send blocks"

POOL_OVER_TLS = "test_a_pool_works_over_tls_and_tells_nobody_who_may_not_know"


class AnyName(str):
    """A node id that equals any other."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, _other: object) -> bool:
        return True

    def __ne__(self, _other: object) -> bool:
        return False


def _anybody(_writer: Any, role: str, _name: str | None = None) -> Any:
    class Anybody:
        name = AnyName("anybody")

    return Anybody()


@mutation(
    "a node may register under any name", {AS_NODE: ["test_a_node_cannot_register_as_another"]}
)
def _any_registration() -> AbstractContextManager[object]:
    return replaced("kvcast.controller.agent_links.expect_peer", _anybody)


@mutation(
    "a caller is the node that it says it is",
    {AS_NODE_IN_BULK: ["test_agents_put_and_get_over_tls"]},
    line="it was answered",
)
def _any_caller() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.network.bulk_link.expect_peer", _anybody)


@mutation(
    "agents register with whoever listens",
    {AS_CONTROLLER: ["test_an_agent_does_not_register_with_a_node"]},
)
def _any_controller() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.network.control_link.expect_peer", _anybody)


@mutation(
    "callers do not ask who answers",
    {AS_NODE_AT_ADDRESS: ["test_a_put_goes_to_nobody_but_the_node_that_it_is_for"]},
)
def _any_callee() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.network.bulk_link.expect_peer", _anybody)


@mutation(
    "every part of the cluster programs the switch",
    {PROGRAMS: [POOL_OVER_TLS]},
    line='answer("node-1")',
    in_daemons=True,
)
def _anybody_programs() -> AbstractContextManager[object]:
    return replaced("kvcast.switchsim.p4runtime.service.admit", nothing)


@p4_mutation(
    "gate does not look at what port_guard says",
    {
        SPOOFS: ["test_a_source_address_belongs_to_its_port"],
        TO_ALL: ["test_a_write_from_a_strange_source_does_not_pass"],
    },
    also=["tests/stf/test_p4_stf.py::test_scenario_passes[port_guard-v1model-reference]"],
)
def _any_source_address(data: Json) -> None:
    p4_edits.ignore_key(data, "gate", "admitted")


@p4_mutation(
    "RDMA to a landing zone is ordinary traffic",
    {PAST_SWITCH: ["test_a_zone_is_not_reached_directly"]},
)
def _zones_reached(data: Json) -> None:
    p4_edits.forget(data, "to_zone", "kind")


@p4_mutation(
    "whatever a home sends to the pool's queue pair is a WRITE",
    {TO_ALL: ["test_what_is_no_home_s_write_does_not_pass"]},
)
def _any_form(data: Json) -> None:
    p4_edits.default(data, "write_form", "well_formed")


@mutation(
    "a home writes wherever a READ says",
    {OTHERS_ANSWER: ["test_a_read_with_another_place_than_its_segment_s_is_not_written"]},
)
def _any_place() -> AbstractContextManager[object]:
    return replaced("kvcast.protocol.responder.responder.Responder._may_write", yes)


@p4_mutation(
    "the parser takes a disguised datagram for ordinary",
    {SPOOFS: ["test_no_disguise_carries_a_datagram_past_the_guard"]},
)
def _disguises_pass(data: Json) -> None:
    for parser in data["parsers"]:
        for state in parser["parse_states"]:
            if state["name"].endswith(("tagged_frame", "options_before_udp")):
                assert [operation["op"] for operation in state["parser_ops"]] == ["verify"]
                state["parser_ops"] = []


@p4_mutation(
    "bucket_home lets every port answer",
    {
        ANSWERS: ["test_only_a_home_of_the_bucket_answers"],
        OTHER_HOME: ["test_only_a_bucket_s_home_ends_a_wait"],
    },
)
def _any_port_answers(data: Json) -> None:
    p4_edits.default(data, "bucket_home", "home")


@mutation(
    "readers take DATA from any node",
    {ANSWERS: ["test_data_from_a_node_that_is_no_home_is_dropped"]},
)
def _any_home() -> AbstractContextManager[object]:
    class Everybody(frozenset[int]):
        def __contains__(self, _node: object) -> bool:
            return True

    def listens(init: Any) -> Any:
        def listening(self: Any, *arguments: Any) -> None:
            init(self, *arguments)
            self.sources = Everybody()

        return listening

    return around("kvcast.protocol.requester.failover.Candidates.__init__", listens)


@mutation(
    "compiled code puts DATA from any node in its place",
    {ANSWERS: ["test_compiled_code_takes_data_from_those_who_are_listened_to"]},
)
def _any_home_compiled() -> AbstractContextManager[object]:
    return recompiled("_is_source", "any_node")


@mutation(
    "readers do not check the assembled block",
    {
        LIES: [
            "test_wrong_bytes_are_never_delivered_and_the_replica_answers",
            "test_a_lie_does_not_get_into_the_switch_for_good",
            "test_data_of_a_liar_never_becomes_a_block",
        ]
    },
    in_daemons=True,
)
def _digest_not_checked() -> AbstractContextManager[object]:
    return replaced("kvcast.protocol.requester.assembly.Assembly.verified", yes)


@mutation(
    "at a listener there is room for all",
    {CONNECTIONS: ["test_connections_beyond_the_bound_are_closed_and_counted"]},
)
def _endless_connections() -> AbstractContextManager[object]:
    return replaced("kvcast.service.listener.Listener._bound_met", nothing)


@mutation(
    "one address may have all places",
    {
        CONNECTIONS: [
            "test_one_address_cannot_take_all_places",
            "test_one_network_cannot_take_all_places_by_having_many_addresses",
        ]
    },
)
def _endless_connections_of_one() -> AbstractContextManager[object]:
    def bound_met(self: Any, _address: str) -> str | None:
        return "connections_at_bound" if self.connections >= self._bounds.connections else None

    return replaced("kvcast.service.listener.Listener._bound_met", bound_met)


DAWDLES = "test_who_dawdles_over_the_handshake_takes_a_place_and_loses_it"


@mutation("who shakes hands takes no place", {CONNECTIONS: [DAWDLES]})
def _handshakes_not_counted() -> AbstractContextManager[object]:
    def connections(self: Any) -> int:
        self._forget_closed()
        return len(self._open)

    return replaced("kvcast.service.listener.Listener.connections", property(connections))


@mutation("a handshake may take for ever", {CONNECTIONS: [DAWDLES]})
def _endless_handshakes() -> AbstractContextManager[object]:

    return replaced("asyncio.sslproto.SSLProtocol._check_handshake_timeout", nothing)


def _nameless(target: str, named: str, error: type[Exception]) -> AbstractContextManager[object]:
    """A function's named errors come out of it as another, which its entry point does not name."""
    home, _, name = named.rpartition(".")
    kind = getattr(_found(home), name)

    def forgets(function: Any) -> Any:
        def nameless(*arguments: Any, **rest: Any) -> Any:
            try:
                return function(*arguments, **rest)
            except kind as cause:
                raise error(str(cause)) from cause

        return nameless

    return around(target, forgets)


@mutation(
    "what an entry point gets wrong comes out as an error that it does not name",
    {NONSENSE: ["test_an_entry_point_takes_hostile_inputs_well"]},
)
def _nameless_errors() -> AbstractContextManager[object]:
    class NoFramingError(Exception):
        """Nobody raises it, so a handler of it handles nothing."""

    async def body(request: Any, kind: Any) -> Any:
        import msgspec

        return msgspec.json.decode(await request.read(), type=kind)

    return all_of(
        replaced("kvcast.bench.fuzz.engine._SHRINK_TRIES", 5),  # what is found need not be small
        _nameless(
            "kvcast.protocol.messages.wire.decode",
            "kvcast.protocol.messages.wire.WireError",
            KeyError,
        ),
        _nameless(
            "kvcast.hostagent.tiers.arena._remove_stale",
            "kvcast.hostagent.tiers.arena.ArenaError",
            KeyError,
        ),
        _nameless(
            "kvcast.hostagent.tiers.kept._try_open",
            "kvcast.hostagent.tiers.kept.ArenaError",
            KeyError,
        ),
        _nameless(
            "kvcast.hostagent.tiers.ssd.layout.open_formatted",
            "kvcast.hostagent.tiers.ssd.layout.SsdError",
            KeyError,
        ),
        around(
            "kvcast.hostagent.core.shared_index.SharedIndex.look",
            lambda _look: lambda self, region: self._look(region),
        ),
        replaced("kvcast.hostagent.client.local_blocks.AgentGoneError", KeyError),
        replaced("kvcast.hostagent.network.local_server.FramingError", NoFramingError),
        replaced("kvcast.protocol.links.stream.FramingError", NoFramingError),
        replaced("kvcast.controller.core.pool.NamespaceError", NoFramingError),
        _nameless(
            "kvcast.hostagent.core.pool.Pool.__init__",
            "kvcast.hostagent.core.pool.PoolMapError",
            KeyError,
        ),
        replaced("kvcast.controller.http.api._body", body),
        _nameless("kvcast.switchsim.loader.load", "kvcast.switchsim.ir.ProgramError", KeyError),
        replaced("kvcast.switchsim.p4runtime.entities.P4RuntimeError", NoFramingError),
        replaced("kvcast.switchsim.p4runtime.service.P4RuntimeError", NoFramingError),
        _nameless(
            "kvcast.controller.http.tokens.parse",
            "kvcast.controller.http.tokens.TokensError",
            KeyError,
        ),
        _nameless(
            "kvcast.workloads.traces.read_trace",
            "kvcast.workloads.generators.WorkloadError",
            KeyError,
        ),
        _nameless("kvcast.switchsim.flags.parse", "builtins.SystemExit", KeyError),
        _nameless(
            "kvcast.routing.core.kv_events.decode_batch",
            "kvcast.routing.core.kv_events.EventError",
            KeyError,
        ),
        _nameless("kvcast.routing.prompts.body_of", "kvcast.routing.prompts.PromptError", KeyError),
    )


@mutation(
    "an agent does not count the clients that it cuts off",
    {NONSENSE: ["test_no_entry_point_breaks_and_everything_is_accounted_for"]},
    line="problems",
    in_daemons=True,
)
def _offences_not_counted() -> AbstractContextManager[object]:
    def complains(self: Any, what: str, _why: str) -> None:
        if what == "a client was cut off":
            self._core.metrics.local_protocol_errors_total -= 1

    return replaced("kvcast.hostagent.network.local_server.LocalServer.complain", complains)


@mutation(
    "no client of the HTTP API has a rate",
    {
        REQUESTS: [
            "test_a_client_beyond_its_rate_is_told_when_to_come_back",
            "test_the_agents_server_has_the_bounds_of_all_our_servers",
        ]
    },
)
def _no_rate() -> AbstractContextManager[object]:
    return replaced("kvcast.service.http_limits.RateLimit.wait_s", lambda *_: 0.0)


@mutation(
    "the page may load and ask whatever it likes",
    {PAGE: ["test_the_files_of_the_page_may_only_ask_their_controller"]},
)
def _page_without_a_policy() -> AbstractContextManager[object]:
    return replaced("kvcast.controller.http.page.HEADERS", {})


@mutation("a body may be of any length", {REQUESTS: ["test_a_body_beyond_the_bound_is_refused"]})
def _endless_bodies() -> AbstractContextManager[object]:
    return replaced("kvcast.service.http.MAX_BODY_BYTES", 1 << 30)


@mutation(
    "a connection may stay without asking for anything",
    {
        REQUESTS: ["test_a_connection_that_asks_for_nothing_is_closed"],
        ROUTER_FLOOD: ["test_a_connection_that_says_nothing_is_closed"],
    },
)
def _silent_connections() -> AbstractContextManager[object]:
    return replaced("kvcast.service.http_connections.HttpConnections._must_speak", nothing)


@p4_mutation(
    "what is stored in a slot is valid in every generation",
    {STALE: ["test_a_new_generation_starts_empty"]},
)
def _generation_ignored(data: Json) -> None:
    for pipeline in data["pipelines"]:
        for condition in pipeline["conditionals"]:
            text = json.dumps(condition["expression"])
            if "slot_validity_" in text and "local_metadata_t._generation" in text:
                condition["true_next"] = condition["false_next"]


def _home_without(**bounds: int) -> AbstractContextManager[object]:
    def unbounded(init: Any) -> Any:
        def begins(self: Any, config: Any, **rest: Any) -> None:
            init(self, replace(config, **bounds), **rest)

        return begins

    return around("kvcast.protocol.responder.responder.Responder.__init__", unbounded)


@mutation(
    "one reader's answers may fill a home's queue",
    {READS: ["test_a_reader_cannot_fill_the_queue_for_others"]},
)
def _endless_answers_of_one() -> AbstractContextManager[object]:
    return _home_without(max_jobs_per_reader=1 << 30)


@mutation(
    "all answers of a home may wait", {READS: ["test_a_reader_cannot_fill_the_queue_for_others"]}
)
def _endless_answers() -> AbstractContextManager[object]:
    return _home_without(max_jobs=1 << 30)


@mutation("all misses of a home may wait", {READS: ["test_misses_waiting_are_bounded"]})
def _endless_misses() -> AbstractContextManager[object]:
    return _home_without(max_replies=1 << 30)


@p4_mutation(
    "a READ that meets another's entry is not sent on",
    {ENTRIES: ["test_a_third_segment_in_the_set_is_forwarded_plain_and_changes_nothing"]},
)
def _taken_entry_swallows(data: Json) -> None:
    p4_edits.redirect(data, "coalescing", {"collide": "join"})


@p4_mutation(
    "an entry is held for ever",
    {
        ENTRIES: ["test_a_lease_that_ran_out_gives_the_entry_to_another_segment"],
        OTHERS_ANSWER: ["test_a_late_write_reaches_who_waits_for_that_place_now"],
    },
)
def _endless_entries(data: Json) -> None:
    p4_edits.redirect(data, "coalescing", {"ask_again": "join", "take_over": "collide"})


@p4_mutation(
    "whoever names a group speaks for it", {GROUPS: ["test_a_stranger_cannot_speak_for_a_group"]}
)
def _group_of_strangers(data: Json) -> None:
    for action in data["actions"]:
        if action["name"].endswith("reader_group.intersect"):
            (assignment,) = action["primitives"]
            expression = assignment["parameters"][1]["value"]["value"]
            assert expression["op"] == "&"
            expression["right"] = {"type": "hexstr", "value": "0xffffffff"}


@p4_mutation(
    "a group that nobody made is everybody",
    {GROUPS: ["test_a_group_that_nobody_made_is_no_group"]},
)
def _group_of_all(data: Json) -> None:
    for action in data["actions"]:
        for primitive in action["primitives"]:
            target, value = primitive["parameters"][0], primitive["parameters"][-1]
            if "reader_group_group_bits" in str(target) and value["type"] == "hexstr":
                value["value"] = "0x0000000f"


@mutation(
    "a group takes nodes that may not use its namespace",
    {GROUPS: ["test_a_group_takes_only_nodes_that_may_use_its_namespace"]},
    errors=["IndexError"],
)
def _group_of_foreign_nodes() -> AbstractContextManager[object]:
    def forgets(group: Any) -> Any:
        def finds(self: Any, namespace: int, node_ids: list[str], known: Any) -> Any:
            from msgspec.structs import replace as changed

            open_ = {number: changed(info, nodes=[]) for number, info in self.by_number.items()}
            with mock.patch.object(self, "by_number", open_):
                return group(self, namespace, node_ids, known)

        return finds

    return around("kvcast.controller.core.namespaces.Namespaces.group", forgets)


@mutation(
    "a node that may not use a namespace finds its readers, and makes its groups",
    {
        GROUPS: ["test_a_company_is_bounded_and_of_those_who_may_read"],
        NAMES: ["test_a_node_makes_no_groups_in_a_namespace_that_it_may_not_use"],
    },
    errors=["IndexError"],
)
def _groups_of_strangers() -> AbstractContextManager[object]:
    return mock.patch("kvcast.controller.core.pool.Pool._may_use", return_value=True)


# === network ======================================================================================

READS_WIRE = "reads or changes what agents"
REPLAYS = "replays a connection"
GUESSES_TOKEN = "guesses a token"
FLIPS = "flips bits"

NO_CERTIFICATE = "test_nobody_without_a_certificate_of_the_cluster_gets_in"


@mutation("no entry point asks for a certificate", {READS_WIRE: [NO_CERTIFICATE]})
def _no_certificates() -> AbstractContextManager[object]:
    import ssl

    def asks_nobody(load: Any) -> Any:
        def loads(self: Any) -> Any:
            contexts = load(self)
            contexts.server.verify_mode = ssl.CERT_NONE
            return contexts

        return loads

    return around("kvcast.service.tls.Credentials._load", asks_nobody)


@mutation("entry points open without TLS", {READS_WIRE: [NO_CERTIFICATE]})
def _plain_entry_points() -> AbstractContextManager[object]:
    return all_of(
        _plain_listener(), replaced("kvcast.controller.agent_links.expect_peer", _anybody)
    )


def _plain_listener() -> AbstractContextManager[object]:
    def plain(init: Any) -> Any:
        def listens(
            self: Any, protocol: Any, bounds: Any, _credentials: Any = None, **rest: Any
        ) -> None:
            init(self, protocol, bounds, None, **rest)

        return listens

    return around("kvcast.service.listener.Listener.__init__", plain)


@mutation(
    "agents speak to each other in the clear",
    {READS_WIRE: ["test_agents_put_and_get_over_tls"]},
    line="in the clear",
)
def _plain_bulk() -> AbstractContextManager[object]:
    def plain(init: Any) -> Any:
        def begins(self: Any, core: Any, options: Any, *rest: Any) -> None:
            init(self, core, options, *[each for each in rest if callable(each)])

        return begins

    return all_of(
        around("kvcast.hostagent.network.bulk_link.BulkServer.__init__", plain),
        around("kvcast.hostagent.network.bulk_link.BulkCaller.__init__", plain),
    )


@mutation(
    "the authority before is trusted, too",
    {REPLAYS: ["test_a_new_authority_shuts_out_the_old_ones_nodes"]},
)
def _old_authorities() -> AbstractContextManager[object]:
    def keeps(load: Any) -> Any:
        def loads(self: Any) -> Any:
            contexts = load(self)
            former = getattr(self, "former", "")
            self.former = former + self.files.ca.read_text()
            if former:
                contexts.server.load_verify_locations(cadata=former)
            return contexts

        return loads

    return around("kvcast.service.tls.Credentials._load", keeps)


@mutation("sessions are resumed", {REPLAYS: ["test_no_session_is_resumed"]})
def _resumption() -> AbstractContextManager[object]:
    import ssl

    def resumes(make: Any) -> Any:
        def context(self: Any, protocol: int) -> Any:
            made = make(self, protocol)
            made.options &= ~ssl.OP_NO_TICKET
            if protocol == ssl.PROTOCOL_TLS_SERVER:
                made.num_tickets = 2
            return made

        return context

    return around("kvcast.service.tls.Credentials._context", resumes)


@mutation(
    "wrong tokens cost nothing",
    {GUESSES_TOKEN: ["test_failed_authentications_are_counted_and_slowed"]},
    line="slept",
)
def _free_guesses() -> AbstractContextManager[object]:
    return replaced("kvcast.service.http_limits.Failures.failed", lambda *_: 0.0)


@mutation(
    "any number of guesses waits at once",
    {GUESSES_TOKEN: ["test_guesses_that_wait_at_once_are_bounded"]},
)
def _endless_guesses() -> AbstractContextManager[object]:
    return replaced("kvcast.controller.http.api.MAX_SLOWED", 1 << 30)


@mutation(
    "a token has two random bytes",
    {GUESSES_TOKEN: ["test_a_token_is_shown_once_and_kept_as_a_hash"]},
    line="32",
)
def _short_tokens() -> AbstractContextManager[object]:
    return replaced("kvcast.cli.tokens.new_token", lambda: "kvcast_AAAA")


@mutation(
    "the bytes are not compared with the digest",
    {FLIPS: ["test_wrong_bytes_are_thrown_away_and_asked_for_elsewhere"]},
)
def _bytes_not_compared() -> AbstractContextManager[object]:
    return replaced("kvcast.protocol.requester.assembly.Assembly.verified", yes)


@mutation(
    "chunks of any copy go into one block", {FLIPS: ["test_chunks_of_another_copy_are_dropped"]}
)
def _copies_mixed() -> AbstractContextManager[object]:
    def mixes(receive_data: Any) -> Any:
        def takes(self: Any, now: float, source: int, frame: Any, fetch: Any) -> None:
            from msgspec.structs import replace

            if (copy := fetch.assembly) is not None:
                frame = replace(frame, digest=copy.digest, size=copy.size)
            receive_data(self, now, source, frame, fetch)

        return takes

    return around("kvcast.protocol.requester.requester.Requester._receive_data", mixes)


@mutation(
    "compiled code puts chunks of any copy into one block",
    {FLIPS: ["test_compiled_code_takes_chunks_of_the_chosen_copy"]},
)
def _copies_mixed_compiled() -> AbstractContextManager[object]:
    return recompiled("_is_of", "any_copy")


ROUTER_EVENTS = "as an engine, tells the router nonsense"
HINTS = "has an agent fetch another tenant's blocks"


@mutation(
    "a request to the router may be of any length",
    {ROUTER_FLOOD: ["test_a_request_that_is_too_long_is_refused"]},
)
def _endless_requests() -> AbstractContextManager[object]:
    def endless(make: Any) -> Any:
        def makes(self: Any, *words: Any) -> Any:
            request = make(self, *words)
            request._client_max_size = 1 << 30
            return request

        return makes

    return around("kvcast.routing.proxy.Proxy._request", endless)


@mutation(
    "the router takes as many requests as come",
    {ROUTER_FLOOD: ["test_requests_at_once_are_bounded"]},
)
def _router_never_full() -> AbstractContextManager[object]:
    return replaced("kvcast.routing.proxy.Proxy._is_full", nothing)


@mutation(
    "an engine is sent as many requests as come",
    {ROUTER_FLOOD: ["test_engines_that_are_full_refuse_more"]},
)
def _engines_never_full() -> AbstractContextManager[object]:
    return replaced("kvcast.routing.core.router.Router._is_full", nothing)


@mutation(
    "what is no batch of events is taken for an empty one",
    {ROUTER_EVENTS: ["test_what_is_no_batch_is_refused_counted_and_does_not_stop_the_stream"]},
)
def _events_unchecked() -> AbstractContextManager[object]:
    return replaced("kvcast.routing.core.kv_events.decode_batch", lambda _: [])


@mutation(
    "the router's tables grow with what they are told",
    {
        ROUTER_EVENTS: [
            "test_the_table_is_bounded",
            "test_the_table_is_bounded_keeps_what_is_used_and_counts_what_it_forgets",
        ]
    },
)
def _router_tables_grow() -> AbstractContextManager[object]:
    def endless(make: Any) -> Any:
        def makes(self: Any, *words: Any, **options: Any) -> None:
            make(self, *words, **(options | {"max_blocks": 1 << 60}))

        return makes

    return all_of(
        around("kvcast.routing.core.kv_events.EngineEvents.__init__", endless),
        replaced("kvcast.routing.core.index.PrefixIndex._turn", nothing),
    )


@mutation(
    "a hint may name any namespace",
    {HINTS: ["test_a_hint_for_a_namespace_of_others_is_refused"]},
)
def _hints_for_all() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.reads.Reads.refusal", nothing)


# === pool against engine ==========================================================================

OTHER_BLOCK = "has an engine take a block of another layout"
OTHERS_MEMORY = "writes into, or stores from, memory"
ENGINE_WAITS = "keeps an engine waiting"
LINK = "kvcast.hostagent.connectors.block_link"


@mutation(
    "an engine takes a block of any size and digest",
    {
        OTHER_BLOCK: [
            "test_namespaces_and_sizes_are_never_mixed",
            "test_bytes_that_changed_are_not_loaded_and_can_be_saved_anew",
        ]
    },
)
def _any_block() -> AbstractContextManager[object]:
    return replaced(f"{LINK}._wrong", lambda *_: "")


@mutation(
    "a transfer touches memory after its report",
    {OTHERS_MEMORY: ["test_nothing_touches_the_engines_memory_after_the_report"]},
)
def _copies_late() -> AbstractContextManager[object]:
    def copy(_: Any, do: Callable[[], None]) -> bool:
        do()
        return True

    return replaced("kvcast.hostagent.connectors.transfers.Transfer.copy", copy)


@mutation(
    "a pool that does not answer is asked all the same",
    {ENGINE_WAITS: ["test_a_pool_that_hangs_costs_its_deadlines_and_is_then_left_alone"]},
)
def _never_left_alone() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.connectors.health.Health.may_ask", yes)


@mutation(
    "an adapter has as much under way as is asked for",
    {ENGINE_WAITS: ["test_an_allowance_bounds_count_and_bytes_and_lets_one_of_any_size_go_alone"]},
)
def _no_allowance() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.connectors.transfers.Allowance.take", yes)


# === operators' mistakes ==========================================================================

OPEN = "listens or connects beyond loopback"
READABLE = "leaves a key or a tokens file readable"
HALF = "copies a certificate without its key"
ENDS = "lets a certificate end"
VIEWERS = "gives a viewer's token"
NOT_TAKEN_BACK = "forgets to take a token back"
LOGS = "sends logs to where"
OTHER_USERS = "lets another user of the node"


@mutation(
    "daemons go beyond loopback as they are told",
    {
        OPEN: [
            "test_an_agent_does_not_leave_loopback_without_tls",
            "test_a_controller_does_not_leave_loopback_without_tls",
            "test_a_router_does_not_leave_loopback_without_tls",
            "test_hints_are_not_taken_beyond_loopback_without_tls",
        ]
    },
    line="raises",
)
def _open_addresses() -> AbstractContextManager[object]:
    return all_of(
        replaced("kvcast.hostagent.flags.refuse_open_addresses", nothing),
        replaced("kvcast.controller.flags.refuse_open_addresses", nothing),
        replaced("kvcast.routing.flags.refuse_open_addresses", nothing),
    )


@mutation(
    "a key that others may read is used",
    {READABLE: ["test_a_private_key_that_others_may_read_is_refused"]},
    line="raises",
)
def _readable_keys() -> AbstractContextManager[object]:
    class Lenient:
        S_IRWXO = S_IWGRP = 0

    return replaced("kvcast.service.tls.stat", Lenient)


@mutation(
    "a tokens file that others may read is used",
    {READABLE: ["test_a_file_that_others_may_read_is_refused"]},
    line="raises",
)
def _readable_tokens() -> AbstractContextManager[object]:
    import stat

    class Lenient:
        S_IRWXG = S_IRWXO = 0
        S_ISREG = staticmethod(stat.S_ISREG)

    return replaced("kvcast.controller.http.tokens.stat", Lenient)


@mutation(
    "certificates and keys are written for everybody",
    {READABLE: ["test_every_file_is_its_owners_alone"]},
)
def _written_for_all() -> AbstractContextManager[object]:
    def for_all(write: Any) -> Any:
        def writes(path: Path, content: bytes) -> None:
            write(path, content)
            path.chmod(0o644)

        return writes

    return around("kvcast.service.authority._write", for_all)


@mutation(
    "the controller's state is written for everybody",
    {READABLE: ["test_secrets_outlive_the_controller_in_a_file_of_its_own"]},
    line="0o600",
)
def _state_for_all() -> AbstractContextManager[object]:
    return replaced("kvcast.controller.store._make_private", nothing)


@mutation(
    "files that do not fit are taken into use",
    {HALF: ["test_files_that_do_not_fit_leave_the_old_certificate_in_force"]},
    line="is before",
)
def _any_pair() -> AbstractContextManager[object]:
    import ssl

    def empties(keep_old: Any) -> Any:
        def gives_up(self: Any, stamp: Any, error: Any) -> None:
            keep_old(self, stamp, error)
            empty = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._contexts = type(self._contexts)(empty, empty, empty)

        return gives_up

    return around("kvcast.service.tls.Credentials._keep_old", empties)


@mutation(
    "daemons read their certificate once",
    {ENDS: ["test_a_new_certificate_is_shown_without_a_restart"]},
    line="serial",
)
def _read_once() -> AbstractContextManager[object]:
    return replaced("kvcast.service.tls.Credentials.refresh", lambda _self: False)


@mutation(
    "the switch reads its certificate once",
    {ENDS: ["test_the_switch_shows_a_new_certificate_without_a_restart"]},
    line="serial",
)
def _switch_reads_once() -> AbstractContextManager[object]:
    return replaced("kvcast.switchsim.p4runtime.tls.CertificateFiles._renewed", nothing)


@mutation(
    "renew writes no new certificates",
    {ENDS: ["test_renew_replaces_what_ends_soon_and_keeps_who_it_is"]},
)
def _nothing_renewed() -> AbstractContextManager[object]:
    def once(issue: Any) -> Any:
        def issues(self: Any, part: Any, **rest: Any) -> Any:
            from kvcast.service.authority import folder_name, read_part

            folder = self.folder / folder_name(part.identity)
            return read_part(folder) if folder.exists() else issue(self, part, **rest)

        return issues

    return around("kvcast.service.authority.Authority.issue", once)


@mutation(
    "a viewer may change things",
    {VIEWERS: ["test_roles_decide_who_may_read_and_who_may_change"]},
    line="403",
)
def _viewers_change() -> AbstractContextManager[object]:
    return around(
        "kvcast.controller.http.api.HttpApi._roles",
        lambda roles: lambda self, request: ("viewer", "operator") if roles(self, request) else (),
    )


@mutation(
    "who has no token reads",
    {VIEWERS: ["test_roles_decide_who_may_read_and_who_may_change"]},
    line="401",
)
def _anybody_reads() -> AbstractContextManager[object]:
    return around(
        "kvcast.controller.http.api.HttpApi._roles",
        lambda roles: lambda self, request: roles(self, request) or ("viewer",),
    )


@mutation(
    "the tokens file is read once",
    {NOT_TAKEN_BACK: ["test_a_removed_token_is_useless_at_once"]},
    line="refresh",
)
def _tokens_read_once() -> AbstractContextManager[object]:
    return replaced("kvcast.controller.http.tokens.TokensFile.refresh", lambda _self: False)


@mutation(
    "tokens never end",
    {NOT_TAKEN_BACK: ["test_a_token_is_shown_once_and_kept_as_a_hash"]},
    line="days=366",
)
def _endless_tokens() -> AbstractContextManager[object]:
    import datetime

    return around(
        "kvcast.controller.http.tokens.TokensFile.who",
        lambda who: lambda self, token, _today: who(self, token, datetime.date(2000, 1, 1)),
    )


@mutation(
    "tokens lie in their file as they are",
    {NOT_TAKEN_BACK: ["test_a_token_is_shown_once_and_kept_as_a_hash"]},
    line="read_text",
)
def _tokens_in_the_clear() -> AbstractContextManager[object]:
    def with_secret(write: Any) -> Any:
        from kvcast.cli import tokens as command

        def writes(path: Path, tokens: Any) -> None:
            write(path, tokens)
            with path.open("a") as file:
                file.writelines(f"# {secret}\n" for secret in made)

        made: list[str] = []
        new_token = command.new_token

        def makes() -> str:
            made.append(new_token())
            return made[-1]

        command.new_token = makes
        return writes

    return around("kvcast.cli.tokens.write", with_secret)


LOG_TEST = "test_no_secret_is_in_any_log"


@mutation("the HTTP API logs what is refused", {LOGS: [LOG_TEST]}, line="token")
def _tokens_logged() -> AbstractContextManager[object]:
    def logs(roles: Any) -> Any:
        def logging_(self: Any, request: Any) -> Any:
            from kvcast.controller.http.api import log

            log.debug("request with %s", request.headers.get("Authorization"))
            return roles(self, request)

        return logging_

    return around("kvcast.controller.http.api.HttpApi._roles", logs)


@mutation("agents log what the controller says", {LOGS: [LOG_TEST]}, line="form")
def _secrets_logged() -> AbstractContextManager[object]:
    def logs(new_secrets: Any) -> Any:
        def logging_(self: Any, message: Any) -> None:
            import logging

            for given in message.secrets:
                logging.getLogger("kvcast.hostagent").debug("secret %s", given.secret.hex())
            new_secrets(self, message)

        return logging_

    return around("kvcast.hostagent.core.agent.AgentCore._new_secrets", logs)


@mutation(
    "messages with secrets print them", {LOGS: ["test_no_printed_form_shows_a_secret"]}, line="repr"
)
def _secrets_printed() -> AbstractContextManager[object]:
    return replaced(
        "kvcast.protocol.messages.control.NamespaceSecret.__repr__",
        lambda self: f"NamespaceSecret({self.secret!r})",
    )


@mutation(
    "the socket is open to all users",
    {OTHER_USERS: ["test_the_socket_is_its_owners_alone_unless_others_are_let_in"]},
)
def _open_socket() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.access.AccessRules.lets_others_in", property(yes))


@mutation("whom no rule names gets in", {OTHER_USERS: ["test_whom_no_rule_names_is_not_let_in"]})
def _anybody_in() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.access.tenants_of", nothing)


# === for the judge ================================================================================

FOR_THE_JUDGE: dict[str, Mutation] = {
    "nothing": Mutation("nothing", {}, lambda: all_of()),
    "planted nowhere": Mutation(
        "planted nowhere", {}, lambda: replaced("kvcast.controller.core.namespaces.no_such_name", 1)
    ),
    "no import": Mutation(
        "no import",
        {},
        lambda: mock.patch.dict("sys.modules", {"kvcast.controller.core.namespaces": None}),
    ),
}


# --- what changes what a key or a number names ----------------------------------------------------


@mutation(
    "puts are taken whatever their namespace means",
    {
        "reads what was on its way when there came to be a secret": [
            "test_a_put_that_was_begun_before_the_secret_is_not_taken_after_it"
        ]
    },
)
def _meaning_not_compared() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.pool.Pool.meaning_of", lambda _self, _namespace: 0)


@mutation(
    "fetches go on when their namespace changes",
    {
        "reads what was on its way when there came to be a secret": [
            "test_a_fetch_ends_when_what_its_key_names_is_not_known_any_more"
        ]
    },
)
def _fetches_go_on() -> AbstractContextManager[object]:
    return replaced(
        "kvcast.hostagent.core.reads.Reads.forget_namespaces", lambda _self, _now, _namespaces: None
    )


@mutation(
    "namespaces are numbered in the order in which they are made",
    {
        "reads another namespace by its old number": [
            "test_a_namespace_gets_the_same_number_from_a_controller_that_knows_nothing"
        ]
    },
)
def _numbered_in_order() -> AbstractContextManager[object]:
    return replaced("kvcast.controller.core.namespaces.number_of", lambda *_parts: 1)


@mutation(
    "a number is taken for what it was when it was told",
    {
        "reads another namespace by its old number": [
            "test_a_client_does_not_read_another_namespace_under_the_number_that_it_was_told"
        ]
    },
)
def _told_is_told() -> AbstractContextManager[object]:
    return replaced(
        "kvcast.hostagent.core.sessions.Session._stands_for_another",
        lambda _self, _namespace: False,
    )


@mutation(
    "an arena is made of whatever lies there",
    {
        "leaves another agent's file, a link or a pipe": [
            "test_an_entry_point_takes_hostile_inputs_well[arena]",
            "test_a_live_agents_arena_is_not_taken_and_a_dead_ones_is_replaced",
        ]
    },
)
def _arena_of_whatever() -> AbstractContextManager[object]:
    import os

    def open_it(path: str) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    return replaced("kvcast.hostagent.tiers.arena._make_locked", open_it)


@mutation(
    "whatever comes for a group is taken",
    {
        "fills the memory of a reader group's nodes": [
            "test_only_members_take_what_they_did_not_ask_for_and_of_homes_alone",
            "test_what_is_taken_unasked_is_bounded_and_ends",
        ]
    },
)
def _overheard_unbounded() -> AbstractContextManager[object]:
    def overhear(self: Any, now: float, _source: int, block: Any, group: int) -> None:
        if block not in self._fetches:
            self._metrics.overheard_total += 1
            self._join(now, block, now + 1e9, None, group, True)

    return replaced("kvcast.hostagent.core.reads.Reads.overhear", overhear)


# --- engines' connectors --------------------------------------------------------------------------

_CONNECTORS = "kvcast.hostagent.connectors"


@mutation(
    "an engine's namespace is named by its model alone",
    {
        "has an engine compute with another's bytes": [
            "test_every_fact_that_decides_what_bytes_mean_makes_another_namespace"
        ]
    },
)
def _named_by_model() -> AbstractContextManager[object]:
    from kvcast.hostagent.connectors.naming import NamespaceName

    def name(*, model: str, **_facts: object) -> NamespaceName:
        return NamespaceName("t", model[:256], "-", "-")

    return replaced(f"{_CONNECTORS}.naming.namespace_name", name)


@mutation(
    "all layers of an engine's block have one key",
    {"has an engine take one group": ["test_parts_of_blocks_have_keys_of_their_own"]},
)
def _one_key() -> AbstractContextManager[object]:
    return replaced(
        f"{_CONNECTORS}.naming.keys_of", lambda one, groups: [one[:16] for _ in range(groups)]
    )


@mutation(
    "engines do not say how they hash",
    {
        "has engines hash prompts alike": [
            "test_engines_that_hash_otherwise_are_told",
            "test_seeds_are_told_apart_without_being_told",
        ]
    },
)
def _hashing_untold() -> AbstractContextManager[object]:
    return replaced(f"{_CONNECTORS}.naming.hashing_facts", lambda _algorithm, _seed: b"any")


@mutation(
    "an engine takes bytes as they lie in the arena",
    {
        "changes bytes in an agent's memory": [
            "test_bytes_that_changed_in_the_arena_are_not_loaded_and_make_room_for_right_ones"
        ]
    },
)
def _arena_believed() -> AbstractContextManager[object]:
    return replaced(f"{_CONNECTORS}.link.Block.verify", yes)


@mutation(
    "an agent believes every pace that it is told",
    {"spoils what operators see": ["test_a_pace_that_is_no_number_changes_nothing"]},
)
def _paces_believed() -> AbstractContextManager[object]:
    return replaced("kvcast.hostagent.core.engines._are_numbers", yes)


@mutation(
    "an engine waits for as long as the pool takes",
    {
        "holds an engine's requests up": [
            "test_a_pool_that_does_not_answer_holds_a_request_no_longer_than_a_lookup_may_take",
            "test_the_deadline_counts_from_the_engines_first_question",
        ]
    },
)
def _engines_wait() -> AbstractContextManager[object]:
    def timeless(matched: Any) -> Any:
        def match(self: Any, now: float, name: str, *rest: Any) -> Any:
            if (request := self._requests.get(name)) is not None:
                request.wanted_since = now
            return matched(self, now, name, *rest)

        return match

    return around(f"{_CONNECTORS}.planner.Planner.matched", timeless)


@mutation(
    "what failed is forgotten",
    {
        "has engines try for ever": [
            "test_a_failed_load_is_not_tried_again_for_that_request_nor_its_block_by_others",
            "test_a_dead_pool_is_left_alone_and_asked_again_later",
        ]
    },
)
def _failures_forgotten() -> AbstractContextManager[object]:
    def until(_self: Any, _now: float, _hashes: Any, _here: int, most: int) -> int:
        return most

    return all_of(
        replaced(f"{_CONNECTORS}.planner.Planner._there", until),
        replaced(f"{_CONNECTORS}.health.Health.failed", nothing),
    )


@mutation(
    "what comes late is written all the same",
    {
        "sends bytes late": [
            "test_nothing_is_written_once_a_load_was_reported",
            "test_nothing_is_written_after_the_report",
        ]
    },
)
def _written_late() -> AbstractContextManager[object]:
    def write(_self: Any, _part: int, copy: Callable[[], None]) -> bool:
        copy()
        return True

    return replaced(f"{_CONNECTORS}.loads.OpenLoad.write", write)


@mutation(
    "what was computed on a load that failed is saved",
    {
        "has a layer's bytes fail to come": [
            "test_what_was_computed_on_top_of_a_load_that_failed_is_never_saved"
        ]
    },
)
def _saved_in_doubt() -> AbstractContextManager[object]:
    def certain(heard: Any) -> Any:
        return lambda self, number, _came: heard(self, number, 1 << 30)

    return around(f"{_CONNECTORS}.planner.Planner._heard_of", certain)


@mutation(
    "a layer that nobody has waited for counts",
    {
        "has a layer's bytes fail to come": [
            "test_a_load_by_layers_of_which_a_layer_was_not_waited_for_counts_for_nothing"
        ]
    },
)
def _not_awaited() -> AbstractContextManager[object]:
    def waited(end: Any) -> Any:
        def report(self: Any, reason: str) -> Any:
            self._awaited.update(range(self.groups))
            return end(self, reason)

        return report

    return around(f"{_CONNECTORS}.loads.OpenLoad.end", waited)


@mutation(
    "engines ask and save without bounds",
    {
        "has an engine keep its memory": [
            "test_saves_beyond_the_bound_wait_and_leave_no_gap",
            "test_questions_are_bounded",
        ]
    },
)
def _engines_unbounded() -> AbstractContextManager[object]:
    class Uncounted(dict[int, str]):
        def __len__(self) -> int:
            return 0

    def unbounded(begin: Any) -> Any:
        def init(self: Any, options: Any, counters: Any) -> None:
            begin(self, replace(options, most_saving=1 << 30), counters)
            self._lookups_out = Uncounted()

        return init

    return around(f"{_CONNECTORS}.planner.Planner.__init__", unbounded)

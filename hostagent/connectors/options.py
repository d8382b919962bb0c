"""What an operator may say to a connector, in the engine's own configuration.

Owns: the names, defaults and bounds. Must not know: engines, or what is done with them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

SOCKET_VARIABLE: Final = "KVCAST_SOCKET"
"""Names the agent's socket where the configuration does not."""
DEFAULT_SOCKET: Final = "/run/kvcast/agent.sock"

Seconds = Annotated[float, Meta(ge=0.0, le=3600.0)]


class ConfigurationError(ValueError):
    """The connector's configuration is not understood; the message says where."""


class ConnectorOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The connector's options (vLLM: `kv_connector_extra_config`)."""

    socket: str = ""
    """The agent's Unix socket on this node; else the variable KVCAST_SOCKET, else
    /run/kvcast/agent.sock."""
    tenant: str = "default"
    """Whose namespaces these are."""
    model: str = ""
    """The model's name in the pool; by default the name or path by which the engine knows it. To
    be given where nodes keep one model under different paths."""
    version: str = ""
    """Anything that tells two states of a model of one name and revision apart."""
    deadline_s: Annotated[float, Meta(gt=0.0, le=3600.0)] = 2.0
    """The longest that the pool may hold a request up, from the moment at which the engine first
    asks for it until its blocks lie in the engine's memory. What has not come by then is
    computed."""
    lookup_s: Annotated[float, Meta(gt=0.0, le=60.0)] = 0.25
    """The share of it that finding out what the pool holds may take."""
    await_s: Seconds = 0.0
    """How long a request that says that its prompt is being computed elsewhere waits for that,
    while what is there already is fetched. 0: what requests say of it is not heard, since anybody
    may say it who can send requests, and reader groups are few."""
    fresh_s: Seconds = 0.5
    """How old an answer about a prompt's chain may be when the engine gets to it; an older one is
    asked for again."""
    retry_s: Seconds = 5.0
    """How long a block that could not be had counts as not there."""
    block_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = 1 << 20
    """Size of a block of the pool to aim at, in bytes: so many layers of one engine block go
    together."""
    load_by_layers: bool = False
    """Whether a request that is alone is computed while its blocks come, each layer as soon as it
    is there. Requests that come meanwhile wait until that step is over."""
    save_by_layers: bool = True
    """Whether blocks are saved layer by layer while a step computes, and not when it is over."""
    weigh: bool = True
    """Whether only so much of a prefix is loaded as comes sooner than it is computed, by what both
    have taken of late; else all of it is."""
    window_bytes: Annotated[int, Meta(ge=1024)] = 64 << 20
    """Blocks that one load has in the arena at once, in bytes (at most an eighth of the arena)."""
    least_tokens: Annotated[int, Meta(ge=0)] = 0
    """Prefixes shorter than this are computed; it is not worth the way."""
    saving_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.25
    """Share of the engine's KV memory that may be kept from reuse while it is being saved. Beyond
    it, saves wait; those of finished requests are left out."""
    save_s: Annotated[float, Meta(gt=0.0, le=3600.0)] = 10.0
    """How long one save may take, until its memory is given back."""
    save_generated: bool = True
    """Whether generated tokens are saved, too, and not only prompts."""
    prefetch: bool = True
    """Whether the agent begins to fetch when a request arrives, and not when it is scheduled."""
    verify: bool = True
    """Whether bytes are checked against their digest once more on their way into the engine."""
    lock_pages: bool = True
    """Whether the agent's arena is page-locked for copies to and from a GPU (`cudaHostRegister`),
    which makes them three to four times as fast; all of its pages are there then."""
    ack: Literal["home", "replicas", "local"] = "home"
    """What a save waits for, as in the client's `put`. Requests never wait for saves."""
    event_medium: Annotated[str, Meta(min_length=1, max_length=64)] = "KVCAST"
    """What KV events call the pool. `kvcast route` knows it by the default; Dynamo's router takes
    "EXTERNAL", and leaves out media that it does not know."""
    groups: bool = True
    """Whether ranks on several nodes that hold the same bytes read as a reader group."""

    @property
    def agent_socket(self) -> str:
        return self.socket or os.environ.get(SOCKET_VARIABLE, "") or DEFAULT_SOCKET


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of adapters through which an engine stores and loads blocks that it names itself
    (`block_link`)."""

    socket: str = ""
    """As in `ConnectorOptions`; so `tenant`, `model`, `version`, `verify` and `ack`."""
    tenant: str = "default"
    model: str = ""
    revision: str = ""
    """The model's revision, where the engine does not tell its adapters."""
    version: str = ""
    lookup_s: Annotated[float, Meta(gt=0.0, le=60.0)] = 0.25
    """The longest that a question what the pool holds may take; what is not known by then counts
    as not held."""
    load_s: Annotated[float, Meta(gt=0.0, le=3600.0)] = 2.0
    """The longest that a load may take; what has not come by then is computed."""
    save_s: Annotated[float, Meta(gt=0.0, le=3600.0)] = 10.0
    """The longest that a save may take, until its memory is given back."""
    retry_s: Seconds = 5.0
    """How long a block that could not be had counts as not held."""
    window_bytes: Annotated[int, Meta(ge=1024)] = 64 << 20
    """Blocks that one load or save has in the arena at once, in bytes (at most an eighth of it)."""
    waiting_bytes: Annotated[int, Meta(ge=1024)] = 1 << 30
    """Bytes of loads, and of saves, that may be under way; what exceeds it is not loaded, or not
    saved."""
    prefill_tokens_per_s: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    """What the engine computes of prompts, in tokens a second, which engines do not tell their
    adapters: what would come later than it is computed then counts as not held. 0: all that is
    held is loaded."""
    chunk_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """Tokens of one chunk, where the engine does not tell its adapters (LMCache's `chunk_size`)."""
    prefetch: bool = True
    """Whether the agent begins to fetch what it was asked about."""
    verify: bool = True
    ack: Literal["home", "replicas", "local"] = "home"

    @property
    def agent_socket(self) -> str:
        return self.socket or os.environ.get(SOCKET_VARIABLE, "") or DEFAULT_SOCKET


def parse_store_options(extra: Mapping[str, Any] | None) -> StoreOptions:
    """As `parse_options`."""
    try:
        return msgspec.convert(dict(extra or {}), StoreOptions)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"kvcast's adapter: {error}") from error


def parse_options(extra: Mapping[str, Any] | None) -> ConnectorOptions:
    """The options in an engine's configuration; ConfigurationError names what is wrong."""
    try:
        return msgspec.convert(dict(extra or {}), ConnectorOptions)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"kvcast's connector: {error}") from error


MOST_READERS: Final = 32
"""Nodes that may wait for one prompt as a reader group."""


class _Handover(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefilling: bool = False
    readers: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...],
        Meta(max_length=MOST_READERS),
    ] = ()


def handover_of(parameters: Mapping[str, Any] | None) -> tuple[bool, tuple[str, ...]]:
    """What a request says of its prompt, under "kvcast" in vLLM's `kv_transfer_params`: whether
    another engine is computing it (`prefilling`), and the nodes whose engines wait for that
    (`readers`). What is not understood counts as not said: it comes from a user."""
    try:
        said = msgspec.convert((parameters or {}).get("kvcast") or {}, _Handover)
    except (msgspec.ValidationError, AttributeError, TypeError):
        return False, ()
    return said.prefilling, tuple(dict.fromkeys(said.readers))

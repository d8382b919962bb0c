"""Where the fields of a frame's kvcast header begin, in bytes, for code that reads frames in place.

Owns: nothing of its own: all follow from `wire.KVCAST`. Must not know: who reads them. They are
names and no look-ups, since compiled code takes a module's constants only.
"""

from __future__ import annotations

from typing import Final

from kvcast.protocol.messages.wire import KVCAST

VERSION_AT: Final = KVCAST.offset_of("version")
OP_AT: Final = KVCAST.offset_of("op")
FLAGS_AT: Final = KVCAST.offset_of("flags")
NAMESPACE_AT: Final = KVCAST.offset_of("namespace")
GROUP_AT: Final = KVCAST.offset_of("group")
KEY_AT: Final = KVCAST.offset_of("key")
DIGEST_AT: Final = KVCAST.offset_of("digest")
SIZE_AT: Final = KVCAST.offset_of("size")
SEGMENT_AT: Final = KVCAST.offset_of("segment")
CHUNK_AT: Final = KVCAST.offset_of("chunk")
GATHER_AT: Final = KVCAST.offset_of("gather")
WANTED_AT: Final = KVCAST.offset_of("wanted")
TAG_AT: Final = KVCAST.offset_of("tag")

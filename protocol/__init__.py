"""What the parts of kvcast say to each other, and the cores that need no network to say it.

Start at `messages.wire` (one datagram), then `requester` and `responder` (its two ends). For
streams: `messages.framing`, `messages.control`, `messages.local`, `messages.bulk`, then `links`.

Compiled code that moves blocks without Python: `placement` (received frames), `lane` (answers to
READs), `courier` (gets of clients), `conveyor` (large blocks, by TCP), `pushing` (puts), `lookups`
and `chains` (how long a prefix is there), `meetings` (who wants the same block). Shared by all:
`pacing`, `fair_queue`, `timers`, `bounded_map`. Sockets and clocks are `hostagent.network`'s.
"""

"""What the parts of kvcast say to each other, and the cores that need no network to say it.

Start at `messages.wire` (one datagram), then `requester` and `responder` (its two ends). For
streams: `messages.framing`, `messages.control`, `messages.local`, `messages.bulk`, then `links`.
"""

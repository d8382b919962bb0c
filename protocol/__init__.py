"""What the parts of kvcast say to each other, and the cores that need no network to say it.

Start at `wire` (one datagram), then `requester` and `home` (the state machines on its two ends),
then `framing`, `control`, `local` and `bulk` (streams).
"""

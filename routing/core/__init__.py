"""The router's decisions: events and the present time in, choices out. No sockets, no clock.

`router` chooses, by `index` (who holds what), `load` (who is busy) and `costs` (what takes how
long). `kv_events` reads what engines say they hold, in the names that `hashing` makes.
"""

"""The controller's decisions, free of I/O and clocks. `pool` puts them together.

| for | modules |
|---|---|
| who is in the pool, and answers for what | `membership`, `placement`, `replicas`, `namespaces` |
| what the switch's memory holds | `tiers`, `admission`, `ghosts`, `residency`, `adaptive` |
| readers that go together | `companies`, `multicast_groups` |
| what is written to the switch | `program` (what it should hold), `reconcile` (what is to change) |
"""

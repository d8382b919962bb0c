"""Deterministic simulation: whole pools in virtual time, from a seed, under faults.

| for | modules |
|---|---|
| a run | `command` and `run`; `plan` (what will happen, from the seed), `cluster`, `shrink` |
| time, chance, and what frames and TCP do | `world`, `network`, `streams` |
| the daemons' cores in it | `agent`, `controller`, `switch`, and a `client` of an agent |
| ways between agents | `bulk`, `rdma` with `verbs`, `zones` |
| the same in compiled code | `conveyor` and `pushing`, on `moved_connections` |
| tiers below DRAM | `disk` with `disk_side`, `objects`, `tier_side` |
| what goes wrong | `faults`, `hostile` (hosts that lie), `namespaces` (an operator) |
| what judges | `model` with `model_writes`, `held` (quotas and ages), `blast` (weights) |
| other questions | `incast` with `card_host`, `crashes` (of a disk), `flows/` (10,000 hosts) |
"""

"""The agent's decisions, free of I/O and clocks. `agent` puts them together.

| for | modules |
|---|---|
| clients | `sessions`, `access`, `limits`, `shared_index` (what they pin by themselves) |
| gets, puts, questions | `reads` (with `fetches`: the way of each block), `writes`, `queries` |
| the same in compiled code | `courier`, `pushing`, `lookups` |
| other agents | `serving`, `handover`, `rdma_answers`, `bulk_requests`, `connection_ends` |
| what lies where | `store` (DRAM), `reservations`, `ssd` and `lower_tiers` (below it), `headroom` |
| an object store | `cold`, `cold_share` (quotas there) |
| the pool | `pool` (its map), `spread` (which holder to read from) |
| after another agent | `recovery` |
| numbers | `metrics`, `namespace_metrics`, `histogram`, `engines` (what they report), `tracing` |
"""

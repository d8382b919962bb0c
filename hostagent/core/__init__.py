"""The agent's decisions, free of I/O and clocks. `agent` puts them together.

| for | modules |
|---|---|
| clients | `sessions`, `access`, `limits`, `shared_index` (what they pin by themselves) |
| gets, puts, questions | `reads`, `writes`, `queries`; in compiled code `courier`, `pushing` |
| other agents | `serving`, `handover`, `writing` (answers by RDMA) |
| what lies where | `store` (DRAM), `ssd` and `lower_tiers` (below it), `cold` (an object store) |
| the pool | `pool` (its map), `spread` (which holder to read from) |
"""

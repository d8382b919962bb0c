"""The memory that holds an agent's blocks: the arena, what says what lies there, and the disks.

`arena` is DRAM and its allocator, `index` the table of its blocks that clients read, `kept` an
arena that outlives its agent, `ssd/` the files below DRAM, `policies/` what to evict. Which blocks
lie where is decided in `kvcast.hostagent.core.store` and `kvcast.hostagent.core.ssd`.
"""

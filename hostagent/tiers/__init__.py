"""The memory that holds an agent's blocks, a module a kind: today the DRAM arena alone."""

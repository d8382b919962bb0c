"""Questions about a pool, each answered by one file; and the workloads that ask them."""

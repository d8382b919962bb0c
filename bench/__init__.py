"""Questions about a pool, each answered by one module or folder."""

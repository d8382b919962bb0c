"""What inference engines ask of a pool, and the bytes of the blocks that they ask for."""

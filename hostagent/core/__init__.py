"""The agent's decisions, free of I/O and clocks."""

"""Pools of up to tens of thousands of hosts, simulated by flows instead of frames."""

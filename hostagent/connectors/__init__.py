"""Connectors: how inference engines use the pool through their own plug-in points.

Owns: one module an engine (`vllm`), which is all that imports that engine, and what they share:
decisions without I/O (`planner`, `loads`, `health`, `naming`), options, statistics, and the thread
that talks to the agent (`link`). Must not know: anything of the agent but its client library.
"""

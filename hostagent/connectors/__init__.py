"""Connectors: how inference engines use the pool through their own plug-in points.

Owns: one module for each plug-in point (`vllm`, `vllm_tier`, `lmcache`, `sglang`), which is all
that imports that engine, and what they share: decisions without I/O (`planner`, `loads`,
`transfers`, `found`, `health`, `naming`), options, statistics, and the thread that talks to the
agent (`agent_link`; with a plan of ours `link`, with the engine's own `block_link`). `vllm_plugin`
is what vLLM loads at its start. Must not know: anything of the agent but its client library.
"""

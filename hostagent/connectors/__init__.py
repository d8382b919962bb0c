"""Connectors: how inference engines use the pool through their own plug-in points.

Owns: one module for each plug-in point (`vllm`, `vllm_tier`, `lmcache`, `sglang`), which is all
that imports that engine, and what they share. Must not know: anything of the agent but its client
library.

| shared | modules |
|---|---|
| decisions without I/O | `planner`, `loads`, `transfers`, `lookup_answers`, `weighing` |
| when to wait for the pool | `health`, `idling` |
| names, options, counts | `naming`, `options`, `counters` |
| the thread to the agent | `agent_link`; by our plan `link`, by the engine's `block_link` |
| an engine's memory | `torch_memory` |

`vllm_plugin` is what vLLM loads at its start.
"""

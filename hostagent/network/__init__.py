"""The agent's adapters: sockets, the event loop and its timers around the core.

Frames: `datagrams` and `mover`. Clients: `local_server`; `courier` is also the event loop's wait.
Other agents: `bulk_link`, `conveyor`, `pushing`, and by RDMA `rdma_link`. The controller:
`control_link`. People and tools: `metrics_server`, `hints_server`, `otlp`.
"""

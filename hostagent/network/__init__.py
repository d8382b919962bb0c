"""The agent's adapters: sockets, the event loop and its timers around the core.

| to | modules |
|---|---|
| the network, by frames | `datagrams` (when), `mover` (how, compiled), `interfaces` |
| clients | `local_server`, `peer_credentials`; `courier` is also the event loop's wait |
| other agents, by TCP | `bulk_link`; compiled `lander`, `conveyor`, `pushing` |
| other agents, by RDMA | `rdma_link`, `cards`, `verbs` and `calling_card`, `landing_zone` |
| libibverbs | `libverbs` |
| the controller | `control_link` |
| people and tools | `metrics_server`, `hints_server`, `otlp` |
| the agent that comes after | `survivors` |

`compiled` compiles all that an agent runs compiled.
"""

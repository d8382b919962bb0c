"""The messages that kvcast's parts exchange: their types, and their form as bytes.

| between | modules |
|---|---|
| nodes and the switch, by UDP | `wire`, in Ethernet frames `ethernet`; for cards `roce` |
| agent and agent, by TCP | `bulk`, `rdma` |
| agent and controller, by TCP | `control` |
| client and agent, on one node | `local`; without a message `shared`; the courier's `questions` |

All TCP and Unix streams are framed by `framing`. Who says what when is in `kvcast.protocol.links`.
"""

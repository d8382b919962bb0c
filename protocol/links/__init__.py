"""The conversations over TCP, as cores without I/O: what is said, in which order, until when.

Three links, two ends each: `bulk_caller` and `bulk_callee` (agent to agent), `rdma_caller` and
`rdma_callee` (the same, where cards move the bytes), `control_caller` and `control_callee` (agent
to controller). `carriers` chooses between the first two for each call. All ends build on `stream`;
`bulk_request` has the states of what `bulk_caller` asks.

A core takes events (connected, lost, bytes received, the present time, a call asked for) and gives
bytes to send, timers and instructions; the daemons' adapters and the simulator drive the very same
objects. Nothing here knows sockets, TLS, tasks or
clocks, nor why a call is made or what a request deserves.
"""

"""The conversations over TCP, as cores without I/O: what is said, in which order, until when.

Two links, two ends each: `bulk_caller` and `bulk_callee` (agent to agent), `control_caller` and
`control_callee` (agent to controller). A core takes events (connected, lost, bytes received, the
present time, a call asked for) and gives bytes to send, timers and instructions; the daemons'
adapters and the simulator drive the very same objects. Nothing here knows sockets, TLS, tasks or
clocks, nor why a call is made or what a request deserves.
"""

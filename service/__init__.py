"""What every kvcast daemon and command shares; it knows none of them.

| for | modules |
|---|---|
| flags and files | `options`, `tls_options`, `values`, `addresses` |
| who may connect | `tls`, `authority` (makes certificates), `identity` (what one says) |
| connections | `listener`, `http`, `http_limits`, `link_driver` (drives `kvcast.protocol.links`) |
| sockets, as the kernel has them | `sockets` |
| start, stop, errors | `readiness`, `logs`, `commands` |
| reports of benches | `reports`, `statistics`, `provenance` |
"""

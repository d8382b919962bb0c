"""Questions about a pool, each answered by one module or folder, which opens with its question.

| about | modules |
|---|---|
| incast, and readers that are not quite at once | `incast`, `apart`, `replicas` |
| a node: its path, its store, its disk, RDMA | `read_path`, `store` with `stores/`, `ssd`, `rdma` |
| the switch and its controller | `switch`, `memory`, `controller`, `policies` |
| engines, and the router before them | `ttft` with `engines/`, `route`, `route_engines` |
| operations | `restart`, `tenants`, `folders`, `outage` |
| whether it is worth it | `demo` with `replay`, `evaluate` |
| whether it holds | `soak/`, `hostile`, `fuzz/` |
"""

import os

# A benchmark that speaks gRPC starts processes, too. gRPC's handlers of a fork would start threads
# in the child, whose descriptors are about to be closed: one start of forty ended so (SIGABRT).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

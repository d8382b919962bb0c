"""Questions about a pool, each answered by one module or folder."""

import os

# A benchmark that speaks gRPC starts processes, too. gRPC's handlers of a fork would start threads
# in the child, whose descriptors are about to be closed: one start of forty ended so (SIGABRT).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

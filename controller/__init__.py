"""The controller: who is in the pool, who owns which bucket, and what the switch holds.

Cores (placement, membership, names, admission, residency, portsets, program, reconcile, pool)
take events and the present time and return instructions; they open nothing and read no clock.
Adapters (switch, agents, store, http_api, metrics, daemon) own gRPC, sockets, SQLite and tasks.
"""

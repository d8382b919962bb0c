"""The controller: who is in the pool, who answers for which bucket, what the switch holds.

`core/` takes events and the present time and returns instructions; it opens nothing and reads no
clock. `switch/`, `http/`, `agent_links`, `store` and `service` own gRPC, sockets, SQLite and tasks.
"""

"""The agent: the daemon on every inference node, and the client library that engines link with.

`daemon` reads the flags and `agent` puts the parts together. `core/` decides, `network/` has the
sockets, `tiers/` the memory and the disks. An engine's process uses `client/`; the modules that
engines load are `connectors/`, and `models/` moves folders of files.
"""

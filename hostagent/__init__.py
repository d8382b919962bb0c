"""The daemon on every inference node, and the client library that engines link with."""

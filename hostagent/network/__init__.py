"""The agent's adapters: sockets, the event loop and its timers around the core."""

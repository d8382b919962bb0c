"""The router's decisions: events and the present time in, choices out. No sockets, no clock."""

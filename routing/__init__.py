"""`kvcast route`: a request goes to the engine that can answer it soonest, by who holds what."""

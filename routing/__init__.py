"""`kvcast route`: a request goes to the engine that can answer it soonest, by who holds what.

A request comes in at `proxy`, is named in `prompts`, and its engine is chosen in `core.router`.
What engines hold comes by `event_streams`, whether they are up by `engines`; `prefetches` tells
agents what to fetch meanwhile. `daemon`, `flags` and `service` start all of it.
"""

"""The stores that `kvcast.bench.store` measures: how each is started, and how each is asked."""

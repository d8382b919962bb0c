"""Engines in processes of their own environment, for benchmarks and tests.

Owns: how an engine is started and asked (`engine`), its side of that (`process`), and models of
random weights (`tiny_models`). The last two run in the engines' environment, which has nothing of
kvcast's but what its connectors need.
"""

"""Machine code, made from a small subset of Python when a program starts.

`subset` is what one writes in, `writer` spells LLVM's IR, `jit` compiles that and keeps what it has
compiled, `linux` has the C interface of the system.
"""

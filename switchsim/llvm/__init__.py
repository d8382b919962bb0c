"""The compiled engine: the typed program to LLVM IR, and from there to machine code."""

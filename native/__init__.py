"""Machine code: LLVM IR as text, the subset of Python that becomes it, and the compiler's cache."""

"""A software switch: p4c's BMv2 JSON in, P4Runtime out.

`loader` reads a program, an `engine` runs it, and everything else here serves one of the two.
"""

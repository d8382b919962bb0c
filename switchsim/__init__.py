"""A software switch: p4c's BMv2 JSON in, P4Runtime out.

`loader` reads a program, `switch` runs it, and everything else here serves one of the two.
"""

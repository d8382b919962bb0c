"""Deterministic simulation: whole pools in virtual time, from a seed, under faults."""

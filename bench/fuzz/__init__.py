"""Fuzzing: inputs that know the structure of each entry point, as long as one likes."""

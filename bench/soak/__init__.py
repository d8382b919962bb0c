"""Soak: does what should stay flat stay flat, for as long as one likes, under faults?"""

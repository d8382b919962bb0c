"""Folders of files (a model's weights, mostly) in the pool.

`manifest` says what a folder is made of, and which names may be written; `loading` puts one into
the pool, `fetching` takes it out. All of it is built on the client library alone.
"""

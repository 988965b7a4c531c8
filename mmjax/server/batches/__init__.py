"""Batches: the lines of a file, each a request of a route, answered into another file."""

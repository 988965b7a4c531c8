"""Bookkeeping of what is held where: ids, hashes and sizes; no device arrays, no requests."""

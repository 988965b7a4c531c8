"""The processor cache in shared memory: P0 writes an item once, P1 reads it without a copy."""

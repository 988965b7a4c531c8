"""EAGLE-3 heads, which guess tokens ahead of another model."""

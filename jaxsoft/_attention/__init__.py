"""The family of attention: queries (batch, length, heads, size) against keys and values, reduced over the keys."""

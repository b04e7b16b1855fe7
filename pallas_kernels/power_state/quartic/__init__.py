"""The chunked form at p = 4: features are products of two products of two entries of a key."""

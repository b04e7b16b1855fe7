"""The chunked form at p = 2: features are products of two entries of a key."""

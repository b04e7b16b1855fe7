"""Cases of each kernel that `tools.h100` compiles, and what it predicts of them."""

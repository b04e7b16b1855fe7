"""Forms of attention as functions of arrays in one layout: pairs of tokens, chunks with a state, one step, formulas."""

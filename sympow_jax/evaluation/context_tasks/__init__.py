"""Tasks that ask for something earlier in the context: recall, needles, chains of variables, copies."""

"""Reads and tokenizes documents, in pieces: of text files, parquet and JSON lines, local or remote."""

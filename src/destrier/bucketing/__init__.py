"""Batches of rows of like length: of as many rows each, or of as many tokens at most."""

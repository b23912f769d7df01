"""Functions that are run over inputs: `optimize` and `map`."""

"""Several streams as one: which source each sample is of, and how they are read together."""

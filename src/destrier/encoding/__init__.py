"""Python values as Arrow columns, strictly."""

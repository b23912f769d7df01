"""Columns whose values are ranges of files that stay where they are."""

"""Work on tables that are there: rows, columns, keys."""

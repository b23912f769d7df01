"""The writer: from a source, through worker processes and a journal, to one commit."""

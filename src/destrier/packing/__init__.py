"""Token blocks: documents packed into blocks of one length, which are then samples like rows.

Documents are the rows of a selection; blocks are numbered once for all, from the documents'
lengths alone, and the order permutes their numbers as it does rows. Only the reader differs.
"""

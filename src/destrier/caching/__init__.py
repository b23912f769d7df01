"""A read-through cache on local disk: blocks of rows of a column, as they were read.

::

    blocks      which rows make a block, and which blocks are worth keeping
    checks      whether bytes are those that were written
    values      columns as ranges of bytes, and rows of them put together
    entry       one block in one file
    store       the files of a folder, and its limit
    location    the folder that a user names
    cached      reads rows through all of it
"""

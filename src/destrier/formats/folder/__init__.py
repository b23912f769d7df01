"""Folders of files: one row a file, or rows that a function makes of them."""

from __future__ import annotations

from destrier.formats.folder.listing import detect
from destrier.formats.folder.source import FolderSource, open_source

__all__ = ["FolderSource", "detect", "open_source"]

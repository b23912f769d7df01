"""WebDataset: tars whose members make samples by their names."""

from __future__ import annotations

from destrier.formats.webdataset.export import WebDatasetSink, open_sink
from destrier.formats.webdataset.paths import detect
from destrier.formats.webdataset.source import WebDatasetSource, open_source

__all__ = ["WebDatasetSink", "WebDatasetSource", "detect", "open_sink", "open_source"]

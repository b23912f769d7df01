"""Hugging Face features that are structs of bytes and path: images, audio, video."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from destrier.errors import SourceError
from destrier.writing.source import ENCODING_KEY

__all__ = [
    "BYTES_ENCODING",
    "PATH_ENCODING",
    "Media",
    "is_media",
    "media_columns",
    "split_media",
]

BYTES_ENCODING = b"hf:bytes"
PATH_ENCODING = b"hf:path"
_KINDS = {"Image": b"image/*", "Audio": b"audio/*", "Video": b"video/*"}
_FIELDS = ["bytes", "path"]


@dataclass(frozen=True)
class Media:
    """A column of structs of bytes and path, and the two columns that it becomes.

    Attributes:
        name: Of the column, and of the one with the bytes.
        content_type: Of the bytes, as far as the feature says it.
    """

    name: str
    content_type: bytes

    @property
    def names(self) -> list[str]:
        """The names of the two columns."""
        return [self.name, f"{self.name}_path"]

    def fields(self) -> list[pa.Field]:
        """The two columns."""
        metadata = {b"content_type": self.content_type, ENCODING_KEY: BYTES_ENCODING}
        return [
            pa.field(self.names[0], pa.large_binary(), metadata=metadata),
            pa.field(self.names[1], pa.string(), metadata={ENCODING_KEY: PATH_ENCODING}),
        ]

    def split(self, column: pa.Array, shown: str, row: int | None) -> dict[str, pa.Array]:
        """The values of the two columns.

        Raises:
            SourceError: If a struct holds neither, for it would be taken for a null.
        """
        column = pa.concat_arrays([column])
        data, path = column.flatten()
        if column.type.field(0).name != "bytes":
            data, path = path, data
        neither = pc.and_(pc.and_(data.is_null(), path.is_null()), column.is_valid())
        at = neither.index(pa.scalar(value=True)).as_py() if len(neither) else -1
        if at >= 0:
            number = None if row is None else row + at
            where = f"row {at} of a batch" if row is None else f"row {number}"
            raise SourceError(
                f"{shown}, {where}, column {self.name!r}: a value with neither bytes nor "
                "path, which is not the same as a null; leave it out with columns=[...]",
                file=shown,
                row=number,
                column=self.name,
            )
        return {self.names[0]: data, self.names[1]: path}


def _features_of(schema: pa.Schema) -> Mapping[str, Any]:
    """The features that a schema's metadata declare, by column."""
    try:
        found = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = found["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def media_columns(schema: pa.Schema) -> dict[str, Media]:
    """The columns of a file that are split in two, by name."""
    found = {}
    for name, feature in _features_of(schema).items():
        index = schema.get_field_index(name)
        if not is_media(feature) or index < 0 or f"{name}_path" in schema.names:
            continue
        type_ = schema.field(index).type
        if pa.types.is_struct(type_) and sorted(field.name for field in type_) == _FIELDS:
            types = {field.name: field.type for field in type_}
            if _is_bytes(types["bytes"]) and _is_text(types["path"]):
                found[name] = Media(name, _KINDS[feature["_type"]])
    return found


def is_media(feature: Any) -> bool:
    """Whether a feature is an image, audio or video."""
    kind = feature.get("_type") if isinstance(feature, dict) else None
    return isinstance(kind, str) and kind in _KINDS


def split_media(schema: pa.Schema, media: Mapping[str, Media]) -> pa.Schema:
    """A file's schema with the columns of media split."""
    fields: list[pa.Field] = []
    for field in schema:
        fields += media[field.name].fields() if field.name in media else [_labelled(field, schema)]
    return pa.schema(fields, metadata=schema.metadata)


def _labelled(field: pa.Field, schema: pa.Schema) -> pa.Field:
    """A column of class labels keeps their names in its metadata."""
    feature = _features_of(schema).get(field.name)
    if not isinstance(feature, dict) or feature.get("_type") != "ClassLabel":
        return field
    names = feature.get("names")
    if not isinstance(names, list):
        return field
    return field.with_metadata(
        {**(field.metadata or {}), b"class_names": json.dumps(names).encode()}
    )


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))

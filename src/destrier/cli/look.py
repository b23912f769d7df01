"""Commands that look at a table: info and head."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from destrier.cli.arguments import (
    add,
    add_choice,
    add_json,
    add_table,
    count,
    open_from,
)
from destrier.cli.printing import print_facts, print_json, print_table
from destrier.errors import FilterError, ReadError
from destrier.show import Blob, cell, plain, size

if TYPE_CHECKING:
    from destrier.description import TableReport
    from destrier.table import Table

__all__ = ["add_commands"]

_SHOWN_VERSIONS = 5


def add_commands(commands: Any) -> None:
    """Add the commands to a parser."""
    command = add(commands, "info", "describe a table: schema, rows, versions, fragments, sizes")
    add_table(command)
    add_json(command)
    command.set_defaults(run=_info)

    command = add(commands, "head", "print the first rows, in the order of the table")
    add_table(command)
    command.add_argument("-n", type=count, default=10, metavar="ROWS", help="how many (10)")
    add_choice(command)
    add_json(command)
    command.set_defaults(run=_head)


def _info(options: argparse.Namespace) -> int:
    from destrier.description import report_table

    report = report_table(open_from(options))
    if options.json:
        print_json(dataclasses.asdict(report))
    else:
        _print_info(report)
    return 0


def _print_info(report: TableReport) -> None:
    latest = report.version == report.latest_version
    version = "the latest" if latest else f"the latest is {report.latest_version}"
    deleted = f", {report.deleted_rows:,} deleted" if report.deleted_rows else ""
    facts = {
        "table": report.uri,
        "version": f"{report.version} ({version})",
        "rows": f"{report.rows:,}{deleted}",
        "fragments": f"{report.fragments:,}",
        "size": f"{size(report.bytes)} of data files, about {size(report.row_bytes)} a row",
        "identity": report.identity,
        "tags": ", ".join(f"{name} = {v}" for name, v in report.tags.items()) or "none",
        "indices": ", ".join(report.indices) or "none",
    }
    print_facts(facts)
    print()
    heads = ("column", "type", "null", "on disk", "metadata")
    rows = [
        (
            column.name,
            column.type,
            "yes" if column.nullable else "no",
            size(column.bytes),
            ", ".join(f"{key}={value}" for key, value in column.metadata.items()),
        )
        for column in report.columns
    ]
    print_table(heads, rows)
    print()
    count = len(report.versions)
    shown = report.versions[-_SHOWN_VERSIONS:]
    print(f"versions: {count}" + (f", the last {len(shown)}:" if count > len(shown) else ""))
    for version_ in shown:
        print(f"  {version_['version']}  {version_['time']}")
    for warning in report.warnings:
        print(f"\nwarning: {warning}")


def _head(options: argparse.Namespace) -> int:
    table = open_from(options)
    columns = table.schema.names if options.columns is None else options.columns
    table.check_columns(columns)
    rows = list(_first_rows(table, columns, options.filter, options.n))
    if options.json:
        print_json([{key: plain(value) for key, value in row.items()} for row in rows])
    elif not rows:
        print("no rows" if options.filter is None else f"no rows where {options.filter}")
    else:
        heads = ("row", *columns)
        print_table(heads, [[cell(value) for value in row.values()] for row in rows])
    return 0


def _first_rows(
    table: Table, columns: list[str], filter: str | None, count: int
) -> Iterator[dict[str, Any]]:
    """Yield the first rows that a filter keeps; the row offset comes first, as ``row``."""
    from destrier.description import blob_columns
    from destrier.lancecalls import lance_call

    try:
        found = lance_call(
            "Lance",
            lambda: table.dataset.scanner(
                columns=[*columns, "_rowoffset"],
                filter=filter,
                limit=count,
                scan_in_order=True,
                batch_size=min(count, 1024),
            ).to_table(),
        )
    except ReadError as error:
        if filter is None:
            raise
        raise FilterError(
            f"cannot run the filter {filter!r} on {table.name}: {error}; "
            f"its columns are: {', '.join(table.schema.names)}"
        ) from error
    blobs = blob_columns(table)
    for row in found.to_pylist():
        values = {n: Blob(row[n]["size"]) if n in blobs and row[n] else row[n] for n in columns}
        yield {"row": row["_rowoffset"], **values}

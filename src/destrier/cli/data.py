"""Commands that bring data in and out: convert, link, relink, export, verify."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from destrier.cli.arguments import add, add_choice, add_json, storage_option, whole
from destrier.cli.printing import print_json
from destrier.errors import ArgumentError
from destrier.formats import EXPORTS, FORMATS
from destrier.lancecalls import redact

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add the commands to a parser."""
    command = add(commands, "convert", "copy a dataset of another format into a table, exactly")
    _add_ends(command, "the dataset: a file, a folder, a pattern of files, or a URI", "the table")
    _add_writing(command)
    command.add_argument(
        "--compression",
        type=_pair,
        action="append",
        default=[],
        metavar="COLUMN=CODEC",
        help="zstd, zstd:9, lz4, fsst or none; may be repeated",
    )
    command.set_defaults(run=_convert)

    command = add(commands, "link", "make a table of files that stay where they are")
    _add_ends(command, "files, tars, or uncompressed MDS or LitData chunks", "the table")
    _add_writing(command)
    command.add_argument("--crc", action="store_true", help="read all values and store their CRCs")
    command.set_defaults(run=_link)

    command = add(commands, "relink", "tell a linked table that its files have moved")
    command.add_argument("uri", metavar="URI", help="the table")
    command.add_argument("old", metavar="OLD", help="where the addresses of the files began")
    command.add_argument("new", metavar="NEW", help="where they begin now")
    _add_storage(command, "--storage-option", "of the table and the files")
    command.set_defaults(run=_relink)

    command = add(commands, "export", "write a table as a dataset of another format")
    _add_ends(command, "the table", "a new or empty folder, or its URI")
    command.add_argument("--format", choices=EXPORTS, required=True, help="the other format")
    add_choice(command)
    command.add_argument("--permutation", metavar="URI", help="a list of rows in their order")
    command.add_argument("--part", metavar="NAME", help="of the permutation")
    _add_work(command)
    _add_storage(command, "--storage-option", "of the table")
    _add_storage(command, "--destination-option", "of the store that is written to")
    command.set_defaults(run=_export)

    command = add(commands, "verify", "compare a dataset with a table, or a table with its export")
    _add_ends(command, "the dataset, or the table that was exported", "the table, or its export")
    command.add_argument(
        "--format", choices=("auto", *FORMATS), default="auto", help="of the dataset"
    )
    add_choice(command, " of SRC")
    command.add_argument(
        "--limit", type=whole, default=10, metavar="N", help="differences to show (10)"
    )
    _add_work(command)
    _add_storage(command, "--storage-option", "of the table")
    _add_storage(command, "--source-option", "of the dataset's store")
    command.set_defaults(run=_verify)


def _add_ends(command: argparse.ArgumentParser, src: str, dst: str) -> None:
    command.add_argument("src", metavar="SRC", help=src)
    command.add_argument("dst", metavar="DST", help=dst)


def _add_writing(command: argparse.ArgumentParser) -> None:
    command.add_argument("--format", choices=("auto", *FORMATS), default="auto", help="of SRC")
    add_choice(command)
    command.add_argument(
        "--mode", choices=("create", "append", "overwrite"), default="create", help="(create)"
    )
    command.add_argument(
        "--restart", action="store_true", help="drop what an unfinished run has written"
    )
    command.add_argument(
        "--provenance", action="store_true", help="store file and row of the dataset"
    )
    _add_work(command)
    _add_storage(command, "--storage-option", "of the table")
    _add_storage(command, "--source-option", "of the dataset's store")


def _add_work(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--num-workers", type=whole, metavar="N", help="processes (one a processor)"
    )
    command.add_argument(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the format, as its page names them; may be repeated",
    )
    add_json(command)


def _add_storage(command: argparse.ArgumentParser, name: str, what: str) -> None:
    command.add_argument(
        name,
        type=storage_option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"{what}, never shown; may be repeated",
    )


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return key, value


def _option(text: str) -> tuple[str, Any]:
    """A value is JSON if it can be (true, 512, ["a", "b"]), else text."""
    key, value = storage_option(text)
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _writing(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "format": options.format,
        "columns": options.columns,
        "filter": options.filter,
        "num_workers": options.num_workers,
        "mode": options.mode,
        "restart": options.restart,
        "provenance": options.provenance,
        "storage_options": dict(options.storage_option) or None,
        "source_options": dict(options.source_option) or None,
        **dict(options.option),
    }


def _convert(options: argparse.Namespace) -> int:
    from destrier.conversion import convert

    written = convert(
        options.src,
        options.dst,
        compression=dict(options.compression) or None,
        **_writing(options),
    )
    return _report(written, options, f"{written.rows:,} of {written.rows_read:,} rows")


def _link(options: argparse.Namespace) -> int:
    from destrier.conversion import link

    written = link(options.src, options.dst, crc=options.crc, **_writing(options))
    return _report(written, options, f"{written.rows:,} of {written.rows_read:,} rows")


def _report(result: Any, options: argparse.Namespace, said: str) -> int:
    if options.json:
        print_json({**dataclasses.asdict(result), "uri": redact(result.uri)})
    else:
        print(f"{redact(result.uri)}: {said}")
    return 0


def _relink(options: argparse.Namespace) -> int:
    from destrier.links.relinking import relink

    changed = relink(
        options.uri,
        options.old,
        options.new,
        storage_options=dict(options.storage_option) or None,
    )
    print(f"{redact(options.uri)}: {changed:,} links changed")
    return 0


def _export(options: argparse.Namespace) -> int:
    from destrier.exporting import export

    permutation = options.permutation
    if options.part is not None:
        if permutation is None:
            raise ArgumentError("--part names a part of a --permutation, which is not given")
        from destrier.permutation import Permutation

        stored = dict(options.storage_option) or None
        permutation = Permutation.open(permutation, storage_options=stored)[options.part]
    exported = export(
        options.src,
        options.dst,
        format=options.format,
        columns=options.columns,
        filter=options.filter,
        permutation=permutation,
        num_workers=options.num_workers,
        storage_options=dict(options.storage_option) or None,
        destination_options=dict(options.destination_option) or None,
        **dict(options.option),
    )
    return _report(exported, options, f"{exported.rows:,} rows in {exported.files:,} files")


def _verify(options: argparse.Namespace) -> int:
    from destrier.verification import verify

    found = verify(
        options.src,
        options.dst,
        format=options.format,
        columns=options.columns,
        filter=options.filter,
        num_workers=options.num_workers,
        limit=options.limit,
        storage_options=dict(options.storage_option) or None,
        source_options=dict(options.source_option) or None,
        **dict(options.option),
    )
    if options.json:
        print_json(dataclasses.asdict(found))
    elif found.equal:
        print(f"equal: {found.rows:,} rows")
    else:
        print(f"{found.differing:,} differences" + (", the first:" if found.differences else ""))
        for difference in found.differences:
            print(f"  {difference}")
        if any(each.column is not None and each.row is None for each in found.differences):
            print("an export comes after its table: destrier verify TABLE EXPORT")
    return 0 if found.equal else 1

"""The command line.

Exit codes: 0, 1 for an error (one line on the standard error stream), 2 for wrong usage, 130 after
Ctrl-C. With ``--json`` the answer is one JSON value on the standard output stream.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import warnings
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from destrier.errors import (
    ArgumentError,
    DestrierError,
    DestrierWarning,
    FilterError,
    ReadError,
)
from destrier.show import Blob, cell, number, plain, side_by_side, size, spoken

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from destrier.report import PlanReport, TableReport
    from destrier.table import Table

__all__ = ["main"]

_SHOWN_ROWS = 8
_SHOWN_VERSIONS = 5
_SECRET_LENGTH = 4  # shorter values, such as "true", are no secrets and stand in ordinary words


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    secrets: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", DestrierWarning)
        warnings.showwarning = partial(_show_warning, secrets)
        try:
            options = _parser().parse_args(argv)
            secrets += [value for _, value in getattr(options, "storage_option", [])]
            code: int = options.run(options)
            sys.stdout.flush()
        except DestrierError as error:
            print(f"destrier: error: {_one_line(str(error), secrets)}", file=sys.stderr)
            return 1
        except BrokenPipeError:
            _drop_output()  # whoever reads it has seen enough
            return 0
        except OSError as error:
            _drop_output()
            print(f"destrier: error: {_one_line(str(error), secrets)}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        return code


def _drop_output() -> None:
    """Write what is still to be written, or drop it: Python must not try again when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(text: str, secrets: Sequence[str]) -> str:
    from destrier.table import redact

    text = spoken(redact(text))
    for secret in secrets:
        if len(secret) >= _SECRET_LENGTH:
            text = text.replace(secret, "***")
    return " ".join(text.split())


def _show_warning(
    secrets: Sequence[str],
    message: Warning | str,
    category: type[Warning],  # noqa: ARG001 - Python's signature
    filename: str,  # noqa: ARG001
    lineno: int,  # noqa: ARG001
    file: TextIO | None = None,
    line: str | None = None,  # noqa: ARG001
) -> None:
    print(f"destrier: warning: {_one_line(str(message), secrets)}", file=file or sys.stderr)


# ---- arguments ------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and a hint, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"destrier: usage: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="destrier",
        description="Looks at Lance tables as training streams read them.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = _add(commands, "info", "describe a table: schema, rows, versions, fragments, sizes")
    command.add_argument("uri", metavar="URI", help="a Lance dataset")
    _add_table(command)
    _add_json(command)
    command.set_defaults(run=_info)

    command = _add(commands, "head", "print the first rows, in the order of the table")
    command.add_argument("uri", metavar="URI", help="a Lance dataset")
    command.add_argument("-n", type=_count, default=10, metavar="ROWS", help="how many (10)")
    _add_filter(command)
    _add_columns(command)
    _add_table(command)
    _add_json(command)
    command.set_defaults(run=_head)

    command = _add(
        commands, "plan", "print which rows each rank reads in a step, and what it costs"
    )
    command.add_argument("uri", metavar="URI", help="a Lance dataset")
    _add_plan(command)
    _add_filter(command)
    _add_columns(command)
    _add_table(command)
    _add_json(command)
    command.set_defaults(run=_plan)

    command = _add(
        commands, "permute", "write a shuffled list of rows, or several parts, as a table"
    )
    command.add_argument("uri", metavar="URI", help="a Lance dataset")
    command.add_argument("out", metavar="OUT", help="URI or path of the new table")
    command.add_argument(
        "--seed", type=_whole, default=0, metavar="N", help="of the shuffle and the parts (0)"
    )
    command.add_argument(
        "--parts",
        type=_parts,
        metavar="NAME=SIZE,...",
        help="shares such as train=0.8,val=0.2, or numbers of rows such as train=5000,val=1000",
    )
    command.add_argument("--no-shuffle", action="store_true", help="keep the order of the table")
    command.add_argument("--overwrite", action="store_true", help="replace a table at OUT")
    _add_filter(command)
    _add_table(command)
    command.set_defaults(run=_permute)

    command = _add(commands, "demo", "train on real digits, kill the run, and resume it exactly")
    command.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        default=Path("demo-out"),
        help="folder to write (demo-out)",
    )
    command.add_argument("--quick", action="store_true", help="use fewer digits")
    command.set_defaults(run=_demo)
    return parser


class _Version(argparse.Action):
    """Prints the version; it is looked up only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from destrier import __version__

        print(f"destrier {__version__}")
        parser.exit()


def _add(commands: Any, name: str, does: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=does, description=f"{does[0].upper()}{does[1:]}.", allow_abbrev=False
    )
    return parser


def _add_table(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--table-version", type=_version, metavar="VERSION", help="a number or a tag (the latest)"
    )
    command.add_argument(
        "--storage-option",
        type=_storage_option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="passed to Lance, never shown; may be repeated",
    )


def _add_filter(command: argparse.ArgumentParser) -> None:
    command.add_argument("--filter", metavar="SQL", help='rows to take, e.g. "label != 9"')


def _add_columns(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--columns", type=_names, metavar="NAME,...", help="columns to read (all of them)"
    )


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON, for scripts")


def _add_plan(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--global-batch",
        type=_count,
        metavar="N",
        default=256,
        help="rows of a step over all ranks (256)",
    )
    command.add_argument(
        "--world-size", type=_count, metavar="N", default=1, help="number of ranks (1)"
    )
    command.add_argument(
        "--step", type=_whole, metavar="N", default=0, help="the step to look at (0)"
    )
    command.add_argument("--epoch", type=_whole, metavar="N", default=0, help="its epoch (0)")
    command.add_argument("--seed", type=_whole, metavar="N", help="seed of the order (0)")
    command.add_argument(
        "--num-splits", type=_count, metavar="N", help="lanes of the order (chosen)"
    )
    command.add_argument("--clump-size", type=_count, metavar="N", help="rows read as one (chosen)")
    command.add_argument("--window", type=_count, metavar="N", help="clumps a window (chosen)")
    command.add_argument("--no-shuffle", action="store_true", help="in the order of the table")


def _whole(text: str) -> int:
    return _integer(text, 0)


def _count(text: str) -> int:
    return _integer(text, 1)


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return value


def _version(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("no column is named")
    return names


def _storage_option(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError("the form is KEY=VALUE")  # what was given may be a secret
    return key, value


def _parts(text: str) -> dict[str, Fraction]:
    parts: dict[str, Fraction] = {}
    for item in text.split(","):
        name, separator, number_ = (piece.strip() for piece in item.partition("="))
        if not (name and separator):
            raise argparse.ArgumentTypeError(f"{item!r} is not of the form NAME=SIZE")
        if name in parts:
            raise argparse.ArgumentTypeError(f"two parts have the name {name!r}")
        try:
            parts[name] = Fraction(number_)
        except (ValueError, ZeroDivisionError):
            raise argparse.ArgumentTypeError(f"{number_!r} of {name} is not a number") from None
    return parts


def _open(options: argparse.Namespace) -> Table:
    from destrier.table import open_table

    return open_table(
        options.uri,
        version=options.table_version,
        storage_options=dict(options.storage_option) or None,
    )


# ---- info -----------------------------------------------------------------------------------


def _info(options: argparse.Namespace) -> int:
    from destrier.report import report_table

    report = report_table(_open(options))
    if options.json:
        _print_json(dataclasses.asdict(report))
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
    _print_facts(facts)
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
    _print_table(heads, rows)
    print()
    count = len(report.versions)
    shown = report.versions[-_SHOWN_VERSIONS:]
    print(f"versions: {count}" + (f", the last {len(shown)}:" if count > len(shown) else ""))
    for version_ in shown:
        print(f"  {version_['version']}  {version_['time']}")
    for warning in report.warnings:
        print(f"\nwarning: {warning}")


# ---- head -----------------------------------------------------------------------------------


def _head(options: argparse.Namespace) -> int:
    table = _open(options)
    columns = table.schema.names if options.columns is None else options.columns
    table.check_columns(columns)
    rows = list(_first_rows(table, columns, options.filter, options.n))
    if options.json:
        _print_json([{key: plain(value) for key, value in row.items()} for row in rows])
    elif not rows:
        print("no rows" if options.filter is None else f"no rows where {options.filter}")
    else:
        heads = ("row", *columns)
        _print_table(heads, [[cell(value) for value in row.values()] for row in rows])
    return 0


def _first_rows(
    table: Table, columns: list[str], filter: str | None, count: int
) -> Iterator[dict[str, Any]]:
    """Yield the first rows that a filter keeps; the row offset comes first, as ``row``."""
    from destrier.report import blob_columns
    from destrier.table import lance_call

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


# ---- plan -----------------------------------------------------------------------------------


def _plan(options: argparse.Namespace) -> int:
    from destrier.dataset import StreamingDataset
    from destrier.plan import check_batch
    from destrier.report import report_plan

    check_batch(options.global_batch, options.world_size, uneven=False)
    dataset = StreamingDataset(
        _open(options),
        filter=options.filter,
        num_splits=options.num_splits,
        shuffle=False if options.no_shuffle else None,
        shuffle_seed=options.seed,
        shuffle_clump_size=options.clump_size,
        shuffle_window=options.window,
        epoch=options.epoch,
        global_batch_size=options.global_batch,
        rank=0,
        world_size=options.world_size,
    )
    report = report_plan(
        dataset.stream(),
        global_batch=options.global_batch,
        world_size=options.world_size,
        step=options.step,
        epoch=options.epoch,
        columns=options.columns,
    )
    if options.json:
        _print_json(dataclasses.asdict(report))
    else:
        _print_plan(report)
    return 0


def _print_plan(report: PlanReport) -> None:
    _print_facts(
        {
            "table": report.table,
            "rows": f"{report.rows:,}"
            + (f" of {report.table_rows:,}, where {report.filter}" if report.filter else ""),
            "order": _order(report),
            "epoch": f"{report.steps:,} steps of {report.global_batch:,} rows, "
            f"{report.surplus_rows:,} rows over",
            "reads a step": f"about {number(report.requests_a_step)} requests of "
            f"{size(report.bytes_a_step)} in all (estimated, for the middle of an epoch: one for "
            f"each run of neighbouring rows in each of {len(report.columns)} columns, rows of "
            "average size on disk; Lance joins requests that lie close)",
            "open rows": f"{report.open_rows:,}, about {size(report.open_bytes)} over all ranks"
            if report.open_rows
            else "none: rows are read shortly before their step",
            "deff": _effects(report),
        }
    )
    print(f"\nstep {report.step} of epoch {report.epoch}, row offsets of each rank:")
    for share in report.shares:
        rows = ", ".join(map(str, share.rows[:_SHOWN_ROWS]))
        more = f", ... {len(share.rows)} rows" if len(share.rows) > _SHOWN_ROWS else ""
        print(f"  rank {share.rank}: {rows}{more}")
    for note in report.notes:
        print(f"\nnote: {note}")


def _order(report: PlanReport) -> str:
    splits = f"{report.num_splits} splits"
    if not report.shuffle:
        return f"the table's, {splits}"
    if report.clump_size == 1:
        return f"shuffled row by row, {splits}, seed {report.seed}"
    return (
        f"shuffled in clumps of {report.clump_size} rows and windows of {report.window} clumps, "
        f"{splits}, seed {report.seed}"
    )


def _effects(report: PlanReport) -> str:
    if report.deff is None or report.deff_successive is None:
        return "without meaning: nothing is shuffled"
    return (
        f"{report.deff:.2f} for a batch, {report.deff_successive:.2f} for 16 successive ones "
        "(at most, for rows that are sorted: variance of the mean over that of a uniform order)"
    )


# ---- permute, demo --------------------------------------------------------------------------


def _permute(options: argparse.Namespace) -> int:
    from destrier.builder import PermutationBuilder
    from destrier.table import redact

    table = _open(options)
    builder = PermutationBuilder(table)
    if options.filter is not None:
        builder = builder.filter(options.filter)
    if options.parts is not None:
        names, sizes = list(options.parts), list(options.parts.values())
        _check_sizes(options.parts)
        if all(share.denominator == 1 for share in sizes) and sum(sizes) > 1:
            builder = builder.split_random(
                counts=[int(share) for share in sizes], seed=options.seed, names=names
            )
        else:
            builder = builder.split_random(ratios=sizes, seed=options.seed, names=names)
    if not options.no_shuffle:
        builder = builder.shuffle(seed=options.seed)
    permutation = builder.execute()
    saved = permutation.save(
        options.out,
        storage_options=dict(options.storage_option) or None,
        overwrite=options.overwrite,
    )
    parts = ", ".join(f"{name} {len(permutation[name]):,}" for name in permutation.parts)
    print(
        f"{redact(saved)}: {len(permutation):,} of {table.num_rows:,} rows"
        + (f" in parts: {parts}" if parts else "")
    )
    return 0


def _check_sizes(parts: dict[str, Fraction]) -> None:
    """Raise unless all sizes are shares of 1, or all are numbers of rows."""
    shares = [name for name, part in parts.items() if part.denominator > 1]
    for name, part in parts.items():
        shown = f"{name}={float(part):.10g}"
        if part <= 0:
            raise ArgumentError(f"the size of a part must be over 0, got {shown}")
        if part > 1 and part.denominator > 1:
            raise ArgumentError(f"{shown} is neither a share of 1 nor a whole number of rows")
        if part >= 1 and shares:
            share = f"{shares[0]}={float(parts[shares[0]]):.10g}"
            raise ArgumentError(
                f"--parts mixes shares of 1 ({share}) and numbers of rows ({shown}): give shares "
                "for all parts, or numbers for all"
            )


def _demo(options: argparse.Namespace) -> int:
    from destrier.demo import FULL, QUICK, run_demo

    def say(line: str) -> None:
        print(line, flush=True)

    fine = run_demo(options.out, scale=QUICK if options.quick else FULL, say=say)
    return 0 if fine else 1


# ---- printing -------------------------------------------------------------------------------


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def _print_facts(facts: dict[str, str]) -> None:
    width = max(map(len, facts)) + 2
    for name, value in facts.items():
        print(f"{name + ':':<{width}}{value}")


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns side by side, cut at the width of a terminal."""
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in side_by_side(heads, rows):
        print(line[:limit])


if __name__ == "__main__":
    sys.exit(main())

"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from destrier.packing.packed import Packed
    from destrier.table import Table

__all__ = [
    "add",
    "add_choice",
    "add_filter",
    "add_json",
    "add_mixture",
    "add_order",
    "add_packing",
    "add_table",
    "count",
    "open_from",
    "order_from",
    "packed_from",
    "storage_option",
    "whole",
]


def add(commands: Any, name: str, does: str) -> argparse.ArgumentParser:
    """Add a command, and return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=does, description=f"{does[0].upper()}{does[1:]}.", allow_abbrev=False
    )
    return parser


def add_table(command: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the table, or several, and the options that say how it is opened."""
    if several:
        command.add_argument(
            "uris", nargs="+", metavar="[NAME=]URI", help="a Lance dataset, or several to mix"
        )
    else:
        command.add_argument("uri", metavar="URI", help="a Lance dataset")
    command.add_argument(
        "--table-version", type=version, metavar="VERSION", help="a number or a tag (the latest)"
    )
    command.add_argument(
        "--storage-option",
        type=storage_option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="passed to Lance, never shown; may be repeated",
    )


def add_choice(command: argparse.ArgumentParser, of: str = "") -> None:
    """Add the options for rows and columns."""
    add_filter(command, of)
    command.add_argument(
        "--columns", type=names, metavar="NAME,...", help=f"columns{of} to take (all of them)"
    )


def add_filter(command: argparse.ArgumentParser, of: str = "") -> None:
    """Add the option for rows."""
    command.add_argument("--filter", metavar="SQL", help=f'rows{of} to take, e.g. "label != 9"')


def add_json(command: argparse.ArgumentParser) -> None:
    """Add the option for JSON."""
    command.add_argument("--json", action="store_true", help="print JSON, for scripts")


def add_order(command: argparse.ArgumentParser) -> None:
    """Add the options for the order of rows."""
    command.add_argument("--seed", type=whole, metavar="N", help="seed of the order (0)")
    command.add_argument(
        "--num-splits", type=count, metavar="N", help="lanes of the order (chosen)"
    )
    command.add_argument("--clump-size", type=count, metavar="N", help="rows read as one (chosen)")
    command.add_argument("--window", type=count, metavar="N", help="clumps a window (chosen)")
    command.add_argument("--no-shuffle", action="store_true", help="in the order of the table")


def add_mixture(command: argparse.ArgumentParser) -> None:
    """Add the options for several tables as one."""
    command.add_argument(
        "--weights",
        type=float,
        nargs="+",
        metavar="W",
        help="of several tables, in which proportion rows come (every row once)",
    )
    command.add_argument(
        "--temperature", type=float, metavar="T", help="weights by length to the power of 1/T"
    )
    command.add_argument(
        "--stop",
        choices=("first_exhausted", "all_exhausted", "never"),
        help="when an epoch is over (first_exhausted, with weights)",
    )
    command.add_argument("--length", type=count, metavar="N", help="rows of an epoch, instead")
    command.add_argument(
        "--batching",
        choices=("mixed", "stratified", "per_source"),
        help="what a batch is made of (mixed)",
    )


def add_packing(command: argparse.ArgumentParser) -> None:
    """Add the options for blocks of tokens."""
    command.add_argument(
        "--block-size", type=count, metavar="N", help="pack documents into blocks of N tokens"
    )
    command.add_argument(
        "--tokens", metavar="NAME", default="tokens", help="the column of tokens (tokens)"
    )
    command.add_argument(
        "--how", choices=("concatenate", "best_fit"), default="concatenate", help="how to pack"
    )
    command.add_argument("--overlap", type=whole, metavar="N", default=0, help="of blocks (0)")
    command.add_argument("--eos-id", type=whole, metavar="N", help="a token to end documents with")
    command.add_argument("--pad-id", type=whole, metavar="N", help="a token to fill blocks with")


def packed_from(options: argparse.Namespace) -> Table | Packed:
    """Open the table that the arguments name, as blocks if they say so."""
    table = open_from(options)
    if options.block_size is None:
        return table
    from destrier.packing.packed import Packed

    return Packed(
        table,
        block_size=options.block_size,
        column=options.tokens,
        how=options.how,
        overlap=options.overlap,
        eos_id=options.eos_id,
        pad_id=options.pad_id,
    )


def order_from(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a dataset that say its order."""
    return {
        "num_splits": options.num_splits,
        "shuffle": False if options.no_shuffle else None,
        "shuffle_seed": options.seed,
        "shuffle_clump_size": options.clump_size,
        "shuffle_window": options.window,
    }


def whole(text: str) -> int:
    """A number of at least 0."""
    return integer(text, 0)


def count(text: str) -> int:
    """A number of at least 1."""
    return integer(text, 1)


def integer(text: str, least: int) -> int:
    """A whole number of at least some other."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return value


def version(text: str) -> int | str:
    """A version number or a tag."""
    return int(text) if text.isdecimal() else text


def names(text: str) -> list[str]:
    """Names with commas between them."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("no column is named")
    return names


def storage_option(text: str) -> tuple[str, str]:
    """A pair with = between; never repeated in an error, since it may be a secret."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError("the form is KEY=VALUE")  # what was given may be a secret
    return key, value


def open_from(options: argparse.Namespace) -> Table:
    """Open the table that the arguments name."""
    from destrier.table import open_table

    return open_table(
        options.uri,
        version=options.table_version,
        storage_options=dict(options.storage_option) or None,
    )

"""The command that writes lists of rows: permute."""

from __future__ import annotations

import argparse
from fractions import Fraction
from typing import Any

from destrier.cli.arguments import add, add_filter, add_table, open_from, whole
from destrier.errors import ArgumentError

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add the command to a parser."""
    command = add(
        commands, "permute", "write a shuffled list of rows, or several parts, as a table"
    )
    add_table(command)
    command.add_argument("out", metavar="OUT", help="URI or path of the new table")
    command.add_argument(
        "--seed", type=whole, default=0, metavar="N", help="of the shuffle and the parts (0)"
    )
    command.add_argument(
        "--parts",
        type=_parts,
        metavar="NAME=SIZE,...",
        help="shares such as train=0.8,val=0.2, or numbers of rows such as train=5000,val=1000",
    )
    command.add_argument("--no-shuffle", action="store_true", help="keep the order of the table")
    command.add_argument("--overwrite", action="store_true", help="replace a table at OUT")
    add_filter(command)
    command.set_defaults(run=_permute)


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


def _permute(options: argparse.Namespace) -> int:
    from destrier.builder import PermutationBuilder
    from destrier.lancecalls import redact

    table = open_from(options)
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

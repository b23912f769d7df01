"""The command line.

Exit codes: 0, 1 for an error (one line on the standard error stream) or a comparison that found
differences, 2 for wrong usage, 130 after Ctrl-C. With ``--json`` the answer is one JSON value on
the standard output stream.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn, TextIO

from destrier.cli import benching, data, demonstration, look, permuting, planning
from destrier.errors import DestrierError, DestrierWarning
from destrier.show import spoken

__all__ = ["main"]

_SECRET_LENGTH = 4  # shorter values, such as "true", are no secrets and stand in ordinary words


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    secrets: list[str] = []
    command = ""
    with warnings.catch_warnings():
        warnings.simplefilter("always", DestrierWarning)
        warnings.showwarning = partial(_show_warning, secrets)
        try:
            options = _options(argv)
            command = options.command
            for name in ("storage_option", "source_option", "destination_option"):
                secrets += [value for _, value in getattr(options, name, [])]
            secrets += [str(v) for k, v in getattr(options, "option", []) if "password" in k]
            code: int = options.run(options)
            sys.stdout.flush()
        except DestrierError as error:
            said = _one_line(spoken(str(error), command), secrets)
            print(f"destrier: error: {said}", file=sys.stderr)
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
    from destrier.lancecalls import redact

    text = redact(text)
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
    print(f"destrier: warning: {_one_line(spoken(str(message)), secrets)}", file=file or sys.stderr)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and a hint, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"destrier: usage: {message}; see {self.prog} --help\n")


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    """What was given; of an option that is unknown, the help of its command tells more."""
    parser = _parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        given, prog = " ".join(unknown), f"{parser.prog} {options.command}"
        parser.exit(2, f"destrier: usage: unrecognized arguments: {given}; see {prog} --help\n")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="destrier",
        description="Looks at tables as training streams read them; brings data in and out.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    for group in (look, planning, benching, permuting, data, demonstration):
        group.add_commands(commands)
    return parser


class _Version(argparse.Action):
    """Prints the version; it is looked up only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from destrier import __version__

        print(f"destrier {__version__}")
        parser.exit()

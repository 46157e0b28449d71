"""What scripts that run another program say and take: flags, `--`, and that program."""

import sys
from collections.abc import Callable
from typing import NoReturn

from absl import flags


def say(script: str, text: str) -> None:
    """One line on standard error that begins with the script's name."""
    print(f"{script}: {' '.join(text.split())}", file=sys.stderr)


def fail(script: str, text: str) -> NoReturn:
    """Says it, and ends with exit code 2."""
    say(script, text)
    sys.exit(2)


def command_parser(script: str, example: str) -> Callable[[list[str]], list[str]]:
    """A flags_parser for absl.app.run: parses the flags before `--`, returns the program after it.

    A mistake is one line and exit code 2.

    Args:
      script: Its name.
      example: A program, for the message where there is none.
    """

    def parse(argv: list[str]) -> list[str]:
        try:
            command = flags.FLAGS(argv)[1:]
        except flags.Error as error:
            fail(script, f"{error} (flags of the program itself go after --)")
        if not command:
            fail(script, f"expected a program to run, found none: add -- {example}")
        return command

    return parse

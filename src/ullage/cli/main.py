"""``ullage COMMAND ...``: finds the command, runs it, and turns every error into one message and an exit status.

Only the command that is asked for is imported.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from ullage import __version__
from ullage.cli import status
from ullage.errors import InvalidInput, UllageError, nearest

COMMANDS = {
    "estimate": "what every rank of a job will hold, as an account, with a verdict",
    "show": "a technique on a job, step by step, with bytes and seconds",
    "plan": "the strategy that fits and is best, among all that a job leaves open",
    "models": "the models that a job may name",
    "devices": "the GPUs that a job may name",
    "check": "a configuration that you have: does it fit, what is wrong with it, what helps",
    "why": "what ran out of memory, from a message, a log or a snapshot, and what helps",
    "convert": "a configuration or a job, written for another engine or launcher",
    "trace": "real code run on fake tensors, every allocation with its life",
    "bench": "this machine measured, so that a job on it is told what it takes here",
    "measure": "a few steps of a job, what its ranks held, and how far the estimate is off",
    "prove": "a job run on its ranks and on one device, and whether they agree",
    "train": "a job over its data, with checkpoints, going on where it was killed",
    "timeline": "a step's memory over time, drawn, or a real snapshot beside the account",
    "validate": "estimates held against measured runs",
}

HELP_WIDTH = 100
_GARBAGE = 200_000
"""Objects between two searches for cycles, of which a command makes few: at Python's 700, a tenth of its time goes there."""

_HELP = """\
usage: ullage COMMAND ...

Says what every byte on every GPU is, for a training job.

{commands}

  ullage COMMAND --help   its options
  ullage --version

Exit status: {statuses}
"""


class Parser(argparse.ArgumentParser):
    """One that raises where argparse would print its usage and leave."""

    def error(self, message: str) -> NoReturn:
        raise InvalidInput(message, remedy=f"see {self.prog} --help")


def _formatter(prog: str) -> argparse.HelpFormatter:
    """Of a fixed width: argparse makes one for every option, and asking the terminal costs an import."""
    return argparse.HelpFormatter(prog, max_help_position=30, width=HELP_WIDTH)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; argv: the arguments after the program's name (None: those of the process). Returns the exit status."""
    gc.set_threshold(_GARBAGE)
    arguments = _own(list(sys.argv[1:] if argv is None else argv))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter is no reason to stop
    traceback = "--traceback" in arguments
    arguments = [argument for argument in arguments if argument != "--traceback"]
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except UllageError as error:
        return _fail(str(error), status.WRONG_INPUT)
    except KeyboardInterrupt:
        return _fail("interrupted", status.INTERRUPTED)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status.BROKEN_PIPE
    except Exception as error:  # any other is a bug of ours
        if traceback:
            raise
        return _fail(f"{_bug(error)}; --traceback shows where", status.BUG)
    finally:
        if argv is None:  # the process ends, and its memory goes back as a whole: none of it need be looked through
            gc.freeze()


def _own(arguments: list[str]) -> list[str]:
    """Without what DeepSpeed's launcher puts before them, and into LOCAL_RANK too (deepspeed/launcher/launch.py, --no_local_rank)."""
    launchers = f"--local_rank={os.environ.get('LOCAL_RANK')}"
    return arguments[1:] if arguments[:1] == [launchers] else arguments


def _run(arguments: list[str]) -> int:
    if not arguments:
        sys.stderr.write(_help())
        return status.WRONG_INPUT
    name, *rest = arguments
    if name in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return 0
    if name in ("-V", "--version"):
        sys.stdout.write(f"ullage {__version__}\n")
        return 0
    if name not in COMMANDS:
        raise _unknown(name)
    command = import_module(f"ullage.cli.{name}")
    parser = Parser(
        prog=f"ullage {name}",
        description=command.__doc__,
        formatter_class=_formatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.usage = f"ullage {name} {command.USAGE}"
    parser.add_argument("-h", "--help", action="help", help="this text")
    command.configure(parser)
    parsed, extra = parser.parse_known_intermixed_args(rest)
    if extra:
        raise _unknown_option(parser, extra[0])
    code: int = command.run(parsed)
    return code


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}   {what}" for name, what in COMMANDS.items())
    return _HELP.format(commands=commands, statuses=status.MEANING)


def _unknown(name: str) -> InvalidInput:
    near = nearest(name, COMMANDS)
    remedy = f"did you mean ullage {near}?" if near else None
    if near is None and os.path.exists(name):
        remedy = f"did you mean ullage estimate {name}?"
    shown = name[:60] if name.isprintable() else repr(name[:60])
    return InvalidInput("is no command", key="command", value=shown, allowed=", ".join(COMMANDS), remedy=remedy)


def _unknown_option(parser: argparse.ArgumentParser, given: str) -> InvalidInput:
    name = given.partition("=")[0]
    shown = given[:60] if given.isprintable() else repr(given[:60])
    if not name.startswith("-"):
        return InvalidInput(f"takes no further argument {shown}", key=parser.prog, remedy=f"see {parser.prog} --help")
    known = [option for action in parser._actions for option in action.option_strings]
    near = nearest(name, known)
    remedy = f"did you mean {near}?" if near else f"see {parser.prog} --help"
    return InvalidInput(f"has no option {shown}", key=parser.prog, remedy=remedy)


def _bug(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return f"a bug in ullage, please report it with the job: {type(error).__name__}{f': {text}' if text else ''}"


def _fail(message: str, code: int) -> int:
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in " ".join(message.splitlines()))
    try:
        sys.stdout.flush()
        sys.stderr.write(f"ullage: {line}\n")
        sys.stderr.flush()
    except BrokenPipeError:
        pass
    return code


if __name__ == "__main__":
    sys.exit(main())

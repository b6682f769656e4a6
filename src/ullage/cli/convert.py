"""A configuration file, or a job file, written for another engine or launcher. What that one cannot say is told on stderr."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ullage.cli.answer import save, write_json
from ullage.cli.flags import add_job_flags, overrides, placed
from ullage.errors import InvalidInput, UllageError

USAGE = "FILE --to FORMAT [options]"


def configure(parser: argparse.ArgumentParser) -> None:
    from ullage.formats.registry import LAUNCHERS, WRITTEN

    add_job_flags(parser, metavar="FILE", what="a configuration that ullage reads, or a job file (docs/formats.md)")
    parser.add_argument("--to", metavar="FORMAT", help=", ".join((*WRITTEN, *LAUNCHERS)))
    parser.add_argument(
        "--from", dest="source", metavar="FORMAT", help="the file's own format; without it, by its content"
    )
    parser.add_argument("--out", type=Path, metavar="OUT", help="where the text is written (stdout)")
    parser.add_argument("--json", action="store_true", help="the text and what it does not say, as JSON")


def run(arguments: argparse.Namespace) -> int:
    from ullage.api import convert
    from ullage.report import json

    for key, given in (("FILE", arguments.job), ("--to", arguments.to)):
        if given is None:
            raise InvalidInput("is missing", key=key, remedy="ullage convert FILE --to deepspeed")
    written = overrides(arguments)
    try:
        found = convert(arguments.job, arguments.to, tuple(written), name=arguments.source)
    except UllageError as error:
        raise placed(error, written) from None
    if arguments.out is not None:
        save(arguments.out, found.text)
    if arguments.json:
        write_json(json.conversion(found))
        return 0
    if arguments.out is None:
        sys.stdout.write(found.text)
        sys.stdout.flush()
    else:
        sys.stdout.write(f"{arguments.out}: {found.format}\n")
    from ullage.report.formats import told

    for line in told(found):
        sys.stderr.write(f"{line}\n")
    return 0

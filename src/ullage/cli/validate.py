"""Estimates held against measured runs: files of records, or folders of them (docs/job.md describes a record)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ullage.cli.answer import write_json, write_report

USAGE = "PATH... [options]"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a file of records, or a folder of .json files")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the answer as JSON (docs/job.md)")
    form.add_argument("--verbose", action="store_true", help="each record too, and every reason in full")
    form.add_argument("--markdown", action="store_true", help="a page: tables, and each grade A miss with its cause")
    form.add_argument("--residuals", action="store_true", help="the spreads that intervals are made of, as TOML")
    parser.add_argument("--causes", type=Path, metavar="FILE", help="with --markdown: known causes of misses, as TOML")


def run(arguments: argparse.Namespace) -> int:
    from ullage.api import validate
    from ullage.errors import InvalidInput
    from ullage.validation.causes import read_causes

    if arguments.causes is not None and not arguments.markdown:
        raise InvalidInput("goes with --markdown", key="--causes", value=str(arguments.causes))
    causes = read_causes(arguments.causes) if arguments.causes is not None else ()
    found = validate(arguments.paths, _progress if sys.stderr.isatty() else None)
    if arguments.json:
        from ullage.report import json

        write_json(json.validation(found))
    elif arguments.markdown:
        from ullage.report.accuracy import accuracy_page

        sys.stdout.write(accuracy_page(found, causes))
    elif arguments.residuals:
        from ullage.report.residuals import residuals_text

        sys.stdout.write(residuals_text(found))
    else:
        from ullage.report.validation import validation_report

        write_report(validation_report(found, verbose=arguments.verbose))
    return 0


def _progress(done: int, of: int) -> None:
    end = "\n" if done == of else ""
    sys.stderr.write(f"\r{done} of {of} records{end}")
    sys.stderr.flush()

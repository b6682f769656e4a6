"""The models that a job may name: type, parameters, layers and width of each."""

from __future__ import annotations

import argparse
import sys

USAGE = "[--json]"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    from ullage.api import models

    found = models()
    if arguments.json:
        from ullage.report import json

        sys.stdout.write(json.dumps(json.models(found)) + "\n")
    else:
        from ullage.report.catalogue import models_report
        from ullage.report.console import to_stdout, write

        write(models_report(found), to_stdout())
    return 0

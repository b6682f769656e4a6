"""The models that a job may name: type, parameters, layers and width of each."""

from __future__ import annotations

import argparse

from ullage.cli.answer import write_json, write_report

USAGE = "[--json]"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    from ullage.api import models

    found = models()
    if arguments.json:
        from ullage.report import json

        write_json(json.models(found))
    else:
        from ullage.report.catalogue import models_report

        write_report(models_report(found))
    return 0

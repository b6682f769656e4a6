"""The GPUs that a job may name: capacity as the driver reports it, bandwidth, dense bf16 rate, and other spellings."""

from __future__ import annotations

import argparse

from ullage.cli.answer import write_json, write_report

USAGE = "[--json]"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    from ullage.api import devices

    found = devices()
    if arguments.json:
        from ullage.report import json

        write_json(json.devices(found))
    else:
        from ullage.report.catalogue import devices_report

        write_report(devices_report(found))
    return 0

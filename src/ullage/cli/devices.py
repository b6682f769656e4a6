"""The GPUs that a job may name: capacity as the driver reports it, bandwidth, dense bf16 rate, and other spellings."""

from __future__ import annotations

import argparse
import sys

USAGE = "[--json]"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    from ullage.api import devices

    found = devices()
    if arguments.json:
        from ullage.report import json

        sys.stdout.write(json.dumps(json.devices(found)) + "\n")
    else:
        from ullage.report.catalogue import devices_report
        from ullage.report.console import to_stdout, write

        write(devices_report(found), to_stdout())
    return 0

"""How fast this machine multiplies, moves and sends, measured into a calibration file that estimate, plan and measure then use.

A job's cluster names it: cluster: 2xthis-machine, or --calibration FILE. Needs ullage[train]; on two cores it takes two minutes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ullage.cli.answer import write_report

USAGE = "[--out FILE] [options]"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the calibration file (~/.config/ullage/this-machine.toml)"
    )
    parser.add_argument("--device", metavar="KIND", help="cpu or cuda (cuda where torch sees a GPU)")
    parser.add_argument(
        "--processes",
        metavar="N,N",
        help="as many at once as a job has ranks here, each number measured (1,2; GPUs: 1 and all)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes and repeats: half a minute, and coarser")


def run(arguments: argparse.Namespace) -> int:
    from ullage.api import bench
    from ullage.report.bench import bench_report

    path = bench(arguments.out, device=arguments.device, processes=arguments.processes, quick=arguments.quick)
    write_report(bench_report(path))
    return 0

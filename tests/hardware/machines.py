"""A calibration file of round numbers: 100 GFLOP/s in fp32, 400 in bf16; 10 GB/s in fp32, 5 in bf16; gloo at 1 GB/s, nothing hidden."""

from __future__ import annotations

from pathlib import Path

_HEAD = """\
schema = 2
date = "2026-11-30"
source = "a test"
[device]
name = "this-machine"
vendor = "cpu"
memory_bytes = 16000000000
process_bytes = 200000000
"""


def calibration(processes: tuple[int, ...] = (1, 2)) -> str:
    return _HEAD + "".join(_run(count) for count in processes)


def written(folder: Path, text: str | None = None, name: str = "machine.toml") -> Path:
    path = folder / name
    path.write_text(calibration() if text is None else text)
    return path


def _run(processes: int) -> str:
    rows = [f"\n[[run]]\nprocesses = {processes}\nthreads = {max(1, 2 // processes)}\nspread = 0.02\noverlap = 0.0\n"]
    for dtype, rate in (("fp32", 1e11), ("bf16", 4e11)):
        for direction in ("forward", "dgrad", "wgrad", "batched"):
            rows.append(
                f'[[run.matmul]]\ndtype = "{dtype}"\ndirection = "{direction}"\nm = [128, 512]\nn = [128]\nk = [128]\n'
                f"flops_per_s = [{rate / processes}, {rate / processes}]\n"
            )
        for backward in ("true", "false"):
            rows += [
                f'[[run.attention]]\ndtype = "{dtype}"\nhead_dim = 64\ncausal = {causal}\nbackward = {backward}\n'
                f"seq = [128, 512]\nflops_per_s = [5e10, 5e10]\n"
                for causal in ("true", "false")
            ]
    rows += [
        f'[[run.memory]]\nkind = "{kind}"\ndtype = "{dtype}"\nbackward = false\nbytes = [10000, 100000000]\n'
        f"seconds = [{seconds}]\n"
        for dtype, seconds in (("fp32", "1e-6, 1e-2"), ("bf16", "2e-6, 2e-2"))
        for kind in ("pointwise", "tanh", "norm", "softmax", "cross_entropy", "permute", "copy", "optimizer")
    ]
    if processes > 1:
        rows += [
            f'[[run.collective]]\nkind = "{kind}"\nranks = {processes}\npayload_bytes = [1000, 100000000]\nseconds = [1e-4, 1e-1]\n'
            for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        ]
    return "\n".join(rows) + "\n"

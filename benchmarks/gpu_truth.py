"""Truth records of one GPU: a matrix of single-GPU jobs, each run by ``ullage measure`` in a process of its own (a dry run's in this one).

    python -m benchmarks.gpu_truth H200-SXM-141GB gpu_truth.json
    python -m benchmarks.gpu_truth H200-SXM-141GB dry.json --dry-run   # small models on the CPU: does every job of the matrix run?

Four shapes of model, each with what moves memory: precision, attention, recomputation, optimizer, adapters, sequence length, gradient
accumulation; and of the first two shapes the largest micro-batch that the estimate calls fitting, and the first that it calls oom. A
job that runs out of memory becomes a record with ``fits: false``. Jobs are taken in turn until the minutes are over; what was left out is
said. The file is one that ``ullage validate`` reads.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ullage
from ullage.errors import UllageError

SHAPES: Mapping[str, str] = {  # by model_type
    "llama": "llama-3.2-1b",  # grouped heads, tied head over a large vocabulary
    "gpt2": "gpt2-medium",  # learned positions, LayerNorm, dropout, biases
    "qwen3": "qwen3-0.6b",  # norms of heads
    "phi3": "phi-3-mini",  # fused projections, an untied head
}
SMALL: Mapping[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
SMALL_PHI3: Mapping[str, object] = {**SMALL, "pad_token_id": 0}
_WHOLE = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)  # a CPU has no fused attention that drops
SMALL_GPT2: Mapping[str, object] = {
    **_WHOLE,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 512,
    "n_positions": 256,
}
_SMALL: Mapping[str, Mapping[str, object]] = {"gpt2": SMALL_GPT2, "phi3": SMALL_PHI3}
VARIANTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("bf16-mixed", {}),
    ("fp32", {"precision": "fp32"}),
    ("all in bf16", {"precision": "bf16"}),
    ("fp16-mixed", {"precision": "fp16-mixed"}),
    ("full recomputation", {"recompute": "full"}),
    ("every second layer", {"recompute": {"every": 2}}),
    ("eager attention", {"attention": "eager"}),
    ("foreach AdamW", {"optimizer": {"name": "adamw", "impl": "foreach"}}),
    ("for-loop AdamW", {"optimizer": {"name": "adamw", "impl": "for-loop"}}),
    ("SGD", {"optimizer": {"name": "sgd", "impl": "foreach"}}),
    ("long sequence", {"data": {"seq_len": 4096, "micro_batch": 1}}),
    ("gradient accumulation", {"data": {"seq_len": 1024, "micro_batch": 2, "grad_accum": 4}}),
    ("adapters", {"lora": {"rank": 16, "targets": "all-linear"}, "precision": "bf16"}),
    ("recomputation by op", {"recompute": "selective"}),
)
DATA: Mapping[str, int] = {"seq_len": 1024, "micro_batch": 4}
NEAR_LIMIT = ("llama", "gpt2")
"""Shapes that are also run with the largest micro-batch that fits by the estimate, and with the first that does not."""
LARGEST = 4096
DEFAULT_MINUTES = 8.0
ONE_JOB_S = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", help="as `ullage devices` names it")
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=DEFAULT_MINUTES)
    parser.add_argument("--dry-run", action="store_true", help="small models; needs no GPU")
    arguments = parser.parse_args()
    until = time.monotonic() + 60 * arguments.minutes
    records: list[object] = []
    for name, job in matrix(arguments.device, small=arguments.dry_run):
        if time.monotonic() > until:
            print(f"left out: {name}")
            continue
        began = time.monotonic()
        found, said = measured(job, _here if arguments.dry_run else _beside)
        print(f"{time.monotonic() - began:5.1f} s  {name}: {said}", flush=True)
        if found is not None:
            records.append(found)
            arguments.out.write_text(json.dumps(records, indent=1) + "\n")
    print(f"{len(records)} records in {arguments.out}")


def matrix(device: str, *, small: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Jobs by name: every shape's first variant, then every shape's second, so that time that runs out leaves none without."""
    for variant, keys in VARIANTS:
        for shape in SHAPES:
            yield f"{shape}, {variant}", _job(device, shape, keys, small)
    for shape in NEAR_LIMIT if not small else ():
        whole = _job(device, shape, {}, small)
        most = largest_that_fits(whole)
        for size, what in ((most, "the largest that fits"), (_first_oom(whole, most), "the first that does not")):
            yield f"{shape}, {what} (micro-batch {size})", whole | {"data": {**DATA, "micro_batch": size}}


def _job(device: str, shape: str, keys: Mapping[str, Any], small: bool) -> dict[str, Any]:
    name = SHAPES[shape]
    model: object = name
    if small:
        model = {"model_type": shape, **_SMALL.get(shape, SMALL)}
        keys = {**keys, **({"data": {**keys["data"], "seq_len": 64}} if "data" in keys else {})}
    data = {**DATA, "seq_len": 64} if small else DATA
    return {
        "schema": 1,
        "model": model,
        "cluster": f"1x{device}",
        "data": data,
        "precision": "bf16-mixed",
        "engine": {"name": "single"},
        "optimizer": {"name": "adamw", "impl": "fused"},
        **keys,
    }


def largest_that_fits(job: Mapping[str, Any]) -> int:
    """Sequences of a micro-batch, by the estimate's verdict; found by halving."""
    low, high = 1, LARGEST
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _verdict(job, middle) == "fits" else (low, middle - 1)
    return low


def _first_oom(job: Mapping[str, Any], above: int) -> int:
    return next(size for size in range(above + 1, 4 * above + 4) if _verdict(job, size) == "oom")


def _verdict(job: Mapping[str, Any], micro_batch: int) -> str:
    return ullage.estimate(ullage.read_job({**job, "data": {**job["data"], "micro_batch": micro_batch}})).verdict


@dataclass(frozen=True, kw_only=True)
class _Ran:
    out: str
    err: str


def _beside(arguments: Sequence[str]) -> _Ran:
    """In a process of its own: what a job leaves on the GPU goes with it. Raises subprocess.TimeoutExpired."""
    command = [sys.executable, "-m", "ullage.cli.main", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=ONE_JOB_S)
    return _Ran(out=ran.stdout, err=ran.stderr)


def _here(arguments: Sequence[str]) -> _Ran:
    """In this process, where a job of small models takes less time than a start."""
    from ullage.cli.main import main as command

    out, err = io.StringIO(), io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(out), redirect_stderr(err):
        warnings.simplefilter("ignore")
        command(arguments)
    return _Ran(out=out.getvalue(), err=err.getvalue())


def measured(job: dict[str, Any], run: Callable[[Sequence[str]], _Ran]) -> tuple[object | None, str]:
    """The job's record, and what is to be said of it."""
    with tempfile.TemporaryDirectory() as name:
        file, out = Path(name) / "job.json", Path(name) / "record.json"
        file.write_text(json.dumps(job))
        try:
            ran = run(["measure", str(file), "--steps", "3", "--out", str(out), "--json"])
        except subprocess.TimeoutExpired:
            return None, f"not done after {ONE_JOB_S} s"
        if out.exists():
            (record,) = json.loads(out.read_text())
            return record, f"{json.loads(ran.out)['error_ratio']:+.2%}"
        said = " ".join(ran.err.split())[-200:]
        return (_out_of_memory(job), "out of memory") if "out of memory" in ran.err.lower() else (None, said)


def _out_of_memory(job: dict[str, Any]) -> object:
    try:
        predicted: str = ullage.estimate(ullage.read_job(job)).verdict
    except UllageError as error:
        predicted = str(error)
    return {
        "id": f"measured-oom-{abs(hash(json.dumps(job))):x}",
        "source": "benchmarks/gpu_truth.py",
        "grade": "A",
        "job": job,
        "measured": {},
        "fits": False,
        "assumed": [],
        "notes": f"ran out of memory; predicted: {predicted}",
    }


if __name__ == "__main__":
    main()

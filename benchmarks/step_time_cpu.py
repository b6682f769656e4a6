"""Seconds of a step on this CPU, predicted from a calibration and measured: python benchmarks/step_time_cpu.py [machine.toml]

Measures the machine first where no file is given. Exit status 0 only where every job is within 20 %. Run it where nothing else runs.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import ullage
from ullage.timing.step import step_time

BOUND = 0.20
STEPS = 9

_LLAMA = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
_QWEN = {
    "model_type": "qwen2",
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
_GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 8192,
    "n_embd": 256,
    "n_layer": 8,
    "n_head": 4,
    "n_positions": 512,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}

Values = Mapping[str, object]
JOBS: dict[str, tuple[int, Values]] = {
    "llama, one process, fp32": (
        1,
        {"model": _LLAMA, "engine": {"name": "single"}, "precision": "fp32", "data": {"seq_len": 512}},
    ),
    "qwen2, one process, bf16-mixed, recompute full": (
        1,
        {
            "model": _QWEN,
            "engine": {"name": "single"},
            "precision": "bf16-mixed",
            "recompute": "full",
            "data": {"seq_len": 1024},
        },
    ),
    "gpt2, DDP, 2 processes, fp32": (
        2,
        {"model": _GPT2, "engine": {"name": "ddp"}, "precision": "fp32", "data": {"seq_len": 256, "micro_batch": 2}},
    ),
    "llama, FSDP2, 2 processes, bf16-mixed": (
        2,
        {
            "model": _LLAMA,
            "engine": {"name": "fsdp2"},
            "precision": "bf16-mixed",
            "data": {"seq_len": 512},
        },
    ),
    "qwen2, ZeRO-1, 2 processes, fp32, 4 micro-batches": (
        2,
        {
            "model": _QWEN,
            "engine": {"name": "zero1"},
            "precision": "fp32",
            "data": {"seq_len": 256, "grad_accum": 4},
        },
    ),
    "llama, tensor parallel, 2 processes, fp32": (
        2,
        {
            "model": _LLAMA,
            "engine": {"name": "fsdp2"},
            "layout": {"tp": 2},
            "precision": "fp32",
            "data": {"seq_len": 256},
        },
    ),
}


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(arguments[0]) if arguments else ullage.bench(Path(folder) / "machine.toml", device="cpu")
        return _compared(path)


def _compared(path: Path) -> int:
    worst = 0.0
    print(f"{'job':<50} {'measured':>9} {'predicted':>9} {'ratio':>6}  parts of the prediction")
    for name, (ranks, values) in JOBS.items():
        job = ullage.read_job({**values, "cluster": {"device": str(path), "gpus_per_node": ranks}})
        found = ullage.measure(job, ullage.Settings(steps=STEPS))
        assert found is not None, "no launcher started this"
        predicted = step_time(job)
        ratio = predicted.step_s / found.step_s
        worst = max(worst, abs(ratio - 1))
        parts = ", ".join(f"{part} {seconds:.3f}" for part, seconds in predicted.parts)
        print(f"{name:<50} {found.step_s:>8.3f}s {predicted.step_s:>8.3f}s {ratio:>6.2f}  {parts}", flush=True)
    print(f"worst: {100 * worst:.0f} % off, {100 * BOUND:.0f} % may be")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The same job gives the same answer in every process, whatever order Python's sets come in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = {
    "model": {"base": "llama-3.1-8b", "num_hidden_layers": 4},
    "cluster": "4xH100-SXM-80GB",
    "layout": {"tp": 2, "sp": True},
    "engine": {"name": "megatron", "zero_stage": 1},
    "data": {"seq_len": 1024, "grad_accum": 2},
    "recompute": {"modules": ["layernorm", "mlp"]},
}


@pytest.mark.parametrize("seed", ["1", "2"])
def test_an_answer_does_not_depend_on_the_hash_seed(seed: str, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(JOB), encoding="utf-8")

    def answer(hash_seed: str) -> str:
        command = [sys.executable, "-m", "ullage", "estimate", str(path), "--json"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert answer("0") == answer(seed)

"""Jobs to change: the smallest whole one, and a way to write it to a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"

GPT = {
    "model_type": "gpt",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "position": "rope",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "bias": False,
    "qkv_bias": False,
    "tie_word_embeddings": False,
}

MakeJob = Callable[..., dict[str, object]]


@pytest.fixture
def minimal() -> MakeJob:
    """``minimal(layout={"tp": 2})``: a job of a 32-layer model on 8 GPUs with these keys besides."""

    def make(**keys: object) -> dict[str, object]:
        return {"model": dict(GPT), "cluster": "8xH100-SXM-80GB", **keys}

    return make


@pytest.fixture
def write_job(tmp_path: Path, minimal: MakeJob) -> Callable[[str], Path]:
    """Writes the minimal job's model and cluster as job.yaml, followed by ``rest``."""

    def write(rest: str) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(f"model: {json.dumps(GPT)}\ncluster: 8xH100-SXM-80GB\n{rest}", encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def measured_jobs() -> list[dict[str, object]]:
    """Jobs of published measurements, as their records state them: one per corner of the format."""
    records = json.loads((DATA / "jobs.json").read_text(encoding="utf-8"))
    assert isinstance(records, list)
    return records

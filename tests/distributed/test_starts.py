"""A plan's files start for real: DeepSpeed on two processes from its JSON, a script on two by ``accelerate launch`` from its YAML."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.distributed.starting import Started, initialise
from tests.distributed.world import run

import ullage
from ullage.formats.convert import write_job
from ullage.formats.registry import format_named
from ullage.job.job import Job

pytestmark = pytest.mark.xdist_group("deepspeed")

TIMEOUT_S = 120.0


def planned(**keys: object) -> Job:
    """The best plan of a small job on two GPUs."""
    job = {
        "model": {"base": "gpt2", "num_hidden_layers": 2},
        "cluster": "2xA100-SXM-40GB",
        "data": {"seq_len": 64, "global_batch": 8},
        **keys,
    }
    return ullage.plan(job, top=1).plans[0].job


def text_of(job: Job, name: str) -> str:
    return write_job(job, format_named(name)).text


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_starts_from_a_plans_json(stage: int) -> None:
    job = planned(engine={"name": "deepspeed", "zero_stage": stage}, layout={"dp": 2})
    found: list[Started] = run(initialise, (text_of(job, "deepspeed"),), ranks=2, timeout_s=TIMEOUT_S)
    for one in found:
        assert (one.stage, one.micro_batch, one.grad_accum) == (stage, job.data.micro_batch, job.data.grad_accum)
        assert one.batch == 8
        assert one.bf16
        assert one.clipping == 1.0
        assert 0 < one.loss < 1


def test_accelerate_launches_a_plans_yaml(tmp_path: Path) -> None:
    job = planned(engine={"name": "fsdp2"}, layout={"dp": 2}, recompute="full")
    file = tmp_path / "accelerate.yaml"
    file.write_text(text_of(job, "accelerate"))
    script = Path(__file__).with_name("launched.py")
    cpu = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", file, script],
        env={**os.environ, **cpu},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    found = [json.loads(one) for one in re.findall(r"FOUND (\{.*?\})", done.stdout)]  # ranks may share a line
    assert len(found) == 2, done.stderr[-2000:]
    for one in found:
        assert one == {
            "processes": 2,
            "mixed_precision": "bf16",
            "fsdp_version": 2,
            "reshard_after_forward": job.engine.zero_stage == 3,
            "activation_checkpointing": True,
        }

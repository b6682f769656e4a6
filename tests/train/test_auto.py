"""``--auto``: the best plan among those that are run, and what a person wrote stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.distributed.training import LLAMA

from ullage.cli.main import main
from ullage.errors import Infeasible, Unsupported
from ullage.train.auto import chosen
from ullage.train.reach import refuse_what_is_not_run

WANTED = {"schema": 1, "model": LLAMA, "cluster": "2xH100-SXM-80GB", "data": {"seq_len": 64, "global_batch": 16}}


def test_a_plan_that_is_run() -> None:
    """The best of all has context parallelism, which is not."""
    large = {"model": "llama-3.2-1b", "cluster": "4xA100-SXM-40GB", "data": {"seq_len": 2048, "global_batch": 16}}
    found = chosen({"schema": 1, **large}, ())
    refuse_what_is_not_run(found.job)
    assert found.estimate.verdict == "fits"
    assert found.job.data.micro_batch * found.job.data.grad_accum * found.job.layout.dp == 16


def test_what_is_written_is_not_changed() -> None:
    assert chosen(WANTED, ("recompute=full",)).job.recompute.kind == "full"
    for engine in ("ddp", "deepspeed"):
        found = chosen(WANTED, (), engine).job
        refuse_what_is_not_run(found)
        assert found.engine.name == engine
    with pytest.raises(Unsupported, match="--auto: no plan is run here; the best: attention"):
        chosen(WANTED, ("attention=mem-efficient",))


def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = {"name": "small", "memory": "256MiB", "bf16_flops_per_s": 1e14, "memory_bytes_per_s": 1e12}
    small = {**WANTED, "cluster": {"device": device, "gpus_per_node": 1}}
    with pytest.raises(Infeasible, match="nothing fits"):
        chosen(small, ())
    file = tmp_path / "job.json"
    file.write_text(json.dumps(small))
    assert main(["train", str(file), "--auto", "--data", "a.bin", "--out", "nowhere"]) == 1
    assert "not started: --auto: nothing fits" in capsys.readouterr().err


def test_a_models_folder_is_kept(tmp_path: Path) -> None:
    """It has the tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert chosen({**WANTED, "model": str(tmp_path)}, ()).job.model.name == str(tmp_path)

"""The job that a training goes on as where memory ran out."""

from types import SimpleNamespace

import pytest
from tests.distributed.training import job_of

from ullage.errors import OutOfMemory
from ullage.frozen import FrozenMap
from ullage.postmortem.advice import Advice
from ullage.train import replan


def test_what_is_learnt_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight bits of moments, 16 of weights, adapters and shorter sequences are no going on, though they fit; a smaller micro-batch is."""
    changes = (
        {"optimizer": "adamw-8bit"},
        {"precision": "bf16"},
        {"lora": {"rank": 4}},
        {"data.seq_len": 8},
        {"data.micro_batch": 1, "data.grad_accum": 4},
    )
    advice = [
        Advice(change=FrozenMap(change), what="", frees_bytes=1, slowdown_ratio=None, verdict_after="fits")
        for change in changes
    ]
    monkeypatch.setattr(replan, "advised", lambda _: SimpleNamespace(advice=advice))
    job = job_of("single", 1, precision="bf16-mixed", data={"seq_len": 16, "micro_batch": 4, "grad_accum": 1})
    found = replan.following(OutOfMemory("ran out", value="CUDA out of memory."), job)
    assert found is not None
    assert found[1] is advice[-1]
    assert found[0].data.micro_batch == 1

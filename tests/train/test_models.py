"""Models whose own settings decide what a run can show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.distributed.training import job_of

from ullage.errors import InvalidInput, Unsupported
from ullage.job.read import read_job
from ullage.trace.models import build
from ullage.train.measured import measure
from ullage.train.proof import prove
from ullage.train.settings import Settings

GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 64}


@pytest.mark.parametrize("verb", [prove, measure])
def test_what_drops_is_not_proved_and_on_cpus_not_measured(verb: Callable[..., object]) -> None:
    """GPT-2 drops a tenth of its attention by default: ranks drop others than one device, and no fused kernel of a CPU drops."""
    job = read_job(
        {
            "schema": 1,
            "model": GPT2,
            "cluster": "1xH100-SXM-80GB",
            "engine": {"name": "single"},
            "data": {"seq_len": 16},
        }
    )
    with pytest.raises(Unsupported) as raised:
        verb(job, Settings(steps=1))
    assert raised.value.key == "model.resid_pdrop"


def test_padding_beyond_the_vocabulary_is_no_bug() -> None:
    """Phi-3's class pads with token 32,000."""
    with pytest.raises(InvalidInput, match="Padding_idx"):
        build(job_of("single", 1, model={"model_type": "phi3"}))

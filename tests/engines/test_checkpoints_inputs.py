"""Inputs of DeepSpeed's checkpoints, by what runtime/activation_checkpointing of 0.19.8 and of 2022 does with them."""

from __future__ import annotations

import pytest

from ullage.api import estimate
from ullage.calibration.host import host_bytes_per_s
from ullage.engines.base import pinned
from ullage.errors import Contradiction, Unsupported
from ullage.formats.convert import write_job
from ullage.formats.registry import format_named
from ullage.job.read import read_job
from ullage.timing.step import step_time

LAYERS, HIDDEN, SEQ = 32, 256, 65536
STREAM = SEQ * HIDDEN * 2
TODAY = {"deepspeed_version": "0.19.8"}


def job(*, tp: int = 1, stack: str = "megatron", stage: int = 2, offload: str = "none", **options: object) -> dict:
    """Checkpoints are most of what its forward leaves."""
    model = {
        "model_type": "gpt" if stack == "megatron" else "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 4 * HIDDEN,
        "vocab_size": 128,
        "max_position_embeddings": SEQ,
    }
    return {
        "model": model,
        "cluster": f"{2 * tp}xA100-SXM-80GB",
        "data": {"seq_len": SEQ},
        "layout": {"dp": 2, "tp": tp},
        "stack": stack,
        "engine": {"name": "deepspeed", "zero_stage": stage, "options": {"reduce_bucket_size": 1000} | options},
        "precision": "fp16-mixed",
        "recompute": "full",
        "loss": "vocab-parallel" if stack == "megatron" else "full",
        "offload": {"activations": offload},
    }


def allocated(document: dict) -> int:
    return estimate(read_job(document)).peak.allocated_bytes


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("said", [{"offload": "cpu"}, {"cpu_checkpointing": True}], ids=str)
def test_copies_that_block_leave_nothing_on_the_gpu(stage: int, said: dict) -> None:
    """Of 2022, from and to memory that is not pinned. One of the checkpoints is back while the first backward runs."""
    kept, gone = job(stage=stage), job(stage=stage, **said)
    assert (LAYERS - 3) * STREAM <= allocated(kept) - allocated(gone) <= LAYERS * STREAM
    assert estimate(read_job(gone)).host_bytes == 2 * LAYERS * STREAM  # two ranks


def test_copies_aside_leave_two_on_the_gpu() -> None:
    """keep_last_count is one, and the tensor before it is not dropped from the stash when the last comes; the rest has pinned blocks."""
    kept, aside = job(**TODAY), job(offload="cpu", **TODAY)
    assert allocated(kept) - allocated(aside) == (LAYERS - 2) * STREAM
    assert estimate(read_job(aside)).host_bytes == 2 * (LAYERS - 2) * pinned(STREAM)
    before = job(offload="cpu", deepspeed_version="0.19.5")
    assert estimate(read_job(before)).host_bytes == 2 * LAYERS * STREAM


def test_divided_inputs_are_a_rank_s_part_of_each() -> None:
    """--partition-activations: a whole one comes back for each backward, when its part is let go of."""
    kept, parts = job(tp=2), job(tp=2, partition_activations=True)
    freed = allocated(kept) - allocated(parts)
    assert (LAYERS - 3) * STREAM / 2 <= freed <= LAYERS * STREAM / 2
    both = job(tp=2, partition_activations=True, cpu_checkpointing=True)
    assert estimate(read_job(both)).host_bytes == 4 * LAYERS * STREAM // 2
    assert allocated(both) < allocated(parts)


def test_transformers_layers_call_torchs_checkpoint() -> None:
    """DeepSpeed's keys do nothing there, and a warning says so; TRL's and axolotl's own offload is as under any engine."""
    plain, said = job(stack="transformers"), job(stack="transformers", cpu_checkpointing=True)
    assert allocated(plain) == allocated(said)
    assert any("cpu_checkpointing" in one and "does nothing" in one for one in estimate(read_job(said)).warnings)
    gone = estimate(read_job(job(stack="transformers", offload="cpu")))
    assert (LAYERS - 3) * STREAM <= allocated(plain) - gone.peak.allocated_bytes <= LAYERS * STREAM
    assert gone.host_bytes == 2 * LAYERS * pinned(STREAM)


def test_a_pass_waits_for_copies_that_block() -> None:
    """Each way once, at the rate of memory that is not pinned."""
    plain, waiting = (step_time(read_job(job(offload=place))) for place in ("none", "cpu"))
    rate = host_bytes_per_s(read_job(job()).cluster.device, "d2h", pinned=False).value
    assert waiting.step_s - plain.step_s == pytest.approx(2 * LAYERS * STREAM / rate, rel=1e-6)
    aside = step_time(read_job(job(offload="cpu", **TODAY)))
    assert aside.step_s < waiting.step_s


def test_what_is_not_modelled_or_does_not_go_together() -> None:
    with pytest.raises(Unsupported, match="recompute: full"):
        estimate(read_job(job(offload="cpu") | {"recompute": "none"}))
    with pytest.raises(Contradiction, match="cpu_checkpointing"):
        read_job(job(offload="cpu", cpu_checkpointing=False))


def test_the_file_says_it() -> None:
    assert '"cpu_checkpointing": true' in write_job(read_job(job(offload="cpu")), format_named("deepspeed")).text

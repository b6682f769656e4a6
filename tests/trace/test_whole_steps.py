"""A whole step's peak under every engine: the closed form, the trace of the real code and torch's own trackers agree."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

from ullage.engines.estimate import estimate
from ullage.job.read import read_job
from ullage.memory.ledger import by_category
from ullage.trace import sharded, values
from ullage.trace.hooks import as_in_a_run
from ullage.trace.like import cuda as like_cuda
from ullage.trace.models import factory_of
from ullage.trace.recorder import Recorder
from ullage.trace.run import _process_group
from ullage.trace.whole import ENGINES, MODELS, MODES, Case, cases, row, traced

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),  # of DTensor's views: nobody changes them in place
    pytest.mark.filterwarnings("ignore:`torch.jit"),  # as torch.distributed.optim is imported
]
NEAR = 0.005

CASES = [
    Case("llama", "single", "mixed, accumulation, short"),
    Case("gpt2", "single", "eager"),
    Case("llama", "ddp", "fp32, short"),
    Case("llama", "ddp, in place", "mixed, fused, short"),
    Case("qwen3", "zero1", "for-loop, short"),
    Case("llama", "fsdp2, 2", "accumulation"),
    Case("llama", "fsdp2, 2", "for-loop, short"),
    Case("gpt2", "fsdp2, 3", "sgd, long"),
    Case("llama-3.2-1b", "fsdp2, 2", "accumulation"),
    Case("llama-3.2-1b", "fsdp2, 3", "for-loop, short"),
    Case("llama", "fsdp2, 3", "mixed, recompute"),
    Case("qwen3", "tp", "mixed"),
    Case("llama", "tp", "mixed, fused, short"),
    Case("llama", "tp", "mixed, eager, recompute"),
    Case("qwen3", "tp", "mixed, accumulation, short"),
    Case("llama", "tp along the sequence", "accumulation"),
    Case("qwen3", "tp along the sequence", "for-loop, short"),
    Case("qwen3", "tp along the sequence", "mixed, fused, short"),
    Case("llama", "tp along the sequence x fsdp2", "fp32, short"),
    Case("qwen3", "tp along the sequence x fsdp2", "mixed, eager, recompute"),
    Case("bert", "ddp", "sgd, long"),
    Case("bert", "zero1", "mixed, recompute"),
    Case("bert", "fsdp2, 3", "recompute, long"),
    Case("bert, sequences", "single", "mixed, fused, short"),
    Case("bert, sequences", "fsdp2, 3", "accumulation"),
    Case("llama", "tp x fsdp2", "recompute, long"),
    Case("llama", "tp x fsdp2", "mixed, fused, short"),
    Case("qwen3", "tp x fsdp2", "mixed, accumulation, short"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_peak_and_its_moment(case: Case) -> None:
    found = row(case)
    assert found.closed == pytest.approx(found.traced, rel=NEAR)
    assert found.closed_moment == found.traced_moment


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
@pytest.mark.parametrize(("engine", "ranks"), [("single", 1), ("fsdp2", 4)])
def test_images(engine: str, ranks: int, precision: str) -> None:
    """A batch of pixels in fp32, and patches for tokens."""
    job = read_job(
        {
            "schema": 1,
            "model": {
                "model_type": "vit",
                "hidden_size": 192,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "intermediate_size": 688,
                "image_size": [64, 96],
                "patch_size": 8,
                "num_labels": 10,
            },
            "cluster": f"{ranks}xH100-SXM-80GB",
            "data": {"micro_batch": 16},
            "engine": {"name": engine},
            "precision": precision,
            "optimizer": {"name": "adamw", "impl": "foreach"},
        }
    )
    answer, found = estimate(job), traced(job)
    assert answer.peak.allocated_bytes - by_category(answer.ledger)["workspace"] == pytest.approx(
        found.steady.bytes, rel=NEAR
    )
    assert by_category(answer.ledger)["input"] == 16 * 3 * 64 * 96 * 4 + 512


@pytest.mark.parametrize("attention", ["flash", "eager"])
def test_a_padding_mask_of_an_encoder(attention: str) -> None:
    """Layers weigh more than the head here, and each of them has the mask of booleans in its own type, or adds it."""
    job = read_job(
        {
            "schema": 1,
            "model": {**MODELS["bert"], "vocab_size": 64},  # type: ignore[dict-item]
            "cluster": "1xH100-SXM-80GB",
            "data": {"seq_len": 248, "micro_batch": 8, "padding_mask": True},
            "engine": {"name": "single"},
            "precision": "bf16",
            "attention": attention,
            "recompute": "full",
            "optimizer": {"name": "adamw", "impl": "foreach"},
        }
    )
    answer, found = estimate(job), traced(job)
    assert answer.peak.moment.startswith("backward of layer")
    closed = answer.peak.allocated_bytes - by_category(answer.ledger)["workspace"]
    assert closed == pytest.approx(found.steady.bytes, rel=NEAR)


def test_the_cases_meet_every_engine() -> None:
    assert {case.engine for case in CASES} == set(ENGINES)
    assert len({case.mode for case in CASES}) > len(MODES) // 2
    assert set(CASES) <= set(cases())


class _Valued(TorchDispatchMode):
    """Answers what the layer code asks of small tensors, below torch's tracker."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return values.follow(func, args, kwargs or {}, self.fake)


def tracked(case: Case) -> int:
    """The second step's peak by torch's own tracker, which rounds to 512 bytes on CUDA alone."""
    job = case.job
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(_process_group(0, job.layout.world))
        for mode in (fake, _Valued(fake), like_cuda(), sharded.as_in_a_run(Recorder(fake=fake)), as_in_a_run()):
            stack.enter_context(mode)
        model, optimizer, step = factory_of(job)()
        if job.engine.name == "fsdp2":
            tracker: MemTracker = FSDPMemTracker(model, optimizer)
        else:
            tracker = MemTracker()
            tracker.track_external(model, optimizer)
        with as_in_a_run():
            with tracker:
                step()
            tracker.reset_mod_stats()
            with tracker:
                step()
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", "single", "bf16"),
        Case("gpt2", "single", "bf16"),
        Case("llama", "ddp", "mixed, recompute"),
        Case("llama", "fsdp2, 2", "bf16"),
        Case("llama", "fsdp2, 3", "mixed"),
    ],
    ids=str,
)
def test_torch_tracker_agrees(case: Case) -> None:
    found = row(case)
    assert found.closed == pytest.approx(tracked(case), rel=NEAR)


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("options", [{}, {"reduce_in_place": True}], ids=str)
def test_linears_that_cast_their_input_once(options: dict[str, bool], recompute: str) -> None:
    """Long sequences, so that what layers keep is most of the peak."""

    def peaks(options: dict[str, bool]) -> tuple[int, int]:
        keys: dict[str, Any] = {
            "engine": {"name": "ddp", "options": options},
            "layout": {"dp": 4},
            "recompute": recompute,
        }
        keys |= {"optimizer": {"name": "sgd", "impl": "foreach"}, "data": {"seq_len": 512, "micro_batch": 4}}
        job = read_job({"model": MODELS["llama"], "cluster": "4xH100-SXM-80GB", "precision": "bf16-mixed", **keys})
        answer = estimate(job)
        closed = answer.peak.allocated_bytes - by_category(answer.ledger).get("workspace", 0)
        return closed, traced(job).steady.bytes

    (closed, found), (_, before) = peaks({**options, "cast_once": True}), peaks(options)
    assert closed == pytest.approx(found, rel=NEAR)
    if recompute == "none":  # of each of three layers two copies for q, k and v, and one for gate and up
        assert before - found == pytest.approx(3 * 3 * (4 * 512) * 256 * 2, rel=0.01)

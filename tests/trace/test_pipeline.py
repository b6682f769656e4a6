"""A traced module cut into the stages of torch's pipelining, against the real code of each stage."""

from dataclasses import replace

import pytest
from tests.trace import stages
from tests.trace.helpers import language_model

from ullage.engines.estimate import estimate
from ullage.engines.registry import account, ranks_of
from ullage.errors import Infeasible, Unsupported
from ullage.frozen import FrozenMap
from ullage.job.read import read_job
from ullage.kernels.step import Context
from ullage.memory.borders import stages_of
from ullage.memory.program import locate_peak
from ullage.model.build import graph as build
from ullage.trace.families import FAMILIES
from ullage.trace.graph import graph_of
from ullage.trace.run import trace

SCHEDULES = {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe"}
OUTSIDE = ("input", "workspace", "buffers")
DATA = {"seq_len": 40, "micro_batch": 2, "grad_accum": 4}
CONTEXT = Context(sizes=FrozenMap(), stack="traced", compute="fp32", params="fp32", residual="fp32")


def job(schedule="1f1b", split=(2, 2), **changes):
    keys = {
        "model": "llama-3.2-1b",
        "cluster": "4xH100-SXM-80GB",
        "engine": {"name": "fsdp2", "zero_stage": 2},
        "precision": "fp32",
        "grad_clip": False,
        "optimizer": {"name": "adamw", "impl": "fused"},
        "layout": {"pp": 2, "schedule": schedule},
        "data": {"seq_len": 1, "micro_batch": 1, "grad_accum": stages.MICRO_BATCHES},
    }
    found = read_job(keys | changes)
    return replace(found, stack="traced", layout=replace(found.layout, pp_split=split))


def estimated(one, graph):
    """Allocated bytes at the peak of each rank, without the batch and workspaces."""
    found = [account(one, graph, rank) for rank in ranks_of(one, graph)]
    return [
        locate_peak(each.program).bytes
        - sum(item.bytes * count for item, count in each.static if item.category in OUTSIDE)
        for each in found
    ]


def measured(found):
    batch = [
        one
        for one in found.allocations
        if one.category == "input" and one.phase == "load" and one.alive(found.steady.at)
    ]
    return found.steady.bytes - sum(one.bytes for one in batch)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", [stages.MaskedModel, stages.EncoderDecoder])
def test_every_stage_is_what_torch_runs(kind, schedule: str) -> None:
    graph = graph_of(trace(stages.whole(kind), ops=True, like="cpu"))
    run = [
        measured(trace(stages.stage(kind, index, SCHEDULES[schedule]), rank=stages.SHARDS * index, world=4, like="cpu"))
        for index in range(2)
    ]
    assert estimated(job(schedule, kind.split), graph) == pytest.approx(run, rel=0.01)


def test_what_crosses_two_cuts_is_handed_from_stage_to_stage() -> None:
    graph = graph_of(trace(stages.whole(stages.EncoderDecoder), ops=True, like="cpu"))
    four = job(split=(1, 1, 1, 1), cluster="8xH100-SXM-80GB", layout={"pp": 4})
    handed = [one.ahead for rank in ranks_of(four, graph) for one in stages_of(graph, four.layout, rank, CONTEXT)]
    one = 4 * stages.BATCH * stages.SEQ * stages.WIDTH
    assert [sum(border.tensors) for border in handed] == [2 * one, 2 * one, 2 * one, 0]
    assert [border.gradients for border in handed] == [border.tensors for border in handed]


def test_a_mask_has_no_gradient() -> None:
    graph = graph_of(trace(stages.whole(stages.MaskedModel), ops=True, like="cpu"))
    (stage,) = stages_of(graph, job().layout, ranks_of(job(), graph)[0], CONTEXT)
    assert len(stage.ahead.tensors) == 2
    assert len(stage.ahead.gradients) == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", ["llama"])
def test_a_traced_model_is_cut_as_the_named_one(family: str, schedule: str) -> None:
    sizes = {"num_hidden_layers": 4, "n_layer": 4, "tie_word_embeddings": False, "hidden_size": 256, "n_embd": 256}
    graph = graph_of(trace(language_model(family, precision="fp32", optimizer={"fused": True}, **sizes), ops=True))
    model = {**FAMILIES[family], **sizes, "model_type": family}
    named = replace(job(schedule, model=model, data=DATA), stack="transformers")
    found = estimated(named, build(named.model))
    assert estimated(job(schedule, data=DATA), graph) == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved-1f1b"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_whole_estimate(schedule: str, recompute: str) -> None:
    graph = graph_of(trace(stages.whole(stages.EncoderDecoder), ops=True))
    layout = {"pp": 2, "schedule": schedule, **({"vpp": 2} if schedule.startswith("inter") else {})}
    answer = estimate(job(split=None, layout=layout, recompute=recompute), graph)
    assert len(answer.ranks) == 2
    assert answer.peak.reserved_bytes >= answer.peak.allocated_bytes


def test_other_engines_say_that_they_cannot() -> None:
    graph = graph_of(trace(stages.whole(stages.MaskedModel), ops=True))
    with pytest.raises(Unsupported, match="torch's own pipelining"):
        ranks_of(replace(job(), engine=replace(job().engine, name="deepspeed")), graph)


def test_more_stages_than_layers() -> None:
    graph = graph_of(trace(stages.whole(stages.MaskedModel), ops=True))
    with pytest.raises(Infeasible, match="4 layers"):
        ranks_of(job(split=None, cluster="8xH100-SXM-80GB", layout={"pp": 8}), graph)

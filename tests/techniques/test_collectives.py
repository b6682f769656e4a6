"""Every collective of a step: sums that are the time's, volumes by hand."""

import pytest
from tests.techniques.conftest import BASE, MEGATRON

import ullage
from ullage.model.build import graph as build
from ullage.techniques.registry import TECHNIQUES
from ullage.timing.step import stages

WIDE = {"cluster": "2x8xH100-SXM-80GB"}


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (BASE, {"engine": {"name": "fsdp2"}}),
        (BASE, {"engine": {"name": "ddp"}}),
        (MEGATRON, {"layout": {"tp": 4, "sp": True, "pp": 2}} | WIDE),
        (MEGATRON, {"layout": {"cp": 4, "tp": 2}}),
        (MEGATRON, {"model": "mixtral-8x7b", "layout": {"tp": 2, "ep": 4}}),
    ],
    ids=str,
)  # fmt: skip
def test_axes_add_up(show, base: dict, changes: dict) -> None:
    shown = show("collectives", base, **changes)
    axes, sent, seconds = shown.parts
    assert axes.total("wire_bytes") == pytest.approx(sent.total("wire_bytes"), abs=len(sent.rows) + len(axes.rows))
    assert axes.total("sent_s") == pytest.approx(seconds.total("sent_s"))
    stage = stages(shown.job, build(shown.job.model, mtp=shown.job.engine.name == "megatron"))[shown.stage]
    waits = sum(value for name, value in stage.parts.items if name in ("tp", "cp", "ep", "dp", "shard"))
    assert axes.total("waited_s") == pytest.approx(waits)


def test_a_plain_all_reduce(show) -> None:
    (row,) = show("collectives", engine={"name": "ddp"}).part("Bytes").rows
    gradients = 8_030_261_248 * 4
    assert row == ("backward", "stage: gradients", "all-reduce", 8, 1, gradients, 2 * 7 * gradients // 8)


@pytest.mark.parametrize(("overlaps", "behind"), [(True, "a pass"), (False, "nothing")])
def test_what_a_reduction_hides_behind(show, overlaps: bool, behind: str) -> None:
    engine = {"name": "megatron", "zero_stage": 1, "options": {"overlap_grad_reduce": overlaps}}
    rows = show("collectives", MEGATRON, engine=engine, layout={"dp": 8}).part("Seconds").rows
    reduction = next(row for row in rows if row[2] == "reduce-scatter")
    assert reduction[6] == behind
    assert (reduction[7] < reduction[5]) == overlaps


def test_an_axis_says_which_links_it_crosses(show) -> None:
    part = show("collectives", MEGATRON, layout={"tp": 8}, **WIDE).part("By axis")
    found = {row[0]: row[1:4] for row in part.rows}
    assert found["tensor parallel"][:2] == (8, 1)
    assert found["data parallel"][:2] == (2, 2)
    assert found["tensor parallel"][2] != found["data parallel"][2]


def test_one_gpu_sends_nothing() -> None:
    job = ullage.read_job({"model": "llama-3.2-1b", "cluster": "1xH100-SXM-80GB", "engine": {"name": "single"}})
    with pytest.raises(ullage.InvalidInput, match="one GPU"):
        ullage.show("collectives", job)


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_what_is_not_modelled_is_not_shown(show, technique: str) -> None:
    lora = {"rank": 8, "targets": ["linear_qkv"], "dora": True}
    job = {"lora": lora, "layout": {"tp": 2, "pp": 2}, "recompute": "full"}
    with pytest.raises(ullage.Unsupported, match="lora"):
        show(technique, MEGATRON, **job)


@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("stage", [-1, 2])
def test_no_such_stage(show, technique: str, stage: int) -> None:
    with pytest.raises(ullage.InvalidInput, match="is no pipeline stage"):
        show(technique, MEGATRON, layout={"tp": 2, "pp": 2}, recompute="full", stage=stage)


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_traced_module_has_no_matrices(technique: str) -> None:
    from dataclasses import replace

    job = ullage.read_job(MEGATRON | {"layout": {"tp": 2, "pp": 2}, "recompute": "full"})
    with pytest.raises(ullage.Unsupported, match="traced module"):
        ullage.show(technique, replace(job, stack="traced"))


def test_no_such_technique() -> None:
    with pytest.raises(ullage.UnknownName, match="did you mean tensor-parallel"):
        ullage.show("tensor_parallel", ullage.read_job(BASE))

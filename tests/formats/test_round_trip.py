"""read(write(job)) = job for what a format says; what it does not say is told, and is nothing that it could."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.formats.jobs import drawn, written

from ullage.errors import UllageError
from ullage.formats.complete import document_of
from ullage.formats.convert import write_job
from ullage.formats.registry import format_named
from ullage.frozen import FrozenMap
from ullage.job.read import read_job
from ullage.job.write import job_to_dict

RECIPES = ("training-arguments", "llamafactory", "axolotl")
# What must survive the way there and back, whatever the job.
SAID = {
    "deepspeed": {
        "data.micro_batch", "data.grad_accum", "engine.name", "engine.zero_stage", "engine.shard_group", "engine.options",
        "layout.tp", "layout.cp", "grad_clip", "offload.optimizer", "offload.params", "optimizer.name",
    },
    "accelerate": {
        "engine.name", "engine.zero_stage", "layout.dp", "layout.tp", "layout.cp", "offload.params", "offload.optimizer",
    },
    "megatron": {
        "data.seq_len", "data.micro_batch", "data.grad_accum", "layout.tp", "layout.pp", "layout.sp", "engine.zero_stage", "grad_clip",
        "engine.name",
    },
    "torchtitan": {
        "data.seq_len", "data.micro_batch", "data.grad_accum", "layout.dp", "layout.tp", "layout.pp", "engine.zero_stage", "grad_clip",
        "engine.name", "recompute", "offload", "compile", "loss", "optimizer.impl",
    },
    # engine.name: of one process alone nothing is said
    **{
        name: {
            "data.seq_len", "data.micro_batch", "data.grad_accum", "engine.zero_stage", "grad_clip", "offload.params", "offload.optimizer",
            "compile",
        }
        for name in RECIPES
    },
}  # fmt: skip
# Options by which a text says what a key of the job says, or a default of the format.
SAYS_AGAIN = {
    "deepspeed": {"grad_accum_dtype", "communication_data_type", "zero_hpz_partition_size"},
    "accelerate": set(),
    "megatron": set(),
    "torchtitan": {"reshard_after_forward", "compile_loss"},
    **{name: {"grad_accum_dtype", "communication_data_type"} for name in RECIPES},
}
ENGINES = {
    "torchtitan": [("fsdp2", "torchtitan")],
    "megatron": [("megatron", None)],
    "deepspeed": [("deepspeed", None)],
    "accelerate": [("fsdp1", None), ("fsdp2", None), ("ddp", None), ("deepspeed", None)],
    **{name: [("fsdp1", None), ("fsdp2", None), ("ddp", None), ("deepspeed", None)] for name in RECIPES},
}


@pytest.mark.parametrize(
    ("to", "engine", "stack"), [(to, *one) for to, engines in ENGINES.items() for one in engines], ids=str
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_job_comes_back(to: str, engine: str, stack: str | None, data: st.DataObject) -> None:
    try:
        job = data.draw(drawn(engine, stack))
    except UllageError:
        return  # no such job
    found = written(job, to)
    untold = {one.key for one in found.unsaid}
    could = {key for key in untold if any(key == said or key.startswith(f"{said}.") for said in SAID[to])}
    assert not could, [str(one) for one in found.unsaid]
    module = format_named(to)
    for key in untold:
        assert any(key == name or key.startswith(f"{name}.") for name in module.CANNOT), key
    reading = module.read(found.text, "text")
    document, findings = document_of(_with_machines(reading, job))
    assert not findings
    _fill(document, job_to_dict(job), untold)
    back = read_job(document)
    assert set(back.engine.options) - set(job.engine.options) <= SAYS_AGAIN[to]
    kept = {name: value for name, value in back.engine.options.items() if name in job.engine.options}
    back = replace(back, engine=replace(back.engine, options=FrozenMap(kept)))
    assert replace(back, defaults=(), warnings=()) == replace(job, defaults=(), warnings=())


@pytest.mark.parametrize("to", SAID)
def test_leftovers_are_written_back(to: str) -> None:
    """Whatever no job holds stands in the text again, as it was."""
    module = format_named(to)
    engine = {"name": module.ENGINES[0], "zero_stage": 3 if module.ENGINES[0] != "megatron" else 1}
    job = read_job({"model": "llama-3.1-8b", "cluster": "8xH100", "engine": engine})
    leaf = ("--nobody-knows",) if to == "megatron" else ("nobody", "knows")
    text = module.SYNTAX.put(module.write(module.leaves(job), ()), leaf, 7)
    first = module.read(text, "text")
    assert (".".join(leaf), 7) in [(one.key, one.value) for one in first.leftovers]
    again = write_job(job, module, first.leftovers)
    assert set(map(str, module.read(again.text, "text").leftovers)) == set(map(str, first.leftovers))


def _with_machines(reading, job):
    given = job_to_dict(job)
    return replace(reading, keys={**reading.keys, "model": given["model"], "cluster": given["cluster"]})


def _fill(document, given, untold) -> None:
    """Each key that the text does not say, from the job."""
    for key in untold:
        if key == "model":
            continue
        source, target = given, document
        *above, name = key.split(".")
        if above and isinstance(target.get(above[0]), str):
            target[above[0]] = given[above[0]]
            continue
        for part in above:
            source, target = source[part], target.setdefault(part, {})
        if isinstance(source, dict):
            target[name] = source[name]

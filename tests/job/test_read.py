"""Reading a whole job: formats, overrides, defaults, and the jobs of published measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ullage.job.job import Lora, Loss, Recompute
from ullage.job.read import read_job
from ullage.job.write import job_to_dict


def test_every_default_is_listed(minimal):
    job = read_job(minimal())
    assert "schema = 1" in job.defaults
    assert "data.seq_len = 4096" in job.defaults
    assert "layout.dp = 8 (8 GPUs / (tp x cp x pp))" in job.defaults
    assert "engine.name = fsdp2" in job.defaults
    assert "engine.zero_stage = 3" in job.defaults
    assert "grad_clip = true" in job.defaults
    assert "precision = bf16-mixed" in job.defaults
    assert "layout.pp_split = even" in job.defaults
    keys = [line.split(" = ")[0] for line in job.defaults]
    assert len(keys) == len(set(keys))


def test_defaults_stand_in_the_order_of_the_format(minimal):
    sections = [line.split(" ")[0].split(".")[0] for line in read_job(minimal()).defaults]
    assert sections == sorted(sections, key=list(dict.fromkeys(sections)).index)
    assert sections[0] == "schema"
    assert sections[-1] == "compile"


def test_a_written_key_is_no_default(minimal):
    assert not any(line.startswith("layout.tp ") for line in read_job(minimal(layout={"tp": 2})).defaults)


def test_a_complete_job_takes_no_default(measured_jobs):
    for record in measured_jobs:
        again = read_job(job_to_dict(read_job(record["job"])))
        assert [line for line in again.defaults if not line.startswith("model.")] == []


@pytest.mark.parametrize("model", ["llama-3.1-8b", {"base": "llama-3.1-8b", "num_hidden_layers": 12}])
def test_a_model_of_the_catalogue_is_written_by_its_name(model: object):
    job = read_job({"model": model, "cluster": "8xH100-SXM-80GB"})
    assert job_to_dict(job)["model"] == model


@pytest.mark.parametrize(
    "cluster",
    [
        "4x8xH100-SXM-80GB",
        "RTX-4090-24GB",
        {"device": "H100-SXM-80GB", "gpus_per_node": 8, "nodes": 4, "inter": "400Gb/s-IB", "host_memory": "2TB"},
        {"device": {"memory": "80GiB", "bf16_flops_per_s": 989e12, "memory_bytes_per_s": 3.35e12}, "gpus_per_node": 2},
    ],
)
def test_clusters_are_written_as_they_were_read(minimal, cluster: object):
    job = read_job(minimal(cluster=f"1x{cluster}" if cluster == "RTX-4090-24GB" else cluster))
    assert read_job(job_to_dict(job)).cluster == job.cluster


def test_the_models_own_defaults_are_listed():
    gpt = {"model_type": "gpt", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
    job = read_job(
        {"model": {**gpt, "intermediate_size": 256, "max_position_embeddings": 512}, "cluster": "1xH100-SXM-80GB"}
    )
    assert any(line.startswith("model.") for line in job.defaults)


def test_jobs_of_published_measurements_are_read_and_written(measured_jobs):
    for record in measured_jobs:
        job = read_job(record["job"])
        again = read_job(json.loads(json.dumps(job_to_dict(job))))
        assert replace(again, defaults=()) == replace(job, defaults=()), record["id"]


@pytest.mark.parametrize("suffix", [".json", ".toml", ".yaml", ""])
def test_formats_say_the_same(minimal, tmp_path: Path, suffix: str):
    path = tmp_path / f"job{suffix}"
    if suffix == ".toml":
        path.write_text(_as_toml(minimal(layout={"tp": 2})), encoding="utf-8")
    else:
        path.write_text(json.dumps(minimal(layout={"tp": 2})), encoding="utf-8")
    assert read_job(path) == read_job(minimal(layout={"tp": 2}))


def _as_toml(job: dict[str, object]) -> str:
    def flat(keys):
        return "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())

    tables = {key: value for key, value in job.items() if isinstance(value, dict)}
    plain = {key: value for key, value in job.items() if key not in tables}
    return flat(plain) + "".join(f"\n[{name}]\n{flat(keys)}" for name, keys in tables.items())


def test_counts_may_be_written_with_an_exponent(write_job):
    assert read_job(write_job("data: {seq_len: 4e3}")).data.seq_len == 4000


def test_a_section_of_comments_is_left_out(write_job):
    assert read_job(write_job("layout:\n  # tp: 2\n")).layout.tp == 1


def test_a_version_keeps_its_last_zero(write_job):
    assert read_job(write_job("stack_version: 4.40")).stack_version == "4.40"
    assert read_job(write_job("stack: torchtitan\nstack_version: 2025-02-01")).stack_version == "2025-02-01"


def test_global_batch_becomes_accumulation(minimal):
    job = read_job(minimal(data={"global_batch": 64, "micro_batch": 2}))
    assert job.data.grad_accum == 4


def test_overrides_are_set_before_reading(write_job):
    path = write_job("layout: {dp: 8}\ndata: {grad_accum: 4}\noptimizer: adamw")
    job = read_job(path, ["layout.tp=2", "layout.dp=null", "data.global_batch=8", "optimizer.impl=foreach"])
    assert (job.layout.dp, job.layout.tp) == (4, 2)
    assert job.data.grad_accum == 2
    assert (job.optimizer.name, job.optimizer.impl) == ("adamw", "foreach")


def test_overrides_take_flow_values(minimal):
    job = read_job(minimal(), ["recompute={modules: [mlp]}", "lora={rank: 4}", "engine.options.reduce_dtype=bf16"])
    assert job.recompute == Recompute(kind="modules", modules=("mlp",))
    assert job.lora == Lora(rank=4)
    assert job.precision.reduce == "bf16"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("none", Recompute()),
        ("full", Recompute(kind="full")),
        ({"every": 2}, Recompute(kind="every", every=2)),
        ({"layers": 12}, Recompute(kind="layers", layers=12)),
        ({"sqrt": True}, Recompute(kind="sqrt")),
        ({"sqrt": False}, Recompute()),
    ],
)
def test_recompute_forms(minimal, written: object, read: Recompute):
    assert read_job(minimal(recompute=written)).recompute == read


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("full", Loss()),
        ("chunked", Loss(kind="chunked", chunks=8)),
        ("fused-linear", Loss(kind="fused-linear")),
        ({"kind": "fused-linear", "chunks": 4}, Loss(kind="fused-linear", chunks=4)),
    ],
)
def test_loss_forms(minimal, written: object, read: Loss):
    assert read_job(minimal(loss=written)).loss == read


def test_options_in_the_engines_words_are_read_into_the_key(minimal):
    lora = read_job(minimal(lora={"rank": 8}, engine={"options": {"lora_dtype": "float32", "use_dora": True}})).lora
    assert lora is not None
    assert (lora.dtype, lora.dora) == ("fp32", True)
    hybrid = read_job(minimal(engine={"name": "fsdp1", "options": {"sharding_strategy": "HYBRID_SHARD"}}))
    assert (hybrid.engine.zero_stage, hybrid.engine.shard_group) == (3, 8)
    hpz = read_job(minimal(engine={"name": "deepspeed", "options": {"zero_hpz_partition_size": 4}}))
    assert hpz.engine.shard_group == 4


def test_a_doubtful_job_is_read_with_warnings(minimal):
    job = read_job(
        minimal(
            cluster="2x8xH100-SXM-80GB",
            layout={"tp": 16},
            engine={"name": "megatron", "options": {"fp8_recipe": "mxfp8"}},
        )
    )
    assert any(line.startswith("layout.tp = 16") for line in job.warnings)
    assert any(line.startswith("engine.options.fp8_recipe") for line in job.warnings)


@pytest.mark.parametrize(("options", "warned"), [({}, True), ({"bnb_4bit_quant_storage": "bf16"}, False)])
def test_the_type_that_packed_weights_are_seen_as_is_told_where_it_is_taken(minimal, options, warned):
    lora = {"rank": 8, "targets": "all-linear", "base": "nf4"}
    job = read_job(minimal(engine={"name": "fsdp2", "options": options}, lora=lora))
    assert any("bnb_4bit_quant_storage" in line for line in job.warnings) is warned


@pytest.mark.parametrize(
    ("engine", "stage"),
    [
        ({"name": "fsdp2"}, 3),
        ({"name": "fsdp2", "options": {"reshard_after_forward": "never"}}, 2),
        ({"name": "fsdp1", "options": {"sharding_strategy": "SHARD_GRAD_OP"}}, 2),
        ({"name": "fsdp1", "options": {"sharding_strategy": "NO_SHARD"}}, 0),
        ({"name": "deepspeed"}, 3),
        ({"name": "ddp"}, 0),
        ({"name": "zero1"}, 1),
        ({"name": "megatron"}, 0),
        ({"name": "megatron", "options": {"use_distributed_optimizer": True}}, 1),
        ({"name": "megatron", "options": {"use_megatron_fsdp": True}}, 3),
        ({"name": "megatron", "zero_stage": 1, "options": {"use_megatron_fsdp": True}}, 3),
    ],
)
def test_the_stage_follows_engine_and_options(minimal, engine: dict[str, object], stage: int):
    assert read_job(minimal(engine=engine)).engine.zero_stage == stage

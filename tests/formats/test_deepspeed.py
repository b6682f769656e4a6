"""DeepSpeed's JSON: people's files read, and what is written held against DeepSpeed's own parser."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.formats.jobs import some, written

from ullage.api import check
from ullage.errors import InvalidInput, UllageError
from ullage.formats import deepspeed
from ullage.formats.complete import document_of
from ullage.formats.convert import read_file, read_whole
from ullage.formats.known import names
from ullage.formats.tree import dotted

ON = ("model=llama-2-7b", "cluster=8xA100-SXM-80GB")

PARSER = """
import json, sys, logging
logging.disable(logging.CRITICAL)
import deepspeed.runtime.config as config
worlds, refused = json.load(sys.stdin), []
for world, keys in worlds:
    class Dist:
        get_rank = staticmethod(lambda: 0)
        get_world_size = staticmethod(lambda group=None, world=world: world)
    config.dist = Dist
    try:
        read = config.DeepSpeedConfig(keys)
        refused.append([read.zero_optimization_stage, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps,
                        read.bfloat16_config.enabled, read.float16_config.enabled])
    except Exception as error:
        refused.append(f"{type(error).__name__}: {error}")
print(json.dumps(refused))
"""


def test_deepspeed_itself_reads_what_is_written() -> None:
    jobs = list(some("deepspeed", 40))
    texts = [json.loads(written(job, "deepspeed").text) for job in jobs]
    worlds = [[job.layout.dp * job.layout.cp, keys] for job, keys in zip(jobs, texts, strict=True)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARSER],
        input=json.dumps(worlds),
        capture_output=True,
        text=True,
        check=False,
    )
    if "No module named 'deepspeed'" in done.stderr:
        pytest.skip("deepspeed is not installed")
    answers = json.loads(done.stdout.splitlines()[-1])
    for job, answer in zip(jobs, answers, strict=True):
        half = job.precision.params
        wanted = [job.engine.zero_stage, job.data.micro_batch, job.data.grad_accum, half == "bf16", half == "fp16"]
        assert answer == wanted, job


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "LlamaFactory_6942-ds_z3_offload.json",
            {"engine.zero_stage": 3, "offload.optimizer": "cpu", "offload.params": "cpu"},
        ),
        ("LlamaFactory_4133-ds_z2_config.json", {"engine.zero_stage": 2, "offload.optimizer": "none"}),
        ("DeepSpeed_1288-ds_config.json", {"engine.zero_stage": 2, "offload.optimizer": "cpu"}),
        ("DeepSpeed_477-ds_config.json", {"engine.zero_stage": 2, "data.micro_batch": 4, "data.grad_accum": 1}),
        (
            "OpenRLHF_632-ds_train_config.json",
            {"engine.zero_stage": 3, "offload.optimizer": "cpu", "offload.params": "none"},
        ),
        (
            "DeepSpeedExamples_186-ds_config.json",
            {"precision.params": "fp16", "data.micro_batch": 8, "optimizer.name": "adam"},
        ),
    ],
)
def test_people_s_files(data, name: str, wanted: dict[str, object]) -> None:
    _, job = read_whole(data / name, ON)
    for key, value in wanted.items():
        found: object = job
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value, key


def test_every_leaf_is_read_or_left_over(data) -> None:
    for path in sorted(data.glob("*ds*.json")):
        reading = read_file(path)
        left = {one.path for one in reading.leftovers}
        for leaf in reading.tree.leaves:
            said = leaf in left or leaf in reading.origins.values() or leaf in deepspeed.OPTIONS
            batch = leaf in {one[1] for one in (reading.batch.whole, reading.batch.micro, reading.batch.accum) if one}
            switch = leaf[-1] in ("enabled", "pin_memory", "gradient_clipping")
            assert said or batch or switch, (path.name, dotted(leaf))


def read(text: str):
    return deepspeed.read(text, "ds.json")


def test_auto_is_left_over_with_who_decides() -> None:
    left = {one.key: one.why for one in read('{"gradient_clipping": "auto", "bf16": {"enabled": "auto"}}').leftovers}
    assert set(left) == {"gradient_clipping", "bf16.enabled"}
    assert all(why.startswith("auto") for why in left.values())


def test_auto_of_what_accelerate_fills_in() -> None:
    """accelerate's examples/deepspeed_config_templates/zero_stage3_config.json; DeepSpeedPlugin of utils/dataclasses.py."""
    reading = read(
        '{"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": "auto", '
        '"offload_optimizer": {"device": "auto", "nvme_path": "auto"}, "reduce_bucket_size": "auto"}}'
    )
    left = {one.key: one.why for one in reading.leftovers}
    assert set(left) == {
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_optimizer.nvme_path",
    }
    assert all("Accelerate" in why for why in left.values())


def test_a_field_s_own_name_is_its_key_as_well() -> None:
    """DeepSpeedZeroConfig(max_live_parameters=5).max_live_parameters is 5 in 0.19.8 (populate_by_name)."""
    reading = read('{"zero_optimization": {"stage": 3, "max_live_parameters": 5, "param_persistence_threshold": 7}}')
    assert not reading.leftovers
    engine = reading.keys["engine"]
    assert isinstance(engine, dict)
    assert engine["options"] == {"stage3_max_live_parameters": 5, "stage3_param_persistence_threshold": 7}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"zero_optimization": {"stagee": 3}}', "DeepSpeed 0.19.8 stops at it"),
        ('{"fp16": {"enabled": true, "opt_level": "O2"}}', "DeepSpeed 0.19.8 stops at it"),
        ('{"gradient_clipping": 1.0, "comment": "ours"}', "it changes nothing"),
    ],
)
def test_what_an_unknown_key_does(tmp_path, text: str, what: str) -> None:
    """DeepSpeedConfig of 0.19.8: extra="forbid" in the models of its sections; the top is a dict."""
    path = tmp_path / "ds.json"
    path.write_text(text)
    assert any(what in one.what for one in check(path, ON).findings)


def test_unknown_keys_are_left_over_with_the_nearest_name() -> None:
    text = (
        '{"zero_optimization": {"stagee": 3, "stage": 2}, "gradient_cliping": 1.0, "scheduler": {"type": "WarmupLR"}}'
    )
    left = {one.key: one.why for one in read(text).leftovers}
    assert "did you mean zero_optimization.stage?" in left["zero_optimization.stagee"]
    assert "did you mean gradient_clipping?" in left["gradient_cliping"]
    assert "no job says it" in left["scheduler.type"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"zero_optimization": {\n"stage": "three"}}', ["zero_optimization.stage = three", "ds.json, line 2"]),
        ('{"zero_optimization": {"stage": 4}}', ["4", "0 or 1 or 2 or 3", "line 1"]),
        ('{"bf16": {"enabled": "yes"}}', ["bf16.enabled = yes", "true or false", "line 1"]),
        ('{"train_micro_batch_size_per_gpu": 0}', ["train_micro_batch_size_per_gpu = 0", "at least 1"]),
        ('{"gradient_clipping": "lots"}', ["gradient_clipping = lots", "no number"]),
        ('{"zero_optimization": {"reduce_bucket_size": "big"}}', ["reduce_bucket_size = big"]),
    ],
)
def test_a_wrong_value_is_one_message_with_its_line(tmp_path, text: str, parts: list[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(UllageError) as error:
        read_whole(path, ON, "deepspeed")
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        ({"train_batch_size": 64}, (8, 1)),
        ({"train_micro_batch_size_per_gpu": 2}, (2, 1)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, (2, 4)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, (2, 4)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, (2, 3)),
        ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, (2, 3)),
    ],
)
def test_batch_sizes_follow_deepspeed_s_rules(tmp_path, batch: dict[str, int], sizes: tuple[int, int]) -> None:
    """runtime/config.py, _set_batch_related_parameters, on 8 ranks."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}, **batch}))
    _, job = read_whole(path, ON)
    assert (job.data.micro_batch, job.data.grad_accum) == sizes


def test_batch_sizes_that_do_not_multiply_are_an_error(tmp_path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 100, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}')
    with pytest.raises(InvalidInput, match="100 is not micro-batch 2 x accumulation 3 x 8 data-parallel ranks = 48"):
        read_whole(path, ON)
    _, findings = document_of(read_file(path), ON)
    assert findings[0].fix == ((("train_batch_size",), 48),)


def test_options_are_keys_that_deepspeed_publishes() -> None:
    published = set(names("deepspeed"))
    for path in deepspeed.OPTIONS:
        assert dotted(path) in published, path

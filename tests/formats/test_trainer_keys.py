"""The words of transformers' Trainer: held against its own classes, where transformers is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.formats.jobs import some, written

from ullage.formats.convert import read_whole
from ullage.formats.known import names
from ullage.formats.registry import format_named
from ullage.formats.trainer import OPTIMIZERS
from ullage.job.read import read_job

PARSER = """
import dataclasses, json, sys
from transformers import HfArgumentParser, TrainingArguments
from transformers.training_args import OptimizerNames
wanted = json.load(sys.stdin)
fields = [field.name for field in dataclasses.fields(TrainingArguments)]
answers = []
for path in wanted:
    try:
        args, = HfArgumentParser(TrainingArguments).parse_yaml_file(path, allow_extra_keys=True)
        answers.append({name: getattr(args, name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16",
                        "optim", "max_grad_norm", "gradient_checkpointing", "torch_compile", "fsdp_config")})
    except Exception as error:
        answers.append(f"{type(error).__name__}: {error}")
print(json.dumps([fields, [one.value for one in OptimizerNames], answers], default=str))
"""

# Optimizers of transformers' that no job holds: a reader says so, and lets adamw stand for them.
NO_JOB_HOLDS = {
    "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_anyprecision", "ademamix", "adagrad", "ademamix_8bit", "paged_ademamix_32bit",
    "paged_ademamix_8bit", "rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "galore_adamw", "galore_adamw_8bit",
    "galore_adafactor", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "lomo", "adalomo",
    "grokadamw", "schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd", "apollo_adamw", "apollo_adamw_layerwise",
    "stable_adamw",
}  # fmt: skip

# Keys that are no TrainingArguments: trl/trainer/sft_config.py and model_config.py at f2cd5771.
OF_TRL = {
    "model_name_or_path", "dtype", "attn_implementation", "use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules",
    "lora_modules_to_save", "use_dora", "load_in_8bit", "load_in_4bit", "use_bnb_nested_quant", "max_length", "loss_type",
    "activation_offloading",
}  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str], list[object]]:
    """transformers' fields, its optimizers, and what it reads of each job that is written."""
    folder = tmp_path_factory.mktemp("args")
    paths = []
    for number, job in enumerate(_jobs()):
        text = written(job, "training-arguments").text
        paths.append(str(folder / f"{number}.yaml"))
        Path(paths[-1]).write_text(f"output_dir: {folder}\nuse_cpu: true\n{text}")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARSER],
        input=json.dumps(paths),
        capture_output=True,
        text=True,
        check=False,
    )
    if "No module named 'transformers'" in done.stderr:
        pytest.skip("transformers is not installed")
    assert done.returncode == 0, done.stderr
    fields, optimizers, answers = json.loads(done.stdout.splitlines()[-1])
    return fields, optimizers, answers


def _jobs() -> list[object]:
    return [job for engine in ("ddp", "fsdp2") for job in some(engine, 6)]


def test_transformers_itself_reads_what_is_written(told: tuple[list[str], list[str], list[object]]) -> None:
    for job, answer in zip(_jobs(), told[2], strict=True):
        assert isinstance(answer, dict), answer
        assert answer["per_device_train_batch_size"] == job.data.micro_batch
        assert answer["gradient_accumulation_steps"] == job.data.grad_accum
        assert bool(answer["gradient_checkpointing"]) == (job.recompute.kind == "full")
        assert (answer["max_grad_norm"] > 0) == job.grad_clip
        assert answer["torch_compile"] == job.compile
        if job.engine.name == "fsdp2":
            assert answer["fsdp_config"]["version"] == 2
            assert answer["fsdp_config"]["reshard_after_forward"] == (job.engine.zero_stage == 3)


def test_every_key_that_is_written_is_one_of_theirs(told: tuple[list[str], list[str], list[object]]) -> None:
    module = format_named("training-arguments")
    lora = {"rank": 8, "base": "nf4", "dora": True, "modules_to_save": ["lm_head"]}
    on = {
        "model": "llama-3.1-8b",
        "cluster": "1xH100",
        "engine": {"name": "single"},
        "attention": "eager",
        "stack": "liger",
    }
    more = [read_job({**on, "lora": lora}), read_job({**on, "loss": "chunked", "offload": {"activations": "cpu"}})]
    keys = {path[0] for job in (*_jobs(), *some("deepspeed", 6), *more) for path in module.leaves(job)}
    assert keys - OF_TRL <= set(told[0])
    assert keys >= {"deepspeed", "fsdp", "fsdp_config", "optim"}
    assert set(names("training-arguments")) >= OF_TRL | set(told[0])


def test_every_optimizer_of_theirs_is_known_or_named(told: tuple[list[str], list[str], list[object]]) -> None:
    assert set(told[1]) - set(OPTIMIZERS) == NO_JOB_HOLDS


@pytest.mark.parametrize("to", ["training-arguments", "llamafactory", "axolotl"])
@pytest.mark.parametrize("base", ["bf16", "int8", "nf4-double"])
def test_adapters_come_back(tmp_path: Path, to: str, base: str) -> None:
    """What each says of a LoRA run, read again: the rank, what is adapted, and the base in four or eight bits."""
    lora = {"rank": 32, "alpha": 64, "dropout": 0.1, "targets": ["q_proj", "v_proj"], "base": base}
    types = {"params": "bf16", "compute": "bf16", "grads": "bf16", "master": None, "reduce": "bf16", "autocast": True}
    job = read_job(
        {
            "model": "llama-3.1-8b", "cluster": "1xH100-SXM-80GB", "engine": {"name": "single"}, "precision": types, "lora": lora,
            "optimizer": {"name": "adamw", "state": "fp32"}, "recompute": "full", "data": {"seq_len": 2048, "micro_batch": 2},
        }
    )  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(written(job, to).text)
    _, back = read_whole(path, ("cluster=1xH100-SXM-80GB",))
    assert back.lora is not None
    assert job.lora is not None
    assert (back.lora.rank, back.lora.alpha, back.lora.targets, back.lora.base) == (32, 64, ("q_proj", "v_proj"), base)
    assert back.precision == job.precision
    assert back.recompute == job.recompute
    assert back.model == job.model

"""Recipes for transformers' Trainer, LLaMA-Factory and axolotl: people's files against the jobs that their reports' facts say."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from ullage.api import check
from ullage.errors import InvalidInput
from ullage.formats.convert import read_file, read_whole
from ullage.formats.foreign import reader_of
from ullage.formats.theirs import theirs_of
from ullage.formats.tree import flat
from ullage.job.read import read_job
from ullage.job.write import job_to_dict

CASES = Path(__file__).parents[1] / "postmortem" / "data" / "cases.toml"

# Report -> (its file, keys of the report's job that the file says otherwise, and why that is no mistake).
FILES = {
    # its fp16 is the file's; the report's facts have no word for the type that the base was loaded in, which LLaMA-Factory makes fp16
    "LlamaFactory#2379": ("LlamaFactory_2379-args.yaml", {"precision"}),
    "LlamaFactory#2518": ("LlamaFactory_2518-args.yaml", set()),
    "FastChat#693": ("FastChat_693-train_args.yaml", set()),
    "LLaVA#177": ("LLaVA_177-train_args.yaml", set()),
    # the report's facts leave out autocast, and nested quantisation, which the recipe asks for
    "axolotl#PR2412": ("axolotl_PR2412-config.yaml", {"precision"}),
    "trl#2864": ("trl_2864-grpo.yaml", {"lora.base", "precision"}),
    # posted in part, without the adapters
    "qlora#17": ("qlora_17-args.yaml", {"recompute", "precision"}),
}


def _cases() -> dict[str, dict[str, object]]:
    found = tomllib.loads(CASES.read_text())["case"]
    return {case["id"]: case["job"] for case in found if case["id"] in FILES}


@pytest.mark.parametrize("name", FILES)
def test_a_file_says_what_its_report_says(data: Path, name: str) -> None:
    """In every key that the file tells and the report's job has."""
    given = _cases()[name]
    file, otherwise = FILES[name]
    on = f"model={given['model'] if isinstance(given['model'], str) else 'llama-2-70b'}"
    cluster = given["cluster"] if isinstance(given["cluster"], str) else "1xRTX-5090-32GB"
    theirs = theirs_of(data / file, (on, f"cluster={cluster}"))
    assert not theirs.contradicted
    wanted = flat(job_to_dict(read_job(given)), "")
    found = flat(job_to_dict(theirs.job), "")
    stated = [".".join(path) for path in flat(given, "") if path[0] not in ("model", "cluster")]
    reading = theirs.reading
    origins = {**reading.origins, **({"data.micro_batch": ()} if reading.batch.micro[1] in reading.tree.leaves else {})}
    told = [key for key in map(".".join, wanted) if any(map(key.startswith, stated)) and _told(key, origins)]
    assert told
    for key in told:
        if not any(key == one or key.startswith(f"{one}.") for one in otherwise):
            assert found[tuple(key.split("."))] == wanted[tuple(key.split("."))], key


def _told(key: str, origins: object) -> bool:
    while key:
        if key in origins:
            return True
        key = key.rpartition(".")[0]
    return False


def test_deepspeed_s_file_is_read_from_beside_it_and_auto_is_what_the_arguments_say(data: Path, tmp_path: Path) -> None:
    """transformers/integrations/deepspeed.py, HfTrainerDeepSpeedConfig.trainer_config_process."""
    recipe = tmp_path / "lora_32k.yaml"
    shutil.copy(data / "LlamaFactory_4642-lora_32k.yaml", recipe)
    away = read_file(recipe)
    assert any("ZeRO stage 3 with offload, as its name says" in one.what for one in away.findings)
    assert away.keys["offload"] == {"optimizer": "cpu", "params": "cpu"}
    shutil.copy(data / "LlamaFactory_4642-ds_z3_offload_config.json", tmp_path / "ds_z3_offload_config.json")
    reading, job = read_whole(recipe, ("model=qwen2-7b", "cluster=8xA100-SXM-80GB"))
    assert (job.engine.name, job.engine.zero_stage, job.offload.params) == ("deepspeed", 3, "cpu")
    assert (job.precision.params, job.precision.master) == ("bf16", "fp32")  # bf16.enabled: auto, and bf16: true
    assert (job.data.micro_batch, job.data.grad_accum, job.data.seq_len) == (1, 2, 32768)
    assert job.engine.options["sub_group_size"] == 1e9
    assert job.grad_clip
    assert job.lora is not None
    assert (job.lora.rank, job.lora.alpha, job.lora.targets) == (8, 16, ("all-linear",))
    assert not any("auto" in str(one.value) and "batch" in one.key for one in reading.leftovers)


def test_numbers_of_both_files_that_exclude_each_other(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}')
    recipe = tmp_path / "args.yaml"
    recipe.write_text(
        "model_name_or_path: Qwen/Qwen2.5-7B\nper_device_train_batch_size: 2\nbf16: true\ndeepspeed: ds.json\n"
    )
    found = check(recipe, ("cluster=8xA100-SXM-80GB",))
    error = next(one for one in found.findings if one.severity == "error" and one.key == "per_device_train_batch_size")
    assert "train_micro_batch_size_per_gpu says 4" in error.what
    assert found.job.precision.params == "bf16"  # accelerate adds bf16 where DeepSpeed's file has neither section


@pytest.mark.parametrize(
    ("gpus", "engine", "params"), [("1x", "single", "bf16"), ("8x", "ddp", "bf16"), ("4x8x", "ddp", "bf16")]
)
def test_without_an_engine_the_processes_decide(data: Path, gpus: str, engine: str, params: str) -> None:
    _, job = read_whole(data / "axolotl_1641-config.yaml", (f"cluster={gpus}A100-SXM-80GB",))
    assert (job.engine.name, job.precision.params, job.precision.autocast) == (engine, params, True)


def test_an_engine_that_a_flag_names_decides_the_element_types(data: Path) -> None:
    overrides = ("cluster=8xA100-SXM-80GB", "engine.name=deepspeed", "engine.zero_stage=2")
    _, job = read_whole(data / "axolotl_1641-config.yaml", overrides)
    assert (job.precision.params, job.precision.master) == ("bf16", "fp32")


def test_a_model_that_nobody_knows_is_named(data: Path) -> None:
    with pytest.raises(InvalidInput, match=r"LLaMA-65B-hf.*model_name_or_path"):
        check(data / "qlora_17-args.yaml", ("cluster=1xA100-SXM-80GB",))


def test_defaults_are_told(data: Path) -> None:
    told = {one.key: one.what for one in read_file(data / "LlamaFactory_2379-args.yaml").findings}
    assert "lora_rank: 8, lora_alpha: 16, disable_gradient_checkpointing: false, cutoff_len: 2048" in told["defaults"]


def test_an_edit_is_in_their_keys(tmp_path: Path) -> None:
    recipe = tmp_path / "sft.yaml"
    recipe.write_text(
        "# ours\nmodel_name_or_path: meta-llama/Llama-3.1-8B\nmax_seq_length: 8192  # long\nper_device_train_batch_size: 4\n"
        "gradient_accumulation_steps: 2\nbf16: true\nfsdp: full_shard auto_wrap\ngradient_checkpointing: false\n"
    )
    found = check(recipe, ("cluster=8xH100-SXM-80GB",))
    assert found.estimate.verdict == "oom"
    changed = {
        line[1:].partition(":")[0] for line in (found.edit or "").splitlines() if line[:1] == "+" and line[:3] != "+++"
    }
    assert changed <= {"per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "fsdp"}
    assert "gradient_checkpointing" in changed or "per_device_train_batch_size" in changed


def test_what_stands_in_deepspeed_s_own_file_is_not_edited_here(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}')
    recipe = tmp_path / "args.yaml"
    recipe.write_text(
        "model_name_or_path: Qwen/Qwen2.5-32B\nper_device_train_batch_size: 1\nbf16: true\ndeepspeed: ds.json\n"
    )
    found = check(recipe, ("cluster=8xA100-SXM-80GB", "data.seq_len=2048"))
    assert found.estimate.verdict == "oom"
    assert "deepspeed:" not in "".join(
        line for line in (found.edit or "").splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model_name_or_path: x\nfinetuning_type: lor\ntemplate: y\n", ["finetuning_type", "did you mean lora?", "line 2"]),
        ("model_name_or_path: x\ntemplate: y\ntensor_model_parallel_size: 2\n", ["another engine of LLaMA-Factory's", "line 3"]),
        ("base_model: x\nmicro_batch_size: two\n", ["micro_batch_size", "two", "line 2"]),
        ("base_model: x\nfsdp:\n  - full_sharded\n", ["full_sharded", "full_shard"]),
        ("per_device_train_batch_size: 1\ndtype: float17\n", ["float17", "bf16"]),
        ("dist_config:\n  name: fsdp2\ncutoff_len: 2048\n", ["v1 trainer, which is not read"]),
        ("python train.py --model_name_or_path x --bf16 maybe\n", ["bf16", "maybe", "line 1"]),
    ],
)  # fmt: skip
def test_bad_recipes(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(InvalidInput) as caught:
        read_whole(path, ("model=llama-3.1-8b", "cluster=8xH100-SXM-80GB"))
    for part in parts:
        assert part in str(caught.value)


def test_every_key_is_in_the_job_or_left_over(data: Path) -> None:
    """None is dropped: each leaf of a file is an origin, a number of the batch, a leftover, or a switch that is off."""
    for path in sorted(data.glob("*.yaml")):
        if reader_of(path.read_text()) is None:
            continue
        reading = read_file(path)
        batch = {one[1] for one in (reading.batch.micro, reading.batch.accum, reading.batch.whole) if one}
        kept = {*reading.origins.values(), *batch, *(one.path for one in reading.leftovers)}
        gone = [leaf for leaf, value in reading.tree.leaves.items() if leaf not in kept and value is not False]
        assert set(gone) <= _SAID_TOGETHER, path


_SAID_TOGETHER = {
    ("stage",), ("finetuning_type",), ("use_peft",), ("adapter",), ("fsdp",), ("deepspeed",), ("source_max_len",),
    ("use_bnb_nested_quant",), ("fp16",), ("bf16",),
}  # fmt: skip
"""Keys that decide about others, or say one key of a job together with another."""


def test_a_row_of_two_sequences(tmp_path: Path) -> None:
    """A chosen and a rejected answer go through the model together: twice the sequences, and DeepSpeed's file still counts rows."""
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}')
    recipe = tmp_path / "dpo.yaml"
    recipe.write_text(
        "model_name_or_path: Qwen/Qwen2.5-7B\nbeta: 0.1\nmax_length: 1024\nper_device_train_batch_size: 2\n"
        "gradient_accumulation_steps: 4\nbf16: true\ndeepspeed: ds.json\n"
    )
    reading, job = read_whole(recipe, ("cluster=8xH100-SXM-80GB",))
    assert (job.data.micro_batch, job.data.grad_accum) == (4, 4)
    assert any("reference model's weights come on top" in one.what for one in reading.findings)


def test_frozen_layers_are_all_but_the_last(tmp_path: Path) -> None:
    """model/adapter.py, _setup_freeze_tuning: the last freeze_trainable_layers are trained, embedding, norm and head are not."""
    recipe = tmp_path / "freeze.yaml"
    recipe.write_text(
        "model_name_or_path: meta-llama/Llama-3.1-8B\nstage: sft\nfinetuning_type: freeze\nfreeze_trainable_layers: 3\n"
        "freeze_extra_modules: lm_head\ntemplate: llama3\ncutoff_len: 1024\nbf16: true\n"
    )
    _, job = read_whole(recipe, ("cluster=1xH100-SXM-80GB",))
    frozen = {f"model.layers.{index}.*" for index in range(29)}
    assert set(job.freeze) == frozen | {"model.embed_tokens.*", "model.norm.*"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # schemas/config.py: `offload` stands for activation_offloading
        ("gradient_checkpointing: offload\n", {"recompute": "full", "offload.activations": "cpu"}),
        ("gradient_checkpointing: true\nactivation_offloading: disk\n", {"recompute": "full", "offload.activations": "cpu"}),
        ("fsdp_version: 2\nfsdp_config:\n  offload_params: true\n", {"engine.name": "fsdp2", "offload.params": "cpu"}),
        ("fsdp:\n  - shard_grad_op\n  - auto_wrap\n", {"engine.name": "fsdp1", "engine.zero_stage": 2}),
        ("fsdp_version: 2\nfsdp_config:\n  reshard_after_forward: false\n", {"engine.zero_stage": 2, "precision.params": "bf16"}),
        (
            "plugins:\n  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin\n",
            {"loss.kind": "fused-linear", "stack": "transformers"},
        ),
        (
            "plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_rope: true\nliger_fused_linear_cross_entropy: true\n",
            {"stack": "liger", "loss.kind": "fused-linear"},
        ),
        (
            "adapter: qlora\nload_in_4bit: true\nlora_r: 16\nlora_target_linear: true\n",
            {"lora.base": "nf4-double", "lora.targets": ["all-linear"]},
        ),
        (
            "adapter: lora\nload_in_8bit: true\nlora_r: 16\nlora_target_modules: 'model.layers.[\\d]+.self_attn.(q|v)_proj'\n",
            {"lora.base": "int8", "lora.targets": ["q_proj", "v_proj"]},
        ),
        ("adapter: lora\nlora_r: 16\noptimizer: paged_adamw_8bit\n", {"optimizer.state": "8bit", "optimizer.paged": True}),
        # fp32 adapters have fp32 moments
        ("adapter: lora\nlora_r: 16\n", {"optimizer.state": "fp32", "lora.base": "bf16"}),
        ("optimizer: adamw_torch_8bit\n", {"optimizer.state": "8bit", "engine.options.optimizer_library": "torchao"}),
        ("batch_size: 16\nmicro_batch_size: 2\n", {"data.micro_batch": 2, "data.grad_accum": 8}),
        ("sequence_len: 500_000\n", {"data.seq_len": 500_000}),
        ("chunked_cross_entropy: true\n", {"loss.kind": "chunked", "loss.chunks": 8}),
        ("flex_attention: true\n", {"engine.options.attention_backend": "flex"}),
        ("eager_attention: true\nmax_grad_norm: 0.0\n", {"attention": "eager", "grad_clip": False}),
        # core/builders/base.py, _configure_precision_settings
        ("bf16: full\n", {"precision.params": "bf16", "precision.autocast": False}),
        ("bf16: false\nbfloat16: true\n", {"precision.params": "bf16", "precision.autocast": True}),
    ],
)  # fmt: skip
def test_axolotl_s_words(tmp_path: Path, text: str, wanted: dict[str, object]) -> None:
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(f"base_model: meta-llama/Llama-3.1-8B\n{text}")
    _, job = read_whole(recipe, ("cluster=8xH100-SXM-80GB",))
    _has(job, wanted)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # hparams/finetuning_args.py: lora_alpha is twice the rank where nobody says it; all linears are adapted
        ("lora_rank: 16\n", {"lora.rank": 16, "lora.alpha": 32, "lora.targets": ["all-linear"], "recompute": "full"}),
        (
            "lora_target: q_proj,v_proj\nadditional_target: lm_head\n",
            {"lora.targets": ["q_proj", "v_proj"], "lora.modules_to_save": ["lm_head"]},
        ),
        ("quantization_bit: 4\nbf16: true\n", {"lora.base": "nf4-double", "precision.params": "bf16"}),
        ("quantization_bit: 4\ndouble_quantization: false\n", {"lora.base": "nf4"}),
        ("quantization_bit: 8\n", {"lora.base": "int8"}),
        # model/adapter.py: what is trained is made fp32, but under pure_bf16
        ("finetuning_type: full\nbf16: true\n", {"precision.params": "fp32", "precision.compute": "bf16"}),
        ("finetuning_type: full\npure_bf16: true\n", {"precision.params": "bf16", "precision.autocast": False}),
        ("disable_gradient_checkpointing: true\nflash_attn: disabled\n", {"recompute": "none", "attention": "eager"}),
        ("enable_liger_kernel: true\n", {"stack": "liger", "loss.kind": "fused-linear"}),
        ("enable_liger_kernel: true\nstage: dpo\nper_device_train_batch_size: 2\n", {"loss.kind": "full", "data.micro_batch": 4}),
        ("finetuning_type: full\nuse_muon: true\n", {"optimizer.name": "muon"}),
        ("use_dora: true\n", {"lora.dora": True}),
    ],
)  # fmt: skip
def test_llamafactory_s_words(tmp_path: Path, text: str, wanted: dict[str, object]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model_name_or_path: meta-llama/Llama-3.1-8B\ntemplate: llama3\n{text}")
    _, job = read_whole(recipe, ("cluster=8xH100-SXM-80GB",))
    _has(job, wanted)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # training_args.py: of a Trainer without TRL nothing is run again unless it says so
        ("bf16: true\n", {"engine.name": "ddp", "recompute": "none", "precision.params": "fp32", "data.micro_batch": 8}),
        # trl/trainer/base_config.py: gradient_checkpointing and bf16 are on; model_config.py: fp32
        ("max_length: 2048\n", {"recompute": "full", "precision.compute": "bf16", "precision.params": "fp32", "data.seq_len": 2048}),
        ("max_length: 2048\ntorch_dtype: bfloat16\n", {"precision.params": "bf16", "precision.autocast": True}),
        ("max_seq_length: 512\nmodel_init_kwargs:\n  torch_dtype: bfloat16\n", {"precision.params": "bf16", "data.seq_len": 512}),
        # model_config.py: rank 16, alpha 32, dropout 0.05, whose QLoRA is cast to bf16 (sft_trainer.py)
        (
            "use_peft: true\nload_in_4bit: true\ndtype: bfloat16\n",
            {"lora.rank": 16, "lora.alpha": 32, "lora.dropout": 0.05, "lora.base": "nf4", "lora.dtype": "bf16"},
        ),
        ("bf16: true\nfsdp: full_shard auto_wrap offload\n", {"engine.name": "fsdp1", "engine.zero_stage": 3, "offload.params": "cpu"}),
        ("bf16: true\nfsdp: true\nfsdp_config:\n  reshard_after_forward: false\n", {"engine.name": "fsdp2", "engine.zero_stage": 2}),
        (
            "bf16: true\ndeepspeed:\n  zero_optimization:\n    stage: 3\n    offload_param: {device: cpu}\n  bf16: {enabled: auto}\n",
            {"engine.name": "deepspeed", "engine.zero_stage": 3, "offload.params": "cpu", "precision.master": "fp32"},
        ),
        ("use_liger_kernel: true\n", {"stack": "liger", "loss.kind": "fused-linear"}),
        ("use_liger_kernel: true\nliger_kernel_config:\n  fused_linear_cross_entropy: false\n", {"stack": "liger", "loss.kind": "full"}),
        ("max_prompt_length: 512\nmax_completion_length: 1024\n", {"data.seq_len": 1536}),
        ("optim: paged_adamw_32bit\n", {"optimizer.paged": True, "optimizer.state": "fp32"}),
        ("activation_offloading: true\n", {"offload.activations": "cpu"}),
        ("max_length: 512\nloss_type: chunked_nll\n", {"loss.kind": "chunked"}),
    ],
)  # fmt: skip
def test_the_trainer_s_words(tmp_path: Path, text: str, wanted: dict[str, object]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model_name_or_path: meta-llama/Llama-3.1-8B\nlearning_rate: 1e-5\n{text}")
    _, job = read_whole(recipe, ("cluster=8xH100-SXM-80GB",))
    _has(job, wanted)


def _has(job: object, wanted: dict[str, object]) -> None:
    for key, value in wanted.items():
        found: object = job
        for part in key.split("."):
            found = found[part] if isinstance(found, Mapping) else getattr(found, part)
        if key == "recompute":
            found = found.kind
        assert (list(found) if isinstance(found, tuple) else found) == value, key


COMMAND = """\
#!/bin/bash
export OMP_NUM_THREADS=8
torchrun --nproc_per_node=8 --master_port 20001 train.py \\
    --model_name_or_path meta-llama/Llama-2-7b-hf \\
    --bf16 True --fp16 False \\
    --per-device-train-batch-size 8 \\
    --gradient_accumulation_steps 8 \\
    --fsdp "full_shard auto_wrap" \\
    --lora_r 16 --lora_target_modules q_proj v_proj \\
    --model_max_length 2048 \\
    --gradient_checkpointing False
"""


def test_a_command_is_read_and_edited_like_a_file(tmp_path: Path) -> None:
    """HfArgumentParser's words: a list takes several, a switch one or none, a dash is an underscore."""
    path = tmp_path / "run.sh"
    path.write_text(COMMAND)
    found = check(path, ("cluster=8xA100-SXM-40GB",))
    assert (found.job.data.micro_batch, found.job.data.grad_accum, found.job.data.seq_len) == (8, 8, 2048)
    assert found.job.engine.name == "fsdp1"
    assert found.job.lora is not None
    assert found.job.lora.targets == ("q_proj", "v_proj")
    assert found.job.recompute.kind == "none"
    assert {"nproc_per_node", "master_port"} <= {one.key for one in found.leftovers}
    added = [line[1:].strip() for line in (found.edit or "").splitlines() if line[:1] == "+" and line[:3] != "+++"]
    assert added
    assert all(line.startswith("--") for line in added)


def test_the_files_that_it_names_may_lie_where_the_trainer_starts(tmp_path: Path) -> None:
    """LLaMA-Factory's own examples name examples/deepspeed/... from the folder of the repository; fsdp_config may be a file too."""
    (tmp_path / "examples" / "deepspeed").mkdir(parents=True)
    (tmp_path / "examples" / "train").mkdir()
    (tmp_path / "examples" / "deepspeed" / "ours.json").write_text('{"zero_optimization": {"stage": 1}}')
    recipe = tmp_path / "examples" / "train" / "recipe.yaml"
    recipe.write_text(
        "model_name_or_path: meta-llama/Llama-3.1-8B\ntemplate: llama3\nbf16: true\ndeepspeed: examples/deepspeed/ours.json\n"
    )
    _, job = read_whole(recipe, ("cluster=8xH100-SXM-80GB",))
    assert (job.engine.name, job.engine.zero_stage) == ("deepspeed", 1)
    (tmp_path / "fsdp.json").write_text('{"version": 2, "reshard_after_forward": false, "cpu_offload": true}')
    recipe = tmp_path / "args.yaml"
    recipe.write_text(
        "model_name_or_path: meta-llama/Llama-3.1-8B\nbf16: true\nfsdp: full_shard\nfsdp_config: fsdp.json\n"
    )
    _, job = read_whole(recipe, ("cluster=8xH100-SXM-80GB",))
    assert (job.engine.name, job.engine.zero_stage, job.offload.params) == ("fsdp2", 2, "cpu")
    edit = check(recipe, ("cluster=8xH100-SXM-80GB",)).edit
    assert edit is None or "fsdp_config" not in "".join(line for line in edit.splitlines() if line[:1] in "+-")


def test_offloaded_states_are_not_in_eight_bits(tmp_path: Path) -> None:
    """accelerate/utils/deepspeed.py, map_pytorch_optim_to_deepspeed."""
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}')
    recipe = tmp_path / "recipe.yml"
    recipe.write_text("base_model: meta-llama/Llama-3.1-8B\noptimizer: adamw_bnb_8bit\ndeepspeed: ds.json\n")
    found = check(recipe, ("cluster=8xH100-SXM-80GB",))
    assert found.job.optimizer.state == "fp32"
    assert any("DeepSpeedCPUAdam" in one.what for one in found.findings)

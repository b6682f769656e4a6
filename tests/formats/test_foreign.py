"""Files that are recognised and not read; none is taken for a format that has a key in common with it."""

import pytest

from ullage.errors import InvalidInput
from ullage.formats.registry import format_of


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("train_type: lora\nper_device_train_batch_size: 1\nbf16: true\n", "ms-swift"),
        ("micro_train_batch_size: 2\nzero_stage: 3\nbf16: true\n", "OpenRLHF"),
        ("model:\n  _component_: torchtune.models.llama3_1.lora_llama3_1_70b\n", "torchtune"),
        ("model:\n  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained\n", "NeMo"),
        ("data:\n  max_prompt_length: 2048\nactor_rollout_ref:\n  actor:\n    fsdp_config:\n      param_offload: true\n", "verl"),
        ("trainer:\n  callbacks:\n    - class_path: lightning.pytorch.callbacks.ModelCheckpoint\n", "Lightning"),
        ('{\n  "architectures": ["LlamaForCausalLM"],\n  "hidden_size": 4096\n}\n', "config.json"),
        ("accelerate launch -m axolotl.cli.train --sample_packing true --micro_batch_size 2\n", "axolotl"),
    ],
)  # fmt: skip
def test_a_file_of_a_trainer_is_named_and_not_read(text: str, title: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        format_of(text, "file.yaml")
    message = str(caught.value)
    assert title in message
    assert "DeepSpeed JSON" in message


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"train_batch_size": 8, "gradient_accumulation_steps": 2, "bf16": {"enabled": true}}', "deepspeed"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  gradient_accumulation_steps: 1\n", "accelerate"),
        (
            '#!/bin/bash\ncat > ds.json <<X\n{"train_batch_size": 8}\nX\ndeepspeed pretrain.py --num-layers 2 --hidden-size 8\n',
            "megatron",
        ),
        ("per_device_train_batch_size: 8\nuse_vllm: true\nbf16: true\n", "training-arguments"),  # huggingface/trl#2864
        (
            "base_model: mistralai/Mistral-7B-v0.1\ndeepspeed: zero2.json\nfsdp_config:\n  fsdp_offload_params: true\n",
            "axolotl",
        ),
        ("### method\nstage: sft\nfinetuning_type: lora\ncutoff_len: 32768\nbf16: true\n", "llamafactory"),
        (
            "torchrun train.py --model x --per_device_train_batch_size 1 --bf16 True --fsdp full_shard\n",
            "training-arguments",
        ),
        ("llamafactory-cli train --stage sft --finetuning_type lora --cutoff_len 1024\n", "llamafactory"),
        ("num-layers: 32\nhidden-size: 4096\nbf16: true\n", "megatron"),
        ("schema: 1\nmodel: {model_type: gpt, hidden_size: 8}\nmodel_type: gpt\n", "job"),
    ],
)
def test_what_is_read_stays_what_it_is(text: str, name: str) -> None:
    found = format_of(text, "file")
    assert name == found.NAME

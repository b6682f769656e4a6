"""Encoders and models that read images: what their files say, and what they cannot be run with."""

from __future__ import annotations

import pytest

from ullage.errors import UllageError
from ullage.job.job import Job
from ullage.job.read import read_job
from ullage.model.build import graph
from ullage.model.count import flops_per_token, parameter_count

JOB = {
    "schema": 1,
    "cluster": "2xA100-SXM-80GB",
    "data": {"micro_batch": 32},
    "engine": {"name": "ddp"},
}
BERT = {**JOB, "model": "bert-base-uncased", "data": {"seq_len": 512, "micro_batch": 32}}
VIT = {**JOB, "model": "vit-base-patch16-224"}


def read(job: dict[str, object], *changes: str) -> Job:
    return read_job(job, changes)


def test_an_image_says_how_many_tokens_there_are() -> None:
    """224 / 16 = 14 patches a side, and one token for the whole (arXiv 2010.11929, section 3.1)."""
    assert read(VIT).data.seq_len == 14 * 14 + 1
    assert "data.seq_len = 197" in read(VIT).defaults
    larger = read(VIT, "model={base: vit-base-patch16-224, image_size: 384}")
    assert larger.data.seq_len == 24 * 24 + 1


@pytest.mark.parametrize(
    ("job", "change", "parts"),
    [
        (VIT, "data.seq_len=500", ["data.seq_len = 500", "model.image_size 224", "model.patch_size", "use 197"]),
        (VIT, "data.padding_mask=true", ["data.padding_mask", "no padding"]),
        (VIT, "data.seq_len_mean=100", ["data.seq_len_mean", "one size"]),
        (VIT, "model={base: vit-base-patch16-224, patch_size: 300}", ["model.patch_size = 300", "224 x 224"]),
        (VIT, "model={base: vit-base-patch16-224, image_size: [224]}", ["model.image_size", "a height and a width"]),
        (BERT, "data.seq_len=4096", ["data.seq_len = 4096", "512 positions"]),
        (
            BERT,
            "model={model_type: roberta, num_hidden_layers: 12, max_position_embeddings: 513}",
            ["data.seq_len = 512", "511 positions"],  # rows up to the padding token's id, 1, are no token's
        ),
        (
            BERT,
            "model={model_type: roberta, num_hidden_layers: 12, max_position_embeddings: 2}",
            ["model.max_position_embeddings = 2", "pad_token_id"],
        ),
        (BERT, "stack=liger", ["stack = liger", "bert", "use stack transformers"]),
        (VIT, "engine.name=megatron", ["stack = megatron", "vit", "use stack transformers"]),
        (BERT, "loss=fused-linear", ["loss = fused-linear", "use full"]),
        (BERT, "lora={rank: 8}", ["lora = set", "encoder's head"]),
        (BERT, "recompute={modules: [mlp]}", ["recompute", "use full"]),
        (BERT, "model={base: bert-base-uncased, is_decoder: true}", ["model.is_decoder"]),
        (BERT, "model={base: bert-base-uncased, tie_word_embeddings: false}", ["model.tie_word_embeddings", "bias"]),
        (
            BERT,
            "model={base: bert-base-uncased, architectures: [BertForQuestionAnswering]}",
            ["model.architectures = BertForQuestionAnswering", "BertForSequenceClassification"],
        ),
        (
            BERT,
            "model={base: bert-base-uncased, architectures: [BertForSequenceClassification], id2label: {}}",
            ["model.id2label = empty"],
        ),
        (
            BERT,
            "model={base: bert-base-uncased, architectures: [BertForSequenceClassification], num_labels: 1, "
            "problem_type: single_label_classification}",
            ["model.problem_type", "num_labels"],
        ),
    ],
)
def test_what_cannot_be_run(job: dict[str, object], change: str, parts: list[str]) -> None:
    with pytest.raises(UllageError) as caught:
        read(job, change)
    text = str(caught.value)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(("axis", "engine"), [("tp", "fsdp2"), ("pp", "deepspeed"), ("cp", "fsdp2")])
def test_transformers_cuts_no_encoder(axis: str, engine: str) -> None:
    """Neither class has a base_model_tp_plan or a base_model_pp_plan (models/bert, models/vit)."""
    changes = (f"layout.{axis}=2", f"engine.name={engine}")
    if axis == "cp":
        changes += ("layout.cp_kind=ring",)
    with pytest.raises(UllageError, match=f"layout.{axis} = 2: transformers has no plan for bert"):
        read(BERT, *changes)


def test_a_head_changes_what_is_trained() -> None:
    """bert-base-uncased says BertForMaskedLM; a classifier has a pooler and 3 labels instead (models/bert/modeling_bert.py)."""
    words = 768 * 769 + 2 * 768 + 30522
    counted = parameter_count(graph(read(BERT).model))
    change = "model={base: bert-base-uncased, architectures: [BertForSequenceClassification], num_labels: 3}"
    classes = parameter_count(graph(read(BERT, change).model))
    assert counted - words == classes - 768 * 769 - 3 * 769


def test_flops_count_a_head_of_whole_sequences_once_a_sequence() -> None:
    """12 layers of 12 h^2 weights, 6 FLOPs each; attention 12 h s a layer; the pooler and 2 labels once in 512 tokens."""
    change = "model={base: bert-base-uncased, architectures: [BertForSequenceClassification]}"
    layers = 12 * (6 * 12 * 768**2 + 12 * 768 * 512)
    assert flops_per_token(graph(read(BERT, change).model), 512) == layers + 6 * 768**2 // 512 + 6 * 2 * 768 // 512


def test_flops_of_images() -> None:
    """196 patches of 3 x 16 x 16 pixels, whose gradient nothing asks for: 4 FLOPs a weight; 1000 classes once."""
    layers = 12 * (6 * 12 * 768**2 + 12 * 768 * 197)
    patches = 4 * 768 * 3 * 16 * 16 * 196 // 197
    assert flops_per_token(graph(read(VIT).model), 197) == layers + patches + 6 * 1000 * 768 // 197


def test_a_model_without_a_head_is_said_to_be_taken_with_one() -> None:
    job = read(BERT, "model={base: bert-base-uncased, architectures: [BertModel]}")
    assert any(one.startswith("model.architectures = BertModel: names no head") for one in job.warnings)
    assert not [one for one in read(BERT).warnings if "architectures" in one]

"""The work of a job's first layer, and small mixtures in Megatron for it."""

from __future__ import annotations

from typing import Any

from ullage.engines.base import context_of
from ullage.job.adapted import graph_of
from ullage.job.job import Job
from ullage.job.read import read_job
from ullage.timing.ops import block_work
from ullage.timing.work import OpWork

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}
GPT_OSS: dict[str, Any] = {
    "model": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    },
    "cluster": "8xB200-SXM-180GB",
    "stack": "megatron",
    "layout": {"dp": 8, "ep": 8},
    "data": {"seq_len": 1024, "micro_batch": 1},
}


def layer_works(job: Job) -> dict[str, OpWork]:
    """By name."""
    graph = graph_of(job)
    layer = next(block for block in graph.blocks() if block.role == "layer")
    return {work.name: work for work in block_work(layer, context_of(job, graph))}


def in_megatron(job: dict[str, Any], **options: object) -> Job:
    return read_job(job | {"engine": {"name": "megatron", "zero_stage": 1, "options": options}})

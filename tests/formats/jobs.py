"""Jobs of each engine, drawn at random with the keys that formats say; and what a format made of one, read back."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hypothesis import strategies as st
from tests.properties.jobs import EXPERTS, MODEL

from ullage.errors import UllageError
from ullage.formats.convert import Conversion, write_job
from ullage.formats.registry import format_named
from ullage.job.job import Job
from ullage.job.read import read_job

OPTIONS: dict[str, dict[str, list[object]]] = {
    "deepspeed": {
        "reduce_bucket_size": [1000, 50_000_000, "auto"],
        "overlap_comm": [True, False],
        "sub_group_size": [100_000_000],
        "stage3_prefetch_bucket_size": [0, 10_000_000, "auto"],
        "stage3_param_persistence_threshold": [0, 100_000, "auto"],
        "round_robin_gradients": [True],
        "contiguous_gradients": [True, False],
        "partition_activations": [True],
        "grad_accum_dtype": ["fp32"],
        "gradient_clipping": [0.5, 2],
        "allgather_bucket_size": [500_000_000],
        "zero_allow_untested_optimizer": [True],
        "pin_memory": [True, False],
    },
    "fsdp1": {
        "backward_prefetch": ["BACKWARD_PRE"],
        "forward_prefetch": [True, False],
        "use_orig_params": [True, False],
        "limit_all_gathers": [True],
        "fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    },
    "fsdp2": {},
    "megatron": {
        "overlap_grad_reduce": [True, False],
        "overlap_param_gather": [True, False],
        "transformer_impl": ["transformer_engine", "local"],
        "gradient_accumulation_fusion": [False],
        "bias_dropout_fusion": [False],
        "attention_backend": ["flash", "unfused", "auto"],
        "ddp_bucket_size": [40_000_000],
        "use_distributed_optimizer": [],
        "deterministic_mode": [True],
        "tp_comm_overlap": [True],
        "clip_grad": [0.5],
        "lr": [0.0001],
    },
}


def document(choose, engine: str, stack: str | None = None) -> dict[str, object]:
    """A job document of ``engine``; choose(list) picks one."""
    stage = choose({"deepspeed": [0, 1, 2, 3], "megatron": [0, 1], "ddp": [0], "zero1": [1]}.get(engine, [2, 3]))
    parallel = engine == "megatron" or stack == "torchtitan"
    layout = {"dp": choose([1, 2, 4]), "tp": choose([1, 2]) if parallel else 1, "pp": choose([1, 2]) if parallel else 1}
    if engine == "megatron" and layout["tp"] > 1:
        layout["sp"] = choose([True, False])
    options = {name: choose(values) for name, values in OPTIONS.get(engine, {}).items() if values and choose([0, 0, 1])}
    offload = {}
    if engine == "deepspeed" and stage:
        offload["optimizer"] = choose(["none", "cpu"])
        if stage == 3 and offload["optimizer"] == "cpu":
            offload["params"] = choose(["none", "cpu"])
    if engine in ("fsdp1", "fsdp2") and choose([0, 1]):
        offload = {"optimizer": "cpu", "params": "cpu"}
    found: dict[str, object] = {
        "model": choose([MODEL, EXPERTS]) if engine != "megatron" else MODEL,
        "cluster": {
            "device": "H100-SXM-80GB",
            "gpus_per_node": layout["dp"] * layout["tp"] * layout["pp"],
            "nodes": 1,
        },
        "data": {"seq_len": choose([256, 4096]), "micro_batch": choose([1, 3]), "grad_accum": choose([2, 4, 8])},
        "layout": layout,
        "engine": {"name": engine, "zero_stage": stage, "options": options},
        "precision": choose(["fp32", "bf16-mixed", "fp16-mixed", "bf16"]),
        "optimizer": {"name": choose(["adamw", "adam", "sgd"])},
        "grad_clip": choose([True, False]) or "gradient_clipping" in options or "clip_grad" in options,
        "recompute": choose(["none", "full", "selective"]),
        "offload": offload,
        "compile": choose([True, False]),
    }
    if stack:
        found["stack"] = stack
        if layout["tp"] > 1:
            layout["sp"], found["loss"] = True, choose(["vocab-parallel", "full"])
    return found


def drawn(engine: str, stack: str | None = None) -> st.SearchStrategy[Job]:
    @st.composite
    def job(draw: st.DrawFn) -> Job:
        return read_job(document(lambda values: draw(st.sampled_from(values)), engine, stack))

    return job()


def some(engine: str, count: int, stack: str | None = None) -> Iterator[Job]:
    """The same jobs in every run, for a parser that is slow to start."""
    chance = random.Random(0)
    while count:
        try:
            yield read_job(document(chance.choice, engine, stack))
        except UllageError:
            continue
        count -= 1


def written(job: Job, to: str) -> Conversion:
    return write_job(job, format_named(to))

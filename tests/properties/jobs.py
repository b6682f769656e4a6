"""Small jobs of every engine, drawn at random."""

from __future__ import annotations

from hypothesis import strategies as st

from ullage.errors import UllageError
from ullage.job.job import Job
from ullage.job.read import read_job

MODEL = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
}
EXPERTS = {
    "model_type": "mixtral",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 1024,
}

ENGINES = (
    {"name": "single"},
    {"name": "ddp"},
    {"name": "zero1"},
    {"name": "fsdp2", "zero_stage": 2},
    {"name": "fsdp2", "zero_stage": 3},
    {"name": "deepspeed", "zero_stage": 0},
    {"name": "deepspeed", "zero_stage": 1},
    {"name": "deepspeed", "zero_stage": 2},
    {"name": "deepspeed", "zero_stage": 3},
    {"name": "megatron", "zero_stage": 0},
    {"name": "megatron", "zero_stage": 1},
)
RECOMPUTE = ["none", "full", "selective", {"every": 2}, {"layers": 1}, {"sqrt": True}]
PARALLEL = ("megatron",)  # the engines whose stacks divide layers by tp and pp in these tests


def job(engine: dict[str, object], **keys: object) -> Job:
    """A job on as many GPUs as its layout needs."""
    layout: dict[str, object] = {"dp": 1, "tp": 1, "pp": 1, **(keys.pop("layout", {}))}  # type: ignore[dict-item]
    world = 1
    for degree in ("dp", "tp", "pp"):
        value = layout[degree]
        assert isinstance(value, int)
        world *= value
    stack = {"fsdp2": "torchtitan", "megatron": "megatron"}.get(str(engine["name"]), "transformers")
    return read_job(
        {
            "model": MODEL,
            "cluster": {"device": "H100-SXM-80GB", "gpus_per_node": world, "nodes": 1},
            "layout": layout,
            "engine": engine,
            "stack": stack,
            "precision": "bf16-mixed",
            **keys,
        }
    )


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """A job that some engine runs."""
    engine = draw(st.sampled_from(ENGINES))
    name = engine["name"]
    layout: dict[str, object] = {"dp": 1 if name == "single" else draw(st.sampled_from([1, 2, 4, 8]))}
    if name in PARALLEL:
        layout["tp"] = draw(st.sampled_from([1, 2, 4]))
        layout["sp"] = layout["tp"] != 1 and draw(st.booleans())
        layout["pp"] = draw(st.sampled_from([1, 2, 4]))
    keys: dict[str, object] = {
        "data": {
            "seq_len": draw(st.sampled_from([256, 512, 1024])),
            "micro_batch": draw(st.integers(1, 3)),
            "grad_accum": draw(st.integers(1, 5)),
        },
        "recompute": draw(st.sampled_from(RECOMPUTE)),
        "attention": draw(st.sampled_from(["flash", "eager"])),
        "optimizer": {"name": "adamw", "impl": draw(st.sampled_from(["fused", "foreach", "for-loop"]))},
        "precision": draw(st.sampled_from(["bf16-mixed", "bf16"])),
    }
    try:
        return job(engine, layout=layout, **keys)
    except UllageError as error:
        raise AssertionError(f"{engine} {layout} {keys}: {error}") from error

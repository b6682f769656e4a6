"""Adapters beside a frozen model: the closed form against PEFT's own code, one whole step of it."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from ullage.engines.estimate import estimate
from ullage.errors import InvalidInput, Unsupported
from ullage.job.adapted import graph_of, names
from ullage.job.read import read_job
from ullage.memory.ledger import by_category
from ullage.trace.families import FAMILIES, TARGETS
from ullage.trace.models import config_of
from ullage.trace.whole import traced

pytest.importorskip("peft")

BASE: dict[str, object] = {
    "schema": 1,
    "cluster": "1xA100-SXM-80GB",
    "engine": {"name": "single"},
    "data": {"seq_len": 256, "micro_batch": 2, "grad_accum": 2},
    "optimizer": {"name": "adamw", "impl": "foreach"},
}
SHAPE = {"num_hidden_layers": 4, "vocab_size": 1024, "max_position_embeddings": 2048}
WIDTH = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 4}
MODELS = {
    "llama": ({"model_type": "llama", **WIDTH, **SHAPE}, "q_proj", "v_proj"),
    "qwen2": ({"model_type": "qwen2", **WIDTH, **SHAPE}, "q_proj", "v_proj"),
    "phi3": ({"model_type": "phi3", "pad_token_id": 0, **WIDTH, **SHAPE}, "qkv_proj"),
}
MODES = list(product(("bf16", "bf16-mixed"), ("none", "full"), (0.0, 0.1), (None, "bf16")))


ELSEWHERE = {
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 520},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "vocab_size": 520, "n_positions": 128},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 520, "max_seq_len": 128},
}


@pytest.mark.parametrize("family", [*(one for one in FAMILIES if one not in TARGETS), *ELSEWHERE])
def test_linears_have_the_names_of_their_class(family: str) -> None:
    """Routers are no linears."""
    from transformers import AutoModelForCausalLM

    keys = {"model_type": family, **{**FAMILIES, **ELSEWHERE}[family]}
    job = read_job({**BASE, "model": keys, "data": {"seq_len": 128}})  # as long as the shortest table of positions
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(job))
    linears = {
        path.rpartition(".")[2]
        for path, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") and any(part.isdigit() for part in path.split("."))
    }
    assert {name for name in names(graph_of(job)) if "." not in name} == linears


def _compared(keys: dict[str, object]) -> tuple[int, int]:
    job = read_job({**BASE, **keys})
    answer = estimate(job)
    closed = answer.peak.allocated_bytes - by_category(answer.ledger).get("workspace", 0)
    return closed, traced(job).steady.bytes


@pytest.mark.parametrize("every", [False, True], ids=["some", "all-linear"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("number", range(4))
def test_a_step_is_peft_s(model: str, every: bool, number: int) -> None:
    """Each model in four of the sixteen modes."""
    config, *targets = MODELS[model]
    precision, recompute, dropout, dtype = MODES[(5 * number + 3 * list(MODELS).index(model) + every) % len(MODES)]
    lora = {"rank": 16, "targets": "all-linear" if every else targets, "dropout": dropout, "dtype": dtype}
    closed, real = _compared({"model": config, "precision": precision, "recompute": recompute, "lora": lora})
    assert closed == pytest.approx(real, rel=0.005)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_frozen_experts_and_routers_keep_no_rows(family: str, recompute: str) -> None:
    """Adapters of the attention alone: what experts and an fp32 router are given is kept for a weight's gradient that nobody asks for."""
    closed, real = _compared(
        {
            "model": {"model_type": family, **FAMILIES[family]},
            "precision": "bf16",
            "recompute": recompute,
            "lora": {"rank": 8, "targets": ["o_proj"]},
        }
    )
    assert closed == pytest.approx(real, rel=0.006)


@pytest.mark.parametrize(
    ("model", "precision", "recompute", "dropout", "dtype"),
    [
        ("llama", "bf16", "none", 0.0, None),
        ("qwen2", "bf16", "full", 0.1, None),
        ("llama", "bf16-mixed", "none", 0.1, None),
        ("phi3", "bf16", "none", 0.1, "bf16"),
        ("qwen2", "bf16-mixed", "full", 0.0, "bf16"),
    ],
)
def test_dora_is_peft_s(model: str, precision: str, recompute: str, dropout: float, dtype: str | None) -> None:
    """The whole update and its norms in each forward, the base's output kept for the magnitude."""
    config, *_ = MODELS[model]
    lora = {"rank": 16, "targets": "all-linear", "dropout": dropout, "dtype": dtype, "dora": True}
    closed, real = _compared({"model": config, "precision": precision, "recompute": recompute, "lora": lora})
    assert closed == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize(
    ("engine", "stage", "precision", "recompute", "dropout"),
    [
        ("ddp", 0, "bf16", "none", 0.0),
        ("fsdp2", 3, "bf16", "none", 0.0),
        ("fsdp2", 3, "bf16-mixed", "full", 0.1),
        ("fsdp2", 2, "bf16-mixed", "none", 0.0),
    ],
)
def test_dora_under_engines(engine: str, stage: int, precision: str, recompute: str, dropout: float) -> None:
    """FSDP2 gathers the adapters in the compute type, in which the identity matrix is made too."""
    closed, real = _compared(
        {
            "model": MODELS["llama"][0],
            "cluster": "4xA100-SXM-80GB",
            "engine": {"name": engine, **({"zero_stage": stage} if stage else {})},
            "precision": precision,
            "recompute": recompute,
            "lora": {"rank": 16, "targets": "all-linear", "dropout": dropout, "dora": True},
        }
    )
    assert closed == pytest.approx(real, rel=0.005)


@pytest.mark.parametrize(
    ("modules", "tied", "targets", "recompute"),
    [
        (["embed_tokens", "lm_head"], False, ["q_proj", "v_proj"], "full"),
        (["embed_tokens", "lm_head"], True, ["q_proj"], "none"),
        (["embed_tokens"], True, ["q_proj"], "none"),
        (["layernorm", "model.norm"], False, ["q_proj"], "none"),
        ([], False, ["q_proj", "lm_head"], "none"),
    ],
)
def test_modules_trained_in_full_are_copies(modules: list[str], tied: bool, targets: list[str], recompute: str) -> None:
    """Beside the frozen originals, in the model's type; and an adapter of the head."""
    config, *_ = MODELS["llama"]
    closed, real = _compared(
        {
            "model": {**config, "tie_word_embeddings": tied},
            "precision": "bf16",
            "recompute": recompute,
            "lora": {"rank": 16, "targets": targets, "modules_to_save": modules},
        }
    )
    assert closed == pytest.approx(real, rel=0.005)


ENDS = ["embed_tokens", "lm_head"]
NORMS = ["layernorm", "model.norm"]


@pytest.mark.parametrize(
    ("engine", "stage", "precision", "recompute", "modules", "dtype"),
    [
        ("ddp", 0, "bf16", "full", ENDS, None),
        ("ddp", 0, "bf16-mixed", "none", NORMS, None),
        ("fsdp2", 3, "bf16", "full", ENDS, None),
        ("fsdp2", 3, "bf16-mixed", "none", ENDS, None),
        ("fsdp2", 2, "bf16-mixed", "none", NORMS, None),
        ("fsdp2", 3, "bf16", "full", NORMS, "bf16"),
    ],
)
def test_modules_trained_in_full_under_engines(
    engine: str, stage: int, precision: str, recompute: str, modules: list[str], dtype: str | None
) -> None:
    """DDP has buckets of each type; FSDP2 shards original and copy, the latter in fp32 under mixed precision, as accelerate makes it."""
    config, *targets = MODELS["llama"]
    closed, real = _compared(
        {
            "model": config,
            "cluster": "4xA100-SXM-80GB",
            "engine": {"name": engine, **({"zero_stage": stage} if stage else {})},
            "precision": precision,
            "recompute": recompute,
            "lora": {"rank": 16, "targets": targets, "modules_to_save": modules, "dtype": dtype},
        }
    )
    assert closed == pytest.approx(real, rel=0.005)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    ("stage", "original", "recompute", "modules", "seq_len"),
    [
        (3, False, "full", ENDS, 256),
        (3, False, "none", ENDS, 32),
        (3, True, "none", ENDS, 256),
        (2, False, "none", ["lm_head"], 256),
    ],
)
def test_fsdp1_wraps_each_module_that_is_trained(
    stage: int, original: bool, recompute: str, modules: list[str], seq_len: int
) -> None:
    """PEFT's policy wraps what is trained and has no children: embedding and head are units, gathered again in the backward."""
    config, *targets = MODELS["llama"]
    closed, real = _compared(
        {
            "model": config,
            "cluster": "4xA100-SXM-80GB",
            "engine": {"name": "fsdp1", "zero_stage": stage, "options": {"use_orig_params": original}},
            "data": {"seq_len": seq_len, "micro_batch": 2, "grad_accum": 2},
            "precision": "bf16-mixed",
            "recompute": recompute,
            "lora": {"rank": 16, "targets": targets, "modules_to_save": modules},
        }
    )
    assert closed == pytest.approx(real, rel=0.005)


def test_fsdp2_takes_one_type_of_what_it_trains_together() -> None:
    """torch: "FSDP expects uniform original parameter dtype" (_fsdp_param_group.py, _init_mp_dtypes)."""
    config, *targets = MODELS["llama"]
    keys = {
        "model": config,
        "cluster": "4xA100-SXM-80GB",
        "engine": {"name": "fsdp2"},
        "precision": "bf16",
        "lora": {"rank": 16, "targets": targets, "modules_to_save": NORMS},
    }
    with pytest.raises(Unsupported, match=r"set lora\.dtype: bf16"):
        estimate(read_job({**BASE, **keys}))


def test_a_module_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidInput, match="names no module"):
        estimate(read_job({**BASE, "model": MODELS["llama"][0], "lora": {"modules_to_save": ["wte"]}}))


def test_ddp_reduces_adapters_alone() -> None:
    config, *targets = MODELS["llama"]
    engine = {"name": "ddp"}
    lora = {"rank": 16, "targets": targets}
    closed, real = _compared(
        {"model": config, "precision": "bf16", "lora": lora, "engine": engine, "cluster": "2xA100-SXM-80GB"}
    )
    assert closed == pytest.approx(real, rel=0.005)


@pytest.mark.parametrize(
    ("stage", "precision", "recompute", "every", "dtype"),
    [
        (3, "bf16", "full", True, None),
        (3, "bf16-mixed", "none", False, None),
        (2, "bf16-mixed", "full", True, "bf16"),
    ],
)
def test_fsdp2_shards_base_and_adapters_together(
    stage: int, precision: str, recompute: str, every: bool, dtype: str | None
) -> None:
    """Shards of both in the types that they have, gathered in the compute type; of the adapters alone gradients are reduced."""
    config, *targets = MODELS["llama"]
    closed, real = _compared(
        {
            "model": config,
            "cluster": "4xA100-SXM-80GB",
            "engine": {"name": "fsdp2", "zero_stage": stage},
            "precision": precision,
            "recompute": recompute,
            "lora": {"rank": 16, "targets": "all-linear" if every else targets, "dtype": dtype},
        }
    )
    assert closed == pytest.approx(real, rel=0.005)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # as FSDP1 asks whether they changed
@pytest.mark.parametrize(
    ("stage", "original", "recompute", "targets", "grad_accum"),
    [
        (3, False, "none", ["q_proj", "v_proj"], 2),
        (3, False, "full", "all-linear", 2),
        (3, False, "full", ["down_proj"], 1),
        (2, False, "full", "all-linear", 1),
        (3, True, "none", "all-linear", 1),
    ],
)
def test_fsdp1_wraps_each_adapter_by_itself(
    stage: int, original: bool, recompute: str, targets: object, grad_accum: int
) -> None:
    """PEFT's policy: the next layer is gathered when the backward has come to this one's first adapter. With use_orig_params PEFT finds
    fp32 shards, and casts its input to that."""
    config, *_ = MODELS["llama"]
    closed, real = _compared(
        {
            "model": config,
            "cluster": "4xA100-SXM-80GB",
            "engine": {"name": "fsdp1", "zero_stage": stage, "options": {"use_orig_params": original}},
            "data": {"seq_len": 256, "micro_batch": 2, "grad_accum": grad_accum},
            "precision": "bf16-mixed",
            "recompute": recompute,
            "lora": {"rank": 16, "targets": targets, "dropout": 0.1},
        }
    )
    assert closed == pytest.approx(real, rel=0.005)


@pytest.mark.parametrize(
    ("engine", "key"),
    [
        ({"recompute": "full"}, "engine.options.use_orig_params"),
        ({"zero_stage": 2}, "engine.options.use_orig_params"),
        ({"dtype": "bf16"}, "lora.dtype"),
    ],
)
def test_what_fsdp1_makes_of_adapters_otherwise_is_refused(engine: dict[str, object], key: str) -> None:
    """accelerate makes 16-bit parameters that are trained fp32 (accelerator.py, prepare_model)."""
    config, *_ = MODELS["llama"]
    keys = {
        "model": config,
        "cluster": "4xA100-SXM-80GB",
        "engine": {
            "name": "fsdp1",
            "zero_stage": engine.get("zero_stage", 3),
            "options": {"use_orig_params": True},
        },
        "precision": "bf16-mixed",
        "recompute": engine.get("recompute", "none"),
        "lora": {"rank": 16, "targets": ["q_proj"], "dtype": engine.get("dtype")},
    }
    with pytest.raises(Unsupported) as raised:
        estimate(read_job({**BASE, **keys}))
    assert raised.value.key == key


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_fsdp1_without_adapters() -> None:
    """Flat parameters of layers that are trained as a whole."""
    config, *_ = MODELS["llama"]
    closed, real = _compared(
        {"model": config, "cluster": "4xA100-SXM-80GB", "engine": {"name": "fsdp1"}, "precision": "bf16-mixed"}
    )
    assert closed == pytest.approx(real, rel=0.005)

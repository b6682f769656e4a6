"""A step takes no less than its host does to issue it."""

import pytest

from ullage.hardware.catalogue import device
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.timing.issued import Issuing, forward_s, issuing
from ullage.timing.step import StepTime, stages, step_time
from ullage.timing.work import Matmul, OpWork, Pass, Traffic

H100 = device("H100-SXM-80GB")

SMALL = {
    "model": {
        "model_type": "gpt", "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 2048, "vocab_size": 50304, "max_position_embeddings": 1024, "position": "learned",
        "norm": "layernorm", "mlp": "gelu", "bias": True, "qkv_bias": True,
        "tie_word_embeddings": True, "hidden_dropout": 0.1, "attention_dropout": 0.1,
    },
    "cluster": "8xH100-SXM-80GB",
    "data": {"seq_len": 1024, "micro_batch": 4, "grad_accum": 4},
    "layout": {"dp": 2, "pp": 4, "vpp": 3, "schedule": "interleaved-1f1b"},
    "engine": {"name": "megatron", "options": {"transformer_impl": "transformer_engine"}},
    "stack": "megatron",
    "precision": {"params": "bf16", "compute": "bf16", "grads": "fp32", "master": "fp32", "reduce": "fp32"},
    "recompute": "none",
    "attention": "eager",
}  # fmt: skip
"""Megatron-LM@d98e8a64 tests/functional_tests/test_cases/gpt/gpt3_mcore_te_tp1_pp4_vp1."""


def timed(job: dict = SMALL, **options: object) -> StepTime:
    engine = job["engine"] | {"options": job["engine"]["options"] | options}
    return step_time(read_job(job | {"engine": engine}))


def of(job: dict) -> Issuing | None:
    read = read_job(job)
    (stage, *_) = stages(read, graph_of(read))
    return issuing(stage.context, read.cluster.device)


def test_modules_take_what_they_were_measured_with() -> None:
    """te.Linear of 1024 x 1024 x 1024, forward and backward: 0.573835 ms on an H100 (NVIDIA/TransformerEngine#445); RMSNorm of few rows:
    88 to 95 us (linkedin/Liger-Kernel#1462)."""
    host = of(SMALL)
    assert host is not None
    matmul = Matmul(m=1024, n=1024, k=1024, dtype="bf16")
    linear = OpWork(
        name="linear",
        module="",
        forward=Pass(matmuls=(matmul,)),
        backward=Pass(matmuls=matmul.transposes(accumulate=False)),
    )
    moved = Pass(traffic=(Traffic(bytes=1 << 20, kind="norm"),))
    norm = OpWork(name="norm", module="", forward=moved, backward=moved)
    assert host.of([linear]) + host.of([linear], backward=True) == pytest.approx(573.8e-6, rel=0.01)
    assert 85e-6 < host.of([norm]) + host.of([norm], backward=True) < 96e-6


DECODED = {
    "model_type": "gpt", "hidden_size": 1152, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 4608, "vocab_size": 1024, "max_position_embeddings": 4096, "position": "rope",
    "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "qkv_bias": False, "tie_word_embeddings": False,
    "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
"""gpt_583m: its shape beyond layers, width and heads does not matter to a host."""

EXPERTS = DECODED | {
    "hidden_size": 2048, "num_hidden_layers": 27, "num_key_value_heads": 16, "intermediate_size": 10944,
    "num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 2816,
}  # fmt: skip
"""gpt_16b."""


@pytest.mark.parametrize(
    ("model", "cluster", "ms"),
    [
        (DECODED, "1xH100-SXM-80GB", 22.52),
        (DECODED, "1xGB200-192GB", 26.77),
        (EXPERTS, "1xH100-SXM-80GB", 92.86),
        (EXPERTS, "1xGB200-192GB", 114.5),
    ],
)
def test_forwards_of_a_few_tokens(model: dict, cluster: str, ms: float) -> None:
    """Megatron-Core decodes them eagerly with Transformer Engine: milliseconds a token, which its host takes, for the layers and for
    what surrounds them (NVIDIA/Megatron-LM@d98e8a64 tests/performance_tests/test_cases/gpt, baseline_values.json; the lowest batch)."""
    options = {"moe_token_dispatcher_type": "alltoall", "moe_router_score_function": "sigmoid"}
    job = SMALL | {
        "model": model,
        "cluster": cluster,
        "layout": {"dp": 1},
        "data": {"seq_len": 128, "micro_batch": 1, "grad_accum": 1},
        "engine": {"name": "megatron", "options": options if "num_experts" in model else {}},
        "attention": "flash",
    }
    read = read_job(job)
    (stage,) = stages(read, graph_of(read))
    layers = [(time.issued[0], count) for block, time, count in stage.runs[0] if "layer" in block.name]
    assert 0.88 * ms < 1e3 * sum(issued_s * count for issued_s, count in layers) < ms


def test_gradients_that_autograd_adds_are_not_python() -> None:
    host = of(SMALL)
    assert host is not None
    added = OpWork(name="sum", module="", forward=Pass(), backward=Pass(traffic=(Traffic(bytes=1 << 20),)))
    assert host.of([added], backward=True) == 0.0


def test_a_step_of_few_small_layers() -> None:
    """0.09177 s a step on 8 H100, the median of the run's last two thirds (golden_values_dev_dgx_h100.json)."""
    found = timed()
    assert 0.8 * 0.09177 < found.step_s < 1.05 * 0.09177
    assert dict(found.parts)["host"] > 0.2 * found.step_s
    assert sum(dict(found.parts).values()) == pytest.approx(found.step_s)


def test_nothing_waits_where_a_graph_is_replayed() -> None:
    assert "host" not in dict(timed(cuda_graph_impl="local", cuda_graph_scope=["full_iteration"]).parts)


def test_large_layers_are_issued_ahead() -> None:
    model = SMALL["model"] | {"hidden_size": 6144, "intermediate_size": 24576, "head_dim": 96}
    model |= {"num_attention_heads": 64, "num_key_value_heads": 64}
    large = SMALL | {"model": model, "layout": {"dp": 8}}
    assert "host" not in dict(timed(large, check_for_nan_in_loss_and_grad=False).parts)


@pytest.mark.parametrize(("option", "idle"), [({}, 1), ({"check_for_nan_in_loss_and_grad": False}, 0)])
def test_each_loss_is_waited_for(option: dict[str, object], idle: int) -> None:
    """Its host sees whether a loss is a number before it issues the backward (Megatron-LM pretrain_gpt.py, loss_func).
    Eight of torch's ops and two functions of Python's lead to the first matmul, 13.5 and 46 us each on an H100's host; of four
    micro-batches, on the last stage alone."""
    model = SMALL["model"] | {"hidden_size": 6144, "intermediate_size": 24576, "head_dim": 96}
    large = SMALL | {
        "model": model | {"num_attention_heads": 64, "num_key_value_heads": 64},
        "layout": {"dp": 4, "pp": 2},
    }
    job = read_job(large | {"engine": large["engine"] | {"options": option}})
    first, last = stages(job, graph_of(job))
    assert dict(first.parts.items).get("host", 0.0) == 0.0
    assert dict(last.parts.items).get("host", 0.0) == pytest.approx(idle * 4 * (8 * 13.5e-6 + 2 * 46e-6), abs=1e-9)


def test_other_stacks_are_not_known() -> None:
    job = {
        "model": "llama-3.2-1b",
        "cluster": "8xH100-SXM-80GB",
        "engine": {"name": "fsdp2"},
        "data": {"seq_len": 128, "micro_batch": 1},
    }
    assert of(job) is None
    local = of(SMALL | {"engine": {"name": "megatron", "options": {"transformer_impl": "local"}}})
    assert local is not None
    assert local.linear_s == pytest.approx((46e-6, 46e-6))


def test_nothing_is_issued_ahead_of_a_wait() -> None:
    """Two blocks, one longer for its host, one for its device: a host that need not wait is as far ahead as it is quicker."""
    for waits, found in ((False, 5.0), (True, 3.0 + 4.0)):
        assert forward_s([(waits, 1.0, 3.0, 1), (waits, 4.0, 2.0, 1)]) == found
    assert forward_s([(True, 1.0, 3.0, 2), (True, 4.0, 2.0, 2)]) == 2 * 3.0 + 2 * 4.0
    assert forward_s([(False, 1.0, 3.0, 1), (True, 4.0, 2.0, 1), (False, 1.0, 5.0, 1)]) == 3.0 + 7.0


def test_what_no_host_holds_up_is_its_devices_alone() -> None:
    assert forward_s([(True, 4.0, 2.0, 3), (True, 4.0, 3.0, 1)]) == 3 * 2.0 + 3.0

"""Offload to the host as it was published. One rate describes all sizes of an optimizer; a step was measured by another project."""

import pytest

from ullage.calibration.host import HostOptimizer, host_optimizer_bytes_per_s
from ullage.engines.estimate import estimate
from ullage.hardware.catalogue import device
from ullage.job.read import read_job
from ullage.timing.step import step_time
from ullage.units import GIB

ADAM = [
    ("fused", 28, {1e9: 0.22, 2e9: 0.51, 4e9: 1.03, 8e9: 2.41, 10e9: 2.57}),
    ("foreach", 80, {1e9: 1.39, 2e9: 2.75, 4e9: 5.71, 8e9: 11.93, 10e9: 14.76}),
]
"""Ren et al., "ZeRO-Offload" (arXiv 2101.06840), table 4: CPU-Adam and PyTorch's Adam on the CPUs of a DGX-2, by parameters."""


@pytest.mark.parametrize(("impl", "moved", "seconds"), ADAM)
def test_adam_on_the_cpus_of_a_dgx_2(impl: HostOptimizer, moved: int, seconds: dict[float, float]) -> None:
    rate = host_optimizer_bytes_per_s(device("V100-SXM-32GB"), impl, 16)
    assert rate.provenance == "measured"
    assert {numel: numel * moved / rate.value for numel in seconds} == pytest.approx(seconds, rel=0.18)


def test_a_llama_of_70_billion_parameters_under_cpu_offload() -> None:
    """torchtune's README: 1,568 tokens/s of 8 A100 and 13.9 GiB on each, full fine-tuning in bf16, batch 2 of 2,048 tokens, fused AdamW
    on the CPUs."""
    job = {
        "model": "llama-3.1-70b",
        "cluster": "8xA100-SXM-80GB",
        "data": {"seq_len": 2048, "micro_batch": 2},
        "engine": {"name": "fsdp2", "options": {"custom_sharded_layers": ["tok_embeddings", "output"]}},
        "stack": "torchtune",
        "precision": "bf16",
        "optimizer": {"name": "adamw", "impl": "fused", "state": "bf16"},
        "grad_clip": False,
        "recompute": "full",
        "loss": {"kind": "chunked", "chunks": 8},
        "offload": {"optimizer": "cpu", "params": "cpu"},
        "compile": True,
    }
    assert 8 * step_time(read_job(job)).tokens_per_s_per_gpu == pytest.approx(1568, rel=0.15)
    assert estimate(read_job(job)).peak.allocated_bytes == pytest.approx(13.9 * GIB, rel=0.01)


YI_34B = {
    "model_type": "llama", "hidden_size": 7168, "intermediate_size": 20480, "num_hidden_layers": 60, "num_attention_heads": 56,
    "num_key_value_heads": 8, "vocab_size": 64000, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
QLORA = [("llama-2-7b", 12, 22.38, 464), (YI_34B, 4, 22.98, 2061), ("llama-2-70b", 2, 14.92, 4399)]


@pytest.mark.parametrize(("model", "micro_batch", "reserved_gib", "seconds"), QLORA, ids=["7B", "34B", "70B"])
def test_qlora_with_its_base_on_the_host(model: object, micro_batch: int, reserved_gib: float, seconds: float) -> None:
    """AnswerDotAI/fsdp_qlora benchmarks_03_2024.md: two RTX 4090, FSDP1 with --use_cpu_offload, 2,048 tokens, 1,024 samples. The rest are
    train.py's defaults, whose "all" leaves o_proj out."""
    job = {
        "model": model,
        "cluster": "2xRTX-4090-24GB",
        "data": {"seq_len": 2048, "micro_batch": micro_batch},
        "engine": {"name": "fsdp1", "options": {"use_orig_params": False}},
        "precision": "bf16",
        "recompute": "full",
        "lora": {
            "rank": 64,
            "alpha": 16,
            "dropout": 0.1,
            "targets": ["k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj"],
            "base": "nf4",
        },
        "offload": {"optimizer": "cpu", "params": "cpu"},
    }
    read = read_job(job)
    assert estimate(read).peak.reserved_bytes == pytest.approx(reserved_gib * GIB, rel=0.08)
    assert step_time(read).step_s * 1024 / (2 * micro_batch) == pytest.approx(seconds, rel=0.1)


TFLOPS = [
    (20, 2048, 32, 36),
    (40, 2048, 32, 36),
    (64, 2304, 32, 37),
    (53, 3072, 16, 37),
    (72, 3072, 16, 41.5),
    (50, 4096, 10, 41),
    (55, 4096, 8, 36),
    (60, 4096, 4, 34),
    (65, 4096, 4, 34.5),
]
"""Layers, hidden size, micro-batch (table 3 of the same paper), and TFLOP/s of one V100 at a batch of 512, read off its figure 8."""


@pytest.mark.parametrize(("layers", "hidden", "micro_batch", "tflops"), TFLOPS)
def test_zero_offload_on_one_v100(layers: int, hidden: int, micro_batch: int, tflops: float) -> None:
    """The paper names neither the sequence nor ``overlap_comm`` nor what it counts as a FLOP: 1,024 tokens, DeepSpeed's default (off) and
    6 for each parameter of a layer and token are taken; that Megatron of 2020 scaled, masked and normalised scores in passes of their own,
    which makes the model the faster of the two, is not told. Gradients that go to the host and back in each micro-batch are why the largest
    models, of the smallest micro-batches, are slower."""
    heads = hidden // 128
    model = {
        "model_type": "gpt", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "head_dim": 128, "intermediate_size": 4 * hidden, "vocab_size": 50304,
        "max_position_embeddings": 1024, "position": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "qkv_bias": True,
        "tie_word_embeddings": True, "hidden_dropout": 0.1, "attention_dropout": 0.1,
    }  # fmt: skip
    job = {
        "model": model,
        "cluster": "1xV100-SXM-32GB",
        "data": {"seq_len": 1024, "micro_batch": micro_batch, "grad_accum": 512 // micro_batch},
        "engine": {"name": "deepspeed", "zero_stage": 2, "options": {"pin_memory": True}},
        "stack": "megatron",
        "precision": "fp16-mixed",
        "recompute": "full",
        "attention": "eager",
        "offload": {"optimizer": "cpu"},
    }
    flops = 6 * 12 * layers * hidden**2
    assert step_time(read_job(job)).tokens_per_s_per_gpu * flops / 1e12 == pytest.approx(tflops, rel=0.16)

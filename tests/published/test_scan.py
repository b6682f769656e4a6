"""Forwards of Mamba-2's convolution and scan on a B200: ai-dynamo/aiconfigurator@095f58a
aic-core/.../systems/data/b200_sxm/linear_attention/trtllm/1.3.0rc15/mamba2_perf.parquet (causal_conv1d_fn, mamba_chunk_scan_combined)."""

from __future__ import annotations

import pytest

from ullage.engines.base import context_of
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.timing.machine import traffic_s
from ullage.timing.ops import block_work


@pytest.mark.parametrize(
    ("heads", "hidden", "sequences", "ms"),
    [
        (64, 2688, 1, 0.068 + 0.367),  # Nemotron 3 Nano; the scan of 2 x 4096, that of 1 x 8192 took 0.718
        (64, 2688, 2, 0.124 + 0.721),
        (64, 2688, 4, 0.234 + 1.435),
        (64, 2688, 8, 0.454 + 2.852),
        (128, 4096, 1, 0.106 + 0.715),  # Super
        (128, 4096, 2, 0.199 + 1.424),
        (128, 4096, 8, 0.753 + 5.000),
    ],
)
def test_scan(heads: int, hidden: int, sequences: int, ms: float) -> None:
    model = {
        "model_type": "nemotron_h",
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "hybrid_override_pattern": "M*",
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_head_dim": 128,
        "intermediate_size": 2688,
        "vocab_size": 131072,
        "mamba_num_heads": heads,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "chunk_size": 128,
    }
    data = {"seq_len": 8192, "micro_batch": sequences}
    job = read_job({"model": model, "cluster": "8xB200-SXM-180GB", "stack": "megatron", "data": data})
    graph = graph_of(job)
    layer = next(block for block in graph.blocks() if any(op.kind == "ssm" for op in block.ops))
    (work,) = [work for work in block_work(layer, context_of(job, graph)) if work.name == "ssm"]
    (traffic,) = work.forward.traffic
    assert 1e3 * traffic_s(job.cluster.device, traffic, backward=False) == pytest.approx(ms, rel=0.12)

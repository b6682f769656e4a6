"""Parameters, gradients and 8-bit weights of a Megatron rank, by the rules of Megatron-Core's buffers and Transformer Engine's tensors."""

from __future__ import annotations

import pytest

import ullage
from ullage.job.read import read_job

HIDDEN, FFN, LAYERS, VOCAB = 1024, 4096, 4, 32000
MODEL = {
    "model_type": "gpt",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "intermediate_size": FFN,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "position": "rope",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "bias": False,
}
LINEARS = LAYERS * (4 * HIDDEN * HIDDEN + 3 * FFN * HIDDEN)


def lines(
    cluster: str = "8xH100-SXM-80GB", *, fp8_params: bool = True, zero: int = 1, compute: str = "fp8", **options: object
) -> dict[str, int]:
    """Bytes of each line of an account, by its name."""
    job = read_job(
        {
            "schema": 1,
            "model": MODEL,
            "cluster": cluster,
            "data": {"seq_len": 512},
            "engine": {"name": "megatron", "zero_stage": zero, "options": options},
            "precision": {
                "params": "bf16",
                "compute": compute,
                "grads": "bf16",
                "master": "fp32",
                "fp8_params": fp8_params,
            },
        }
    )
    return {line.what: line.bytes for line in ullage.estimate(job).ledger}


def rest(found: dict[str, int]) -> float:
    """Parameters beside those of the linears: the tied embedding and the norms."""
    return found["parameters (dense)"] - 2 * (VOCAB * HIDDEN + (2 * LAYERS + 1) * HIDDEN)


def test_an_8_bit_parameter_is_there_in_no_other_type() -> None:
    assert rest(lines()) == pytest.approx(0, abs=4096)
    assert rest(lines(fp8_params=False)) == pytest.approx(2 * LINEARS, rel=1e-3)
    assert lines()["main gradients (dense)"] == lines(fp8_params=False)["main gradients (dense)"]


@pytest.mark.parametrize(
    ("cluster", "recipe", "orders"),
    [
        ("8xH100-SXM-80GB", "tensorwise", 2),
        ("8xB200-SXM-180GB", "tensorwise", 1),
        ("8xB200-SXM-180GB", "delayed", 1),
        ("8xB200-SXM-180GB", "mxfp8", 2),
    ],
)
def test_where_any_layout_is_multiplied_nothing_is_transposed(cluster: str, recipe: str, orders: int) -> None:
    weights = [size for what, size in lines(cluster, fp8_recipe=recipe).items() if what.startswith("weights in fp8")]
    assert weights == [pytest.approx(LINEARS, rel=1e-3)] * orders


@pytest.mark.parametrize(
    ("compute", "options", "packed", "block"), [("fp8", {"fp8_recipe": "mxfp8"}, 1, 32), ("fp4", {}, 0.5, 16)]
)
def test_blocks_have_a_scale_of_a_byte(compute: str, options: dict[str, object], packed: float, block: int) -> None:
    found = lines("8xB200-SXM-180GB", compute=compute, **options)
    for order in ("rows", "columns"):
        assert found[f"weights in {compute}, by {order} (dense)"] == pytest.approx(packed * LINEARS, rel=1e-3)
        assert found[f"their scales, by {order} (dense)"] == pytest.approx(LINEARS / block, rel=1e-3)


def test_megatron_fsdp_divides_8_bit_parameters() -> None:
    rows = "weights in fp8, by rows (dense)"
    assert lines(zero=3)[rows] == pytest.approx(LINEARS / 8, rel=1e-3)
    assert lines(zero=3, fp8_params=False)[rows] == lines()[rows]


def test_megatron_fsdp_keeps_gradients_in_the_type_that_it_is_told() -> None:
    told = {"megatron_fsdp_main_grads_dtype": "fp32"}
    name = "main gradients (dense)"
    assert lines(zero=3, **told)[name] == pytest.approx(2 * lines(zero=3)[name], rel=1e-3)
    assert lines(**told)[name] == lines()[name]  # the distributed optimizer has no such argument


@pytest.mark.parametrize(("version", "overlaps", "workspaces"), [("0.15.0", 0, 1), ("0.15.0", 1, 3), ("0.18.0", 1, 4)])
def test_user_buffers_have_workspaces_of_their_own(version: str, overlaps: int, workspaces: int) -> None:
    """TE 2.9 makes three of one (pytorch/module/base.py, initialize_ub), 2.10 caches get_cublas_workspace by its arguments; 32 MiB and
    1 KiB each on Hopper."""
    job = read_job(
        {
            "schema": 1,
            "model": MODEL,
            "cluster": "8xH100-SXM-80GB",
            "data": {"seq_len": 512},
            "layout": {"tp": 2, "sp": True},
            "stack_version": version,
            "engine": {"name": "megatron", "options": {"tp_comm_overlap": bool(overlaps)}},
        }
    )
    held = {line.what: line.bytes for line in ullage.estimate(job).ledger}
    assert held["Transformer Engine GEMM workspace"] == pytest.approx(workspaces * (32 * 2**20 + 1024), abs=1024)

"""What is cut and what is exchanged: by hand, as Megatron-LM's papers count."""

import pytest
from tests.techniques.conftest import MEGATRON

import ullage

STREAM = 2048 * 1 * 4096 * 2
"""Tokens x hidden x bf16: what each exchange of a layer carries."""


def of_layers(shown: ullage.Shown, title: str) -> list[tuple]:
    return [row for row in shown.part(title).rows if row[1].startswith("layer")]


def test_four_all_reduces_a_layer(show) -> None:
    """Two in the forward, two in the backward (arXiv 1909.08053, figure 4)."""
    shown = show("tensor-parallel", MEGATRON, layout={"tp": 8})
    rows = [*of_layers(shown, "Forward"), *of_layers(shown, "Backward")]
    assert [row[2] for row in rows] == ["all-reduce"] * 4
    for _, _, _, ranks, count, payload, wire in rows:
        assert (ranks, count, payload) == (8, 32 * 4, STREAM)
        assert wire == 32 * 4 * 2 * 7 * STREAM // 8


def test_sequence_parallelism_sends_the_same_forward(show) -> None:
    """An all-gather and a reduce-scatter are an all-reduce (arXiv 2205.05198, section 4.2.2)."""
    plain = of_layers(show("tensor-parallel", MEGATRON, layout={"tp": 8}), "Forward")
    split = of_layers(show("tensor-parallel", MEGATRON, layout={"tp": 8, "sp": True}), "Forward")
    assert sum(row[-1] for row in plain) == sum(row[-1] for row in split)


def test_shapes(show) -> None:
    part = show("tensor-parallel", MEGATRON, layout={"tp": 4, "pp": 2}, stage=1).part("What is cut")
    found = {row[0]: row[1:5] for row in part.rows}
    assert found["layer.q_proj.weight"] == ("by column", 16, (4096, 4096), (1024, 4096))
    assert found["layer.k_proj.weight"] == ("by column", 16, (1024, 4096), (256, 4096))
    assert found["layer.down_proj.weight"] == ("by row", 16, (4096, 14336), (4096, 3584))
    assert found["layer.input_norm.weight"] == ("whole", 16, (4096,), (4096,))
    assert found["head.lm_head.weight"] == ("by column", 1, (128256, 4096), (32064, 4096))
    assert "embedding.embed_tokens.weight" not in found


def test_matrices_are_the_ranks_parameters(show) -> None:
    shown = show("tensor-parallel", MEGATRON, layout={"tp": 4, "pp": 2})
    parameters = show("pipeline", MEGATRON, layout={"tp": 4, "pp": 2}).part("Stages").column("parameters")
    assert shown.part("What is cut").total("bytes") == 2 * parameters[shown.stage]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_waits_are_those_of_the_time(show, recompute: str) -> None:
    from ullage.timing.step import step_time

    shown = show("tensor-parallel", MEGATRON, layout={"tp": 8, "sp": True}, recompute=recompute)
    waits = {row[0]: row[-1] for row in shown.part("In a step").rows}
    assert waits["forward"] + waits["backward"] == pytest.approx(dict(step_time(shown.job).parts)["tp"])
    assert ("recompute" in waits) == (recompute == "full")


def test_a_job_without_it(show) -> None:
    with pytest.raises(ullage.InvalidInput, match=r"layout.tp = 1.*set layout.tp"):
        show("tensor-parallel")

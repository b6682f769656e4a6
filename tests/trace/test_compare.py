"""The closed form of a block is the trace of it, to the byte. Red: a release changed what a block keeps, and the message says which op."""

from itertools import cycle, product
from typing import Literal

import pytest

from ullage.job.recurrent import FAMILIES as RECURRENT
from ullage.trace import compare
from ullage.trace.compare import ATTENTIONS, COMPARED, PRECISIONS, RECOMPUTES, Case, Row, main, rows, unlike
from ullage.trace.families import EAGER_ONLY, TARGETS

MODES: list[tuple[str, str, Literal["none", "full", "selective"]]] = [
    ("bf16", "sdpa", "none"),
    ("autocast", "eager", "full"),
    ("fp32", "sdpa", "none"),
    ("bf16", "eager", "full"),
    ("autocast", "sdpa", "none"),
    ("autocast", "sdpa", "selective"),
    ("bf16", "eager", "selective"),
]
"""The families take turns; `python -m ullage.trace.compare` tries each in all."""


def _cases() -> list[Case]:
    modes = cycle(MODES)
    chosen = [Case(family, *next(modes)) for family in COMPARED]
    return [case._replace(attention="eager") if case.family in EAGER_ONLY else case for case in chosen]


def _told(row: Row) -> str:
    return "\n".join([f"{row.case} {row.block}: {row.closed} against {row.traced} {row.why}", *unlike(row)])


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_closed_form_is_the_trace(case: Case) -> None:
    found = rows(case)
    layers = [f"layer {number}" for number in range(3)]
    if case.family in TARGETS:  # as many of the decoder behind them
        layers += ["between", *(f"layer {number}" for number in range(3, 6))]
    assert [row.block for row in found if row.block != "embedding"] == [*layers, "head"]
    apart = [_told(row) for row in found if not row.equal]
    assert not apart, "\n\n".join(apart)


@pytest.mark.parametrize("mode", [("fp32", "none"), ("autocast", "full"), ("bf16", "selective")])
def test_an_encoder_and_its_decoder(mode: tuple[str, Literal["none", "full", "selective"]]) -> None:
    """What goes beside the stream is freed by the same block, and its gradient adds up where autograd's does."""
    precision, recompute = mode
    assert not [_told(row) for row in rows(Case("t5", precision, "eager", recompute)) if not row.equal]


@pytest.mark.parametrize("mode", [("bf16", "sdpa", "selective"), ("autocast", "sdpa", "none")])
def test_a_window_shorter_than_the_sequence(mode: tuple[str, str, Literal["none", "selective"]]) -> None:
    """Its mask becomes an additive one before the kernel, by no op that a policy keeps; tables of both kinds of layers are there."""
    assert not [_told(row) for row in rows(Case("gemma3_text", *mode)) if not row.equal]


@pytest.mark.parametrize(
    "mode", [("bf16", "sdpa", "none"), ("autocast", "eager", "full"), ("fp32", "sdpa", "selective")]
)
@pytest.mark.parametrize("family", RECURRENT)
def test_a_sequence_of_several_chunks(
    family: str, mode: tuple[str, str, Literal["none", "full", "selective"]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delta rule goes from chunk to chunk of 64 tokens; the last is filled up."""
    monkeypatch.setattr(compare, "SEQ", 150)
    assert not [_told(row) for row in rows(Case(family, *mode)) if not row.equal]


def test_the_modes_cover_each_choice() -> None:
    assert set(MODES) <= set(product(PRECISIONS, ATTENTIONS, RECOMPUTES))
    assert [set(which) for which in zip(*MODES, strict=True)] == [set(PRECISIONS), set(ATTENTIONS), set(RECOMPUTES)]


def test_a_difference_is_told_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    right = compare.context
    monkeypatch.setattr(compare, "context", lambda case, graph: right(case._replace(attention="eager"), graph))
    row = next(row for row in rows(Case("llama")) if row.block == "layer 1")
    assert not row.equal
    told = "\n".join(unlike(row))
    assert "closed form: attention probabilities" in told
    assert "self_attn: aten._scaled_dot_product_flash_attention_for_cpu" in told


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--family", "none"]) == 0
    assert capsys.readouterr().out.startswith("| family |")

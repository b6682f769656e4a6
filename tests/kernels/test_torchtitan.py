"""What a torchtitan layer saves, in units of 2 x sequence x batch x hidden bytes, against traces of torch's own code.

Eager sums follow from what each autograd node saves; those of selective checkpointing were traced on torch 2.13 with torchtitan's policy,
those of compiled blocks are the outputs of min_cut_rematerialization_partition on a block of these proportions (and torchao 0.18's
Float8Linear).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ullage.frozen import FrozenMap
from ullage.job.bind import local_sizes
from ullage.job.job import Data, Layout, Recompute
from ullage.kernels.step import Context
from ullage.kernels.torchtitan_version import KV_REPEATED_UNTIL, OWN_NORM_UNTIL
from ullage.memory.block import GradRule
from ullage.memory.chunk import CHECKPOINT, PLAIN, SELECTIVE, Replayer
from ullage.model.decoder import build
from ullage.model.graph import Graph
from ullage.model.spec import DecoderSpec

HIDDEN, HEADS, SEQ, VOCAB = 4096, 32, 8192, 32768
UNIT = 2 * SEQ * HIDDEN
LSE = 4 * HEADS / (2 * HIDDEN)
STATISTICS = 2 * 4 / (2 * HIDDEN)  # one fp32 number a row, of two norms


def graph(kv_heads: int, ffn: int) -> Graph:
    return build(
        DecoderSpec(
            name="test",
            layers=1,
            hidden=HIDDEN,
            heads=HEADS,
            kv_heads=kv_heads,
            head_dim=HIDDEN // HEADS,
            ffn=ffn,
            vocab=VOCAB,
        )
    )


def context(
    model: Graph,
    *,
    tp: int = 1,
    sp: bool = False,
    version: str | None = None,
    compile: bool = False,
    loss: str = "full",
    **options: object,
) -> Context:
    return Context(
        sizes=local_sizes(model, Layout(tp=tp, sp=sp), Data(seq_len=SEQ)),
        stack="torchtitan",
        version=version,
        tp=tp,
        sp=sp,
        compile=compile,
        loss=loss,
        options=FrozenMap(options),
    )


def saved(mode: str = PLAIN, *, kv_heads: int = HEADS // 2, ffn: int = 3 * HIDDEN, **settings: object) -> float:
    settings.setdefault("version", "2026-03-01")
    model = graph(kv_heads, ffn)
    layer = next(run.block for run in model.runs if run.block.role == "layer")
    replayer = Replayer(
        context=context(model, **settings),  # type: ignore[arg-type]
        recompute=Recompute(kind="selective" if mode == SELECTIVE else "none"),
        early_stop=False,
    )
    return replayer.program(layer, mode, GradRule()).forward.delta_bytes / UNIT


def head_peak(**settings: object) -> float:
    """Highest rise of the head's backward above its start, in units of the fp32 logits."""
    model = graph(HEADS, 3 * HIDDEN)
    head = next(run.block for run in model.runs if run.block.role == "head")
    replayer = Replayer(context=context(model, **settings), recompute=Recompute())  # type: ignore[arg-type]
    return replayer.program(head, PLAIN, GradRule()).backward.peak_bytes / (4 * SEQ * VOCAB)


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (4, False), (4, True)])
def test_plain_layer(tp: int, sp: bool) -> None:
    """4 + (2 + 2g + 4f/h)/t without sequence parallelism, 2 + (4 + 2g + 4f/h)/t with it: gathered inputs are saved whole."""
    g, f = 0.5, 3
    split = (4 if sp else 2) + 2 * g + 4 * f
    whole = 2 if sp else 4
    small = LSE / tp + STATISTICS / (tp if sp else 1)
    assert saved(tp=tp, sp=sp) == pytest.approx(whole + split / tp + small, rel=1e-3)


def test_full_checkpoint_keeps_the_input() -> None:
    assert saved(CHECKPOINT) == pytest.approx(1.0)


def test_selective_keeps_every_second_matmul() -> None:
    """Input, q, v, attention's output, gate, and the down projection's output, which no backward reads: 4 + g + f/h."""
    assert saved(SELECTIVE) == pytest.approx(4 + 0.5 + 3 + LSE)


def test_compiled_selective_drops_what_no_backward_reads() -> None:
    assert saved(SELECTIVE) - saved(SELECTIVE, compile=True) == pytest.approx(1.0)


def test_compiled_plain_layer() -> None:
    """Input, two norm outputs, q, repeated k and v, attention's output, its projection or the sum after it, gate, up, product."""
    version = "2025-12-01"
    assert version < KV_REPEATED_UNTIL
    expected = 1 + 2 + 3 + 1 + 1 + 3 * 3.5 + LSE + STATISTICS
    assert saved(kv_heads=8, ffn=14336, compile=True, version=version) == pytest.approx(expected, rel=1e-3)


def test_fp8_compiled_saves_weights_in_8_bits_unless_told_not_to() -> None:
    """The 8-bit weights of a layer stay, its norm outputs and the product do not."""
    settings: dict[str, object] = {"kv_heads": 8, "ffn": 14336, "compile": True, "version": "2025-01-15"}
    bf16 = saved(**settings)  # type: ignore[arg-type]
    fp8 = saved(**settings, float8_recipe="tensorwise")  # type: ignore[arg-type]
    told = saved(**settings, float8_recipe="tensorwise", float8_force_recompute_weight_in_bwd=True)  # type: ignore[arg-type]
    weights = HIDDEN * (2 * HIDDEN + 2 * 1024 + 3 * 14336) / UNIT
    assert bf16 - told == pytest.approx(2 + 3.5)
    assert fp8 - told == pytest.approx(weights)


def test_older_norms_keep_fp32_copies() -> None:
    assert saved(version="2025-01-01") - saved(version="2025-09-01") == pytest.approx(2 * 2.0, abs=0.01)
    assert OWN_NORM_UNTIL < "2025-05-01"
    assert saved(version="2025-05-01") - saved(version="2025-09-01") == pytest.approx(2 * 3.0, abs=0.01)


def test_losses() -> None:
    """Above the saved log-softmax: two fp32 gradients; chunked: of one chunk; compiled: one bf16 gradient over bf16 logits."""
    assert head_peak() == pytest.approx(2.0, abs=0.01)
    assert head_peak(compile_loss=True) == pytest.approx(0.5, abs=0.01)
    whole = "whole model and loss"
    assert head_peak(compile=True, compile_scope=whole) == head_peak(compile=True, compile_loss=True)
    assert head_peak(compile_scope=whole) == head_peak()
    assert head_peak(loss="vocab-parallel", tp=4) == pytest.approx(3 / 4, abs=0.01)
    assert head_peak(loss="chunked") < 1.0
    assert head_peak(loss="fused-linear") < 0.1


def test_fused_projection_is_pinned_by_the_view_of_v() -> None:
    assert saved(version=None) - saved() == pytest.approx(1 + 0.5)
    assert saved(SELECTIVE, version=None) - saved(SELECTIVE) == pytest.approx(0.5)


def test_cudnn_attention_was_not_always_saved() -> None:
    """Blackwell runs cuDNN's attention, which selective checkpointing did not list before December 2025."""
    model = graph(HEADS, 3 * HIDDEN)
    layer = next(run.block for run in model.runs if run.block.role == "layer")
    kept = {}
    for capability in ((9, 0), (10, 0)):
        one = replace(context(model, version="2025-08-15"), compute_capability=capability)
        replayer = Replayer(context=one, recompute=Recompute(kind="selective"))
        kept[capability] = replayer.program(layer, SELECTIVE, GradRule()).forward.delta_bytes / UNIT
    assert kept[9, 0] - kept[10, 0] == pytest.approx(1 + LSE)


def test_flex_attention_was_not_always_saved() -> None:
    """Listed by commit f738a03bf of 2025-08-22: the output, as wide as the layer, and a number a row and head."""
    before, since = (
        saved(SELECTIVE, version=version, attention_backend="flex") for version in ("2025-08-21", "2025-08-22")
    )
    assert since - before == pytest.approx(1 + LSE)

"""transformers' layers: closed forms, and real runs to the byte.

data/transformers_traced.json holds one decoder layer each (the second of three) of transformers 5.24 on torch 2.13, CPU: every
allocation and free of the C++ allocator (torch.profiler, profile_memory), each rounded up to 512 bytes. Measured that way no Python object
holds a gradient, so that autograd adds gradients in place where a real run does. Numbers are bytes above the layer's start.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ullage.frozen import FrozenMap
from ullage.job.bind import local_sizes
from ullage.job.job import Data, Layout, Recompute
from ullage.kernels.stacks import lower, segments
from ullage.kernels.step import Context
from ullage.memory.block import BlockProgram, GradRule
from ullage.memory.chunk import CHECKPOINT, PLAIN, Replayer
from ullage.model.build import graph
from ullage.model.config import ModelConfig
from ullage.model.decoder import build
from ullage.model.graph import Block, Graph
from ullage.model.spec import DecoderSpec

DATA = Path(__file__).parent / "data"
TRACED = json.loads((DATA / "transformers_traced.json").read_text())
OFF = json.loads((DATA / "transformers_traced_off.json").read_text())
PARTS = ("forward_peak", "forward_net", "backward_peak", "backward_net")


def block_of(model: Graph, role: str) -> Block:
    return next(run.block for run in model.runs if run.block.role == role)


def program(
    model: Graph, data: Data, *, role: str = "layer", recompute: str = "none", **changes: Any
) -> tuple[BlockProgram, Context]:
    layout = Layout(tp=changes.get("tp", 1), sp=changes.get("sp", False))
    context = Context(sizes=local_sizes(model, layout, data), stack="transformers", **changes)
    replayer = Replayer(
        context=context,
        recompute=Recompute(kind="none" if recompute == "none" else "full"),
        early_stop=recompute != "reentrant",
        reentrant=recompute == "reentrant",
    )
    mode = PLAIN if recompute == "none" else CHECKPOINT
    return replayer.program(block_of(model, role), mode, GradRule()), context


def replayed(traced: dict[str, Any]) -> dict[str, int]:
    keys = {**traced["config"], "model_type": traced["family"]}
    model = graph(ModelConfig(name="traced", keys=FrozenMap(keys)))
    found, _ = program(
        model,
        Data(seq_len=traced["seq"], micro_batch=traced["batch"]),
        recompute=traced["recompute"],
        compute="bf16" if traced["autocast"] else traced["params"],
        params=traced["params"],
        residual=traced["params"],
        autocast=traced["autocast"],
        attention=traced["attention"],
        padding_mask=traced["padding"],
        device="cpu",
    )
    sizes = (found.forward.peak_bytes, found.forward.delta_bytes, found.backward.peak_bytes, found.backward.delta_bytes)
    return dict(zip(PARTS, sizes, strict=True))


@pytest.mark.parametrize("traced", TRACED, ids=[f"{index}-{one['family']}" for index, one in enumerate(TRACED)])
def test_a_real_layer_to_the_byte(traced: dict[str, Any]) -> None:
    assert replayed(traced) == {part: traced[part] for part in PARTS}


@pytest.mark.parametrize("traced", OFF, ids=[f"{index}-{one['family']}" for index, one in enumerate(OFF)])
def test_a_real_layer_that_is_off_in_something_small(traced: dict[str, Any]) -> None:
    """What is saved is equal here too. Off: masks that a checkpoint's closure holds, temporaries of a recomputation that ends early,
    and layers of a few kilobytes where 512-byte rounding shows."""
    found = replayed(traced)
    assert found["forward_net"] == traced["forward_net"]
    for part in ("forward_peak", "backward_peak"):
        assert found[part] == pytest.approx(traced[part], rel=0.08)


# -- closed forms of a llama layer

HIDDEN, HEADS, TOKENS = 4096, 32, 4096
U = TOKENS * HIDDEN * 2
LSE = 4 * TOKENS * HEADS
STATISTICS = 2 * 4 * TOKENS  # one fp32 number a row, of two norms


def llama(g: float, a: float, vocab: int = 32768) -> Graph:
    spec = DecoderSpec(
        name="llama",
        layers=1,
        hidden=HIDDEN,
        heads=HEADS,
        kv_heads=int(HEADS * g),
        head_dim=HIDDEN // HEADS,
        ffn=int(HIDDEN * a),
        vocab=vocab,
    )
    return build(spec)


@pytest.mark.parametrize(("g", "a"), [(0.25, 2.0), (1.0, 2.75), (0.125, 3.5)])
def test_saved_bytes_of_a_llama_layer(g: float, a: float) -> None:
    """bf16 u(10 + 2g + 4a) + 4TH; fp32 weights under autocast u(15 + 2g + 4a) + 2 x parameters + 4TH; fp32 2u(8 + 2g + 4a) + 4TH.

    Under autocast q, k, v, gate and up cast five copies of two norms' outputs: where they cast once, three fewer.
    """
    model, data = llama(g, a), Data(seq_len=TOKENS)
    parameters = sum(model.numel(param) for param in block_of(model, "layer").params if len(param.dims) > 1)

    def net(**changes: Any) -> int:
        return program(model, data, **changes)[0].forward.delta_bytes

    # In bf16 the layer's input goes and its output comes; in fp32 its input is one of the tensors saved.
    assert net() == U * (10 + 2 * g + 4 * a) + LSE + STATISTICS
    assert net(compute="fp32", params="fp32", residual="fp32") == 2 * U * (8 + 2 * g + 4 * a) + LSE + STATISTICS
    autocast = {"params": "fp32", "residual": "fp32", "autocast": True}
    assert net(**autocast) == U * (15 + 2 * g + 4 * a) + 2 * parameters + LSE + STATISTICS
    once = net(**autocast, options=FrozenMap({"cast_once": True}))
    assert once == U * (12 + 2 * g + 4 * a) + 2 * parameters + LSE + STATISTICS


def test_a_checkpointed_mlp_runs_again_as_far_as_its_last_saved_tensor() -> None:
    """Up to the down projection's input: its output, which no backward reads, is not made again."""
    model = llama(0.25, 2.0)
    context = Context(sizes=local_sizes(model, Layout(), Data(seq_len=TOKENS)), stack="transformers")
    block = block_of(model, "layer")
    (mlp,) = segments(block, context, Recompute(kind="modules", modules=("mlp",)))
    assert mlp.early_stop
    assert [step.name for step in lower(block, context)[mlp.start : mlp.stop]][-1] == "down_proj"


@pytest.mark.parametrize("tp", [2, 4])
def test_along_the_sequence_a_layer_keeps_two_whole_tensors(tp: int) -> None:
    """bf16 u(2 + (8 + 2g + 4a) / tp): what attention and MLP have gathered is whole on every rank, all else a rank's tokens or heads."""
    g, a = 0.25, 2.0
    found, _ = program(llama(g, a), Data(seq_len=TOKENS), tp=tp, sp=True)
    assert found.forward.delta_bytes == U * (2 + (8 + 2 * g + 4 * a) / tp) + (LSE + STATISTICS) / tp


def test_along_the_sequence_gradients_of_several_sequences_are_joined() -> None:
    """What the embedding's backward gathers of one sequence is that sequence; of two the ranks' parts lie apart, and are copied."""
    model = llama(0.25, 2.0, vocab=512)
    for rows, copies in ((1, 1), (2, 2)):
        data = Data(seq_len=TOKENS // rows, micro_batch=rows)
        found, _ = program(model, data, role="embedding", tp=2, sp=True)
        assert found.backward.peak_bytes == copies * U


def test_a_checkpointed_layer_keeps_its_input_alone() -> None:
    model, data = llama(0.25, 2.0), Data(seq_len=TOKENS)
    assert program(model, data, recompute="non-reentrant")[0].forward.delta_bytes == U
    assert program(model, data, recompute="reentrant")[0].forward.delta_bytes == U


def test_a_padding_mask_becomes_additive_in_every_layer_and_repeats_keys_and_values() -> None:
    """+ 2 b s^2 + u(2 - 2g)."""
    model, data = llama(0.25, 2.0), Data(seq_len=TOKENS)
    plain, masked = (program(model, data, padding_mask=mask)[0].forward.delta_bytes for mask in (False, True))
    assert masked - plain == 2 * TOKENS**2 + U * (2 - 0.5)


def test_eager_attention_keeps_probabilities_twice() -> None:
    """+ 6 b H s^2 + u(2 - 2g), and no statistics of a kernel."""
    model, data = llama(0.25, 2.0), Data(seq_len=TOKENS)
    sdpa, eager = (program(model, data, attention=kind)[0].forward.delta_bytes for kind in ("flash", "eager"))
    assert eager - sdpa == 6 * HEADS * TOKENS**2 + U * (2 - 0.5) - LSE


# -- the loss by version, in units of tokens x vocabulary bytes (traced with more than one sequence)

LOSS = [
    # version, autocast, forward peak, kept to the backward, backward peak
    ("4.30", False, 6, 2, 6),
    ("4.30", True, 12, 4, 12),
    ("4.40", False, 12, 4, 12),
    ("4.47", False, 14, 4, 12),
    ("4.50", False, 10, 4, 12),
    (None, False, 10, 4, 12),
]


@pytest.mark.parametrize(("version", "autocast", "forward", "kept", "backward"), LOSS)
def test_logits_and_loss_by_version(
    version: str | None, autocast: bool, forward: int, kept: int, backward: int
) -> None:
    vocab, seq = 2**20, 256
    model = llama(1.0, 1.0, vocab)
    params = "fp32" if autocast else "bf16"
    found, _ = program(
        model,
        Data(seq_len=seq, micro_batch=2),
        role="head",
        version=version,
        params=params,
        residual=params,
        autocast=autocast,
        options=FrozenMap({"convert_outputs_to_fp32": False}),
    )
    unit = 2 * seq * vocab
    weight = 2 * vocab * HIDDEN if autocast else 0
    around = 0.15  # norm, labels and the projection's own tensors
    assert (found.forward.peak_bytes - weight) / unit == pytest.approx(forward, abs=around)
    assert (found.forward.delta_bytes - weight) / unit == pytest.approx(kept, abs=around)
    loss_backward = _until_the_projection(found)
    assert (found.forward.delta_bytes - weight + loss_backward) / unit == pytest.approx(backward, abs=around)


def _until_the_projection(found: BlockProgram) -> int:
    """Rise of the head's backward before the projection's own gradients are made."""
    live = peak = 0
    for node in found.backward.children:  # type: ignore[attr-defined]
        if node.item.category == "gradients" or "norm" in node.item.what or "lm_head" in node.item.what:
            break
        live += node.delta_bytes
        peak = max(peak, live)
    return peak


def test_under_autocast_the_outputs_are_copied_to_fp32() -> None:
    """accelerate's convert_outputs_to_fp32: 4 bytes a logit as the forward returns, beside the log-softmax and the 16-bit logits."""
    model, data = llama(1.0, 1.0, 2**20), Data(seq_len=256, micro_batch=2)
    changes = {"role": "head", "params": "fp32", "residual": "fp32", "autocast": True}
    with_copy, _ = program(model, data, **changes)
    without, _ = program(model, data, **changes, options=FrozenMap({"convert_outputs_to_fp32": False}))
    assert with_copy.forward.peak_bytes == without.forward.peak_bytes  # not additive with the cross entropy's own
    assert with_copy.forward.delta_bytes == without.forward.delta_bytes


# -- masks


@pytest.mark.parametrize(
    ("changes", "windows", "elements", "size"),
    [
        ({}, (), 0, 0),
        ({}, (16,), 1, 1),  # the same for every sequence
        ({}, (64,), 0, 0),  # as long as the sequence
        ({"padding_mask": True}, (), 2, 1),
        ({"attention": "eager"}, (), 2, 2),
        ({"attention": "eager", "residual": "fp32"}, (), 2, 4),
    ],
)
def test_the_model_makes_one_mask_which_all_layers_read(
    changes: dict[str, Any], windows: tuple[int, ...], elements: int, size: int
) -> None:
    """elements: in multiples of seq x seq. size: bytes of one. Looked up in traces of llama and mistral (transformers 5.24)."""
    spec = DecoderSpec(
        name="small", layers=1, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=512, windows=windows
    )
    model = build(spec)
    sizes = local_sizes(model, Layout(), Data(seq_len=64, micro_batch=2))
    context = Context(sizes=sizes, stack="transformers", **changes)
    lent = [one for step in lower(block_of(model, "embedding"), context) for one in step.lends]
    assert [one.bytes for one in lent] == ([elements * 64 * 64 * size] if elements else [])
    assert [one for step in lower(block_of(model, "layer"), context) for one in step.borrows] == lent

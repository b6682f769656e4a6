"""Multi-head latent attention in transformers (models/deepseek_v3/modeling_deepseek_v3.py, and v2's rotary embedding in complex fp32)."""

from __future__ import annotations

from ullage.kernels.eager import Tape, Value, promote
from ullage.model.graph import BATCH, SEQ, Dim, Op


def split(tape: Tape, op: Op) -> None:
    """torch.split of the compressed keys and values and the shared rotary key: views whose gradients are joined again."""
    tape.module = op.module
    source = tape[op.inputs[0]]
    tape.views(source, tuple(tape.like(tensor, source.dtype) for tensor in op.outputs))


def assemble(tape: Tape, op: Op) -> None:
    """Whole q by concatenation; whole k written part by part into a new tensor; v is a view of the up-projection."""
    tape.module = op.module
    q_up, kv_up, k_pe = (tape[name] for name in op.inputs)
    q_out, k_out, v_out = op.outputs
    heads: tuple[Dim, ...] = (BATCH, SEQ, "heads")
    q_heads = tape.view(q_up, "q_up.heads", copies=True)
    q_nope, q_pe = Value("q_nope", (*heads, "nope_dim"), q_up.dtype), Value("q_pe", (*heads, "rope_dim"), q_up.dtype)
    tape.views(q_heads, (q_nope, q_pe))
    rotary = _complex if tape.family == "deepseek_v2" else _interleaved
    q_rot, k_rot = rotary(tape, q_pe), rotary(tape, k_pe)
    tape.hold(q_pe, k_pe)
    wide = tape.cast(q_nope, q_rot.dtype, "q_nope.cast")
    q = tape.like(q_out, q_rot.dtype)
    tape.emit(q.name, (wide, q_rot), q, what="q of latent attention", passes=(wide, q_rot))
    kv_heads = tape.view(kv_up, "kv_up.heads", copies=True)
    k_nope, v = Value("k_nope", (*heads, "nope_dim"), kv_up.dtype), tape.like(v_out, kv_up.dtype)
    tape.views(kv_heads, (k_nope, v))
    k = tape.like(k_out, kv_up.dtype)
    copies = tuple(tape.scratch(f"k.copy{at}", k) for at in range(2))
    tape.emit(k.name, (k_nope, k_rot), k, what="k of latent attention", backward_scratch=copies)
    tape.hold(q_nope, k_nope, k_rot, q_rot)


def _interleaved(tape: Tape, source: Value) -> Value:
    """Even and odd elements, each times cosine and sine, joined: four products, a difference and a sum."""
    dtype = promote(source.dtype, tape.context.residual)
    half: tuple[Dim, ...] = (*source.rows, tape.context.size(source.dims[-1]) // 2)
    name = source.name
    even, odd = (tape.view(source, f"{name}.{which}", half, copies=True) for which in ("even", "odd"))
    products = [
        tape.mul_constant(part, f"{name}.{part.name}.{which}", dtype)
        for part, which in ((even, "cos"), (odd, "sin"), (odd, "cos2"), (even, "sin2"))
    ]
    low = tape.add(products[0], products[1], Value(f"{name}.low", half, dtype))
    high = tape.add(products[2], products[3], Value(f"{name}.high", half, dtype))
    out = Value(f"{name}.rotated", source.dims, dtype)
    return tape.emit(out.name, (low, high), out, what=f"{name} after rotary embedding", passes=(low, high))


def _complex(tape: Tape, source: Value) -> Value:
    """Up to fp32, one complex product, back."""
    wide = tape.cast(source, "fp32", f"{source.name}.fp32")
    product = tape.mul_constant(wide, f"{source.name}.product", "fp32")
    return tape.cast(product, source.dtype, f"{source.name}.rotated")

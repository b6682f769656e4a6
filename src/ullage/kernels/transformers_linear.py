"""Linear layers and embeddings of transformers' models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ullage.job.adapted import is_adapted
from ullage.kernels import transformers_adapters as adapters
from ullage.kernels import transformers_masks as masks
from ullage.kernels import transformers_parallel as parallel
from ullage.kernels import transformers_quantised as quantised
from ullage.kernels.eager import Tape, Value, promote
from ullage.kernels.step import Buffer
from ullage.kernels.transformers_matmul import matmul
from ullage.kernels.transformers_rope import INTERLEAVES, table_dtype
from ullage.model.graph import BATCH, SEQ, Dim, Op

Named = list[tuple[str, tuple[Dim, ...]]]
"""Parameters of one linear, by name, with their dimensions."""


def linear(tape: Tape, op: Op) -> Value:
    """One nn.Linear."""
    tape.module = op.module
    rows = op.module == SHARED and tape.family in SHARED_ON_ROWS
    source = parallel.entering(tape, op, flat(tape, tape[op.inputs[0]]) if rows else tape[op.inputs[0]])
    if op.attrs.get("as_weight"):
        source = tape.cast(source, tape.weight_dtype, f"{op.name}.as_weight")
    params = [(param.name, param.dims) for param in adapters.base(op)]
    shared = op.attrs.get("shared")
    if isinstance(shared, str):
        params = [(shared, ("vocab", "hidden"))]
    output = tape.like(op.outputs[0], tape.context.compute)
    if op.name in _SCALES.get(tape.family, ()):
        raw = projected(tape, op, source, params, replace(output, name=f"{output.name}.unscaled"))
        return tape.scale(raw, output.name)
    return projected(tape, op, source, params, output, rows=rows)


def of_chunk(tape: Tape, op: Op, source: Value, name: str, dims: tuple[Dim, ...]) -> Value:
    """One nn.Linear that runs once for each of several parts of its input, this part under a name of its own."""
    params = [(param.name, param.dims) for param in adapters.base(op)]
    return projected(tape, op, source, params, Value(name, dims, tape.context.compute), prefix=f"{name}.")


def weight_of_head(head: Op) -> tuple[str, tuple[Dim, ...]]:
    """The name and dimensions of what the head multiplies with: its own weight, or the embedding's where they are tied."""
    shared = head.attrs.get("shared")
    return (shared, ("vocab", "hidden")) if isinstance(shared, str) else (head.params[0].name, head.params[0].dims)


def projected(
    tape: Tape, op: Op, source: Value, params: Named, output: Value, *, rows: bool = False, prefix: str = ""
) -> Value:
    """prefix: of names, where the linear runs several times."""
    name = f"{prefix}{op.name}"
    if quantised.is_quantised(op):
        return quantised.linear(
            tape, op, name, source, params[0][1], replace(output, dtype=source.dtype), prefix=prefix
        )
    if is_adapted(op):
        base = matmul(tape, name, source, params, replace(output, name=f"{output.name}.base"), rows=rows)
        return adapters.added(tape, op, source, base, output, prefix)
    made = parallel.part(tape, op.name, output, reduced=op.attrs["parallel"] == "row")
    matmul(tape, name, source, params, made, rows=rows)
    return parallel.leaving(tape, op.name, made, output)


SHARED = "shared_experts"
SHARED_ON_ROWS = frozenset({"qwen2_moe", "qwen3_5_moe_text", "qwen3_next"})
"""Models whose shared expert takes tokens as rows, without a dimension of sequences (models/qwen2_moe/modeling_qwen2_moe.py)."""


def flat(tape: Tape, source: Value) -> Value:
    """The stream as rows: (tokens, hidden)."""
    name = f"{source.name}.rows"
    if name in tape.values:
        return tape[name]
    return tape.view(source, name)


_SCALES: Mapping[str, tuple[str, ...]] = {"opt": ("q_proj",)}
"""Projections whose output the layer code multiplies by a number."""


def fused(tape: Tape, ops: tuple[Op, ...]) -> None:
    """Several projections as one linear, and the views of its output that the layer code takes."""
    first = ops[0]
    tape.module = first.module
    name = str(first.attrs["group"])
    size = sum(tape.context.numel(op.outputs[0].dims[2:]) for op in ops)
    inner = first.attrs["in"]
    assert isinstance(inner, tuple)
    params: Named = [(f"{name}.weight", (size, *inner))]
    if len(adapters.base(first)) > 1:
        params.append((f"{name}.bias", (size,)))
    source = tape[first.inputs[0]]
    whole = Value(name, (*source.rows, size), tape.context.compute)
    if quantised.is_quantised(first):
        whole = quantised.linear(tape, first, name, source, params[0][1], replace(whole, dtype=source.dtype))
    elif is_adapted(first):
        base = matmul(tape, name, source, params, replace(whole, name=f"{name}.base"))
        whole = adapters.added(tape, first, source, base, whole)
    else:
        whole = matmul(tape, name, source, params, whole)
    parts = tuple(tape.like(op.outputs[0], whole.dtype) for op in ops)
    if tape.family == "gpt_neox":  # heads are cut into q, k and v after a transposition, whose gradient is copied back
        whole = tape.view(whole, f"{name}.heads", copies=True)
    if tape.family == "phi3" and name == "qkv":  # three slices
        for part in parts:
            tape.views(whole, (part,))
        return
    tape.views(whole, parts)


_BATCHED_POSITIONS = frozenset({"opt", "roberta", "xlm-roberta"})
"""Models that count positions along the attention mask, sequence by sequence."""


def embedding(tape: Tape, op: Op) -> Value:
    """The look-up; learned positions and token types are looked up and added. A look-up saves its indices (token ids are the batch)."""
    tape.module = "embedding"
    output = tape.like(op.outputs[0], tape.weight_dtype)
    tables = op.params
    rotary = _rotary_tables(tape, op)
    assert len(tables) == 1 or not rotary, op.name
    total: Value | None = None
    for index, param in enumerate(tables):
        is_last = index == len(tables) - 1
        name = f"{op.name}.{param.name.split('.')[0]}"
        of_types = param.name.startswith("token_type")
        rows = BATCH if index == 0 or of_types or tape.family in _BATCHED_POSITIONS else 1
        looked = parallel.part(tape, op.name, output, reduced=True)
        if len(tables) > 1:
            looked = Value(name, (rows, *output.dims[1:]), output.dtype)
        if op.attrs.get("shifted"):
            rotary = (tape.context.buffer("decoder_ids", output.dims[:-1], "int64", "the decoder's token ids"),)
        saved = rotary if index == 0 else _indices(tape, name, of_types)
        tape.emit(
            looked.name,
            (),
            looked,
            what="embedding output",
            beside=saved,
            saves=[one.name for one in saved],
            weights=(parallel.embedding_gradient(tape, param),),
        )
        if total is None:
            total = looked
        else:
            out = output if is_last else Value(f"{name}.sum", output.dims, output.dtype)
            summed = (looked.name,) if rows == 1 else ()
            reads = (total, looked)
            passes = (total,) if summed else reads
            total = tape.emit(out.name, reads, out, what="embedding output", passes=passes, summed=summed)
    assert total is not None
    made = total if len(tables) > 1 else parallel.leaving(tape, op.name, total, output)
    masks.make(tape, op)
    return made


_REGISTERED_POSITIONS = frozenset({"bert", "distilbert"})
"""Models whose positions are a view of a buffer, and whose token types are gathered from another by them, once for all sequences
(models/bert/modeling_bert.py, BertEmbeddings)."""


def _indices(tape: Tape, name: str, of_types: bool) -> tuple[Buffer, ...]:
    """What a look-up saves beside token ids, which are the batch; token types are gathered by positions."""
    rows = BATCH if tape.family in _BATCHED_POSITIONS else 1
    if tape.family in _REGISTERED_POSITIONS and not of_types:
        return ()
    what = "token types" if of_types else "positions"
    return (tape.context.buffer(f"{name}.indices", (rows, SEQ), "int64", what),)


_TABLES_BY_KIND = frozenset({"gemma3_text", "olmo3"})
"""Models that turn by other frequencies in layers with a window (models/gemma3/modeling_gemma3.py, Gemma3RotaryEmbedding)."""

_TABLES_BY_SEQUENCE = frozenset(
    {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5_text", "qwen3_5_moe_text"}
)
"""Models whose positions are those of each sequence's images (models/qwen3_vl/modeling_qwen3_vl.py, Qwen3VLTextRotaryEmbedding)."""

_COMPLEX_TABLES = frozenset({"deepseek_v2"})
"""Models that turn queries and keys as complex numbers (models/deepseek_v2/modeling_deepseek_v2.py, DeepseekV2RotaryEmbedding)."""


def _rotary_tables(tape: Tape, op: Op) -> tuple[Buffer, ...]:
    """cos and sin of every position, in the stream's type; saved by the rotary embeddings of all layers (here: to the backward's end)."""
    size = op.attrs.get("rotary")
    if not isinstance(size, int) or not size or tape.family in INTERLEAVES:  # whose layers save tables of their own
        return ()
    if tape.family in _COMPLEX_TABLES:
        table = (1, SEQ, size // 2, 2)
        return (tape.context.buffer("rotary.cis", table, "fp32", "cos and sin of the rotary embedding, complex64"),)
    dtype = promote(tape.weight_dtype, table_dtype(tape))
    windows = op.attrs["windows"]
    assert isinstance(windows, tuple)
    kinds = ["", ".sliding"] if tape.family in _TABLES_BY_KIND and None in windows and len(windows) > 1 else [""]
    rows = BATCH if tape.family in _TABLES_BY_SEQUENCE else 1
    return tuple(
        tape.context.buffer(f"rotary.{which}{kind}", (rows, SEQ, size), dtype, f"{which} of the rotary embedding")
        for kind in kinds
        for which in ("cos", "sin")
    )

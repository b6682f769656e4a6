"""The gated delta rule in transformers' own code (models/qwen3_next/modeling_qwen3_next.py, torch_chunk_gated_delta_rule): fp32, chunk
by chunk, where flash-linear-attention is not installed.

Held against a trace on the CPU. On CUDA torch.linalg.solve_triangular may copy what cuBLAS wants in another order, which is left out. So is
what the nodes of the last state keep, which nobody asks for, until the call returns: without recomputation some forwards of one chunk rise
higher by that, a few rows of a head.
"""

from __future__ import annotations

from math import ceil

from ullage.kernels.eager import Tape, Value
from ullage.kernels.step import Fit, Step
from ullage.model.delta import CHUNK
from ullage.model.graph import BATCH, SEQ, Dim


def number(seq: int) -> int:
    """Chunks of a sequence; the last is filled up."""
    return ceil(seq / CHUNK)


class _Scan:
    """The call's own dimensions."""

    def __init__(self, tape: Tape) -> None:
        context = tape.context
        self.chunks = number(context.size(SEQ))
        self.padded: tuple[Dim, ...] = (BATCH, "delta_heads", self.chunks * CHUNK)
        self.cut: tuple[Dim, ...] = (BATCH, "delta_heads", self.chunks, CHUNK)
        self.one: tuple[Dim, ...] = (BATCH, "delta_heads", CHUNK)
        self.state: tuple[Dim, ...] = (BATCH, "delta_heads", "delta_k_dim", "delta_v_dim")


def rule(tape: Tape, parts: tuple[Value, ...], g: Value, beta: Value, output: Value) -> None:
    """parts: queries and keys (batch, seq, key heads, key dim), values (batch, seq, value heads, value dim)."""
    scan = _Scan(tape)
    repeated = [*(_repeated(tape, one) for one in parts[:2]), parts[2]]
    q, k, v, rate = (tape.cast(one, "fp32", f"{one.name}.fp32") for one in (*repeated, beta))
    tape.hold(*repeated[:2])
    unpadded = v, rate
    normed = _l2norm(tape, q), _l2norm(tape, k)
    scaled = tape.scale(normed[0], "q.scaled")
    q, k, v = (_padded(tape, one, (*scan.padded, one.dims[-1])) for one in (scaled, normed[1], v))
    tape.hold(scaled, normed[1], unpadded[0])
    rate, decay = (_padded(tape, one, scan.padded) for one in (unpadded[1], g))
    tape.hold(unpadded[1])
    v_beta = tape.times(v, rate, Value("v.beta", v.dims, "fp32"))
    k_beta = tape.times(k, rate, Value("k.beta", k.dims, "fp32"))
    mask = Value("chunk.mask", (CHUNK, CHUNK), "bool")
    ones = tape.context.buffer("chunk.ones", mask.dims, "bool")
    tape.emit(mask.name, (), mask, scratch=(ones,))
    small = tuple(tape.context.buffer(f"chunk.decay.flip{at}", scan.cut, "fp32") for at in range(2))
    total = tape.emit("chunk.decay", (decay,), Value("chunk.decay", scan.cut, "fp32"), backward_scratch=small)
    q, k, k_beta, v_beta = (
        tape.view(one, f"{one.name}.chunks", (*scan.cut, one.dims[-1])) for one in (q, k, k_beta, v_beta)
    )
    pairwise = _pairwise(tape, total, mask)
    system = _scores(tape, k_beta, k, pairwise, "chunk.system")
    inside = _scores(tape, q, k, pairwise, "chunk.scores")
    decayed = tape.times(k_beta, _exp(tape, total, "chunk.k_decay"), Value("k.decayed", k.dims, "fp32"))
    new = _solved(tape, system, v_beta, "chunk.values")
    kept = _solved(tape, system, decayed, "chunk.keys")
    state = tape.emit("state.0", (), Value("state.0", scan.state, "fp32"))
    whole = tape.emit("recalled.0", (), Value("recalled.0", new.dims, "fp32"))
    q = tape.times(q, _exp(tape, total, "chunk.q_decay"), Value("q.decayed", q.dims, "fp32"))
    left = Value("chunk.left", scan.cut, "fp32")
    tape.emit(left.name, (total,), left)
    rest = _exp(tape, left, "chunk.rest", saves=scan.chunks > 1)
    k = _weighed_keys(tape, k, rest, needed=scan.chunks > 1)
    last = tape.view(total, "chunk.decay.last", scan.cut[:-1], copies=True)
    factor = _exp(tape, last, "chunk.forgets", saves=scan.chunks > 1)
    framed = [tape[name] for name in ("v.padded", "beta.padded", "g.padded", "v.beta", "k.beta", "k.decayed")]
    loop = _Loop(tape, scan, (new, kept, q, inside, k, factor))
    for at in range(scan.chunks):
        state, whole = loop.chunk(at, state, whole)
    flat = _flat(tape, whole, (*scan.padded, "delta_v_dim"), copies=scan.chunks > 1)
    cut = tape.view(flat, "recalled.cut", (BATCH, "delta_heads", SEQ, "delta_v_dim"), copies=True)
    tape.emit(output.name, (cut,), output, what="output of the delta rule")
    tape.hold(*framed, mask, total, pairwise, system, inside, new, kept, q, k, factor, *loop.named)


def _flat(tape: Tape, whole: Value, dims: tuple[Dim, ...], *, copies: bool) -> Value:
    """Chunks one behind the other: each has its columns together, as solve_triangular gave them."""
    if not copies:
        return tape.view(whole, "recalled.flat", dims)
    return tape.emit("recalled.flat", (whole,), Value("recalled.flat", dims, "fp32"), passes=(whole,))


def _repeated(tape: Tape, value: Value) -> Value:
    """One for each value head, where several share a key head."""
    if tape.context.size("delta_heads") == tape.context.size("delta_k_heads"):
        return value
    name = f"{value.name}.repeated"
    return tape.emit(name, (value,), Value(name, (BATCH, SEQ, "delta_heads", "delta_k_dim"), value.dtype))


def _l2norm(tape: Tape, x: Value) -> Value:
    """x * rsqrt((x * x).sum() + eps); the sum's gradient is a view."""
    name = x.name
    rows = (*x.rows, 1)
    other = (tape.scratch(f"{name}.other", x),)
    square = tape.emit(
        f"{name}.square", (x,), Value(f"{name}.square", x.dims, "fp32"), saves=(x,), backward_scratch=other
    )
    total = tape.emit(f"{name}.sum", (square,), Value(f"{name}.sum", rows, "fp32"), passes=(square,))
    shifted = tape.emit(f"{name}.shifted", (total,), Value(f"{name}.shifted", rows, "fp32"), passes=(total,))
    root = Value(f"{name}.root", rows, "fp32")
    two = tuple(tape.scratch(f"{name}.root{at}", root) for at in range(2))
    tape.emit(root.name, (shifted,), root, saves=(root,), backward_scratch=two)
    return tape.times(x, root, Value(f"{name}.normed", x.dims, "fp32"))


def _padded(tape: Tape, value: Value, dims: tuple[Dim, ...]) -> Value:
    """Filled up to whole chunks: a copy, even where nothing is added."""
    name = f"{value.name.partition('.')[0]}.padded"
    return tape.emit(name, (value,), Value(name, dims, "fp32"))


def _pairwise(tape: Tape, total: Value, mask: Value) -> Value:
    """exp(decay_i - decay_j), zero above the diagonal."""
    pairs = (*total.dims, CHUNK)
    apart = Value("chunk.apart", pairs, "fp32")
    negative = Fit(total.name, tape.scratch("chunk.apart.negative", apart))
    tape.emit(apart.name, (total,), apart, fits=(negative,))
    masked = Value("chunk.masked", pairs, "fp32")
    tape.emit(masked.name, (apart, mask), masked, saves=(mask,), no_grad=(mask,))
    return _exp(tape, masked, "chunk.pairwise")


def _exp(tape: Tape, source: Value, name: str, *, saves: bool = True) -> Value:
    made = Value(name, source.dims, "fp32")
    return tape.emit(name, (source,), made, saves=(made,) if saves else ())


def _scores(tape: Tape, left: Value, right: Value, pairwise: Value, name: str) -> Value:
    made = Value(f"{name}.product", pairwise.dims, "fp32")
    return tape.times(_matmul(tape, left, right, made), pairwise, Value(name, pairwise.dims, "fp32"))


def _matmul(tape: Tape, left: Value, right: Value, out: Value, *, no_grad: bool = False, saves: bool = True) -> Value:
    """Autocast casts both operands, the right one first. no_grad: of the right one."""
    compute = tape.context.compute if tape.context.autocast else "fp32"
    right, left = (tape.cast(one, compute, f"{out.name}.{one.name}") for one in (right, left))
    kept: tuple[Value, ...] = ((right,) if no_grad else (left, right)) if saves else ()
    made = Value(out.name, out.dims, compute)
    return tape.emit(
        out.name,
        (left, right),
        made,
        saves=kept,
        no_grad=(right,) if no_grad else (),
        view_grads=(left,) if no_grad else (left, right),
    )


def _solved(tape: Tape, system: Value, target: Value, name: str) -> Value:
    """linalg.solve_triangular: saves the system and its result; the system's gradient is a product, its negative, and that one's lower
    half."""
    made = Value(name, target.dims, "fp32")
    product = (tape.scratch(f"{name}.system_product", system),)
    return tape.emit(name, (system, target), made, saves=(system, made), backward_scratch=product)


def _weighed_keys(tape: Tape, k: Value, rest: Value, *, needed: bool) -> Value:
    """needed: whether a chunk follows whose state has a gradient."""
    out = Value("k.weighed", k.dims, "fp32")
    if needed:
        return tape.times(k, rest, out)
    return tape.emit(out.name, (k, rest), out)


class _Loop:
    """The scan over chunks."""

    def __init__(self, tape: Tape, scan: _Scan, values: tuple[Value, ...]) -> None:
        self._tape = tape
        self._scan = scan
        self._values = values
        self.named: tuple[Value, ...] = ()  # what the frame names: replaced by each chunk

    def chunk(self, at: int, state: Value, whole: Value) -> tuple[Value, Value]:
        tape, scan = self._tape, self._scan
        new, kept, q, inside, k, factor = self._values
        rows: tuple[Dim, ...] = (*scan.one, "delta_v_dim")
        first, last = at == 0, at == scan.chunks - 1
        predicted = _matmul(tape, self._at(kept, at), state, Value(f"predicted.{at}", rows, "fp32"), no_grad=first)
        fresh = self._at(new, at)
        update = Value(f"update.{at}", rows, "fp32")
        tape.emit(update.name, (fresh, predicted), update, passes=(fresh,))
        tape.hold(*self.named[:1])
        between = _matmul(tape, self._at(q, at), state, Value(f"between.{at}", rows, "fp32"), no_grad=first)
        tape.hold(*self.named[1:])
        self.named = (update, between)
        within = _matmul(tape, self._at(inside, at), update, Value(f"within.{at}", rows, "fp32"))
        out = Value(f"out.{at}", rows, within.dtype)
        tape.emit(out.name, (between, within), out, passes=(between, within))
        whole = self._written(at, whole, out)
        return self._state(at, state, update, k, factor, last=last), whole

    def _at(self, source: Value, at: int) -> Value:
        """The part of one chunk, whose gradient is as large as all."""
        dims = (*source.dims[:2], *source.dims[3:])
        return self._tape.view(source, f"{source.name}.{at}", dims, copies=True)

    def _written(self, at: int, whole: Value, part: Value) -> Value:
        """In place: the backward makes a new gradient of the whole, and a copy of the part's."""
        tape = self._tape
        made = Value(f"recalled.{at + 1}", whole.dims, "fp32")
        wide = (Fit(part.name, tape.scratch(f"{made.name}.part", part, "fp32")),) if part.dtype != "fp32" else ()
        tape.steps.append(
            Step(
                name=made.name,
                reads=(whole.name, part.name),
                aliases=((tape.buffer(made), whole.name),),
                no_grad=(whole.name,) if at == 0 else (),
                backward_scratch=(tape.scratch(f"{made.name}.grad", whole),) if at == 0 else (),
                fits=wide,
                module=tape.module,
            )
        )
        return tape.define(made)

    def _state(self, at: int, state: Value, update: Value, k: Value, factor: Value, *, last: bool) -> Value:
        """state * factor + keys^T @ update; what the last chunk leaves is asked for by nobody."""
        tape = self._tape
        decayed = Value(f"state.{at}.decayed", state.dims, "fp32")
        share = self._at(factor, at)
        if last:
            tape.emit(decayed.name, (state, share), decayed)
        elif at == 0:
            fit = Fit(share.name, tape.scratch(f"{decayed.name}.grad", decayed))
            tape.emit(decayed.name, (state, share), decayed, saves=(state,), no_grad=(state,), fits=(fit,))
        else:
            tape.times(state, share, decayed)
        written = _matmul(tape, self._at(k, at), update, Value(f"written.{at}", state.dims, "fp32"), saves=not last)
        made = Value(f"state.{at + 1}", state.dims, "fp32")
        tape.emit(
            made.name, (decayed, written), made, passes=(decayed,) if written.dtype != "fp32" else (decayed, written)
        )
        tape.hold(state)
        return made

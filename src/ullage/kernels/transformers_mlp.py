"""Activations of transformers' models (activations.py), gated or not."""

from __future__ import annotations

from ullage.kernels.eager import Tape, Value
from ullage.model.graph import Op


def activation(tape: Tape, op: Op) -> Value:
    """act(gate) * up saves gate, act(gate) and up; act(up) alone saves up."""
    tape.module = op.module
    output = tape.like(op.outputs[0], tape[op.inputs[0]].dtype)
    if not op.attrs["glu"]:
        return act(tape, tape[op.inputs[0]], _form(op), output)
    return tape.mul(gate(tape, op), tape[op.inputs[1]], output, "gated activation")


def gate(tape: Tape, op: Op) -> Value:
    """act(gate), once: the layer code has it before it asks for the projection that it multiplies (act(gate_proj(x)) * up_proj(x))."""
    tape.module = op.module
    source = tape[op.inputs[0]]
    name = f"{op.name}.{_form(op)}"
    return tape.values.get(name) or act(tape, source, _form(op), Value(name, source.dims, source.dtype))


def _form(op: Op) -> str:
    return str(op.attrs.get("form") or op.attrs["act"])


def act(tape: Tape, source: Value, form: str, output: Value) -> Value:
    """silu, gelu and gelu_pytorch_tanh are one kernel; gelu_new is composed of eight."""
    if form in ("gelu_new", "gelu_fast"):
        return _gelu_new(tape, source, output)
    if form == "relu2":
        return _squared_relu(tape, source, output)
    saved = output if form in ("relu", "tanh") else source
    return tape.emit(output.name, (source,), output, what=f"{form} output", saves=(saved,))


def _squared_relu(tape: Tape, x: Value, output: Value) -> Value:
    """torch.square(relu(x)) saves relu(x), for both."""
    relu = Value(f"{output.name}.relu", x.dims, x.dtype)
    tape.emit(relu.name, (x,), relu, what="relu output", saves=(relu,))
    two = tuple(tape.scratch(f"{output.name}.{one}", relu) for one in ("power", "factor"))
    tape.emit(output.name, (relu,), output, what="squared relu output", saves=(relu,), backward_scratch=two)
    tape.hold(x, relu)
    return output


def _gelu_new(tape: Tape, x: Value, output: Value) -> Value:
    """0.5 * x * (1 + tanh(c * (x + 0.044715 * x^3)))."""
    name = output.name

    def made(which: str, dtype: str = x.dtype) -> Value:
        return Value(f"{name}.{which}", x.dims, dtype)

    half = tape.scale(x, f"{name}.half")
    two = tuple(tape.scratch(f"{name}.{one}", x) for one in ("square", "factor"))
    cube = tape.emit(f"{name}.cube", (x,), made("cube"), saves=(x,), backward_scratch=two)
    scaled = tape.scale(cube, f"{name}.scaled_cube")
    total = tape.add(x, scaled, made("sum"))
    inner = tape.scale(total, f"{name}.inner")
    tanh = made("tanh")
    tape.emit(tanh.name, (inner,), tanh, saves=(tanh,))
    plus = tape.emit(f"{name}.plus_one", (tanh,), made("plus_one"), passes=(tanh,))
    tape.mul(half, plus, output, "gelu_new output")
    tape.hold(x)
    return output

"""Megatron-LM's arguments of activation recomputation, those of its earlier years too.

2020 to 2022   --checkpoint-activations [--checkpoint-num-layers N]: each N layers run again, as a fork of that time still does
               (megatron/arguments.py of bigscience-workshop/Megatron-DeepSpeed and deepspeedai/Megatron-DeepSpeed)
2022           --activations-checkpoint-method uniform|block [--activations-checkpoint-num-layers N]
since          --recompute-granularity, --recompute-method, --recompute-num-layers, --recompute-modules
"""

from __future__ import annotations

from ullage.formats.reading import Keys, lenient_flag
from ullage.formats.tree import Path
from ullage.job import fields
from ullage.job.job import Job

_SELECTIVE = ["core_attn"]
"""What selective recomputes where no modules are named (megatron/core/transformer/transformer_config.py)."""
_GRANULARITY: Path = ("--recompute-granularity",)
_METHOD: Path = ("--recompute-method",)
_LAYERS: Path = ("--recompute-num-layers",)
_FIRST: Path = ("--checkpoint-activations",)
_SECOND: Path = ("--activations-checkpoint-method",)
_TODAY = "write --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def read_recompute(keys: Keys) -> None:
    """The job's ``recompute``, and what of it is an option."""
    granularity = keys.take(_GRANULARITY, fields.choice("full", "selective"))
    if keys.take(("--recompute-activations",), lenient_flag):
        granularity = granularity or "selective"
    method = keys.take(_METHOD, fields.choice("uniform", "block"))
    layers, path = keys.take(_LAYERS, fields.integer(0)), _GRANULARITY
    if granularity is None and (old := _old(keys)) is not None:
        granularity, (method, layers, path) = "full", old
    modules = keys.raw(("--recompute-modules",))
    if granularity == "full":
        if method == "block" and layers is not None:
            keys.put("recompute", {"layers": layers}, _LAYERS if path == _GRANULARITY else path)
        else:
            keys.put("recompute", "full", path)
            if layers is not None and layers > 1:
                keys.put_option("recompute_method", "uniform", _METHOD)
                keys.put_option("recompute_num_layers", layers, _LAYERS)
    elif granularity == "selective":
        named = (
            _SELECTIVE
            if modules is None
            else [str(one) for one in (modules if isinstance(modules, list) else [modules])]
        )
        keys.put("recompute", "selective" if named == _SELECTIVE else {"modules": named}, path)


def _old(keys: Keys) -> tuple[str | None, int | None, Path] | None:
    """Method, layers and the flag of the earlier forms; None where there is neither."""
    first = keys.take(_FIRST, lenient_flag)
    layers = keys.take(("--checkpoint-num-layers",), fields.integer(1))
    if first:
        keys.find("warning", _FIRST[0], "is the old form", _TODAY)
        return "uniform", layers, _FIRST
    method = keys.take(_SECOND, fields.choice("uniform", "block"))
    layers = keys.take(("--activations-checkpoint-num-layers",), fields.integer(1))
    if method is None:
        return None
    keys.find("warning", _SECOND[0], "is the old form", _TODAY.replace("uniform", method))
    return method, layers, _SECOND


def recompute_leaves(job: Job) -> dict[Path, object]:
    """The job's recomputation in today's arguments."""
    kind = job.recompute.kind
    if kind in ("full", "layers"):
        method = "block" if kind == "layers" else "uniform"
        layers = job.recompute.layers if kind == "layers" else job.engine.options.get("recompute_num_layers", 1)
        return {_GRANULARITY: "full", _METHOD: method, _LAYERS: layers}
    if kind == "selective":
        return {_GRANULARITY: "selective"}
    if kind == "modules":
        return {_GRANULARITY: "selective", ("--recompute-modules",): list(job.recompute.modules)}
    return {}

"""What a job's ``freeze`` leaves out of training: its patterns against the names that transformers gives its parameters.

Layers differ where a pattern names some of them, so that each kind of layer becomes a block of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from itertools import groupby

from ullage.errors import InvalidInput, Unsupported
from ullage.frozen import replace
from ullage.model.graph import Block, Graph, Param, Run

IN_A_LAYER = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    **{name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
    **{name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
}
OUTSIDE = {"embed_tokens": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Models whose parameters have these names (modeling_llama.py and its like)."""


def without(graph: Graph, globs: tuple[str, ...]) -> Graph:
    """The graph with every parameter frozen that a pattern names. Names are those of ``named_parameters()``: a tied weight has one."""
    family = graph.runs[0].block.family
    if family not in FAMILIES:
        raise Unsupported("is not modelled for this family", key="freeze", value=family, allowed=", ".join(FAMILIES))
    met: set[str] = set()
    runs = tuple(_runs(graph, lambda name: _is_frozen(name, globs, met)))
    for glob in globs:
        if glob not in met:
            raise InvalidInput("names no parameter of this model", key="freeze", value=glob)
    if not any(param.trainable for run in runs for param in run.block.params):
        raise InvalidInput("leaves nothing to train", key="freeze", value=", ".join(globs))
    return replace(graph, runs=runs)


def _is_frozen(name: str, globs: tuple[str, ...], met: set[str]) -> bool:
    """met: the patterns that name something, which this adds to."""
    found = [glob for glob in globs if fnmatchcase(name, glob)]
    met.update(found)
    return bool(found)


def _runs(graph: Graph, is_frozen: Callable[[str], bool]) -> Iterator[Run]:
    shared = {second: first for first, second in graph.tied}
    kinds: dict[tuple[str, tuple[bool, ...]], str] = {}
    at = 0
    for run in graph.runs:
        layers = range(at, at + run.repeat)
        blocks = [_named(_frozen(run.block, index, shared, is_frozen), kinds) for index in layers]
        at += run.repeat if run.block.role == "layer" else 0
        for block, equal in groupby(blocks):
            yield Run(block=block, repeat=len(list(equal)))


def _named(block: Block, kinds: dict[tuple[str, tuple[bool, ...]], str]) -> Block:
    """A block under a name that none has in which others are frozen. kinds: the names so far, which this adds to."""
    key = (block.name, tuple(param.trainable for param in block.params))
    alone = block.name not in kinds.values()
    return replace(block, name=kinds.setdefault(key, block.name if alone else f"{block.name} of kind {len(kinds)}"))


def _name(block: Block, param: str, index: int, shared: dict[str, str]) -> str:
    module, _, kind = shared.get(f"{block.name}.{param}", f"{block.name}.{param}").partition(".")[2].rpartition(".")
    if block.role == "layer" and kind.startswith("lora_"):
        return f"base_model.model.model.layers.{index}.{IN_A_LAYER[module]}.{kind}.default.weight"
    if block.role == "layer":
        return f"model.layers.{index}.{IN_A_LAYER[module]}.{kind}"
    return f"{OUTSIDE[module]}.{kind}"


def _frozen(block: Block, index: int, shared: dict[str, str], is_frozen: Callable[[str], bool]) -> Block:
    def param(one: Param) -> Param:
        return replace(one, trainable=not is_frozen(_name(block, one.name, index, shared)) and one.trainable)

    ops = tuple(replace(op, params=tuple(param(one) for one in op.params)) for op in block.ops)
    return replace(block, ops=ops)


def from_the_first_trained(graph: Graph) -> Graph:
    """A graph in which nothing asks for a gradient before the first parameter that is trained.

    Non-reentrant checkpoints there hold their inputs in a reference cycle, until Python's collector comes by
    (torch/utils/checkpoint.py, _NoopSaveInputs): taken as gone.
    """
    asking = False
    runs: list[Run] = []
    for run in graph.runs:
        block = run.block
        trains = any(param.trainable for param in block.params)
        quiet = block
        if not asking and block.role != "embedding":
            quiet = replace(quiet, input=replace(block.input, grad=False))
        if not asking and not trains:
            quiet = replace(quiet, output=replace(block.output, grad=False))
        runs.append(Run(block=quiet, repeat=run.repeat if asking or not trains else 1))
        if not asking and trains and run.repeat > 1:
            runs.append(replace(run, repeat=run.repeat - 1))
        asking = asking or trains
    return replace(graph, runs=tuple(runs))

"""Experts of a frozen base: whether they are packed with its linears, and adapters of them.

Since 5.0 transformers holds all experts of a layer in one parameter for each projection. PEFT adapts such a parameter where
``target_parameters`` names it (tuners/lora/layer.py, ParamWrapper), axolotl's lora_target_parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import groupby

from ullage.errors import InvalidInput, Unsupported
from ullage.frozen import FrozenMap, frozen, replace
from ullage.job.job import Job, Lora
from ullage.model.graph import Block, Graph, Op, Param

PACKS = "quantize_moe_experts"
TARGETS = "lora_target_parameters"
"""axolotl's options (engine.options)."""
ATTR = "lora_experts"
"""What an op knows of an adapter of its experts: rank, and the type in which the layer code sees it."""


@frozen
class Experts:
    """packed: as the linears are. targets: the parameters that are adapted, by the ends of their paths."""

    packed: bool = False
    targets: tuple[str, ...] = ()


def of(job: Job) -> Experts:
    said = job.engine.options.get(TARGETS) or ()
    assert isinstance(said, str | tuple | list)
    targets = (said,) if isinstance(said, str) else tuple(str(one) for one in said)
    return Experts(packed=packs_experts(job), targets=targets)


def packs_experts(job: Job) -> bool:
    """Whether experts are packed as the linears beside them are. bitsandbytes' quantizer looks for linears alone, so that they stay as they
    were loaded; axolotl packs them while they are loaded (docs expert_quantization.qmd, monkeypatch/moe_quant.py), under this name."""
    return job.lora is not None and bool(job.engine.options.get(PACKS))


def refuse_together(job: Job, lora: Lora, packed: Collection[str]) -> None:
    """What these options do not go with, or not yet. packed: bases that a packed expert can have."""
    if packs_experts(job) and lora.base not in packed:
        raise InvalidInput(
            f"packs experts as lora.base says, which is {lora.base}",
            key=f"engine.options.{PACKS}",
            value="true",
            remedy=f"leave it out, or set lora.base to {', '.join(packed)}",
        )
    targets = ", ".join(of(job).targets)
    if not targets:
        return
    key = f"engine.options.{TARGETS}"
    if lora.dropout or lora.dora:
        raise InvalidInput("takes neither dropout nor DoRA (PEFT's ParamWrapper)", key=key, value=targets)
    engines = ("single",) if packs_experts(job) else ("single", "ddp")  # DDP waits for every adapter's gradient
    if job.stack != "transformers" or job.engine.name not in engines or not _is_one_parameter(job):
        raise Unsupported(
            f"is not modelled under engine {job.engine.name} in stack {job.stack}, or before transformers 5",
            key=key,
            value=targets,
        )


def refuse_packed(graph: Graph, job: Job, base: str) -> None:
    """What a packed base of a model with experts does not go with yet."""
    if job.stack != "transformers" or not _is_one_parameter(job):
        raise Unsupported(
            "is not modelled for a model with experts that are linears of their own, as before transformers 5",
            key="lora.base",
            value=base,
        )
    if graph.runs[0].block.family == "llama4_text" and not packs_experts(job):
        raise Unsupported(
            "is not modelled for a llama4 whose experts may have been made linears (its 4-bit checkpoints are) or left in 16 bits",
            key="lora.base",
            value=base,
            remedy=f"set engine.options.{PACKS}: true where they are packed in one parameter",
        )
    if base == "int8" and packs_experts(job) and job.recompute.kind != "none" and _ends_in_experts(graph):
        # axolotl's hooks do not run where a checkpoint's recomputation stops early, and torch's cache is then never emptied again
        raise Unsupported(
            "is not modelled under recomputation for layers that end in experts, whose unpacked weights then stay",
            key="lora.base",
            value=base,
            remedy="use nf4, or recompute none",
        )


def _is_one_parameter(job: Job) -> bool:
    return job.stack_version is None or job.stack_version.startswith("5")


def _ends_in_experts(graph: Graph) -> bool:
    """Whether a layer has no linear behind its routed experts (a shared expert's)."""
    kinds = [[op.kind for op in run.block.ops] for run in graph.runs]
    return any("combine" in of and "linear" not in of[of.index("combine") :] for of in kinds)


# -- adapters


def refuse_unmet(graph: Graph, experts: Experts) -> None:
    """Targets that no layer has."""
    known = {name for run in graph.runs for name, _ in _parameters(run.block)}
    unmet = [target for target in experts.targets if not any(_names(target, name) for name in known)]
    if unmet:
        raise InvalidInput(
            "names no parameter of experts",
            key=f"engine.options.{TARGETS}",
            value=", ".join(unmet),
            allowed=", ".join(f"mlp.experts.{name}" for name in sorted(known)) or "this model has none",
        )


def adapted(graph: Graph, block: Block, lora: Lora, types: tuple[str, str, str, str], experts: Experts) -> Block:
    """A block with A, [experts, rank, in], and B, [out, experts, rank], beside each parameter of experts that is a target.

    Of packed ones the last target alone is trained: PEFT 0.19 and 0.20 look at a parameter before they add its update, where an adapter
    around it has torch cache what is seen.
    """
    beside: dict[str, Op] = {}
    met = [one for one in _parameters(block) if any(_names(target, one[0]) for target in experts.targets)]
    for name, ops in met:
        trained = not experts.packed or name == met[-1][0]
        beside[ops[0].name] = _with_adapter(graph, ops, name, lora, types, trained=trained)
    return replace(block, ops=tuple(beside.get(op.name, op) for op in block.ops)) if beside else block


def _parameters(block: Block) -> Iterator[tuple[str, tuple[Op, ...]]]:
    """Each parameter of the block's experts, by its own name, and the ops that multiply by it."""
    experts = [op for op in block.ops if op.kind == "grouped_linear"]
    for _, found in groupby(experts, lambda op: op.attrs["group"] or op.name):
        ops = tuple(found)
        yield "gate_up_proj" if len(ops) > 1 else ops[0].name.rpartition(".")[2], ops


def _names(target: str, name: str) -> bool:
    """Whether the end of a path means a parameter of experts."""
    *above, last = target.split(".")
    return last == name and above[-1:] in ([], ["experts"])


def untrained(graph: Graph) -> tuple[str, ...]:
    """A warning of adapters that get no gradient."""
    idle = {
        op.params[-1].name.removesuffix(".lora_B")
        for run in graph.runs
        for op in run.block.ops
        if ATTR in op.attrs and not op.params[-1].trainable
    }
    return tuple(
        f"engine.options.{TARGETS}: PEFT leaves the adapters of {name} without a gradient, as several of packed experts are adapted"
        for name in sorted(idle)
    )


def _with_adapter(
    graph: Graph, ops: tuple[Op, ...], name: str, lora: Lora, types: tuple[str, str, str, str], *, trained: bool
) -> Op:
    first = ops[0]
    _, out, inner = first.params[0].dims
    outer = out if len(ops) == 1 else sum(graph.size(op.params[0].dims[1]) for op in ops)
    kept_as, seen_as, *_ = types
    low = Param(name=f"experts.{name}.lora_A", dims=("experts", lora.rank, inner), elements=kept_as, trainable=trained)
    high = Param(name=f"experts.{name}.lora_B", dims=(outer, "experts", lora.rank), elements=kept_as, trainable=trained)
    attrs = FrozenMap({**first.attrs.as_dict(), ATTR: {"rank": lora.rank, "dtype": seen_as}})
    return replace(first, params=(*first.params, low, high), attrs=attrs)

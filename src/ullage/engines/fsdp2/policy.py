"""Which modules become FSDP units and which of them reshard after the forward, by the code that wraps them.

torchtitan's policies: parallelize_llama.py / infra/parallelize.py ``apply_fsdp``. Embedding and [norm, output] became units of their
own with pytorch/torchtitan commit of 2025-07-28; before, they were what was left for the root.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ullage.engines.fsdp2.shapes import block_shapes
from ullage.engines.fsdp2.units import ROOT, Shape, Types, Unit
from ullage.errors import Unsupported
from ullage.frozen import FrozenMap, frozen
from ullage.job.adapted import adapters_type, is_adapter, saved_type
from ullage.job.engine import under_accelerate
from ullage.job.job import Job
from ullage.kernels.transformers_loss import release
from ullage.memory.rank import Chunk, Rank
from ullage.model.graph import Block, Graph

_LOSS_IN_ROOT = ("transformers", "liger", "unsloth", "traced")
"""Stacks whose model class computes the loss itself (labels are among its arguments). Of a traced module the graph sets a loss apart
that no module computes."""

SEPARATE_ENDS_SINCE = "2025-07-28"


@frozen
class Units:
    """root: gathered through the whole forward and backward. of: a block's own unit, by name. joined: weights that a later block
    uses too, by qualified name, with the name that they have there.

    last_stays: the last layer does not reshard. loss_in_root: the root's forward returns the loss, so that its hook, which gathers ahead,
    is the first thing that a backward runs; else it waits for the loss's own backward (_fsdp_state.py _register_pre_backward_hook).
    """

    root: Unit | None
    of: dict[str, Unit]
    joined: FrozenMap = FrozenMap()
    last_stays: bool = False
    loss_in_root: bool = False

    def unit(self, block: Block) -> Unit | None:
        return self.of.get(block.name)


def unwrapped(job: Job) -> Job | None:
    """The job as it runs where there are no shards and accelerate wraps nothing: tensor parallelism alone. None: FSDP wraps it.

    Without FSDP's policy, mixed precision is autocast's.
    """
    layout, precision = job.layout, job.precision
    if job.stack != "transformers" or layout.tp == 1 or not layout.dp == layout.cp == layout.pp == 1:
        return None
    return replace(job, precision=replace(precision, autocast=precision.params != precision.compute))


def wraps_adapters(job: Job) -> bool:
    """Whether FSDP1 wraps each adapter by itself; Fabric, litgpt's, wraps blocks alone."""
    return job.engine.name == "fsdp1" and job.lora is not None and job.stack != "litgpt"


def types_of(job: Job) -> Types:
    precision = job.precision
    compute = precision.compute if precision.compute not in ("fp8", "fp4") else "bf16"
    if job.lora is not None:  # of what is trained
        return Types(original=adapters_type(job), compute=compute, reduce=precision.reduce)
    original = precision.params
    if precision.master is not None and precision.params != precision.master:
        original = precision.master  # FSDP keeps one copy: the master weights, cast for each gather
    return Types(original=original, compute=compute, reduce=precision.reduce)


def resharding(job: Job) -> tuple[str, int]:
    """("default" | "always" | "never", n of reshard_after_forward=n)."""
    said = job.engine.options.get("reshard_after_forward")
    if isinstance(said, str) and said in ("default", "always", "never"):
        return said, 0
    if isinstance(said, int) and not isinstance(said, bool):
        return "always", said
    if said is False or job.engine.zero_stage == 2:
        return "never", 0
    return "default" if said is None else "always", 0


def reshards(job: Job) -> bool:
    """Whether a layer is gathered again for its backward; a pipeline's stages keep what they gathered unless the job says always."""
    policy, _ = resharding(job)
    return policy == "always" or (policy == "default" and job.layout.pp == 1 and job.engine.zero_stage != 2)


def reduces_each(job: Job) -> bool:
    """Whether every micro-batch is reduced. accelerate switches it off but for the last (no_sync), unless sync_each_batch, litgpt through
    Fabric (finetune/full.py, no_backward_sync); Composer does so with DDP alone (composer/distributed/dist_strategy.py,
    ddp_sync_context); a pipeline reduces when its last is done."""
    if job.layout.pp > 1:
        return False
    if job.stack == "transformers" and job.engine.name == "fsdp2" and release(job.stack_version) < DEFERS_SINCE:
        return True
    defers = job.stack == "litgpt" or under_accelerate(job.stack, job.engine.options)
    return not defers or bool(job.engine.options.get("sync_each_batch"))


DEFERS_SINCE = (4, 57)
"""accelerate's no_sync did nothing under FSDP2 before 1.11 (pull request 3762: FSDPModule has set_requires_gradient_sync in its place),
of October 2025, when transformers was at 4.57."""


def keeps_whole_gradients(job: Job) -> bool:
    """Whether FSDP's unsharded gradients outlive a micro-batch, though a setting would reduce them in each."""
    accumulates = job.data.grad_accum > 1 and job.layout.dp > 1
    return job.engine.name in ("fsdp1", "fsdp2") and accumulates and job.layout.pp == 1 and not reduces_each(job)


def units_of(job: Job, graph: Graph, rank: Rank, chunk: Chunk) -> Units:
    """The units of one model chunk (each pipeline stage is wrapped by itself)."""
    policy, kept = resharding(job)
    again = reshards(job)
    ties = _ties_ends(graph, chunk)
    separate = ends_are_separate(job) and not ties
    kind: Callable[..., Unit] = Unit
    if job.engine.name == "fsdp1":
        kind = _with_adapters_apart if wraps_adapters(job) else _flat_unit

    def build(*, shapes: tuple[Shape, ...], **given: Any) -> Unit:
        return kind(shapes=shapes, types=_types(job, shapes), on_host=job.offload.params != "none", **given)

    of: dict[str, Unit] = {}
    rest: list[Shape] = []
    for run in chunk.runs:
        block = run.block
        if block.name in of:  # a layer of a kind that was there before
            continue
        shapes = block_shapes(graph, job, block, rank)
        if block.role == "layer":
            stays = kept if again else 0
            of[block.name] = build(name=block.name, shapes=shapes, reshards=again, kept_shards=stays)
        elif (separate or (_wraps_embedding(job, block) and not ties)) and shapes:
            mine = again and (block.role == "embedding" or policy == "always")
            of[block.name] = build(name=block.name, shapes=shapes, reshards=mine)
        else:
            rest += shapes
    root = build(name=ROOT, shapes=tuple(rest), reshards=False) if rest else None
    if root is not None:  # which alone is not gathered again
        root = replace(root, apart=tuple(replace(one, reshards=again) for one in root.apart))
    # gathered again at once in the backward, so torchtitan once kept the last layer
    keeps_last = job.stack == "torchtitan" and job.engine.name == "fsdp2" and not ends_are_separate(job)
    return Units(
        root=root,
        of=of,
        joined=FrozenMap(dict(graph.tied) if chunk.first and chunk.last else {}),
        last_stays=again and policy == "default" and keeps_last,
        loss_in_root=job.stack in _LOSS_IN_ROOT,
    )


def _types(job: Job, shapes: tuple[Shape, ...]) -> Types:
    """Of a group, of which all that is trained has one type (torch distributed/fsdp/_fully_shard/_fsdp_param_group.py, _init_mp_dtypes;
    _flat_param.py, _validate_tensors_to_flatten, of those that are flattened together)."""
    types = types_of(job)
    found = {shape.original or types.original for shape in shapes if shape.trainable}
    if len(found) > 1 and job.lora is not None and not wraps_adapters(job):
        raise Unsupported(
            f"are {saved_type(job)} beside adapters in {adapters_type(job)}, and FSDP takes one type of what it trains together",
            key="lora.modules_to_save",
            value=", ".join(job.lora.modules_to_save),
            remedy=f"set lora.dtype: {saved_type(job)}",
        )
    return types if len(found) != 1 else replace(types, original=found.pop())


def _with_adapters_apart(*, name: str, shapes: tuple[Shape, ...], types: Types, reshards: bool, **given: Any) -> Unit:
    """FSDP1 with each linear that is trained a unit by itself, so that all else in a flat parameter is frozen: A and B each (peft
    utils/other.py, fsdp_auto_wrap_policy, which transformers' Trainer sets; torchtune's lora_fsdp_wrap_policy)."""
    frozen = tuple(shape for shape in shapes if not shape.trainable)
    apart = tuple(
        _flat_unit(
            name=shape.name,
            shapes=(shape,),
            types=replace(types, original=shape.original or types.original),
            reshards=reshards,
            **given,
        )
        for shape in shapes
        if shape.trainable
    )
    return replace(_flat_unit(name=name, shapes=frozen, types=types, reshards=reshards, **given), apart=apart)


def _flat_unit(
    *,
    name: str,
    shapes: tuple[Shape, ...],
    types: Types,
    reshards: bool = True,
    kept_shards: int = 0,
    on_host: bool = False,
) -> Unit:
    """FSDP1: all parameters of a module in one, padded once (torch distributed/fsdp/_flat_param.py)."""
    total = sum(shape.rows * shape.columns for shape in shapes)
    adapters = sum(shape.rows * shape.columns for shape in shapes if is_adapter(shape.name))
    shards = max(shape.shards for shape in shapes)
    trains = any(shape.trainable for shape in shapes)
    flat = Shape(
        name=name if trains and len(shapes) == 1 else f"{name}.flat_parameter",
        rows=total,
        columns=1,
        shards=shards,
        trainable=trains,
        original=None if trains else shapes[0].original,
        stepped=-(-adapters // shards) if adapters else None,
    )
    return Unit(name=name, shapes=(flat,), types=types, reshards=reshards, flat=True, on_host=on_host)


def _ties_ends(graph: Graph, chunk: Chunk) -> bool:
    return bool(graph.tied) and chunk.first and chunk.last


_WRAPPED_EMBEDDINGS = ("bert", "roberta", "vit", "xlm-roberta")
"""Families that name their embeddings among the modules not to be split (_no_split_modules), which is what accelerate wraps where nobody
names classes. Torch refuses a unit with a weight that another one has too: a tied embedding stays with the head."""


def _wraps_embedding(job: Job, block: Block) -> bool:
    return job.stack != "traced" and block.role == "embedding" and block.family in _WRAPPED_EMBEDDINGS


def ends_are_separate(job: Job) -> bool:
    """Whether embedding and head are units of their own."""
    if job.stack == "torchtitan":
        return job.stack_version is None or job.stack_version >= SEPARATE_ENDS_SINCE
    return bool(job.engine.options.get("custom_sharded_layers"))

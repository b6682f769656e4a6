"""How Megatron's arguments cut layers over a pipeline's ranks and their chunks."""

from __future__ import annotations

from ullage.engines.megatron.split import accounted, stages
from ullage.errors import InvalidInput
from ullage.formats.reading import Keys, lenient_flag, size
from ullage.formats.tree import Path
from ullage.job import fields
from ullage.job.job import Job

_EMBEDDING: Path = ("--account-for-embedding-in-pipeline-split",)
_LOSS: Path = ("--account-for-loss-in-pipeline-split",)
_STAGES: Path = ("--pipeline-model-parallel-layout",)


def read_pipeline(keys: Keys) -> None:
    pp = keys.tree.leaves.get(("--pipeline-model-parallel-size",), 1)
    layers = keys.tree.leaves.get(("--num-layers",))
    virtual = keys.take(("--num-virtual-stages-per-pipeline-rank",), size)
    path: Path = ("--num-virtual-stages-per-pipeline-rank",)
    per_stage = keys.take(("--num-layers-per-virtual-pipeline-stage",), size)
    counted = [_is_on(keys, flag) for flag in (_EMBEDDING, _LOSS)]
    if per_stage is not None and isinstance(layers, int) and isinstance(pp, int):
        path = ("--num-layers-per-virtual-pipeline-stage",)
        virtual = max(1, (layers + sum(counted)) // pp // per_stage)
    if virtual is not None and virtual > 1:
        _interleave(keys, virtual, path)
    first = keys.take(("--decoder-first-pipeline-num-layers",), fields.integer(0))
    last = keys.take(("--decoder-last-pipeline-num-layers",), fields.integer(0))
    if not isinstance(layers, int) or not isinstance(pp, int) or pp == 1:
        return
    text = keys.tree.leaves.get(_STAGES)
    if isinstance(text, str) and any(mark in text for mark in "t|"):
        _by_text(keys, text, pp)
    elif any(counted):
        if (layers + sum(counted)) % (
            pp * (virtual or 1)
        ) == 0:  # a rank's chunks then come out as memory/rank.py divides it
            split = accounted(layers, pp, *counted)
            keys.put("layout.pp_split", list(split), _EMBEDDING if counted[0] else _LOSS)
    elif first is not None or last is not None:
        flag = "--decoder-first-pipeline-num-layers" if first is not None else "--decoder-last-pipeline-num-layers"
        keys.put("layout.pp_split", _split(layers, pp, first, last), (flag,))


def _by_text(keys: Keys, text: str, pp: int) -> None:
    """Layers of each virtual stage of a layout's text; one that is written wrongly is told of where its option is read."""
    try:
        split = [stage.count("t") for stage in stages(text)]
    except InvalidInput:
        return
    if len(split) % pp:
        return
    keys.put("layout.pp_split", split, _STAGES)
    if len(split) > pp:
        _interleave(keys, len(split) // pp, _STAGES)


def _interleave(keys: Keys, chunks: int, path: Path) -> None:
    keys.put("layout.vpp", chunks, path)
    keys.put("layout.schedule", "interleaved-1f1b", path)


def _is_on(keys: Keys, path: Path) -> bool:
    value = keys.tree.leaves.get(path)
    return value is not None and lenient_flag(value, path[0])


def _split(layers: int, pp: int, first: int | None, last: int | None) -> list[int]:
    fixed = [size for size in (first, last) if size is not None]
    even = (layers - sum(fixed)) // max(1, pp - len(fixed))
    middle = [even] * (pp - len(fixed))
    return [*([first] if first is not None else []), *middle, *([last] if last is not None else [])]


def pipeline_leaves(job: Job) -> dict[Path, object]:
    layout = job.layout
    found: dict[Path, object] = {}
    if layout.vpp > 1:
        found["--num-virtual-stages-per-pipeline-rank",] = layout.vpp
    split = layout.pp_split
    if split is None or len(split) != layout.pp or layout.pp == 1 or len(set(split[1:-1])) > 1:
        return found
    if split[0] == split[-1] == split[1] - 1 and split[1] % layout.vpp == 0:
        found["--account-for-embedding-in-pipeline-split",] = True
        found["--account-for-loss-in-pipeline-split",] = True
    elif all(size % layout.vpp == 0 for size in split):  # transformer_block.py, get_num_layers_to_build
        found["--decoder-first-pipeline-num-layers",] = split[0]
        found["--decoder-last-pipeline-num-layers",] = split[-1]
    return found

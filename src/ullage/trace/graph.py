"""A trace as a Graph: blocks of traced ops, equal layers once, so that estimate and plan work for any module.

Sizes are those of the trace: a traced graph has no named dimensions, so the job's batch and sequence do not change it, and tensor
parallelism would need a placement table. Data parallelism, ZeRO, recomputation and torch's pipelining apply. Between two blocks one
tensor is handed on; what else crosses (a skip connection, an encoder's output, rotary embeddings) is told as lent and borrowed
(crossing.py), and between two stages sent beside it (memory/borders.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from ullage.errors import Unsupported
from ullage.frozen import FrozenMap
from ullage.job.job import Job
from ullage.job.read import read_job
from ullage.model.config import ModelConfig
from ullage.model.graph import Block, Graph, Param, Run
from ullage.trace.crossing import Carried
from ullage.trace.cut import Part, parts
from ullage.trace.events import Allocation, Trace, pattern
from ullage.trace.steps import Tape
from ullage.trace.told import BlockTeller, nothing_before, short


def graph_of(trace: Trace) -> Graph:
    """Raises Unsupported where a step has no backward."""
    if not trace.ops or all(op.phase != "backward" for op in trace.ops):
        raise Unsupported("has no backward", key="step", value=trace.name, remedy="return a step that trains")
    tape = Tape(trace)
    cuts = _joined(tape, parts(trace.modules, tape.forward))
    owners = _owners(tape, cuts)
    counts = Counter(name for names in owners for name in names)
    crossing = Carried(tape, cuts, frozenset(one.bytes for one in tape.params.values() if counts[one.name] > 1))
    blocks = [_block(tape, crossing, owners, at) for at in range(len(cuts))]
    runs, tied = _runs(blocks, cuts, owners)
    if cuts[0].role == "layer":
        runs.insert(0, Run(block=nothing_before()))
    return Graph(name=trace.name, runs=tuple(runs), sizes=FrozenMap(), tied=tuple(tied))


_STAND_IN = "llama-3.1-405b"
"""A job must name a model to be read; of a traced one nothing but the name is taken, and the checks of its layout are the graph's."""


def job_of(source: str | Path, name: str) -> Job:
    """The job file ``source`` with a traced module called ``name`` in its model's place."""
    job = read_job(source, (f"model={_STAND_IN}",))
    model = ModelConfig(name=name, keys=FrozenMap())
    return replace(job, model=model, stack="traced", stack_version=None)


def told_apart(job: Job, graph: Graph) -> Job:
    """The job with a warning where a module's layers were asked for and it has none."""
    if graph.layers or job.recompute.kind == "none":
        return job
    said = (
        f"recompute = {job.recompute.kind}: no layers were found in the module, so nothing is recomputed; "
        "a ModuleList, or a Sequential of composed children, is told apart"
    )
    return replace(job, warnings=(*job.warnings, said))


def _joined(tape: Tape, cuts: list[Part]) -> list[Part]:
    """Joins what runs between two layers, and makes nothing, to the layer before."""
    found: list[Part] = []
    for cut in cuts:
        if cut.role == "between" and not any(tick.writes for tick in tape.ticks[cut.start : cut.stop]):
            found[-1] = found[-1]._replace(stop=cut.stop)
        else:
            found.append(cut)
    return found


def _owners(tape: Tape, cuts: list[Part]) -> list[list[str]]:
    """The parameters of each part, by qualified name: those that it reads; what nobody reads belongs to the first part.

    A parameter that several parts read is the first's and the last's, and tied.
    """
    names = {birth: one.name for birth, one in tape.params.items()}
    readers: dict[str, list[int]] = {name: [] for name in names.values()}
    for at, cut in enumerate(cuts):
        for name in dict.fromkeys(
            names[read] for op in tape.forward[cut.start : cut.stop] for read in op.reads if read in names
        ):
            readers[name].append(at)
    found: list[list[str]] = [[] for _ in cuts]
    for name, places in readers.items():
        for at in dict.fromkeys((places[0], places[-1]) if places else (0,)):
            found[at].append(name)
    return found


def _block(tape: Tape, crossing: Carried, owners: list[list[str]], at: int) -> Block:
    cut = crossing.cuts[at]
    shapes = {one.name: one for one in tape.params.values()}
    later = [shapes[name] for names in owners[:at] for name in names if name in owners[at]]
    teller = BlockTeller(tape, crossing, at, later)
    frozen = tape.trace.frozen
    params = tuple(_param(shapes[name], cut.module, trainable=name not in frozen) for name in owners[at])
    ops = teller.ops()
    ops = (replace(ops[0], params=params), *ops[1:])
    name = pattern(cut.module).replace(".", "/") if cut.module else cut.role  # a dot sets off a parameter's name
    return Block(name=name, ops=ops, input=teller.input, output=teller.output, role=cut.role)


def _param(one: Allocation, module: str, *, trainable: bool) -> Param:
    return Param(name=short(one.name, module), dims=one.shape or (1,), trainable=trainable)


def _runs(blocks: list[Block], cuts: list[Part], owners: list[list[str]]) -> tuple[list[Run], list[tuple[str, str]]]:
    """Equal neighbours as one run; blocks of one name that differ are numbered. A parameter of several blocks is tied."""
    kinds: dict[str, list[Block]] = {}
    named: list[Block] = []
    for block in blocks:
        known = kinds.setdefault(block.name, [])
        if block not in known:
            known.append(block)
        number = known.index(block)
        named.append(replace(block, name=f"{block.name} ({number + 1})") if number else block)
    runs: list[Run] = []
    for block in named:
        if runs and runs[-1].block == block:
            runs[-1] = Run(block=block, repeat=runs[-1].repeat + 1)
        else:
            runs.append(Run(block=block))
    return runs, _tied(named, cuts, owners)


def _tied(blocks: list[Block], cuts: list[Part], owners: list[list[str]]) -> list[tuple[str, str]]:
    places: dict[str, list[str]] = {}
    for block, cut, names in zip(blocks, cuts, owners, strict=True):
        for name in names:
            places.setdefault(name, []).append(f"{block.name}.{short(name, cut.module)}")
    return [(found[0], found[1]) for found in places.values() if len(found) > 1]

"""``python -m ullage.trace.compare``: family by family and block by block, the closed form against the trace of the real code.

Of each block three numbers: what its forward leaves (its output and what it saved), the forward's peak and the backward's, each
counted from the block's own beginning. Both sides are CPU code at fp32, bf16 and under autocast.

A block's forward is the life of what it made itself and of its input. What the model's own frame names beside (the embedding's output,
masks, positions) is no block's: it goes when the last layer has returned. So of the embedding's forward, which runs in that frame, only
what lives into the backward counts, and only where no checkpoint names the frame's tensors. The head's backward begins with the loss's
own gradient.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, product
from typing import Any, Literal, NamedTuple

import torch

from ullage.errors import UllageError
from ullage.frozen import FrozenMap
from ullage.job.bind import local_sizes
from ullage.job.job import Data, Layout, Recompute
from ullage.kernels.step import Context
from ullage.memory.block import BlockProgram, GradRule, boundary_grad
from ullage.memory.chunk import CHECKPOINT, PLAIN, SELECTIVE, Replayer
from ullage.memory.program import Change, Item, Node, Repeat, alloc, net
from ullage.memory.program import Sequence as Nodes
from ullage.memory.rank import Chunk
from ullage.model.build import CHECKPOINTED, TARGET_LENGTH
from ullage.model.build import graph as build
from ullage.model.config import ModelConfig
from ullage.model.graph import Graph
from ullage.model.hf_config import decoder_spec
from ullage.trace.crossing import Carried
from ullage.trace.cut import Part, parts
from ullage.trace.encoders import batch_of, class_of
from ullage.trace.events import Allocation, Trace
from ullage.trace.families import EAGER_ONLY, ENCODERS, FAMILIES, TARGETS, TEXT_PARTS
from ullage.trace.models import own_head
from ullage.trace.run import Factory, trace
from ullage.trace.selective import contexts
from ullage.trace.steps import Tape

BATCH, SEQ = 2, 40
COMPARED = (*FAMILIES, *TEXT_PARTS, *ENCODERS)
PRECISIONS = ("bf16", "fp32", "autocast")
ATTENTIONS = ("sdpa", "eager")
RECOMPUTES: tuple[Literal["none", "full", "selective"], ...] = ("none", "full", "selective")
_MODES = {"none": PLAIN, "full": CHECKPOINT, "selective": SELECTIVE}
_LOSS_BYTES = 4
_TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32, "autocast": torch.float32}


class Case(NamedTuple):
    """One model in one mode."""

    family: str
    precision: str = "bf16"
    attention: str = "sdpa"
    recompute: Literal["none", "full", "selective"] = "none"

    def __str__(self) -> str:
        return f"{self.family} {self.precision} {self.attention} recompute {self.recompute}"


class Sizes(NamedTuple):
    """Bytes of one block, each from its own beginning."""

    saved: int
    forward_peak: int
    backward_peak: int


class Row(NamedTuple):
    """A block of a case; ``closed`` None: the closed form does not model it, and ``why``."""

    case: Case
    block: str
    traced: Sizes
    closed: Sizes | None
    why: str = ""

    @property
    def equal(self) -> bool:
        return self.closed == self.traced


def cases(families: Sequence[str] = COMPARED) -> Iterator[Case]:
    for family in families:
        for precision, attention, recompute in product(PRECISIONS, ATTENTIONS, RECOMPUTES):
            if attention == "eager" or family not in EAGER_ONLY:
                yield Case(family, precision, attention, recompute)


def rows(case: Case) -> list[Row]:
    """Every block of a case."""
    config = configured(case)
    found = _traced(case, config)
    traced = traced_sizes(found)
    if case.recompute != "none":
        del traced["embedding"]
    try:
        closed = closed_sizes(case, config)
    except (UllageError, AssertionError, KeyError) as error:  # a table of what differs must show a broken kernel too
        why = str(error) if isinstance(error, UllageError) else f"fails: {type(error).__name__} {error}"
        return [Row(case, name, sizes, None, why) for name, sizes in traced.items()]
    return [
        Row(case, name, sizes, closed.get(name), "" if name in closed else "no such block")
        for name, sizes in traced.items()
    ]


def configured(case: Case) -> Any:
    from transformers import AutoConfig, logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if case.family in ENCODERS:
        encoder = dict(ENCODERS[case.family])
        return AutoConfig.for_model(str(encoder.pop("model_type")), **encoder)
    keys = FAMILIES[case.family] if case.family in FAMILIES else TEXT_PARTS[case.family].keys
    return AutoConfig.for_model(case.family, **keys)


# -- the trace


def factory(case: Case, config: Any) -> Factory:
    """The real class, one step without an optimizer."""

    def made() -> tuple[torch.nn.Module, None, Any]:
        kind, whole = _whole(case, config)
        model: Any = kind.from_config(whole, attn_implementation=case.attention, dtype=_TORCH[case.precision]).train()
        own_head(model)
        if case.recompute != "none":
            by_op = {"context_fn": contexts} if case.recompute == "selective" else {}
            model.activation_checkpointing_enable({"use_reentrant": False, **by_op})
        spec = decoder_spec(_keys(case, config))
        batch = batch_of(spec, BATCH, SEQ)
        if case.family in TARGETS:
            batch["labels"] = batch["labels"][:, : TARGETS[case.family]].clone()

        def step() -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16) if case.precision == "autocast" else nullcontext():
                loss = model(**batch).loss
            loss.backward()
            model.zero_grad()

        return model, None, step

    return made


def _whole(case: Case, config: Any) -> tuple[Any, Any]:
    """The class that builds a model, and its config; of a text part that of the whole, whose other parts run on no text."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    if case.family in TARGETS:
        config.decoder_start_token_id = config.pad_token_id
    if case.family not in TEXT_PARTS:
        return class_of(decoder_spec(_keys(case, config))), config
    part = TEXT_PARTS[case.family]
    whole = AutoConfig.for_model(part.whole, text_config=config.to_dict(), vision_config=part.vision)
    return AutoModelForImageTextToText, whole


def _traced(case: Case, config: Any) -> Trace:
    """One step: without an optimizer the second is like the first."""
    return trace(factory(case, config), name=str(case), steps=1, ops=True, like="cpu")


def traced_sizes(found: Trace) -> dict[str, Sizes]:
    """Sizes of every block, by name."""
    tape = Tape(found)
    cuts = parts(found.modules, tape.forward)
    live = _curve(found)
    sizes = {}
    for at, cut in enumerate(cuts):
        back, end = _backward(tape, cut)
        saved, peak = _forward(tape, cuts, at) if at else (_left_by_embedding(tape, cuts), 0)
        sizes[_name(cut, cuts)] = Sizes(saved, peak, max(live[back : end + 1]) - live[back])
    return sizes


def _left_by_embedding(tape: Tape, cuts: Sequence[Part]) -> int:
    """Bytes of its output and of what lives into the backward."""
    output = Carried.handed(tape, cuts[0], cuts[1])
    made = [one for tick in tape.ticks[cuts[0].start : cuts[0].stop] for one in tick.writes]
    return sum(one.bytes for one in made if one is output or tape.ended(one) > tape.turn)


def _name(cut: Part, cuts: Sequence[Part]) -> str:
    return f"layer {[one for one in cuts if one.role == 'layer'].index(cut)}" if cut.role == "layer" else cut.role


def _curve(found: Trace) -> list[int]:
    """Live bytes after each event."""
    live = dict(found.curve())
    curve = [0] * (found.end + 2)
    for at in range(1, len(curve)):
        curve[at] = live.get(at, curve[at - 1])
    return curve


def _forward(tape: Tape, cuts: Sequence[Part], at: int) -> tuple[int, int]:
    """(what it leaves, peak) of the forward of a part, counted from its beginning."""
    cut = cuts[at]
    start = tape.forward[cut.start].at
    stop = tape.forward[cut.stop].at if cut.stop < len(tape.forward) else tape.turn
    source = Carried.handed(tape, cuts[at - 1], cut)
    changes = (
        [] if source is None or tape.ended(source) > tape.turn else [(min(tape.ended(source), stop), -source.bytes)]
    )
    for one in tape.born.values():
        if start < one.birth <= stop:
            changes.append((one.birth, one.bytes))
            if tape.ended(one) <= stop:
                changes.append((tape.ended(one), -one.bytes))
    changes += [(tape.ended(one), -one.bytes) for one in _lent_to(tape, cuts, at) if start < tape.ended(one) <= stop]
    live = list(accumulate((change for _, change in sorted(changes)), initial=0))
    return live[-1], max(live)


def _lent_to(tape: Tape, cuts: Sequence[Part], at: int) -> Iterator[Allocation]:
    """What earlier layers, or what runs between them, made for others to read."""
    if not any(cut.role == "between" for cut in cuts):
        return
    for lent in Carried(tape, list(cuts)).lent:
        made = cuts[lent.maker]
        read = any(
            lent.one.birth in op.reads for op in tape.forward[made.stop :]
        )  # autocast's copies are lent to nobody
        if lent.maker < at and made.role != "embedding" and read:
            yield lent.one


def _backward(tape: Tape, cut: Part) -> tuple[int, int]:
    """When the backward of a part begins and ends."""
    turned = [index for index, tick in enumerate(tape.steps_back) if cut.start <= tick < cut.stop]
    begin = tape.turn if cut.role == "head" else tape.backward[turned[0]].at
    ends = [op.at for op in tape.backward[turned[-1] + 1 :]]
    if cut.role == "embedding":  # a tied weight's gradients are joined behind it, by the engine (engines/replica.py)
        ends = [op.at for op in tape.backward[turned[0] :] if op.op == "aten.add"] or ends
    return begin, ends[0] if ends else tape.end


# -- the closed form


def closed_sizes(case: Case, config: Any) -> dict[str, Sizes]:
    programs = _programs(case, config)
    sizes = {name: _of(program) for name, program in zip(_names(_graph(case, config)), programs, strict=True)}
    head = programs[-1]
    left = _left(head)
    root = alloc(boundary_grad(_LOSS_BYTES), 2)  # the loss's gradient, named by loss.backward() too
    turned = Nodes([root, head.backward]).peak_bytes
    embedding = sizes["embedding"]._replace(saved=_left(programs[0]), forward_peak=0)
    return {**sizes, "embedding": embedding, "head": Sizes(left, head.forward.peak_bytes, turned)}


def _left(program: BlockProgram) -> int:
    """Of a block's forward, when autocast's context has exited with the model's."""
    return program.forward.delta_bytes - sum(item.bytes for item in program.cached)


def _graph(case: Case, config: Any) -> Graph:
    told = (
        {TARGET_LENGTH: TARGETS[case.family], CHECKPOINTED: case.recompute != "none"} if case.family in TARGETS else {}
    )
    return build(_keys(case, config), arguments=FrozenMap(told))


def _names(graph: Graph) -> Iterator[str]:
    numbers = iter(range(len([*graph.blocks()])))
    for block in graph.blocks():
        yield f"layer {next(numbers)}" if block.role == "layer" else block.role


def _programs(case: Case, config: Any) -> list[BlockProgram]:
    """Of every block."""
    graph = _graph(case, config)
    mode = _MODES[case.recompute]
    replayer = Replayer(context=context(case, graph), recompute=Recompute(kind=case.recompute))
    rule = GradRule(dtype="fp32" if case.precision == "fp32" else None)
    if case.family in TARGETS:  # whose blocks hand each other more than a stream
        elements = replayer.elements(Chunk(runs=graph.runs, first=True, last=True))
        return [replayer.element_program(one, rule) for one in elements]
    modes = [mode if block.role == "layer" else PLAIN for block in graph.blocks()]
    return [replayer.program(block, mode, rule) for block, mode in zip(graph.blocks(), modes, strict=True)]


def _keys(case: Case, config: Any) -> ModelConfig:
    """What is read of a config.json with these keys."""
    model_type = config.model_type if case.family in ENCODERS else case.family
    return ModelConfig(name=case.family, keys=FrozenMap({**config.to_dict(), "model_type": model_type}))


def _of(program: BlockProgram) -> Sizes:
    return Sizes(program.forward.delta_bytes, program.forward.peak_bytes, program.backward.peak_bytes)


def _tokens(graph: Graph) -> int:
    return graph.size("positions") if "patches" in graph.sizes else SEQ


def context(case: Case, graph: Graph) -> Context:
    autocast = case.precision == "autocast"
    params = "fp32" if autocast else case.precision
    return Context(
        sizes=local_sizes(graph, Layout(), Data(seq_len=_tokens(graph), micro_batch=BATCH)),
        stack="transformers",
        compute="bf16" if autocast else case.precision,
        params=params,
        residual=params,
        autocast=autocast,
        attention="flash" if case.attention == "sdpa" else case.attention,
        device="cpu",
        options=FrozenMap({"convert_outputs_to_fp32": False}),
    )


def unlike(row: Row) -> list[str]:
    """What makes a block's numbers differ: what one side allocates more often than the other, by op and by line of the ledger."""
    config = configured(row.case)
    tape = Tape(_traced(row.case, config))
    cuts = parts(tape.trace.modules, tape.forward)
    at, cut = next((at, cut) for at, cut in enumerate(cuts) if _name(cut, cuts) == row.block)
    program = _programs(row.case, config)[at]
    closed = row.closed or Sizes(-1, -1, -1)
    made = [one for tick in tape.ticks[cut.start : cut.stop] for one in (*tick.writes, *tick.scratch)]
    found = []
    if closed.saved != row.traced.saved:
        found += _apart("kept", [one for one in made if tape.ended(one) > tape.turn], net(program.forward))
    if closed.forward_peak != row.traced.forward_peak:
        found += _apart("forward", made, _allocated(program.forward))
    if closed.backward_peak != row.traced.backward_peak:
        back, end = _backward(tape, cut)
        turned = [one for one in tape.born.values() if back < one.birth <= end]
        found += _apart("backward", turned, _allocated(program.backward))
    return found


def _allocated(node: Node) -> Counter[Item]:
    """How often a program allocates each item."""
    if isinstance(node, Change):
        return Counter({node.item: max(node.count, 0)})
    total: Counter[Item] = Counter()
    for child in (
        node.children if isinstance(node, Nodes) else [node.child] * node.times if isinstance(node, Repeat) else []
    ):
        total.update(_allocated(child))
    return total


def _apart(which: str, traced: Sequence[Allocation], closed: Mapping[Item, int]) -> list[str]:
    """By bytes, what one side has more often than the other."""
    here = Counter(one.bytes for one in traced)
    there = Counter(dict.fromkeys(here, 0))
    for item, count in closed.items():
        there[item.bytes] += max(count, 0)
    lines = {one.bytes: f"{one.module}: {one.op} {one.dtype} {one.shape}" for one in traced}
    mine = {item.bytes: f"{item.what} ({item.formula})" for item in closed}
    return [
        f"{which}: {size:,} B, {here[size]} traced, {there[size]} in the closed form; "
        f"traced: {lines.get(size, 'none')}; closed form: {mine.get(size, 'none')}"
        for size in sorted(here.keys() | there.keys())
        if here[size] != there[size]
    ]


# -- the table


HEAD = """\
| family | precision | attention | recompute | block | closed saved / forward / backward | traced | difference |
|---|---|---|---|---|---|---|---|
"""


def line(row: Row) -> str:
    """One of Markdown's: a block of a family in a mode."""
    ours = _shown(row.closed) if row.closed is not None else row.why or "not modelled"
    gap = "" if row.closed is None else _gap(row.closed, row.traced)
    return f"| {' | '.join((*row.case, row.block, ours, _shown(row.traced), gap))} |\n"


def _shown(sizes: Sizes) -> str:
    return " / ".join(f"{size:,}" for size in sizes)


def _gap(closed: Sizes, traced: Sizes) -> str:
    if closed == traced:
        return "0"
    return " / ".join(f"{mine - real:+,}" if mine != real else "0" for mine, real in zip(closed, traced, strict=True))


SUMMARY = """
| family | modes | blocks | equal to the byte |
|---|---|---|---|
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints every block of each family's first mode, what differs in its other modes, and then how many of all are equal."""
    parser = argparse.ArgumentParser(prog="python -m ullage.trace.compare", description=__doc__)
    parser.add_argument("--family", default=",".join(COMPARED), help="names, with commas between")
    parser.add_argument("--differing", action="store_true", help="only what differs")
    arguments = parser.parse_args(argv)
    sys.stdout.write(HEAD)
    summary = []
    for family in COMPARED:
        if family not in arguments.family.split(","):
            continue
        modes = blocks = equal = 0
        for case in cases([family]):
            try:
                found = rows(case)
            except UllageError as error:
                sys.stderr.write(f"{case}: {error}\n")
                continue
            whole = not (modes or arguments.differing)
            sys.stdout.writelines(line(row) for row in found if whole or not row.equal)
            sys.stdout.flush()
            modes, blocks, equal = modes + 1, blocks + len(found), equal + sum(row.equal for row in found)
        summary.append(f"| {family} | {modes} | {blocks} | {equal} |\n")
    sys.stdout.writelines([SUMMARY, *summary])
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m ullage.trace.compare``: family by family and block by block, the closed form against the trace of the real code.

Of each block three numbers: what its forward leaves (its output and what it saved), the forward's peak and the backward's, each
counted from the block's own beginning. Both sides are CPU code at fp32, bf16 and under autocast.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any, NamedTuple

import torch

from ullage.errors import UllageError
from ullage.frozen import FrozenMap
from ullage.job.bind import local_sizes
from ullage.job.job import Data, Layout, Recompute
from ullage.kernels.step import Context
from ullage.memory.block import BlockProgram, GradRule
from ullage.memory.chunk import CHECKPOINT, PLAIN, Replayer
from ullage.memory.program import net
from ullage.model.build import graph as build
from ullage.model.config import ModelConfig
from ullage.model.graph import Graph
from ullage.trace.cut import Part, parts
from ullage.trace.events import Allocation, Trace
from ullage.trace.families import EAGER_ONLY, FAMILIES
from ullage.trace.run import Factory, trace
from ullage.trace.steps import Tape

BATCH, SEQ = 2, 40
PRECISIONS = ("bf16", "fp32", "autocast")
ATTENTIONS = ("sdpa", "eager")
RECOMPUTES = ("none", "full")
_TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32, "autocast": torch.float32}


class Case(NamedTuple):
    """One model in one mode."""

    family: str
    precision: str = "bf16"
    attention: str = "sdpa"
    recompute: str = "none"

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


def cases(families: Sequence[str] = tuple(FAMILIES)) -> Iterator[Case]:
    for family in families:
        for precision, attention, recompute in product(PRECISIONS, ATTENTIONS, RECOMPUTES):
            if attention == "eager" or family not in EAGER_ONLY:
                yield Case(family, precision, attention, recompute)


def rows(case: Case) -> list[Row]:
    """Every kind of block of a case, layers first."""
    config = configured(case)
    found = trace(factory(case, config), name=str(case), ops=True, like="cpu")
    traced = traced_sizes(found)
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
    return AutoConfig.for_model(case.family, **FAMILIES[case.family])


# -- the trace


def factory(case: Case, config: Any) -> Factory:
    """The real class, one step without an optimizer."""

    def made() -> tuple[torch.nn.Module, None, Any]:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=case.attention, dtype=_TORCH[case.precision]
        ).train()
        if case.recompute == "full":
            model.activation_checkpointing_enable({"use_reentrant": False})
        ids = torch.randint(1, config.vocab_size, (BATCH, SEQ))
        labels = ids.clone()

        def step() -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16) if case.precision == "autocast" else nullcontext():
                loss = model(input_ids=ids, labels=labels, use_cache=False).loss
            loss.backward()
            model.zero_grad()

        return model, None, step

    return made


def traced_sizes(found: Trace) -> dict[str, Sizes]:
    """Sizes of the second layer of each kind (the first one's backward is the last, beside the embedding's), by name."""
    tape = Tape(found)
    cuts = parts(found.modules, tape.forward)
    layers = [cut for cut in cuts if cut.role == "layer"]
    return {f"layer {number}": _sizes(found, tape, cuts, cut) for number, cut in enumerate(layers) if number}


def _sizes(found: Trace, tape: Tape, cuts: Sequence[Part], cut: Part) -> Sizes:
    live = dict(found.curve())
    curve = [0] * (found.end + 2)
    for at in range(1, len(curve)):
        curve[at] = live.get(at, curve[at - 1])
    following = cuts[cuts.index(cut) + 1]
    start, stop = tape.forward[cut.start].at, tape.forward[following.start].at
    turned = [index for index, tick in enumerate(tape.steps_back) if cut.start <= tick < cut.stop]
    back, end = tape.backward[turned[0]].at, tape.backward[turned[-1] + 1].at
    return Sizes(
        saved=curve[stop] - curve[start],
        forward_peak=max(curve[start : stop + 1]) - curve[start],
        backward_peak=max(curve[back : end + 1]) - curve[back],
    )


# -- the closed form


def closed_sizes(case: Case, config: Any) -> dict[str, Sizes]:
    programs = _programs(case, config)
    return {f"layer {number}": _of(program) for number, program in enumerate(programs) if number}


def _programs(case: Case, config: Any) -> list[BlockProgram]:
    """Of every layer."""
    keys = {**config.to_dict(), "model_type": case.family}
    graph = build(ModelConfig(name=case.family, keys=FrozenMap(keys)))
    full = case.recompute == "full"
    replayer = Replayer(context=context(case, graph), recompute=Recompute(kind="full" if full else "none"))
    rule = GradRule(dtype="fp32" if case.precision == "fp32" else None)
    layers = [block for block in graph.blocks() if block.role == "layer"]
    return [replayer.program(block, CHECKPOINT if full else PLAIN, rule) for block in layers]


def _of(program: BlockProgram) -> Sizes:
    return Sizes(program.forward.delta_bytes, program.forward.peak_bytes, program.backward.peak_bytes)


def context(case: Case, graph: Graph) -> Context:
    autocast = case.precision == "autocast"
    params = "fp32" if autocast else case.precision
    return Context(
        sizes=local_sizes(graph, Layout(), Data(seq_len=SEQ, micro_batch=BATCH)),
        stack="transformers",
        compute="bf16" if autocast else case.precision,
        params=params,
        residual=params,
        autocast=autocast,
        attention="flash" if case.attention == "sdpa" else case.attention,
        device="cpu",
        options=FrozenMap({"convert_outputs_to_fp32": False}),
    )


def unlike(case: Case) -> list[str]:
    """Where a case's first block differs, what either side keeps and the other does not: by op and by line of the ledger."""
    config = configured(case)
    tape = Tape(trace(factory(case, config), ops=True, like="cpu"))
    cut = next(cut for cut in parts(tape.trace.modules, tape.forward)[1:] if cut.role == "layer")
    real = [(one.bytes, f"{one.module}: {one.op} {one.dtype} {one.shape}") for one in _kept(tape, cut)]
    ours = [
        (item.bytes, f"{item.what} ({item.formula})")
        for item, count in net(_programs(case, config)[0].forward).items()
        for _ in range(count)
    ]
    here, there = Counter(size for size, _ in real), Counter(size for size, _ in ours)
    return [
        *(f"traced only: {size:,} B, {words}" for size, words in real if here[size] > there[size]),
        *(f"closed form only: {size:,} B, {words}" for size, words in ours if there[size] > here[size]),
    ]


def _kept(tape: Tape, cut: Part) -> list[Allocation]:
    return [one for tick in tape.ticks[cut.start : cut.stop] for one in tick.writes if tape.ended(one) > tape.turn]


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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ullage.trace.compare", description=__doc__)
    parser.add_argument("--family", default=",".join(FAMILIES), help="names, with commas between")
    parser.add_argument("--differing", action="store_true", help="only what differs")
    arguments = parser.parse_args(argv)
    equal = total = 0
    sys.stdout.write(HEAD)
    for case in cases([name for name in FAMILIES if name in arguments.family.split(",")]):
        try:
            found = rows(case)
        except UllageError as error:
            sys.stderr.write(f"{case}: {error}\n")
            continue
        equal += sum(row.equal for row in found)
        total += len(found)
        sys.stdout.writelines(line(row) for row in found if not (arguments.differing and row.equal))
        sys.stdout.flush()
    sys.stderr.write(f"{equal} of {total} blocks equal to the byte\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

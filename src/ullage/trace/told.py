"""One block of a traced graph: its ticks as Ops of kind ``traced``, with what crosses its borders."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ullage.frozen import FrozenMap
from ullage.model.graph import Block, Op, Tensor
from ullage.trace.crossing import Carried
from ullage.trace.events import Allocation
from ullage.trace.steps import Tape, Tick

KIND = "traced"
INPUT, OUTPUT = "input", "output"
SCALAR_BYTES = 4


def short(name: str, module: str) -> str:
    """A name seen from a layer: without the layer's own, so that equal layers are equal."""
    return name.removeprefix(f"{module}.") if module else name


class BlockTeller:
    """Writes the ops of part ``at``. tied: its parameters that an earlier part reads too."""

    def __init__(self, tape: Tape, carried: Carried, at: int, tied: Sequence[Allocation] = ()) -> None:
        self.tape = tape
        self.cut = carried.cuts[at]
        self.shared = {
            one.bytes: (short(one.name, self.cut.module), math.prod(one.shape), _dtype(one.dtype)) for one in tied
        }
        self.ticks = tape.ticks[self.cut.start : self.cut.stop]
        self.enters = carried.outputs[at - 1] if at else None
        self.leaves = carried.outputs[at] if at < len(carried.outputs) else self._loss()
        self.names: dict[int, str] = {}
        for tick in self.ticks:
            for one in (*tick.writes, *tick.made):
                self.names[one.birth] = f"{len(self.names)}"
        if self.enters is not None:
            self.names[self.enters.birth] = INPUT
        if self.leaves is not None:
            self.names[self.leaves.birth] = OUTPUT
        self.input = Tensor(
            name=INPUT, dims=(self.enters.bytes if self.enters is not None else 0,), elements="uint8", grad=False
        )
        self.lends = [lent for lent in carried.lent if lent.maker == at]
        self.borrows = [lent for lent in carried.lent if at in lent.users]
        self.sends = [sent for sent in carried.sent if sent.maker == at]
        self.receives = [sent for sent in carried.sent if sent.taker == at]
        self.lent_births = {lent.one.birth: lent for lent in self.lends}
        self.sent_births = {sent.one.birth: sent for sent in self.sends}
        for lent in self.lends:
            self.names[lent.one.birth] = f"to {lent.slot}"
        for lent in self.borrows:
            self.names[lent.one.birth] = f"from {lent.slot}"
        self.at = at
        self.is_last = at == len(carried.outputs)
        out = SCALAR_BYTES if self.is_last else self.leaves.bytes if self.leaves is not None else 0
        self.output = Tensor(name=OUTPUT, dims=(out,), elements="uint8", grad=self.is_last)
        self.made_at = {one.birth: index for index, tick in enumerate(self.ticks) for one in tick.writes}
        self.last = self._output_index()

    def _loss(self) -> Allocation | None:
        """The last block's output: the last tensor made that the backward starts from."""
        made = [one for tick in self.ticks for one in tick.writes if tick.differentiable]
        return made[-1] if made else None

    def _output_index(self) -> int:
        """The step that makes the output; what comes after it is told as part of it, so that its gradient reaches every step."""
        if self.leaves is None:
            return len(self.ticks) - 1
        return self.made_at.get(self.leaves.birth, len(self.ticks) - 1)

    def _index(self, tick: int) -> int:
        """A tick of the tape as a step of this block; what lies outside is its first or its last."""
        return min(max(tick - self.cut.start, 0), self.last)

    # -- ops

    def ops(self) -> tuple[Op, ...]:
        steps = [_Step() for _ in range(self.last + 1)]
        for index, tick in enumerate(self.ticks):
            self._tell(steps, min(index, self.last), tick)
        self._tell_input(steps)
        if self.leaves is None:
            steps[-1].writes.append((OUTPUT, 0, "nothing", ""))
        self._tell_crossings(steps)
        kept = [(index, step) for index, step in enumerate(steps) if step.any or index == self.last]
        return tuple(
            self._op(number, self.ticks[index], step, is_first=number == 0, is_last=index == self.last)
            for number, (index, step) in enumerate(kept)
        )

    def _tell(self, steps: list[_Step], index: int, tick: Tick) -> None:
        step = steps[index]
        for one in tick.writes:
            step.writes.append(self._buffer(one))
            self._tell_end(steps, one, index)
        step.scratch += [
            self._buffer(one, f"{self.names.get(one.birth, 's')}s{at}") for at, one in enumerate(tick.scratch)
        ]
        for one in tick.weights:
            step.weights.append((short(one.name, self.cut.module), math.prod(one.shape), _dtype(one.dtype)))
        for one in tick.made:
            end = self.tape.backward_tick(self.tape.ended(one))
            if end < self.cut.start and one.bytes in self.shared:  # a tied weight's first gradient waits for its second
                step.weights.append(self.shared[one.bytes])
                continue
            if one.birth in self.sent_births:
                step.sends.append(
                    (f"back to {self.sent_births[one.birth].slot}", self.sent_births[one.birth].slot, one.bytes)
                )
                continue
            gone = self._index(end)
            name = f"g{self.names[one.birth]}"
            if gone >= index:  # let go of before the next step: an out-of-order backward, or made by the block's last
                step.extra += one.bytes
            else:
                steps[gone].gradients.append((name, one.bytes, self._what(one), _formula(one)))
                step.takes.append(name)
        step.extra += tick.extra_bytes

    def _tell_end(self, steps: list[_Step], one: Allocation, index: int) -> None:
        """When a tensor made at ``index`` goes: with a later op or with a backward; another part may let go of what it is lent."""
        if one is self.leaves:
            return  # the next block's
        name = self.names[one.birth]
        lent = self.lent_births.get(one.birth)
        if lent is not None:
            steps[index].lends.append((name, lent.slot, one.bytes, lent.grad))
            steps[-1].holds.append(name)  # the block returns it, so its frames name it to their end
            if lent.keeper != self.at:
                return
        death = self.tape.ended(one)
        if death <= self.tape.turn:
            steps[max(index, self._index(self.tape.forward_tick(death)))].holds.append(name)
        else:
            tick = self.tape.backward_tick(death) if death <= self.tape.end else 0
            steps[max(index, self._index(tick))].saves.append(name)

    def _tell_input(self, steps: list[_Step]) -> None:
        """The tensor that the block before made: when this block lets go of it."""
        if self.at or self.cut.role == "layer":
            steps[0].reads.append(INPUT)
        if (
            self.enters is None
        ):  # its input is the batch, or what it reads was made before the block before: no bytes here
            return
        death = self.tape.ended(self.enters)
        if death <= self.tape.turn:
            tick = self.tape.forward_tick(death)
            if tick < self.cut.stop:
                steps[self._index(tick)].holds.append(INPUT)
            else:
                steps[0].caches.append(INPUT)
        else:
            steps[self._index(self.tape.backward_tick(death))].saves.append(INPUT)

    def _tell_crossings(self, steps: list[_Step]) -> None:
        """What earlier parts made and this one reads, and gradients that later parts made and this one lets go of."""
        for lent in self.borrows:
            name = self.names[lent.one.birth]
            read = next((at for at, tick in enumerate(self.ticks) if lent.one.birth in tick.op.reads), None)
            if read is not None:
                steps[min(read, self.last)].reads.append(name)
            steps[0].borrows.append((name, lent.slot, lent.one.bytes, lent.grad))
            if lent.keeper == self.at:
                self._tell_keeping(steps, lent.one, name)
        for sent in self.receives:
            gone = self._index(self.tape.backward_tick(self.tape.ended(sent.one)))
            steps[gone].receives.append((f"back from {sent.slot}", sent.slot, sent.one.bytes))

    def _tell_keeping(self, steps: list[_Step], one: Allocation, name: str) -> None:
        death = self.tape.ended(one)
        if death <= self.tape.turn:
            steps[self._index(self.tape.forward_tick(death))].holds.append(name)
        else:
            steps[self._index(self.tape.backward_tick(death) if death <= self.tape.end else 0)].saves.append(name)

    def _op(self, number: int, tick: Tick, step: _Step, *, is_first: bool, is_last: bool) -> Op:
        """The chain of tensors without bytes carries the backward from each step to the one before."""
        chain = () if is_first else (f"c{number - 1}",)
        outputs = [] if is_last else [(f"c{number}", 0, "", "")]
        tokens = [(f"{name}.of", 0, what, formula) for name, _, what, formula in step.gradients]
        own = {name for name, *_ in step.writes}
        quiet = tuple(dict.fromkeys(name for name in (*step.reads, *step.holds, *step.saves) if name not in own))
        reads = (*chain, *step.takes, *quiet)
        written = sorted(step.writes, key=lambda one: one[0] != OUTPUT)
        return Op(
            name=f"{number} {tick.op.op}",
            kind=KIND,
            inputs=tuple(dict.fromkeys(reads)),
            outputs=(self.output,) if is_last else (),
            attrs=FrozenMap(
                {
                    "reads": tuple(dict.fromkeys(reads)),
                    "no_grad": quiet,
                    "writes": (*written, *outputs, *tokens),
                    "gradients": tuple(step.gradients),
                    "saves": tuple(step.saves),
                    "holds": tuple(step.holds),
                    "caches": tuple(step.caches),
                    "scratch": tuple(step.scratch),
                    "weights": tuple(step.weights),
                    "lends": tuple(step.lends),
                    "borrows": tuple(step.borrows),
                    "sends": tuple(step.sends),
                    "receives": tuple(step.receives),
                    "backward_scratch": (("extra", step.extra, "temporaries", ""),) if step.extra else (),
                }
            ),
            module=short(tick.op.module, self.cut.module) if tick.op.module != self.cut.module else "",
        )

    def _buffer(self, one: Allocation, name: str | None = None) -> tuple[str, int, str, str]:
        size = SCALAR_BYTES if one is self.leaves and self.is_last else one.bytes
        return name or self.names[one.birth], size, self._what(one), _formula(one)

    def _what(self, one: Allocation) -> str:
        module = short(one.module, self.cut.module) if one.module != self.cut.module else ""
        return f"{module}: {one.op}" if module else one.op


class _Step:
    """What is gathered for one Op."""

    __slots__ = (
        "borrows",
        "caches",
        "extra",
        "gradients",
        "holds",
        "lends",
        "reads",
        "receives",
        "saves",
        "scratch",
        "sends",
        "takes",
        "weights",
        "writes",
    )

    def __init__(self) -> None:
        self.writes: list[tuple[str, int, str, str]] = []
        self.scratch: list[tuple[str, int, str, str]] = []
        self.gradients: list[tuple[str, int, str, str]] = []
        self.weights: list[tuple[str, int, str]] = []
        self.reads: list[str] = []
        self.takes: list[str] = []
        self.saves: list[str] = []
        self.holds: list[str] = []
        self.caches: list[str] = []
        self.lends: list[tuple[str, int, int, bool]] = []
        self.borrows: list[tuple[str, int, int, bool]] = []
        self.sends: list[tuple[str, int, int]] = []
        self.receives: list[tuple[str, int, int]] = []
        self.extra = 0

    @property
    def any(self) -> bool:
        lists: Iterable[object] = (
            self.writes, self.scratch, self.gradients, self.weights, self.reads, self.takes, self.saves, self.holds, self.caches,
            self.borrows, self.sends, self.receives,
        )  # fmt: skip
        return any(lists) or bool(self.extra)


_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def _dtype(name: str) -> str:
    return _DTYPES.get(name, name)


def _formula(one: Allocation) -> str:
    return f"{' x '.join(map(str, one.shape)) or '1'} {one.dtype}"


def nothing_before() -> Block:
    """The block before the first layer of a model that begins with one."""
    output = Tensor(name=OUTPUT, dims=(0,), elements="uint8", grad=False)
    writes = ((OUTPUT, 0, "the batch", ""),)
    op = Op(name="0 batch", kind=KIND, inputs=(), outputs=(output,), attrs=FrozenMap({"writes": writes}))
    return Block(name="embedding", ops=(op,), input=Tensor(name=INPUT, dims=(0,)), output=output, role="embedding")

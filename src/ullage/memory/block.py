"""One block, replayed: what its forward allocates, frees and keeps, and what its backward does with that.

The rules are autograd's. A tensor lives until nothing later reads it and no backward needs it; a node's backward makes the
gradients of what it read, drops the gradients of what it made, then lets go of what it saved. A gradient that arrives a second
time is added in place if nobody else holds the first and it is no view; else the sum is a new tensor. A recompute segment keeps its
inputs and ``keep`` alone; on the way back it runs again before its own backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from functools import lru_cache

from ullage import dtypes
from ullage.kernels.step import Buffer, Segment, Step, WeightGrad
from ullage.memory.program import Item, Node, Sequence, alloc, free, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class GradRule:
    """What becomes of a weight gradient that autograd makes.

    mode: "keep" (it stays, as ``dtype``), "add" (added to one that is there already, then freed), "fused" (the matmul adds
    into the accumulator: no tensor; of other ops, as "add"). dtype None: as autograd makes it.
    temporaries: with "add", element types of what the engine allocates, as large as the weight, to use the gradient up at once
    (an optimizer inside the backward). pending: weights whose gradients wait all the same (another block uses them too).
    """

    mode: str = "keep"
    dtype: str | None = None
    temporaries: tuple[str, ...] = ()
    pending: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProgram:
    """forward takes over the block's input and leaves its output and what it saved; backward undoes that.

    backward starts with the gradient of the output live and leaves that of the input, and under GradRule "keep" ``grads``.
    """

    forward: Node
    backward: Node
    grads: tuple[tuple[str, Item], ...]
    cached: tuple[
        Item, ...
    ] = ()  # left by forward beyond its output and what it saved, until the forward's context exits
    views: frozenset[str] = frozenset()  # of grads, those that are views of a matmul's result


@lru_cache(maxsize=4096)
def boundary(n_bytes: int) -> Item:
    """The tensor that one block hands to the next."""
    return Item(
        category="activations",
        what="residual stream between blocks",
        bytes=round_up(n_bytes),
        formula="output of one block, input of the next",
        lives="its block's forward to the next block's backward",
    )


@lru_cache(maxsize=4096)
def boundary_grad(n_bytes: int) -> Item:
    """The gradient of the tensor that one block hands to the next."""
    return Item(
        category="transient",
        what="gradient of the residual stream",
        bytes=round_up(n_bytes),
        formula="gradient handed from one block's backward to the one before",
        lives="one block's backward to the next",
    )


class _Storage:
    __slots__ = ("holders", "is_view", "item")

    def __init__(self, item: Item, is_view: bool = False) -> None:
        self.item = item
        self.is_view = is_view
        self.holders: set[tuple[str, object]] = set()


class BlockReplay:
    """Replays one block; call ``run`` once. items: shared by replays of one block whose programs are mixed in one step."""

    def __init__(
        self,
        steps: ListLike[Step],
        *,
        input: str | None,
        input_bytes: int = 0,
        output: str,
        segments: ListLike[Segment] = (),
        grad_rule: GradRule = GradRule(),
        keeps_input: bool = True,
        input_grad: bool = True,
        items: dict[tuple[str, int, str], Item] | None = None,
    ) -> None:
        self.steps = tuple(steps)
        self.input = input
        self.input_bytes = input_bytes
        self.output = output
        self.segments = tuple(segments)
        self.grad_rule = grad_rule
        self.keeps_input = keeps_input
        self.input_grad = input_grad
        self.nodes: list[Node] = []
        self.storage: dict[str, _Storage] = {}
        self.grad: dict[str, _Storage] = {}
        self.grad_bytes: dict[str, int] = {}
        self.grads: dict[str, Item] = {}
        self.grad_views: set[str] = set()
        self.uses = Counter(weight.param for step in self.steps for weight in step.weights)
        self.items = {} if items is None else items
        self.segment_of: dict[int, int] = {
            index: number
            for number, segment in enumerate(self.segments)
            for index in range(segment.start, segment.stop)
        }
        self.discarded = {
            name
            for segment in self.segments
            if segment.discards_output
            for step in self.steps[segment.start : segment.stop]
            for name in step.made
        }
        self.made_at = {name: index for index, step in enumerate(self.steps) for name in step.made}
        made = [name for step in self.steps for name in step.made]
        assert len(made) == len(set(made)), sorted(name for name in set(made) if made.count(name) > 1)
        self.recomputed: set[int] = set()
        self.backward_at = len(self.steps)
        self.framed: dict[int, list[_Storage]] = {}  # gradients that the frame of a reentrant segment names

    def run(self) -> BlockProgram:
        if self.input is not None:
            stream = _Storage(boundary(self.input_bytes))
            stream.holders.add(("forward", self.input))
            self.storage[self.input] = stream
        self._forward(range(len(self.steps)))
        forward = Sequence(self.nodes)
        output = self.storage.get(self.output)
        if output is not None:
            output.holders.discard(("forward", self.output))  # the next block's from here on
        cached = self._leave_caches()
        self.nodes = []
        self._backward()
        return BlockProgram(
            forward=forward,
            backward=Sequence(self.nodes),
            grads=tuple(self.grads.items()),
            cached=cached,
            views=frozenset(self.grad_views),
        )

    def _leave_caches(self) -> tuple[Item, ...]:
        """Hands what only a cache still holds to whoever ends the forward."""
        left = []
        for name in dict.fromkeys(name for step in self.steps for name in step.caches):
            storage = self.storage[name]
            storage.holders.discard(("cache", name))
            if not storage.holders:
                left.append(storage.item)
        return tuple(left)

    # -- storages

    def _item(self, buffer: Buffer, category: str, lives: str) -> Item:
        key = (buffer.name, buffer.bytes, category)
        if key not in self.items:
            self.items[key] = Item(
                category=category,
                what=buffer.what or buffer.name,
                bytes=round_up(buffer.bytes),
                formula=buffer.formula,
                lives=lives,
            )
        return self.items[key]

    def _bytes(self, name: str) -> int:
        """Bytes of a tensor and so of its gradient: of the view, where it is a view of something larger."""
        return self.grad_bytes.get(name, self.storage[name].item.bytes)

    def _alloc(self, item: Item) -> _Storage:
        if item.bytes:
            self.nodes.append(alloc(item))
        return _Storage(item)

    def _release(self, storage: _Storage, holder: tuple[str, object]) -> None:
        if holder in storage.holders:
            storage.holders.remove(holder)
            if not storage.holders and storage.item.bytes:
                self.nodes.append(free(storage.item))

    def _hold(self, name: str, holder: tuple[str, object]) -> None:
        self.storage[name].holders.add(holder)

    # -- forward

    def _last_reads(self, indices: range, exposes_output: bool, beyond: int) -> dict[str, int]:
        last: dict[str, int] = {}
        for index in indices:
            step = self.steps[index]
            for name in (*step.reads, *step.holds, *step.made):
                last[name] = index
        for step in self.steps[indices.stop : beyond]:  # not run again; what its frames name lives to where they end
            for name in (*step.reads, *step.holds):
                if name in last:
                    last[name] = indices.stop - 1
        if exposes_output:
            last.pop(self.output, None)
        return last

    def _forward(self, indices: range, again: int | None = None, unmade: int | None = None) -> None:
        """Runs steps forward; ``again``: number of the segment that is recomputed; ``unmade``: the step that only saves its inputs."""
        last = self._last_reads(
            indices, exposes_output=again is None, beyond=indices.stop if again is None else self.segments[again].stop
        )
        if again is not None and self.segments[again].reentrant:
            for name in self._outputs(self.segments[again]):
                last.pop(name, None)
        holder_kind = "forward" if again is None else "again"
        ends: dict[int, list[str]] = {}
        for name, index in last.items():
            ends.setdefault(index, []).append(name)
        for index in indices:
            step = self.steps[index]
            if again is None:
                self._keep_segment_inputs(index)
            if index == unmade:
                self._save(index, again)
                self._end(ends.get(index, ()), holder_kind)
                continue
            for buffer in step.writes:
                if again is None or buffer.name not in self.segments[again].keep:
                    self._new(buffer)
            for view, tensor in step.aliases:
                name = view.name if isinstance(view, Buffer) else view
                self.storage[name] = self.storage[tensor]
                self.grad_bytes[name] = round_up(view.bytes) if isinstance(view, Buffer) else self._bytes(tensor)
            for name in step.made:
                self._hold(name, (holder_kind, name))
            for name in step.caches:
                self._hold(name, ("cache", name))
            scratch = [self._item(buffer, "transient", f"forward of {step.name}") for buffer in step.scratch]
            self.nodes.extend(alloc(item) for item in scratch if item.bytes)
            self._save(index, again)
            self.nodes.extend(free(item) for item in scratch if item.bytes)
            self._end(ends.get(index, ()), holder_kind)
        if again is not None:  # the context that the recomputation runs in exits, and its caches go
            for name in (name for index in indices for name in self.steps[index].caches if index != unmade):
                self._release(self.storage[name], ("cache", name))

    def _end(self, names: Iterable[str], holder_kind: str) -> None:
        for name in names:
            if name in self.storage:
                self._release(self.storage[name], (holder_kind, name))

    def _new(self, buffer: Buffer) -> None:
        if buffer.name == self.output:
            item = boundary(buffer.bytes)
        else:
            item = self._item(buffer, "activations", "its forward to its backward if saved, else to its last reader")
        self.storage[buffer.name] = self._alloc(item)

    def _keep_segment_inputs(self, index: int) -> None:
        number = self.segment_of.get(index)
        if number is None or index != self.segments[number].start:
            return
        segment = self.segments[number]
        for step in self.steps[segment.start : segment.stop]:
            for name in step.reads:
                if self.made_at.get(name, -1) < segment.start and (name != self.input or self.keeps_input):
                    self._hold(name, ("segment", number))

    def _save(self, index: int, again: int | None) -> None:
        step = self.steps[index]
        number = self.segment_of.get(index)
        if number is not None and again is None:
            for name in step.made:
                if name in self.segments[number].keep:
                    self._hold(name, ("kept", number))
            return
        for name in step.saves:
            given_away = name == self.input and not self.keeps_input  # kept by the longer segment around this block
            assert self.storage[name].holders or given_away, f"{step.name} saves {name}, which is gone"
            if name in step.offloads:
                continue  # on its way to the host; _backward_step fetches it
            if again is not None or name not in self.discarded:
                self._hold(name, ("saved", index))
        if again is not None and self.segments[again].discards_output:
            self._hand_to_later_readers(index, self.segments[again])

    def _hand_to_later_readers(self, index: int, segment: Segment) -> None:
        """A recomputed output belongs to the steps after its segment whose backward is still to come."""
        for name in self.steps[index].made:
            for later in range(segment.stop, self.backward_at + 1):
                if later < len(self.steps) and name in self.steps[later].saves:
                    self._hold(name, ("saved", later))

    # -- backward

    def _backward(self) -> None:
        if self.output in self.storage:
            item = boundary_grad(self._bytes_of_output())
            self.grad[self.output] = _Storage(item)
            self.grad[self.output].holders.add(("grad", self.output))
        for index in reversed(range(len(self.steps))):
            self.backward_at = index
            self._recompute_for(index)
            self._backward_step(index)
            number = self.segment_of.get(index)
            if number is not None and index == self.segments[number].start:
                self._leave_segment(number)
        self._hand_over()

    def _bytes_of_output(self) -> int:
        return next(buffer.bytes for step in self.steps for buffer in step.writes if buffer.name == self.output)

    def _recompute_for(self, index: int) -> None:
        number = self.segment_of.get(index)
        if number is not None and number not in self.recomputed:
            self._recompute(number)
        for name in self.steps[index].saves:
            if name in self.discarded and (number is None or self.made_at[name] < self.segments[number].start):
                source = self.segment_of[self.made_at[name]]
                if source not in self.recomputed:
                    self._recompute(source)

    def _recompute(self, number: int) -> None:
        segment = self.segments[number]
        self.recomputed.add(number)
        stop = segment.stop
        stops_early = segment.early_stop and not segment.discards_output  # an output that is wanted is computed
        if stops_early:
            while stop > segment.start and not self.steps[stop - 1].saves:
                stop -= 1
        last = self.steps[stop - 1]
        ends_early = stops_early and stop > segment.start and set(last.saves) <= set(last.reads)
        self._forward(range(segment.start, stop), again=number, unmade=stop - 1 if ends_early else None)
        if segment.reentrant:
            for name in self._outputs(segment):
                self._hold(name, ("segment", number))
                self._release(self.storage[name], ("again", name))
                if name in self.grad:
                    self.grad[name].holders.add(("segment", number))
                    self.framed.setdefault(number, []).append(self.grad[name])

    def _outputs(self, segment: Segment) -> list[str]:
        """What steps after a segment read of it, and the block's output if it is made there."""
        later = {name for step in self.steps[segment.stop :] for name in step.reads} | {self.output}
        return [name for step in self.steps[segment.start : segment.stop] for name in step.made if name in later]

    def _leave_segment(self, number: int) -> None:
        segment = self.segments[number]
        names = {name for step in self.steps[segment.start : segment.stop] for name in (*step.reads, *step.made)}
        for name in names:
            if name in self.storage:
                self._release(self.storage[name], ("segment", number))
                self._release(self.storage[name], ("kept", number))
        for gradient in self.framed.pop(number, []):
            self._release(gradient, ("segment", number))

    def _backward_step(self, index: int) -> None:
        step = self.steps[index]
        made = step.made
        arriving = [name for name in made if name in self.grad]
        for name in step.offloads:
            if not self.storage[name].holders:
                self.nodes.append(alloc(self.storage[name].item))
            self._hold(name, ("saved", index))
        new, taken = self._gradients(step, arriving) if arriving else ([], [])
        for name, storage in new:
            storage.holders.add(("new", name))
        for name in arriving:
            self._release(self.grad.pop(name), ("grad", name))
        for name in dict.fromkeys(step.saves):
            if name in self.storage:
                self._release(self.storage[name], ("saved", index))
        for name, storage in new:
            self._accumulate(name, storage)
            self._release(storage, ("new", name))
        for weight, item in taken:
            self._take(weight, item)

    def _take(self, weight: WeightGrad, item: Item) -> None:
        """The engine takes a weight gradient at once; where it steps the optimizer with it, that has temporaries."""
        used = [
            self._item(Buffer(f"{weight.param}.step{at}", dtypes.size_bytes(weight.numel, dtype), f"optimizer step of {weight.param}"),
                       "transient", "the optimizer's step inside the backward")
            for at, dtype in enumerate(self.grad_rule.temporaries)
        ]  # fmt: skip
        self.nodes += [*(alloc(one) for one in used), *(free(one) for one in used), free(item)]

    def _gradients(
        self, step: Step, arriving: list[str]
    ) -> tuple[list[tuple[str, _Storage]], list[tuple[WeightGrad, Item]]]:
        """What a node's own backward makes, handed on after it has let go of its own: gradients of its reads, and of weights
        those that the engine takes at once."""
        scratch = [self._item(buffer, "transient", f"backward of {step.name}") for buffer in step.backward_scratch]
        self.nodes.extend(alloc(item) for item in scratch if item.bytes)
        made: list[tuple[str, _Storage]] = []
        for name in dict.fromkeys(step.reads):
            if name in step.no_grad or (name == self.input and not self.input_grad):
                continue
            if name in step.passes and arriving:
                made.append((name, self.grad[arriving[0]]))
            elif name in step.reuses:
                made.append((name, self.storage[name]))
            else:
                made.append((name, self._alloc(self._grad_item(name))))
                made[-1][1].is_view = name in step.view_grads
        taken = [(weight, item) for weight in step.weights if (item := self._weight_grad(weight)) is not None]
        self.nodes.extend(free(item) for item in scratch if item.bytes)
        return made, taken

    def _grad_item(self, name: str) -> Item:
        if name == self.input:
            return boundary_grad(self.input_bytes)
        forward = self.storage[name].item
        key = (name, self._bytes(name), "gradient")
        if key not in self.items:
            self.items[key] = Item(
                category="transient",
                what=f"gradient of {forward.what}",
                bytes=self._bytes(name),
                formula=forward.formula,
                lives="its consumer's backward to its producer's",
            )
        return self.items[key]

    def _accumulate(self, name: str, storage: _Storage) -> None:
        before = self.grad.get(name)
        if before is None:
            storage.holders.add(("grad", name))
            self.grad[name] = storage
            return
        if len(before.holders) > 1 or before.is_view:  # somebody else still has the first: the sum is a new tensor
            total = self._alloc(self._grad_item(name))
            total.holders.add(("grad", name))
            self._release(before, ("grad", name))
            self.grad[name] = total

    def _weight_grad(self, weight: WeightGrad) -> Item | None:
        """Makes a weight's gradient; returns the tensor that the engine takes at once, if any.

        A weight that is used several times gathers its gradients first: the second is added out of place where the first is a view
        of a matmul's result, later ones in place.
        """
        rule = self.grad_rule
        if rule.mode == "fused" and weight.fusable:
            return None
        self.uses[weight.param] -= 1
        made = self._grad_of(weight, weight.dtype)
        self.nodes.append(alloc(made))
        first = weight.param not in self.grads
        taken = rule.mode in ("add", "fused") and not self.uses[weight.param] and weight.param not in rule.pending
        if first and taken:
            return made
        if not first:
            self._join(weight, made)
            return self.grads.pop(weight.param) if taken else None
        if rule.mode in ("add", "fused") or rule.dtype is None or rule.dtype == weight.dtype:
            self.grads[weight.param] = made
            if weight.fusable:
                self.grad_views.add(weight.param)
            return None
        kept = self._grad_of(weight, rule.dtype)
        self.nodes.append(alloc(kept))
        self.grads[weight.param] = kept
        self.nodes.append(free(made))
        return None

    def _join(self, weight: WeightGrad, made: Item) -> None:
        before = self.grads[weight.param]
        if weight.param in self.grad_views:
            self.grad_views.remove(weight.param)
            self.nodes += [alloc(before), free(before)]
        self.nodes.append(free(made))

    def _grad_of(self, weight: WeightGrad, dtype: str) -> Item:
        key = (weight.param, weight.numel, dtype)
        if key not in self.items:
            self.items[key] = Item(
                category="gradients",
                what=f"gradient of {weight.param}",
                bytes=round_up(dtypes.size_bytes(weight.numel, dtype)),
                formula=f"{weight.numel} elements x {dtypes.bits(dtype) / 8:g} B ({dtype})",
                lives="its backward until the engine takes it",
            )
        return self.items[key]

    def _hand_over(self) -> None:
        """What is left: the input's gradient becomes the previous block's; anything else would be a leak."""
        last = self.grad.pop(self.input, None) if self.input is not None else None
        if last is not None and last.item is not boundary_grad(self.input_bytes):
            self.nodes += [free(last.item), alloc(boundary_grad(self.input_bytes))]
        for name in list(self.grad):
            self._release(self.grad.pop(name), ("grad", name))
        for name in list(self.storage):
            storage = self.storage[name]
            assert not storage.holders or name == self.output, (name, storage.holders)

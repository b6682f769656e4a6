"""What FSDP2 does around each block: gather before, drop after, reduce behind. torch distributed/fsdp/_fully_shard/_fsdp_param_group.py.

Forward: the all-gather output of one group lives until the next group's is copied out. Backward: the next group is gathered while one
computes; its reduce-scatter's input lives until the next group reduces.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from ullage.engines.fsdp2.policy import Units
from ullage.engines.fsdp2.units import Unit
from ullage.engines.replica import joined
from ullage.frozen import frozen
from ullage.memory.block import BlockProgram
from ullage.memory.chunk import Element, Wrap
from ullage.memory.program import Item, Node, Sequence, alloc, free


@frozen
class Sync:
    """reduces: this backward ends with reduce-scatters. first: no earlier micro-batch left gradients.

    unsynced_before: earlier micro-batches left unsharded gradients.
    """

    reduces: bool = True
    first: bool = True
    unsynced_before: bool = False


_EVERY_TIME = Sync()


def gather(unit: Unit) -> list[Node]:
    """Start of an all-gather: cast the shard, write the output; the cast shard goes at once."""
    nodes: list[Node] = []
    if unit.flat:
        return [*take([unit.cast]), *take(unit.gathered), *drop([unit.cast])]
    if unit.staging is None:
        return nodes
    if unit.cast is not None:
        nodes.append(alloc(unit.cast))
    nodes.append(alloc(unit.staging))
    if unit.cast is not None:
        nodes.append(free(unit.cast))
    return nodes


def copy_out(unit: Unit) -> list[Node]:
    """The parameters, out of the all-gather's output; a flat parameter was gathered where it stays."""
    return [] if unit.flat else take(unit.gathered)


def drop(items: Iterable[Item | None]) -> list[Node]:
    return [free(item) for item in items if item is not None]


def take(items: Iterable[Item | None]) -> list[Node]:
    return [alloc(item) for item in items if item is not None]


class ShardedWrap(Wrap):
    """The wrap of one pass of one chunk. ``resident``: parameters stay gathered for the whole step (pipelines), but for those of units
    that reshard, which go after a forward. closed: they went, and this pass gathers them again.

    views: weights, by qualified name, whose gradient is a view of a matmul's result.
    halved: the backward makes no weights' gradients; ``weights`` does. waiting: those of an earlier micro-batch wait in the type that they
    were made in, until this pass's hooks cast them.
    """

    def __init__(
        self,
        units: Units,
        sync: Sync = _EVERY_TIME,
        *,
        resident: bool = False,
        closed: bool = True,
        views: Container[object] = (),
        halved: bool = False,
        waiting: bool = False,
    ) -> None:
        self.units = units
        self.sync = sync
        self.resident = resident
        self.closed = closed
        self.views = views
        self.halved = halved
        self.waiting = waiting

    def _unit(self, element: Element | None) -> Unit | None:
        return None if element is None else self.units.unit(element.block)

    def _reshards(self, unit: Unit, element: Element, after: Element | None) -> bool:
        """``after``: the next block of the model, which tells the last layer."""
        is_last = element.block.role == "layer" and (after is None or after.block.role == "head")
        return unit.reshards and not (is_last and self.units.last_stays)

    # -- forward

    def forward(self, element: Element, node: Node, previous: Element | None, following: Element | None) -> Node:
        unit = self._unit(element)
        if unit is None or (self.resident and not unit.reshards):
            return node
        before = self._unit(previous) or (None if self.resident else self.units.root)
        after: list[Node] = []
        if self._reshards(unit, element, following):
            after = [*take([unit.kept]), *drop(unit.gathered)]
        if not self.closed:
            return Sequence([node, *after])
        # the frame that copies out names the output before it to its end (_fsdp_param_group.py, wait_for_unshard)
        copied = [*copy_out(unit), *drop([before.staging] if before is not None else [])]
        return Sequence([*gather(unit), *copied, node, *after])

    def before_forward(self) -> list[Node]:
        """The root's parameters, gathered first; their all-gather output waits for the next group."""
        root = self.units.root
        if root is None or self.resident:
            return []
        return [*gather(root), *copy_out(root)]

    def after_forward(self, last: Unit | None) -> list[Node]:
        """The last group's all-gather output goes at the end of the root's forward."""
        unit = last or self.units.root
        gathered = unit is not None and self.closed and (unit.reshards or not self.resident)
        return drop([unit.staging]) if unit is not None and gathered else []

    # -- backward

    def backward(
        self, element: Element, program: BlockProgram, previous: Element | None, following: Element | None
    ) -> Node:
        unit = self._unit(element)
        nodes: list[Node] = []
        if unit is not None and self.closed and self._reshards(unit, element, previous):
            nodes += [*drop([unit.kept]), *([] if previous is not None else gather(unit))]
            nodes += [*copy_out(unit), *drop([unit.staging])]
        fetch = self._prefetch(following, element)
        if element.size > 1 and unit is not None and unit.reshards and not self.resident:
            nodes += self._group(element.size - 1, unit, program, fetch)
        elif element.block.role == "head" and not self.units.loss_in_root:
            # the gather ahead follows the loss's own backward, which is by far the larger part of this node
            nodes += [program.backward, *fetch]
        else:
            nodes += [*fetch, program.backward]
        if self.halved:
            return Sequence([*nodes, *(self.cast(element, program) if self.waiting else [])])
        if (
            unit is None
        ):  # its gradients wait for the root; those of a tied weight's first use are added to its second's
            for name, item in program.grads:
                if f"{element.block.name}.{name}" in self.units.joined:
                    nodes += self._join(f"{element.block.name}.{name}", item)
        else:
            grads = [(f"{element.block.name}.{name}", item) for name, item in program.grads]
            nodes += self._reduce(unit, grads, self._unit(previous))
            nodes += drop(item for _, item in grads) if self.waiting else []
            # of several blocks under one checkpoint each reduces by itself; here after all of them
            for _ in range(element.size - 1):
                again = [alloc(unit.joined_gradient)] if unit.flat else []
                nodes += [*again, *self._reduce_again(unit)]
        return Sequence(nodes)

    @property
    def whole(self) -> ShardedWrap:
        """The same around a backward that is not halved."""
        return ShardedWrap(
            self.units, self.sync, resident=self.resident, closed=self.closed, views=self.views, waiting=self.waiting
        )

    def weights(self, element: Element, program: BlockProgram) -> Node:
        """The second half of a backward: gradients that wait as they were made, or are where they add up already."""
        unit = self._unit(element)
        if unit is not None and unit.types.compute == unit.types.reduce:
            grads = [(f"{element.block.name}.{name}", item) for name, item in program.grads]
            return Sequence([program.weights, *self._reduce(unit, grads, None)])
        mixed = unit or self.units.root
        adds = self.waiting and mixed is not None and mixed.types.compute != mixed.types.reduce
        return Sequence([program.weights, *(drop(item for _, item in program.grads) if adds else [])])

    def cast(self, element: Element, program: BlockProgram) -> list[Node]:
        """Gradients that waited, cast to where they add up."""
        unit = self._unit(element)
        return [] if unit is None else self._casts(unit, [item for _, item in program.grads])

    def _casts(self, unit: Unit, grads: list[Item]) -> list[Node]:
        return [*([] if self.sync.unsynced_before else take(unit.accumulated)), *drop(grads)]

    def _group(self, others: int, unit: Unit, program: BlockProgram, fetch: list[Node]) -> list[Node]:
        """The backward of blocks under one checkpoint: what runs again gathers each, and each stays until its own backward, the first of
        which gathers ahead."""
        again = [node for _ in range(others) for node in (*gather(unit), *copy_out(unit), *drop([unit.staging]))]
        gone = [node for _ in range(others) for node in drop(unit.gathered)]
        return [*again, program.backward, *gone, *fetch]

    def _join(self, name: str, later: Item) -> list[Node]:
        """A tied weight's gradient of its first use, and that of its second, which is there already."""
        root = self.units.root
        assert root is not None, name
        if root.flat:  # both are parts of one gradient to come
            return [free(later)]
        first = root.own_gradient(name, root.types.compute)
        return joined(later, first, in_place=self.units.joined[name] not in self.views)

    def _reduce_again(self, unit: Unit) -> list[Node]:
        if self.sync.reduces:
            grads = [unit.joined_gradient] if unit.flat else []
            if self.sync.unsynced_before:
                grads = [*grads, *unit.accumulated]
            return [*drop([unit.reduce_input]), *reduce_scatter(unit, grads, first=self.sync.first)]
        made = [] if self.sync.unsynced_before else take(unit.accumulated)
        return [*made, *drop([unit.joined_gradient] if unit.flat else [])]

    def _prefetch(self, following: Element | None, element: Element) -> list[Node]:
        """One group ahead, in the reversed order of the forward. What an engine does not wrap fetches none."""
        if element.block.role in ("between", "loss"):
            return []
        unit = self._unit(following)
        if not self.closed or unit is None or following is None or not self._reshards(unit, following, element):
            return []
        return gather(unit)

    def _reduce(self, unit: Unit, named: list[tuple[str, Item]], before: Unit | None) -> list[Node]:
        """End of a group's backward: drop the parameters, copy the gradients into the reduction's input, reduce.

        named: the gradients, by their parameters' qualified names.
        """
        sync = self.sync
        nodes: list[Node] = []
        grads = [item for _, item in named]
        if unit.flat:
            nodes, grads = [alloc(unit.joined_gradient), *drop(grads)], [unit.joined_gradient]
        if not sync.reduces:
            if not self.resident:
                nodes += drop(unit.gathered)
            if not sync.unsynced_before and unit.types.compute == unit.types.reduce:
                return [*nodes, *drop(grads), *take(unit.accumulated)]  # the same tensors: nothing is cast
            if not sync.unsynced_before:
                return [*nodes, *take(unit.accumulated), *drop(grads)]
            return [*nodes, *drop(grads)]
        if sync.unsynced_before:
            nodes += drop(grads)
            grads = list(unit.accumulated)
            named = [(shape.name, item) for shape, item in zip(unit.reduced, grads, strict=True)]
        for name, item in [] if unit.flat else named:
            cut = unit.cut_gradient(name, accumulated=sync.unsynced_before)
            if cut is not None:
                nodes += [alloc(cut), free(item)]
                grads[grads.index(item)] = cut
        nodes += drop([before.reduce_input] if before is not None else [])
        if not self.resident:
            nodes += drop(unit.gathered)
        return [*nodes, *reduce_scatter(unit, grads, first=sync.first)]

    def after_backward(self, root_grads: list[tuple[str, Item]], last: Unit | None) -> list[Node]:
        """The root's reduction; then the last reduce-scatter input goes."""
        root = self.units.root
        if root is None:
            return drop([last.reduce_input]) if last is not None and self.sync.reduces else []
        if self.halved:
            return self._casts(root, [item for _, item in root_grads]) if self.waiting else []
        nodes = self._reduce(root, root_grads, last)
        nodes += drop(item for _, item in root_grads) if self.waiting else []
        return [*nodes, *drop([root.reduce_input])] if self.sync.reduces else nodes


def reduce_scatter(unit: Unit, grads: list[Item], *, first: bool) -> list[Node]:
    """Copy-in beside the gradients, which then go; the output is the sharded gradient, or is added to the one that is there.

    Of shards on the host it is copied there, whether or not it is the first (_fsdp_collectives.py, foreach_reduce)."""
    if unit.flat:
        nodes: list[Node] = [*take([unit.cast_gradient, unit.reduce_output])]
    else:
        nodes = [*take([unit.reduce_input]), *drop(grads), *take([unit.reduce_output])]
    made = unit.gradient if first or unit.gradient_leaves else unit.added
    nodes.append(alloc(made))
    nodes += drop([unit.reduce_output])
    if not first or unit.gradient_leaves:
        nodes.append(free(made))
    if unit.flat:
        nodes += [*drop([unit.cast_gradient]), *drop(grads)]
    return nodes

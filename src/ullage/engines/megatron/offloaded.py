"""--cpu-offloading: what the first n layers save waits on the host, copied on a stream of its own.

Source: TransformerEngine pytorch/cpu_offload.py (DefaultOffloadSynchronizer; _check_if_offload), Megatron-Core transformer_config.py (what
it does not go with). A layer is let go of as the forward of the one begins that is as many layers later as stay, and is brought back
as many ahead of its backward: never more than ``layers - n`` layers' tensors are on the device.
"""

from __future__ import annotations

from ullage.engines.base import pinned
from ullage.errors import Infeasible, Unsupported
from ullage.frozen import replace
from ullage.job.job import Job
from ullage.memory.block import BlockProgram, GradRule
from ullage.memory.chunk import PLAIN, Element, Replayer, Wrap
from ullage.memory.program import Item, Node, Sequence, alloc, free, net
from ullage.model.graph import Block
from ullage.units import MIB

LAYERS = "cpu_offloading_num_layers"

LEAST_BYTES = MIB // 2
"""Of a tensor that goes: 256 x 1024 elements, taken as bf16's. Statistics of rows stay."""

MAKES_WAY = "makes way"
"""Mark of a layer that begins with what an earlier one saved let go."""

Stash = tuple[tuple[Item, int], ...]


def layers_of(job: Job) -> int:
    """How many layers wait on the host."""
    options = job.engine.options
    if job.engine.name != "megatron" or False in (
        options.get("cpu_offloading", True),
        options.get("cpu_offloading_activations", True),
    ):
        return 0
    said = options.get(LAYERS, 0)
    return said if isinstance(said, int) else 0


def refuse(job: Job, layers: int) -> None:
    """What Megatron-Core refuses too, and what is not modelled."""
    count, key = layers_of(job), f"engine.options.{LAYERS}"
    if not count:
        return
    if count >= layers:
        raise Infeasible("leaves no layer on the device", key=key, value=count, allowed=f"less than {layers}")
    for what, value, rest in (("layout.pp", job.layout.pp, 1), ("recompute", job.recompute.kind, "none")):
        if value != rest:
            raise Infeasible(f"does not go with {what} = {value}", key=key, value=count, remedy=f"set {what}: {rest}")
    if job.engine.options.get("cpu_offloading_weights"):
        raise Unsupported("is not modelled", key="engine.options.cpu_offloading_weights", value="true")


def stash(block: Block, replayer: Replayer) -> Stash:
    """What a layer's forward leaves of a size to go, with the stream that it was given."""
    left = net(replayer.program(block, PLAIN, GradRule()).forward)
    return tuple((item, count) for item, count in left.items() if count > 0 and item.bytes >= LEAST_BYTES)


def marked(elements: list[Element], count: int) -> list[Element]:
    """The last ``count`` layers make way for themselves."""
    first = sum(one.block.role == "layer" for one in elements) - count
    found, at = [], 0
    for one in elements:
        is_layer = one.block.role == "layer"
        found.append(replace(one, mark=MAKES_WAY) if is_layer and at >= first else one)
        at += is_layer
    return found


def host_bytes(block: Block, replayer: Replayer, count: int) -> int:
    """Of one rank: a pinned block for each tensor of each layer."""
    return count * sum(pinned(item.bytes) * many for item, many in stash(block, replayer))


class OffloadedLayers(Wrap):
    """Around layers of one kind, within what else the engine does around blocks."""

    def __init__(self, found: Stash, inner: Wrap) -> None:
        self.stash = found
        self.inner = inner

    def forward(self, element: Element, node: Node, previous: Element | None, following: Element | None) -> Node:
        inner = self.inner.forward(element, node, previous, following)
        gone = [free(item, count) for item, count in self.stash] if element.mark == MAKES_WAY else []
        return Sequence([*gone, inner])

    def backward(
        self, element: Element, program: BlockProgram, previous: Element | None, following: Element | None
    ) -> Node:
        """``previous``: the layer after this one, whose backward has made room for one more."""
        inner = self.inner.backward(element, program, previous, following)
        room = previous is not None and previous.mark == MAKES_WAY
        back = [alloc(item, count) for item, count in self.stash] if room else []
        return Sequence([*back, inner])

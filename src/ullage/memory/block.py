"""A block of the model in a step of training: the steps that it runs, the program they become, what it hands on."""

from __future__ import annotations

from functools import cache

from ullage.frozen import frozen
from ullage.kernels.step import Segment, Slot, Step
from ullage.memory.program import EMPTY, Item, Node, Sequence, round_up


@frozen
class BlockSteps:
    """The steps of a block from its input to its output, and the segments of them that are recomputed.

    input: the tensor that another block hands on (of input_bytes), if any. keeps_input: whether a segment that reads it keeps it;
    else the longer segment around this block does.
    output_grad: whether the output's gradient arrives as one tensor of its size (else the steps say what they receive).
    handed: names of what crosses beside the stream (kernels/step.py) that is handed for good: what the block lends is another's to
    free, what it borrows is its own, and so with gradients (memory/handing.py). Of a gradient that several blocks add up: that this
    block makes it (gradient_of).
    owns_input: whether it lets go of its input; else whoever gave it keeps it (a stage's receive buffer).
    ends: whether nothing runs after it, so that nobody holds the graph behind its last weight.
    """

    steps: tuple[Step, ...]
    input: str | None
    input_bytes: int = 0
    output: str
    segments: tuple[Segment, ...] = ()
    keeps_input: bool = True
    output_grad: bool = True
    handed: frozenset[str] = frozenset()
    owns_input: bool = True
    ends: bool = False

    def __post_init__(self) -> None:
        made = [name for step in self.steps for name in step.made]
        assert len(made) == len(set(made)), sorted(name for name in set(made) if made.count(name) > 1)


@frozen
class GradRule:
    """What becomes of a weight gradient that autograd makes.

    mode: "keep" (it stays, as ``dtype``), "add" (added to one that is there already, then freed), "fused" (the matmul adds
    into the accumulator: no tensor; of other ops, as "add"). dtype None: as autograd makes it.
    temporaries: with "add", element types of what the engine allocates, as large as the weight, to use the gradient up at once
    (an optimizer inside the backward). pending: weights whose gradients wait all the same (another block uses them too).
    added: weights whose gradients are added to one that is there already, whatever the mode.
    halves: whether a schedule makes weights' gradients later than the input's, and what waits for that: "matmuls" (what a matmul saved
    and its output's gradient; other weights have theirs at once), "all" (every weight, and everything that the forward saved up to the last
    of them).
    """

    mode: str = "keep"
    dtype: str | None = None
    temporaries: tuple[str, ...] = ()
    pending: frozenset[str] = frozenset()
    added: frozenset[str] = frozenset()
    halves: str | None = None


@frozen
class BlockProgram:
    """forward takes over the block's input and leaves its output and what it saved; backward undoes that.

    backward starts with the gradient of the output live and leaves that of the input, and under GradRule "keep" ``grads``.
    cached: left by forward beyond its output and what it saved, until the forward's context exits.
    views: of grads, those that are views of a matmul's result.
    weights: under GradRule.halves what the backward leaves for later; ``grads`` are there when it is through. left: what goes once the
    whole chunk's first half is through. begun: of each weight the child of ``backward`` at which the node that makes its gradient begins.
    """

    forward: Node
    backward: Node
    grads: tuple[tuple[str, Item], ...]
    cached: tuple[Item, ...] = ()
    views: frozenset[str] = frozenset()
    weights: Sequence = EMPTY
    left: tuple[Item, ...] = ()
    begun: tuple[tuple[str, int], ...] = ()


@cache
def boundary(n_bytes: int) -> Item:
    """The tensor that one block hands to the next."""
    return Item(
        category="activations",
        what="residual stream between blocks",
        bytes=round_up(n_bytes),
        formula="output of one block, input of the next",
        lives="its block's forward to the next block's backward",
    )


@cache
def carried(n_bytes: int, slot: Slot, what: str) -> Item:
    """A tensor beside the stream that a later block reads."""
    return Item(
        category="activations",
        what=what,
        bytes=round_up(n_bytes),
        formula=f"made in one block, read in later ones ({slot})",
        lives="its block's forward to the last block that keeps it",
    )


@cache
def carried_grad(n_bytes: int, slot: Slot) -> Item:
    """The gradient of a tensor beside the stream, from the block that read it to the one that made it."""
    return Item(
        category="transient",
        what="gradient of a tensor that skips blocks",
        bytes=round_up(n_bytes),
        formula=f"made in one block's backward for an earlier one ({slot})",
        lives="its reader's backward to its maker's",
    )


@cache
def boundary_grad(n_bytes: int) -> Item:
    """The gradient of the tensor that one block hands to the next."""
    return Item(
        category="transient",
        what="gradient of the residual stream",
        bytes=round_up(n_bytes),
        formula="gradient handed from one block's backward to the one before",
        lives="one block's backward to the next",
    )

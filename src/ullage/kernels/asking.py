"""Which tensors ask for a gradient where only a part of a model is trained, and what a backward then does without.

Autograd records a node where an input or a weight of it asks for a gradient, and saves for the gradients that it will make
(torch/csrc/autograd, derivatives.yaml; tools/autograd/gen_variable_type.py guards each saved input by ``requires_grad`` of the others).
"""

from __future__ import annotations

from collections.abc import Collection

from ullage.frozen import replace
from ullage.kernels.step import Step
from ullage.model.graph import Block


def asked(block: Block, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """A block's steps, with no more of a backward than its trained parameters and its input ask for."""
    trained = {param.name for param in block.params if param.trainable}
    if len(trained) == len(block.params) and block.input.grad:
        return steps
    asking = {block.input.name} if block.input.grad and block.role != "embedding" else set()
    found = []
    for step in steps:
        left = _asked(step, trained, asking)
        if left.weights or any(name in asking and name not in left.no_grad for name in left.reads):
            asking.update(step.made)
        found.append(left)
    return tuple(found)


def _asked(step: Step, trained: Collection[str], asking: Collection[str]) -> Step:
    weights = tuple(weight for weight in step.weights if weight.param in trained)
    silent = {name for name in step.reads if name not in asking} | set(step.no_grad)
    of = {name for name in step.reads if name not in silent} | {weight.param for weight in weights}
    if not of:
        return replace(
            step,
            saves=(),
            backward_scratch=(),
            fits=(),
            passes=(),
            reuses=(),
            hands=(),
            offloads=(),
            no_grad=step.reads,
            weights=(),
            summed=(),
            view_grads=(),
            sends=(),
            receives=(),
        )
    idle = {name for name, served in step.serves if not of & set(served)}
    return replace(
        step,
        saves=tuple(name for name in step.saves if name not in idle),
        backward_scratch=tuple(one for one in step.backward_scratch if one.name not in idle),
        fits=tuple(fit for fit in step.fits if fit.read in of),
        no_grad=tuple(name for name in dict.fromkeys(step.reads) if name in silent),
        weights=weights,
        summed=tuple(name for name in step.summed if name in of),
        view_grads=tuple(name for name in step.view_grads if name in of),
    )

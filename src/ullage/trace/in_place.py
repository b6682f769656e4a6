"""What autograd does in place in a run, and out of place where it sees a dispatch mode or fake tensors.

A second gradient is added into the first where nobody else holds that one and it is no view (torch/csrc/autograd/input_buffer.cpp,
can_accumulate_inplace); the gradient of an index is written into zeros made for it (torch/csrc/autograd/FunctionsManual.cpp,
index_backward, gather_backward, value_selecting_reduction_backward). Under a dispatch mode (isTensorSubclassLike) each makes a new
tensor instead and lets the old one go at once. What is taken over so is one allocation in a run, and one life in a trace. A DTensor's
gradients are added out of place in a run too.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ullage.trace.recorder import Recorder

_SUM = torch.ops.aten.add.Tensor
_INTO_ZEROS = frozenset(
    {torch.ops.aten.index_put.default, torch.ops.aten.scatter.src, torch.ops.aten.scatter_add.default}
)
_ENGINE = "_engine_run_backward"
"""The Python frame from which autograd's engine calls ops; a backward written in Python has its own (torch/autograd/graph.py)."""
_WRAPPERS = frozenset({"torch._dynamo.eval_frame", "torch._compile"})
"""Modules whose frames torch puts around a dispatch."""


def written_over(recorder: Recorder, func: Any, args: Any) -> int | None:
    """The storage that a run would write this op's result into, provided that it goes as the op ends; by its key."""
    if not recorder.backwards or torch.is_grad_enabled() or not (func is _SUM or func in _INTO_ZEROS):
        return None
    if not _called_by_the_engine():
        return None
    first: torch.Tensor = args[0]
    untyped = first.untyped_storage()
    storage = recorder.storages.get(untyped._cdata)
    if storage is None or storage.life is None or first._is_view() or untyped.nbytes() != first.nbytes:
        return None
    handed_in = storage.life.node != recorder.places.number()  # a node's own sums are of what it made itself
    if handed_in if func is _SUM else storage.life.op == "aten.new_zeros":
        key: int = untyped._cdata
        return key
    return None


def _called_by_the_engine() -> bool:
    """Whether the op that a recorder's ``__torch_dispatch__`` is in was called by autograd's own C++."""
    frame = sys._getframe(3)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _WRAPPERS:
        frame = frame.f_back
    return frame.f_code.co_name == _ENGINE

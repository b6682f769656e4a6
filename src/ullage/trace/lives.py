"""What a recorder keeps of a storage while it runs, and what it says of it in the end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ullage.trace.events import Allocation, Mark


class Storage(weakref.ref[torch.UntypedStorage]):
    """What is known of one storage, over all the lives that ``resize_`` gives it; it refers to it weakly, and hears of its end."""

    __slots__ = ("category", "communicates", "key", "life", "lives", "name")

    def __init__(self, untyped: torch.UntypedStorage, gone: Callable[[Storage], None]) -> None:
        super().__init__(untyped, gone)  # type: ignore[call-arg]
        self.key = untyped._cdata
        self.category = ""
        self.name = ""
        self.communicates = False
        self.life: Life | None = None  # the one that lasts
        self.lives: list[Life] = []


class Life:
    """One stretch of a storage's being allocated. number: how many began before it."""

    __slots__ = (
        "birth", "bytes", "death", "dtype", "mark", "module", "node", "number", "op", "recompute", "rewritten", "shape", "storage",
        "stream",
    )  # fmt: skip

    def __init__(self, storage: Storage, number: int, n_bytes: int, birth: int) -> None:
        self.storage = storage
        self.number = number
        self.bytes = n_bytes
        self.birth = birth
        self.death: int | None = None
        self.module = self.op = self.dtype = ""
        self.shape: tuple[int, ...] = ()
        self.stream = self.mark = 0
        self.recompute = 0  # the recomputation that it was born in, 0: none
        self.rewritten: list[int] = []  # when a result was written over it
        self.node = 0  # the number of the autograd node in whose backward it was born, 0: in none


def allocation(life: Life, marks: Sequence[Mark], recomputes: Sequence[int], end: int) -> Allocation:
    """What is said of a life whose storage is gone, or with which the trace ends; later marks change nothing of it.

    marks: the phases. recomputes: when each recomputation ended. end: when the trace did.
    """
    return Allocation(
        bytes=life.bytes,
        category=_category(life, marks, recomputes, end),
        module=life.module,
        op=life.op,
        birth=life.birth,
        death=life.death,
        phase=_phase(marks[life.mark]),
        dtype=life.dtype,
        shape=life.shape,
        name=life.storage.name,
        stream=life.stream,
        rewritten=tuple(life.rewritten),
    )


@cache
def _phase(mark: Mark) -> str:
    return str(mark)


def _category(life: Life, marks: Sequence[Mark], recomputes: Sequence[int], end: int) -> str:
    storage, mark = life.storage, marks[life.mark]
    if storage.category:
        return storage.category
    if storage.communicates:
        return "communication"
    death = end if life.death is None else life.death
    if life.recompute:
        ends = recomputes[life.recompute] if life.recompute < len(recomputes) else end
        return "activations" if death > ends else "transient"
    if mark.what == "load":
        return "input" if death > next((one.at for one in marks if one.step), death) else "transient"
    if mark.what != "forward":
        return "transient"
    backward = next((one.at for one in marks[life.mark :] if one.what == "backward"), None)
    return "activations" if backward is not None and death >= backward else "transient"


def inner_tensors(tensor: Any) -> Iterator[torch.Tensor]:
    """The plain tensors that a wrapper such as DTensor is made of; the tensor itself where it is none."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):  # a DTensor names its mesh too
                yield from inner_tensors(inner)
    else:
        yield tensor


def tensors_in(*values: Any) -> Iterator[torch.Tensor]:
    """The tensors among an op's arguments or results, which are tensors, numbers and containers of such (pytrees cost ten times more)."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(*value)
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())


def device_type(tensor: torch.Tensor) -> str:
    """A fake tensor is asked directly: its ``device`` is an op of its own."""
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return str(device.type)


_GAPS = {
    "aten.mkldnn_rnn_layer": "what oneDNN's or cuDNN's recurrent kernels reserve for their backward is not counted: torch's fake "
    "kernel does not say it",
}


def gaps(lives: Iterable[Allocation]) -> list[str]:
    """What torch's fake kernels are known to leave out, of the ops that ran."""
    ops = {life.op for life in lives}
    return [note for op, note in _GAPS.items() if op in ops]

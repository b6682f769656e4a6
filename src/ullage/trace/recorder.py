"""Records every storage's birth and death of a run: a dispatch mode that sees each op below autograd, real or fake.

A storage is followed from the op that made it to the moment when Python and C++ have both let go of it, and through every
``resize_`` on the way (FSDP2 frees and refills its gathered parameters so). What it was for is known only at the end: a
transient of the backward that became ``.grad`` is a gradient, a tensor of the forward that died in the backward was saved for it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ullage.errors import Unsupported
from ullage.memory.program import round_up
from ullage.trace import in_place, values
from ullage.trace.events import Allocation, Mark, Trace, TracedOp
from ullage.trace.lives import Life, Storage, allocation, device_type, gaps, inner_tensors, tensors_in
from ullage.trace.places import Places, next_number

COLLECTIVES = ("c10d", "fsdp")
"""Namespaces of ops that work in place on communication buffers (functional collectives make ordinary tensors)."""

_SENDS = frozenset(
    {"c10d::send", "_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor"}
)
"""Ops that read what they are given first, and write elsewhere."""

COLLECT_EVERY = 256
"""Births and deaths (and looks that DTensor takes at shapes) between two collections of young garbage: fake tensors leave closures in
cycles, some 10 MB in a step of Llama 3 8B."""

_DEVICE = torch.ops.prim.device.default


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it innermost. fake: the mode that runs below it, None where the tensors are real. device: whose memory is recorded."""

    def __init__(self, *, fake: FakeTensorMode | None = None, device: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self.device = device
        self.places = Places()
        self.clock = 0
        self.step = 0
        self.paused = 0
        self.marks: list[Mark] = [Mark(at=0, step=0, what="load")]
        self.lives: list[Life | Allocation] = []  # in order of birth; an Allocation once its storage is gone
        self.storages: dict[int, Storage] = {}  # that live, by the address of what they are in C++
        self.shapes: dict[Any, Any] = {}  # one object for each
        self.streams: dict[Any, int] = {}
        self.backwards = 0  # running, one inside the other
        self.recomputes: list[int] = [0]  # when each recomputation ended
        self.model: nn.Module | None = None
        self.ops: list[TracedOp] | None = None  # of the step that runs, where they are asked for
        self.wrapped: Any = None  # the op that a wrapper was last asked for: it asks its inner tensors for the same
        self.over: tuple[int, Storage, int] | None = None  # a storage that another takes over if it goes at this time

    def mark(self, what: str) -> None:
        """A phase begins. What cycles of references held in the one before is let go of, here and at no other moment."""
        if (self.marks[-1].step, self.marks[-1].what) != (self.step, what):
            gc.collect()
            self.marks.append(Mark(at=self.clock + 1, step=self.step, what=what))

    @property
    def phase(self) -> str:
        return self.marks[-1].what

    # -- what happens

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # most calls are this one, from C++
            return args[0].device
        kwargs = kwargs or {}
        if any(map(_is_wrapper, types)):
            self.wrapped = func
            return NotImplemented  # a DTensor runs ops of its own on its inner tensors: those are recorded
        if self.paused or func.namespace == "prim":  # prim asks a tensor for its device
            return func(*args, **kwargs)
        if self.ops is not None:
            self._note(self.ops, func, args, kwargs)
        over = None if self.wrapped is func else in_place.written_over(self, func, args)
        if self.wrapped is func:
            self.wrapped = None
        given = _handed(func, args)
        out = func(*given, **kwargs) if self.fake is None else values.follow(func, args, kwargs, self.fake)
        if func.namespace in COLLECTIVES:
            self._communicates(func, args, kwargs, out)
        if isinstance(out, torch.Tensor) and not _is_wrapper(type(out)):
            heir = self._see(out, func)
            self.over = (over, heir, self.clock) if over is not None and heir is not None else None
        else:
            for tensor in tensors_in(out):
                self._see_result(tensor, func)
        return out

    def _note(self, ops: list[TracedOp], func: Any, args: Any, kwargs: Any) -> None:
        """Adds an op to the list of what ran, with the allocations that it reads."""
        reads = []
        for tensor in tensors_in(args, kwargs):
            if device_type(tensor) == self.device:
                storage = self.storages.get(tensor.untyped_storage()._cdata)
                if storage is not None and storage.life is not None:
                    reads.append(storage.life.birth)
        ops.append(
            TracedOp(
                op=_name(func),
                module=self.places.current(),
                at=self.clock,
                node=self.places.number() if self.backwards else next_number(),
                phase=self.phase,
                reads=tuple(dict.fromkeys(reads)),
                called=self.places.calling,
            )
        )

    def _see_result(self, tensor: torch.Tensor, func: Any) -> None:
        for inner in inner_tensors(tensor) if _is_wrapper(type(tensor)) else (tensor,):
            self._see(inner, func)

    def _see(self, tensor: torch.Tensor, func: Any = None) -> Storage | None:
        """Makes a tensor's storage known; ``func``: the op that returned it."""
        device = device_type(tensor)
        if device != self.device:
            if device not in ("cpu", "meta") and self.fake is not None and not _has(device):
                raise Unsupported(  # autograd would end the process
                    f"makes tensors there, and this torch is built without {device}",
                    key="device",
                    value=tensor.device,
                    remedy="trace on the cpu: the bytes are the same",
                )
            return None
        untyped = tensor.untyped_storage()
        key = untyped._cdata
        storage = self.storages.get(key)
        if storage is None:
            storage = self.storages[key] = Storage(untyped, self._gone)
            self._born(storage, untyped.nbytes(), tensor, func)
        elif func is not None and func._schema.is_mutable:
            self._sized(storage, untyped.nbytes(), tensor, func)
        return storage

    def _born(self, storage: Storage, n_bytes: int, tensor: torch.Tensor | None, func: Any) -> None:
        if not (self.clock + 1) % COLLECT_EVERY:
            gc.collect(0)  # each death has a time of its own
        self.clock += 1
        life = Life(storage, len(self.lives), round_up(n_bytes), self.clock)
        life.module = self.places.current()
        life.op = _name(func) if func is not None else ""
        life.mark = len(self.marks) - 1
        if self.backwards and self.places.recomputing:
            life.recompute = len(self.recomputes)
        if tensor is not None:
            life.dtype = _dtype(tensor.dtype)
            shape = tuple(tensor.shape)
            life.shape = self.shapes.setdefault(shape, shape)
        life.stream = self._stream()
        life.node = self.places.number() if self.backwards else 0
        storage.life = life
        storage.lives.append(life)
        self.lives.append(life)

    def _gone(self, storage: Storage) -> None:
        del self.storages[storage.key]
        if self.over is not None and (self.over[0], self.over[2]) == (storage.key, self.clock):
            self._taken_over(storage, self.over[1])
        else:
            self._died(storage)
        for life in storage.lives:
            self.lives[life.number] = self._settled(life)
        storage.lives.clear()

    def _settled(self, life: Life) -> Allocation:
        return allocation(life, self.marks, self.recomputes, self.clock)

    def _taken_over(self, storage: Storage, heir: Storage) -> None:
        """The life goes on under the result's name, as if the op had written into it."""
        assert self.lives[-1] is heir.life, "the result is the last that was born"
        assert storage.life is not None
        self.lives.pop()
        heir.lives.remove(heir.life)
        heir.life, storage.life = storage.life, None
        storage.lives.remove(heir.life)
        heir.lives.append(heir.life)
        heir.life.storage = heir
        heir.life.rewritten.append(self.clock)

    def _died(self, storage: Storage) -> None:
        if storage.life is not None:
            self.clock += 1
            storage.life.death = self.clock
            storage.life = None

    def _sized(self, storage: Storage, n_bytes: int, tensor: torch.Tensor | None, func: Any) -> None:
        """A storage may have another size than before: then what it had is freed and the new size allocated."""
        before = storage.life
        if (before.bytes if before is not None else 0) == round_up(n_bytes):
            return
        if n_bytes:
            self._born(storage, n_bytes, tensor, func)
            if before is not None:  # the old one goes once its contents are copied
                self.clock += 1
                before.death = self.clock
            elif tensor is None:
                self._like_before(storage)
        else:
            self._died(storage)

    def _like_before(self, storage: Storage) -> None:
        """A refilled storage has the shape and type of its earlier life."""
        if len(storage.lives) > 1:
            earlier, life = storage.lives[-2:]
            life.shape, life.dtype, life.op = earlier.shape, earlier.dtype, earlier.op

    def resized(self, untyped: torch.UntypedStorage) -> None:
        """``UntypedStorage.resize_`` was called: no op, so no dispatch."""
        storage = self.storages.get(untyped._cdata)
        if storage is not None:
            self._sized(storage, untyped.nbytes(), None, None)

    def _stream(self) -> int:
        stream = torch.cpu.current_stream() if self.device == "cpu" else None
        return self.streams.setdefault(stream, len(self.streams))

    def _communicates(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """c10d's ops work in the buffers that they are given; FSDP2's own copy into and out of them."""
        buffers = [args, kwargs, out]
        if func.namespace != "c10d":
            written = {
                one.name: at
                for at, one in enumerate(func._schema.arguments)
                if one.alias_info and one.alias_info.is_write
            }
            buffers = [out, *(args[at] if at < len(args) else kwargs.get(name) for name, at in written.items())]
        for tensor in tensors_in(buffers):
            storage = self.storages.get(tensor.untyped_storage()._cdata)
            if storage is not None:
                storage.communicates = True

    # -- phases, told by run.py and hooks.py

    def begin(self, model: nn.Module, optimizer: Any) -> None:
        """The model is built: what it and its optimizer hold is known by name."""
        self.model = model
        self.places.learn(model)
        self.tag_model(model)
        self.device = next((param.device.type for param in model.parameters()), self.device)
        if isinstance(optimizer, torch.optim.Optimizer):
            self.tag_states(optimizer)

    def begin_step(self, number: int) -> None:
        self.step = number
        self.mark("forward")
        if self.ops is not None:
            self.ops.clear()

    def begin_backward(self) -> int:
        """Returns what ``end_backward`` takes."""
        if not self.backwards:
            self.mark("backward")
        self.backwards += 1
        outer, self.places.base = self.places.base, len(self.places.stack)
        return outer

    def end_backward(self, outer: int) -> None:
        self.backwards -= 1
        self.places.base = outer
        if not self.backwards:
            self.tag_gradients()
            self.mark("between")

    def enter(self, module: nn.Module, args: Any) -> None:
        if not self.places.stack and not self.backwards:
            self.mark("forward")
            for tensor in tensors_in(args):
                if tensor.grad_fn is None:
                    self.tag(tensor, "input", "", only_new=True)
        self.places.enter(module)

    def leave(self) -> None:
        self.places.leave()
        if self.backwards and not self.places.recomputing:
            self.recomputes.append(self.clock)

    # -- what things are for

    def tag(self, tensor: torch.Tensor | None, category: str, name: str, *, only_new: bool = False) -> None:
        """Says what a tensor is for. only_new: unless it is known already."""
        if tensor is None:
            return
        for inner in inner_tensors(tensor):
            storage = self._see(inner)
            if storage is not None and not (only_new and storage.category):
                storage.category = category
                storage.name = name

    def tag_model(self, model: nn.Module) -> None:
        for name, buffer in model.named_buffers():
            self.tag(buffer, "buffers", name)
        for name, param in model.named_parameters():
            self.tag(param, "parameters", name)
            self.tag(getattr(param, "ds_tensor", None), "parameters", name)  # DeepSpeed's shard of it, under ZeRO-3

    def tag_gradients(self) -> None:
        """What is in ``.grad`` now."""
        if self.model is not None:
            for name, param in self.model.named_parameters():
                self.tag(param.grad, "gradients", name, only_new=True)

    def tag_states(self, optimizer: torch.optim.Optimizer) -> None:
        for param, state in optimizer.state.items():
            name = self.places.params.get(id(param), "")
            self.tag(param, "optimizer", "master parameters", only_new=True)  # what is no parameter of the model
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    self.tag(value, "optimizer", f"{name}.{key}", only_new=True)

    # -- the answer

    def trace(self, name: str, *, rank: int = 0, world: int = 1, notes: Iterable[str] = ()) -> Trace:
        lives = [self._settled(life) if isinstance(life, Life) else life for life in self.lives]
        return Trace(
            name=name,
            allocations=tuple(one for one in lives if one.bytes),
            marks=tuple(self.marks),
            end=self.clock + 1,
            modules=tuple(self.places.classes.items()),
            rank=rank,
            world=world,
            notes=(*notes, *gaps(lives)),
            ops=tuple(self.ops or ()),
            frozen=self._frozen(),
        )

    def _frozen(self) -> frozenset[str]:
        params = self.model.named_parameters() if self.model is not None else ()
        return frozenset(name for name, param in params if not param.requires_grad)


def _handed(func: Any, args: Any) -> Any:
    """What gloo is to send as a copy, which is not counted: gloo holds it until its threads and its Work have gone; NCCL does not."""
    if func._schema.name not in _SENDS:
        return args
    first = args[0]
    copied = first.clone() if isinstance(first, torch.Tensor) else [one.clone() for one in first]
    return (copied, *args[1:])


def _has(device: str) -> bool:
    module = getattr(torch, device, None)
    return module is not None and module._is_compiled()


@cache
def _is_wrapper(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


@cache
def _name(func: Any) -> str:
    name: str = func._schema.name
    return name.replace("::", ".")


@cache
def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

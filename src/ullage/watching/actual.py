"""What a process holds while a loop runs: the allocator's own counters on a GPU, storages followed on the CPU."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import Literal

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ullage.trace.hooks import watching
from ullage.trace.recorder import Recorder
from ullage.train.watched import Held


class Actual:
    """Entered before the first step and left after the last. steps: those of the first optimizer that stepped."""

    how: Literal["allocator", "storages", "nothing"] = "nothing"
    device = "no device"

    def __init__(self) -> None:
        self.steps = 0
        self.stack = ExitStack()
        self._optimizer: object = None

    def start(self) -> None:
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer))
        self.stack.callback(hook.remove)

    def stop(self) -> Held | None:
        self.stack.close()
        return None

    def stepped(self) -> None:
        """A step has ended."""

    def _stepped(self, optimizer: object) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer is self._optimizer:
            self.steps += 1
            self.stepped()


class Counters(Actual):
    """torch's caching allocator, whose peaks are reset at the start."""

    how = "allocator"

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.cuda.get_device_name()

    def start(self) -> None:
        super().start()
        torch.cuda.reset_peak_memory_stats()

    def stop(self) -> Held | None:
        super().stop()
        free, total = torch.cuda.mem_get_info()
        return Held(
            allocated_bytes=torch.cuda.max_memory_allocated(),
            reserved_bytes=torch.cuda.max_memory_reserved(),
            device_bytes=total - free,
        )


class Storages(Actual):
    """Every storage that the model, its optimizer and the steps make, followed from the op that made it to its end."""

    how = "storages"
    device = "the CPU"

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        super().__init__()
        self.model = model
        self.optimizer = optimizer
        self.recorder = Recorder()

    def start(self) -> None:
        gc.collect()
        gc.freeze()  # the recorder collects between phases, which costs little where what is there already is not looked at again
        self.stack.callback(gc.unfreeze)
        self.stack.enter_context(self.recorder)
        self.stack.enter_context(watching(self.recorder))
        super().start()  # after the recorder's own hooks, so that a step's states are known before the next one begins
        self.recorder.begin(self.model, self.optimizer)
        self.recorder.begin_step(1)

    def stepped(self) -> None:
        self.recorder.begin_step(self.steps + 1)

    def stop(self) -> Held | None:
        super().stop()
        trace = self.recorder.trace(type(self.model).__name__)
        span = trace.span(self.steps) if self.steps else (0, None)
        return Held(allocated_bytes=trace.peak(*span).bytes)


def actual(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> Actual:
    """The counters of the GPU if there is one; else the storages of a model, if it is given."""
    if torch.cuda.is_available():
        return Counters()
    return Storages(model, optimizer) if model is not None else Actual()

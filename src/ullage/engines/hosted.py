"""States on the host of one device: torchao's ``CPUOffloadOptimizer``, as torchtune's recipes name it too.

Source: torchao optim/cpu_offload.py. Small parameters are stepped where they are; of the others the host has a copy, its gradient and
states, and the device what zero_grad leaves.
"""

from __future__ import annotations

from ullage import dtypes
from ullage.engines import optimizer as optimizers
from ullage.engines.base import optimizer_of, pinned
from ullage.engines.optimizer import Group
from ullage.frozen import frozen, replace
from ullage.job.job import Job

SMALLEST = 4096
"""Elements of a parameter that goes (minimal_size)."""


def is_used(job: Job) -> bool:
    return job.engine.name == "single" and job.offload.optimizer != "none"


def drops_gradients(job: Job) -> bool:
    """Whether each gradient is let go of once it is copied."""
    return is_used(job) and job.engine.options.get("offload_gradients") is True


@frozen
class Hosted:
    """What an optimizer steps here, and what on the host."""

    job: Job
    here: tuple[Group, ...]
    there: tuple[Group, ...] = ()

    @property
    def host_bytes(self) -> int:
        """Copies and gradients pinned, each a block; states are not."""
        copies = sum(
            group.repeat * pinned(dtypes.size_bytes(tensor.numel, tensor.dtype))
            for group in self.there
            for tensor in group.tensors
        )
        momentum = bool(self.job.engine.options.get("momentum"))
        states = optimizers.states(optimizer_of(self.job), self.there, momentum=momentum)
        return 2 * copies + sum(item.bytes * count for item, count in states)


def hosted(job: Job, groups: tuple[Group, ...]) -> Hosted:
    if not is_used(job):
        return Hosted(job=job, here=groups)
    return Hosted(job=job, here=_of(groups, goes=False), there=_of(groups, goes=True))


def _of(groups: tuple[Group, ...], *, goes: bool) -> tuple[Group, ...]:
    kept = (
        replace(group, tensors=tuple(one for one in group.tensors if (one.numel >= SMALLEST) is goes))
        for group in groups
    )
    return tuple(group for group in kept if group.tensors)

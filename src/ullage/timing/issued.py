"""Seconds that a host takes to issue what its device does: a pass takes no less.

Of Megatron's layers alone, whose modules and functions for autograd are Python's own (megatron/core, Transformer Engine pytorch/module).
Not counted are what autograd does by itself, the experts of a grouped linear one by one, and jobs that replay any part as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable

from ullage.calibration.host import issue_s
from ullage.frozen import frozen
from ullage.hardware.cluster import Device
from ullage.kernels.megatron_common import is_local
from ullage.kernels.step import Context
from ullage.timing.vintage import of_2021, of_2022
from ullage.timing.work import OpWork


@frozen
class Issuing:
    """Seconds of a matmul of a linear, and of any other op."""

    linear_s: float
    module_s: float

    def of(self, work: Iterable[OpWork], *, backward: bool = False) -> float:
        """Of one direction of ops, exchanges among them."""
        found = 0.0
        for one in work:
            done = one.backward if backward else one.forward
            found += len(done.exchanges) * self.module_s
            if done.matmuls:
                found += len(done.matmuls) * self.linear_s
            elif done.attention is not None:
                found += self.module_s
            elif any(moved.bytes for moved in one.forward.traffic):  # else autograd's own
                found += sum(self.module_s for moved in done.traffic if moved.bytes)
        return found


GRAPHS = ("enable_cuda_graph", "external_cuda_graph")


def issuing(context: Context, device: Device) -> Issuing | None:
    """None where no host is known to hold its device up."""
    graphed = context.option("cuda_graph_impl", "none") != "none" or any(map(context.option, GRAPHS))
    if context.stack != "megatron" or graphed or device.measured is not None:
        return None
    local = is_local(context) or of_2021(context.options) or of_2022(context.options)
    module_s = issue_s(device, "module").value
    return Issuing(linear_s=module_s if local else issue_s(device, "linear").value, module_s=module_s)

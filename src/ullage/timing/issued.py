"""Seconds that a host takes to issue what its device does: a pass takes no less.

Of Megatron's layers alone, whose modules and functions for autograd are Python's own (megatron/core, Transformer Engine pytorch/module).
Not counted are what autograd does by itself, and jobs that replay any part as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from ullage.calibration.host import issue_s, linear_s
from ullage.frozen import frozen
from ullage.hardware.cluster import Device
from ullage.kernels.megatron_common import is_local
from ullage.kernels.step import Context
from ullage.timing.mixture import Calls
from ullage.timing.vintage import of_2021, of_2022
from ullage.timing.work import Matmul, OpWork

_NONE: Mapping[str, Calls] = MappingProxyType({})


@frozen
class Issuing:
    """Seconds of a matmul of a linear, in a forward and in a backward, of any other op whose function is Python's, and of an op of
    torch's own.

    expert_s: of a matmul of each expert after a rank's first: Transformer Engine's grouped linear loops over them in C++
    (common/gemm/cublaslt_gemm.cu); None where experts are modules of their own (Megatron-Core moe/experts.py, SequentialMLP).
    """

    linear_s: tuple[float, float]
    module_s: float
    torch_s: float
    expert_s: float | None

    def of(self, work: Iterable[OpWork], beside: Mapping[str, Calls] = _NONE, *, backward: bool = False) -> float:
        """Of one direction of ops, exchanges among them. beside: what is called beside their steps, by the ops' names."""
        found = 0.0
        for one in work:
            done = one.backward if backward else one.forward
            found += len(done.exchanges) * self.module_s
            if done.matmuls:
                found += sum(self._matmul_s(matmul, backward=backward) for matmul in done.matmuls)
            elif done.attention is not None:
                found += self.module_s
            elif any(moved.bytes for moved in one.forward.traffic):  # else autograd's own
                found += sum(
                    self.module_s for moved in done.traffic if moved.bytes and moved.kernels == 1
                )  # else beside
            calls = beside.get(one.name)
            if calls is not None:
                found += calls.functions * self.module_s + (0.0 if backward else calls.torch * self.torch_s)
        return found

    def _matmul_s(self, matmul: Matmul, *, backward: bool) -> float:
        linear_s = self.linear_s[backward]
        expert_s = linear_s if self.expert_s is None else self.expert_s
        return linear_s + (matmul.groups - 1) * (expert_s if matmul.streams else 0.0)


GRAPHS = ("enable_cuda_graph", "external_cuda_graph")


def issuing(context: Context, device: Device) -> Issuing | None:
    """None where no host is known to hold its device up."""
    graphed = context.option("cuda_graph_impl", "none") != "none" or any(map(context.option, GRAPHS))
    if context.stack != "megatron" or graphed or device.measured is not None:
        return None
    local = is_local(context) or of_2021(context.options) or of_2022(context.options)
    module_s, torch_s = issue_s(device, "module").value, issue_s(device, "torch").value
    both = (module_s, module_s) if local else linear_s(device)
    sequential = context.option("moe_grouped_gemm") is False
    return Issuing(linear_s=both, module_s=module_s, torch_s=torch_s, expert_s=None if sequential else torch_s)


_AFTER_LOSS = Calls(torch=8, functions=2)
"""Between the wait for a micro-batch's loss and the backward's first matmul: whether it is infinite (2), its division by tokens and
micro-batches (3), their gradients and the loss mask's (3); the cross entropy and the head's linear (Megatron-LM@d98e8a64 pretrain_gpt.py,
loss_func; megatron/core/pipeline_parallel/schedules.py, forward_step_calc_loss)."""


def after_loss_s(context: Context, device: Device) -> float:
    """What a device is idle for after a micro-batch's loss, which its host waits for to see whether it is a number, unless told not to."""
    host = issuing(context, device)
    looks = context.option("check_for_nan_in_loss_and_grad", True)
    if host is None or not looks or of_2021(context.options) or of_2022(context.options):
        return 0.0
    return _AFTER_LOSS.torch * host.torch_s + _AFTER_LOSS.functions * host.module_s


def forward_s(pieces: Iterable[tuple[bool, float, float, int]]) -> float:
    """What a forward takes no less than. pieces: of equal blocks in order, whether the host waits for the device in each, seconds of the
    device and of the host for one, and how many. From one wait to the next the longer of both counts: nothing is issued ahead of a wait."""
    found = device = host = issued = 0.0
    held = False
    for waits, device_s, host_s, count in pieces:
        issued += host_s * count
        if not waits:
            device, host = device + device_s * count, host + host_s * count
            continue
        held |= host > device or (host_s > device_s and count > 1)
        found += max(device, host) + (count - 1) * max(device_s, host_s)
        device, host = device_s, host_s
    return found + max(device, host) if held or host > device else issued

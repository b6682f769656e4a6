"""What a collective costs beside its own time: a matmul loses SMs to it, and torch has to call it. Rows: data/overlap.toml."""

from __future__ import annotations

import functools

from ullage.calibration.store import table
from ullage.frozen import frozen
from ullage.hardware.cluster import Device
from ullage.hardware.curve import Kind


@frozen
class Contention:
    """two_waves: matmuls are persistent kernels, whose displaced blocks run as a second wave. share: SMs that NCCL keeps, of all.

    everything: not matmuls alone wait but all that computes, since the same cores send (measured on CPU processes).
    """

    two_waves: bool
    share: float
    source: str
    everything: bool = False

    @property
    def slowdown(self) -> float:
        """Of a matmul that runs beside a longer collective from its start to its end."""
        return 2.0 if self.two_waves else self.others

    @property
    def others(self) -> float:
        """Of any other kernel there: its blocks run on the SMs that are left."""
        return 1.0 / (1.0 - self.share)

    def hindered_s(self, matmul_s: float, others_s: float, total_s: float) -> float:
        """What a wire that is busy all the while adds to a pass. others_s: of its other kernels. total_s: with what it waits for."""
        if self.everything:
            return (self.slowdown - 1.0) * total_s
        return (self.slowdown - 1.0) * matmul_s + (self.others - 1.0) * others_s


_LEAST_OVERLAP = 0.01  # a slowdown stays a number


@functools.cache
def contention(device: Device) -> Contention:
    if device.measured is not None and device.vendor == "cpu":
        share = 1.0 - max(device.measured.overlap, _LEAST_OVERLAP)
        return Contention(two_waves=False, share=share, source=device.measured.source, everything=True)
    data, sms = table("overlap"), table("matmul")["sms"]
    two_waves = device.architecture in data["two_waves"]["architectures"]
    share = data["sms"]["ring"] / sms["devices"].get(device.name, sms["any"])
    source = data["two_waves" if two_waves else "sms"]["source"]
    return Contention(two_waves=two_waves, share=share, source=source)


@functools.cache
def called_s(kind: Kind) -> float:
    """Seconds that a collective takes in a training process beyond its time in nccl-tests."""
    return float(table("overlap")["called"].get(f"{kind}_us", 0.0)) / 1e6


def beside_s(contention: Contention, matmul_s: float, wire_s: float) -> float:
    """Seconds until a matmul and a collective that start together are both through.

    Two waves: the displaced blocks start when the collective or the first wave ends, and take as long as the whole matmul.
    """
    shared = min(matmul_s, wire_s)
    lost = shared if contention.two_waves else shared * contention.share
    return max(wire_s, matmul_s + lost)

"""One rank's part of a measurement: every op in rounds, beside the other ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median

import torch
from torch import distributed

from ullage.bench import collectives, engines, traffic
from ullage.bench.attention import Point, point
from ullage.bench.clock import Clock, Pool, Task, slowest_of_ranks
from ullage.bench.matmul import BATCH, Grid
from ullage.bench.settings import Extent, extent
from ullage.hardware.curve import Samples
from ullage.hardware.measured import Attended, Direction, Measured, Moved
from ullage.units import MIB

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DIRECTIONS: tuple[Direction, ...] = ("forward", "dgrad", "wgrad", "batched")
_LONGEST_S = 0.25
_LONGEST_FP16_S = 0.02
"""On the CPU, where torch multiplies fp16 by a loop of its own in a hundredth of bf16's rate."""
_LEAST_ROUNDS = 2


@dataclass(kw_only=True)
class _Moved:
    """ops: that the task's seconds are of. bytes: counted of each."""

    kind: str
    dtype: str
    backward: bool
    ops: int
    bytes: float
    task: Task

    @property
    def series(self) -> tuple[str, str, bool]:
        return self.kind, self.dtype, self.backward


@dataclass(kw_only=True)
class _Plan:
    """Everything that is timed."""

    grids: list[Grid] = field(default_factory=list)
    moved: list[_Moved] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    sent: list[collectives.Sent] = field(default_factory=list)
    products: list[Task] = field(default_factory=list)
    engines: list[Task] = field(default_factory=list)  # alone, sharded, split

    def by_table(self) -> list[list[Task]]:
        tables = [
            [task for grid in self.grids for task in grid.tasks.values()],
            [one.task for one in self.moved],
            [one.task for one in self.points],
            self.products + [one.task for one in self.sent] + self.engines,
        ]
        return [table for table in tables if table]

    def tasks(self) -> list[Task]:
        return [task for table in self.by_table() for task in table]


def measured(device: str, quick: bool) -> Measured | None:
    """As one rank: what was measured on rank 0, None on the others. device: cpu or cuda."""
    on = _device(device)
    if device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // _processes()))
    told, clock = extent(device, quick=quick), Clock(on)
    process_bytes = _resident_bytes()
    plan = _planned(told, clock, quick=quick)
    tasks = plan.tasks()
    began = time.perf_counter()
    for number in range(told.rounds):
        if number >= _LEAST_ROUNDS and _over(began, told.seconds, on):
            break
        clock.round(tasks)
    seconds = dict(zip(map(id, tasks), slowest_of_ranks(tasks, on), strict=True))
    share = collectives.overlap(clock, on) if distributed.is_initialized() else 1.0
    host = collectives.host_link(on) if device == "cuda" else None
    sent = tuple(_sent(plan, seconds))
    if distributed.is_initialized() and distributed.get_rank():
        return None
    return Measured(
        file="",
        date=date.today().isoformat(),
        source=f"ullage bench, torch {torch.__version__}",
        processes=_processes(),
        threads=torch.get_num_threads(),
        spread=max(median(task.spread for task in some) for some in plan.by_table()),
        overlap=share,
        process_bytes=process_bytes,
        matmuls=tuple(grid.result(seconds) for grid in plan.grids),
        traffic=tuple(_series(plan, seconds)),
        attention=tuple(_attended(plan, seconds)),
        collectives=sent,
        sharded_layer_s=_engine_s(plan, seconds, 1, {"all_gather": 2, "reduce_scatter": 1}, sent),
        split_layer_s=_engine_s(plan, seconds, 2, engines.SPLIT_SENDS, sent),
        host_bytes_per_s=host,
    )


def _processes() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def _device(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _over(began: float, limit_s: float, device: torch.device) -> bool:
    """Whether time is up, which the ranks agree on."""
    passed = torch.tensor([time.perf_counter() - began], device=device)
    if distributed.is_initialized():
        distributed.all_reduce(passed, distributed.ReduceOp.MAX)
    return float(passed) > limit_s


def _planned(told: Extent, clock: Clock, *, quick: bool) -> _Plan:
    plan, device = _Plan(), clock.device
    on_cpu = device.type == "cpu"
    for name, dtype in DTYPES.items():
        if quick and name == "fp16":
            continue
        slow = on_cpu and name == "fp16"
        pool = Pool(device, dtype, _pool_bytes(told, dtype))
        for direction in _DIRECTIONS:
            batched = direction == "batched"
            m, n, k = (told.batched,) * 3 if batched else (told.m, told.n, told.k)
            grid = Grid(dtype=name, direction=direction, m=m, n=n, k=k)
            grid.plan(clock, pool, _LONGEST_FP16_S if slow else _LONGEST_S)
            plan.grids.append(grid)
        if not slow:
            plan.points += [
                point(name, pool, head_dim, seq, causal=causal, backward=backward)
                for head_dim in told.head_dims
                for causal in (True, False)
                for backward in (False, True)
                for seq in told.seq
            ]
    for name, dtype in DTYPES.items():
        if quick and name == "fp16":
            continue
        pool = Pool(device, dtype, max(_POOL_BYTES, 2 * told.moved_bytes[-1]))
        plan.moved += [_moved(kind, name, size, pool) for kind in traffic.KINDS for size in told.moved_bytes]
    for numel in told.optimizer_numel:
        counted, task = traffic.optimizer_task(numel, device)
        plan.moved.append(_Moved(kind="optimizer", dtype="fp32", backward=False, ops=1, bytes=counted, task=task))
    pool = Pool(device, torch.float32, max(_POOL_BYTES, 2 * told.moved_bytes[-1]))
    if distributed.is_initialized():
        plan.engines = [engines.alone(device), engines.sharded(device), engines.split(device)]
        product = collectives.product_task(pool)
        plan.products.append(product)
        plan.sent = [
            collectives.sent(kind, size, pool, product) for kind in collectives.KINDS for size in told.payload_bytes
        ]
    return plan


def _moved(kind: traffic.Kind, dtype: str, size: int, pool: Pool) -> _Moved:
    counted, task = traffic.task(kind, size, pool)
    return _Moved(kind=kind.kind, dtype=dtype, backward=kind.backward, ops=kind.ops, bytes=counted, task=task)


def _pool_bytes(told: Extent, dtype: torch.dtype) -> int:
    """Both operands of the largest product, and more than caches hold."""
    largest = max(told.m[-1] * max(told.n[-1], told.k[-1]), told.n[-1] * told.k[-1], BATCH * told.batched[-1] ** 2)
    return max(_POOL_BYTES, 2 * largest * dtype.itemsize)


_POOL_BYTES = 128 * MIB


def _series(plan: _Plan, seconds: dict[int, float]) -> Iterator[Moved]:
    for series in dict.fromkeys(one.series for one in plan.moved):
        kind, dtype, backward = series
        found = {one.bytes: seconds[id(one.task)] / one.ops for one in plan.moved if one.series == series}
        sizes = tuple(sorted(found))
        yield Moved(
            kind=kind, dtype=dtype, backward=backward, bytes=sizes, seconds=tuple(found[size] for size in sizes)
        )


def _attended(plan: _Plan, seconds: dict[int, float]) -> Iterator[Attended]:
    def series(one: Point) -> tuple[str, int, bool, bool]:
        return one.dtype, one.head_dim, one.causal, one.backward

    for key in dict.fromkeys(map(series, plan.points)):
        dtype, head_dim, causal, backward = key
        found = sorted((one for one in plan.points if series(one) == key), key=lambda one: one.seq)
        yield Attended(
            dtype=dtype,
            head_dim=head_dim,
            causal=causal,
            backward=backward,
            seq=tuple(float(one.seq) for one in found),
            flops_per_s=tuple(one.flops / seconds[id(one.task)] for one in found),
        )


def _sent(plan: _Plan, seconds: dict[int, float]) -> Iterator[Samples]:
    for kind in collectives.KINDS if plan.sent else ():
        found = [(one.payload_bytes, one.seconds(seconds)) for one in plan.sent if one.kind == kind]
        rising = [
            min(second for _, second in found[at:]) for at in range(len(found))
        ]  # slower than a larger one: noise
        yield Samples(
            kind=kind,
            ranks=distributed.get_world_size(),
            payload_bytes=tuple(float(size) for size, _ in found),
            seconds=tuple(rising),
        )


def _engine_s(
    plan: _Plan, seconds: dict[int, float], at: int, sends: Mapping[str, int], sent: Sequence[Samples]
) -> float:
    """Of a layer, what the step under an engine takes beyond the one without, and beyond what it sends."""
    if not plan.engines:
        return 0.0
    more = seconds[id(plan.engines[at])] - seconds[id(plan.engines[0])]
    wire = sum(sends.get(one.kind, 0) * one.seconds[0] for one in sent)
    return max(0.0, more / engines.LAYERS - wire)


def _resident_bytes() -> int:
    """Of this process, torch loaded; where the system does not say, torch's usual size."""
    try:
        fields = Path("/proc/self/statm").read_text().split()
    except OSError:
        return _USUAL_BYTES
    import resource

    return int(fields[1]) * resource.getpagesize()


_USUAL_BYTES = 400 * MIB

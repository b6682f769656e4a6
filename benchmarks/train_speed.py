"""How fast `ullage train` is and what it holds, beside loops around torch's engines and DeepSpeed that are written by hand (by_hand.py).

Two CPU processes with gloo, one small llama, the same weights, batches and AdamW, clipping to a norm of 1. Each contender has two
processes of its own, which live as long as the benchmark: they take turns of some steps, so that whatever else the machine does meets
them all alike, and ratios are those of a round, of which the median is told. A step is timed from its data to the next one's: of ullage
it includes all that its loop does (the learning rate, the mean loss of the ranks, metrics.jsonl, TensorBoard, the memory that is told).

Memory: the highest bytes of all storages of a steady step, of the rank that holds more, followed in steps that are not timed: a
process's resident size, told beside it, is libraries for the most part. The losses say that all did the same work.
Exits with 1 where ullage is below 0.98 of the faster of the others' tokens/s, or holds more than 1.02 of the leaner of them. On a machine
with other work the rounds' ratios scatter: the processor's time, told beside, does so less.
Run: python benchmarks/train_speed.py
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from by_hand import LLAMA, LR, MICRO_BATCH, RANKS, SEQ_LEN, VOCAB, WEIGHT_DECAY, Made, Step, ddp, deepspeed, fsdp2
from ullage.api import read_job
from ullage.job.job import Job
from ullage.units import MIB

STEPS_A_TURN, WARM_UP_TURNS, TURNS = 3, 2, 12
TOKENS = "tokens.bin"
STEPS = STEPS_A_TURN * (WARM_UP_TURNS + TURNS) + 1  # the last ends the run, and is not timed
TRACKED = 4  # DeepSpeed's stage 3 is steady from the third
SLOWEST, FATTEST = 0.98, 1.02
SAME_LOSS = {"fp32": 1e-4, "bf16-mixed": 2e-2}  # relative: docs/train.md, "What equal means", and Adam's drift


# -- who is held against whom


@dataclass(frozen=True, kw_only=True)
class Contender:
    """engine, options: of a job of ullage's; mixed: more options where it has 16-bit types. by_hand: what makes the other's model,
    optimizer and step for a precision."""

    name: str
    engine: str = ""
    options: dict[str, bool] = field(default_factory=dict)
    mixed: dict[str, bool] = field(default_factory=dict)
    by_hand: Callable[[str], Made] | None = None

    def job(self, precision: str) -> Job:
        return read_job(
            {
                "schema": 1,
                "model": LLAMA,
                "cluster": f"{RANKS}xH100-SXM-80GB",
                "stack": "transformers",
                "engine": {"name": self.engine, "options": self.options | (self.mixed if precision != "fp32" else {})},
                "layout": {"dp": RANKS},
                "precision": precision,
                "recompute": "none",
                "grad_clip": True,
                "optimizer": {"name": "adamw", "impl": "fused"},
                "data": {"seq_len": SEQ_LEN, "micro_batch": MICRO_BATCH},
            }
        )


TECHNIQUES = {  # ullage's first
    "replicas": (
        Contender(name="ullage ddp", engine="ddp", options={"reduce_in_place": True}, mixed={"cast_once": True}),
        Contender(name="DDP", by_hand=ddp),
        Contender(name="DeepSpeed", by_hand=partial(deepspeed, stage=0)),
    ),
    "shards": (
        Contender(name="ullage fsdp2", engine="fsdp2"),
        Contender(name="FSDP2", by_hand=fsdp2),
        Contender(name="DeepSpeed ZeRO-3", by_hand=partial(deepspeed, stage=3)),
    ),
}


# -- a rank of one contender, in a process of its own


@dataclass(kw_only=True)
class Gate:
    """Holds a rank before a step until it is its turn; says what the process has used by then."""

    pipe: Connection
    left: int = 0

    def __call__(self) -> None:
        if not self.left:
            self.pipe.send((time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
            self.left = self.pipe.recv()
        self.left -= 1


def as_rank(contender: Contender, precision: str, rank: int, port: int, folder: Path, pipe: Connection) -> None:
    from torch import distributed

    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})
    distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    gate = Gate(pipe=pipe)
    batches = list(batches_of(folder / TOKENS, rank))
    if contender.by_hand is None:
        job = contender.job(precision)
        losses = trained(job, folder, gate)
        make = partial(made, job)
    else:
        make = partial(contender.by_hand, precision)
        losses = looped(make()[2], batches, gate)
    pipe.send((losses[-1] if losses else None, tracked_bytes(make, batches)))
    distributed.destroy_process_group()


def trained(job: Job, folder: Path, gate: Gate) -> list[float | None]:
    """What `ullage train` does as the rank of a launcher; losses are told on rank 0."""
    from ullage.trace.patch import replaced
    from ullage.train import loop
    from ullage.train.batches import micro_batches
    from ullage.train.run import train
    from ullage.train.settings import Training

    def gated(*given: Any) -> list[torch.Tensor]:
        gate()
        return micro_batches(*given)

    out = folder / f"{job.engine.name}-{job.engine.zero_stage}-{job.precision.compute}"
    training = Training(
        data=(folder / TOKENS,),
        out=out,
        steps=STEPS,
        lr=LR,
        lr_schedule="constant",
        weight_decay=WEIGHT_DECAY,
        save_every=STEPS + 1,
    )
    losses: list[float | None] = []
    with replaced(loop, "micro_batches", gated):
        train(job, training, lambda step: losses.append(step.loss))
    return losses


def looped(step: Step, batches: Sequence[torch.Tensor], gate: Gate) -> list[float | None]:
    losses: list[float | None] = []
    for ids in batches:
        gate()
        losses.append(float(step(ids)))
    return losses


def batches_of(path: Path, rank: int) -> Iterator[torch.Tensor]:
    """The sequences that ullage takes in each step, which a loop by hand has in memory."""
    from ullage.train.tokens import Packed

    tokens = Packed((path,), VOCAB, SEQ_LEN, seed=0)
    for number in range(rank, STEPS * RANKS, RANKS):
        yield torch.stack([tokens.sequence(number * MICRO_BATCH + index) for index in range(MICRO_BATCH)])


def made(job: Job) -> Made:
    from ullage.train.composed import run_of

    run = run_of(job, lr=LR, weight_decay=WEIGHT_DECAY)
    return run.model, run.optimizer, lambda ids: run.step([ids]).loss


def tracked_bytes(make: Callable[[], Made], batches: Sequence[torch.Tensor]) -> int:
    """The highest of a steady step, as `ullage measure` follows storages."""
    from ullage.trace.run import real

    waiting = iter(batches)

    def factory() -> tuple[torch.nn.Module, Any, Callable[[], object]]:
        model, optimizer, step = make()
        return model, optimizer, lambda: step(next(waiting))

    return real(factory, steps=TRACKED, trusted=True).steady.bytes


# -- the turns


@dataclass(kw_only=True)
class Racing:
    """A contender's processes. seconds, cpu_s: of each turn, wall clock, and of the processor over both ranks."""

    contender: Contender
    processes: list[Any]
    pipes: list[Connection]
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    used: list[tuple[float, int]] = field(default_factory=list)
    loss: float = 0.0
    bytes: int = 0

    @classmethod
    def started(cls, contender: Contender, precision: str, folder: Path) -> Racing:
        context, port = get_context("spawn"), free_port()
        processes, pipes = [], []
        for rank in range(RANKS):
            mine, its = context.Pipe()
            arguments = (contender, precision, rank, port, folder, its)
            processes.append(context.Process(target=as_rank, args=arguments, daemon=True))
            processes[-1].start()
            its.close()  # a rank that dies is then the end of its pipe
            pipes.append(mine)
        return cls(contender=contender, processes=processes, pipes=pipes)

    def ready(self) -> None:
        self.used = [pipe.recv() for pipe in self.pipes]

    def turn(self) -> None:
        start, before = time.perf_counter(), sum(cpu for cpu, _ in self.used)
        for pipe in self.pipes:
            pipe.send(STEPS_A_TURN)
        self.used = [pipe.recv() for pipe in self.pipes]
        self.seconds.append(time.perf_counter() - start)
        self.cpu_s.append(sum(cpu for cpu, _ in self.used) - before)

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.send(STEPS_A_TURN)
        told = [pipe.recv() for pipe in self.pipes]
        losses = [loss for loss, _ in told if loss is not None]
        self.loss, self.bytes = sum(losses) / len(losses), max(held for _, held in told)
        for process in self.processes:
            process.join()

    @property
    def tokens_per_s(self) -> float:
        return RANKS * MICRO_BATCH * SEQ_LEN * STEPS_A_TURN / median(self.seconds[WARM_UP_TURNS:])

    @property
    def cpu_ms_per_step(self) -> float:
        return median(self.cpu_s[WARM_UP_TURNS:]) / STEPS_A_TURN * 1e3


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the rounds' ratios, after the warm-up."""
    return median(mine / other for mine, other in list(zip(ours, theirs, strict=True))[WARM_UP_TURNS:])


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def raced(contenders: Sequence[Contender], precision: str, folder: Path) -> list[Racing]:
    racing = [Racing.started(one, precision, folder) for one in contenders]
    for one in racing:
        one.ready()
    for number in range(WARM_UP_TURNS + TURNS):
        for one in racing if number % 2 else reversed(racing):
            one.turn()
    for one in racing:
        one.end()
    return racing


def main() -> int:
    os.environ["OMP_NUM_THREADS"] = "1"
    missed = []
    with tempfile.TemporaryDirectory(prefix="ullage-") as name:
        folder = Path(name)
        count = RANKS * MICRO_BATCH * SEQ_LEN * STEPS
        drawn = np.random.default_rng(0).geometric(0.01, count)  # a few tokens are common, so that losses fall
        (drawn % VOCAB).astype("<u2").tofile(folder / TOKENS)
        print(
            f"{RANKS} processes, {TURNS} turns of {STEPS_A_TURN} steps of {MICRO_BATCH} x {SEQ_LEN} tokens each; "
            f"ratios are ullage's over the row's, "
            "CPU ms a step's of both ranks, MiB and resident the larger rank's"
        )
        for technique in sys.argv[1:] or TECHNIQUES:
            for precision, same_loss in SAME_LOSS.items():
                racing = raced(TECHNIQUES[technique], precision, folder)
                missed += told(f"{technique}, {precision}", racing, same_loss)
    for miss in missed:
        print(f"missed: {miss}")
    return int(bool(missed))


def told(title: str, racing: list[Racing], same_loss: float) -> list[str]:
    """Prints a table; what is missed."""
    mine, *others = racing
    speeds = [ratio(one.seconds, mine.seconds) for one in racing]
    speed, memory = min(speeds[1:]), mine.bytes / min(one.bytes for one in others)
    print(
        f"{title}\n  {'':<18}{'tokens/s':>9}{'ratio':>7}{'CPU ms':>9}{'ratio':>7}{'MiB':>9}{'ratio':>7}{'resident':>9}{'loss':>10}"
    )
    for one, speed_beside in zip(racing, speeds, strict=True):
        print(
            f"  {one.contender.name:<18}{one.tokens_per_s:>9.0f}{speed_beside:>7.3f}"
            f"{one.cpu_ms_per_step:>9.1f}{ratio(mine.cpu_s, one.cpu_s):>7.3f}"
            f"{one.bytes / MIB:>9.2f}{mine.bytes / one.bytes:>7.3f}"
            f"{max(rss for _, rss in one.used) / MIB:>9.0f}{one.loss:>10.5f}"
        )
    missed = [f"{one.contender.name} has another loss" for one in others if abs(one.loss / mine.loss - 1) > same_loss]
    missed += [f"{speed:.3f} of the faster one's tokens/s"] * (speed < SLOWEST)
    missed += [f"{memory:.3f} of the leaner one's bytes"] * (memory > FATTEST)
    return [f"{title}: {one}" for one in missed]


if __name__ == "__main__":
    sys.exit(main())

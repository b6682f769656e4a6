"""The training itself: steps of a run over the data, with a learning rate, metrics and checkpoints."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from torch import distributed
from torch.optim.lr_scheduler import LambdaLR

from ullage.errors import InvalidInput, UllageError, Unsupported
from ullage.job.adapted import graph_of
from ullage.job.job import Job
from ullage.model.count import flops_per_token
from ullage.timing.machine import peak_flops_per_s
from ullage.train.adapters import adapted
from ullage.train.answers import Step, Trained
from ullage.train.batches import micro_batches, tokens_of
from ullage.train.checkpoint_files import claimed, resumed_from
from ullage.train.checkpoints import Checkpoints, Position
from ullage.train.composed import Run, Stepped, run_of, stepped_in
from ullage.train.documents import prepare, token_files
from ullage.train.exported import export
from ullage.train.heap import keeping_what_is_freed
from ullage.train.memory import explained, held, limited
from ullage.train.metrics import Metrics
from ullage.train.places import place
from ullage.train.ranks import current_device
from ullage.train.settings import Training
from ullage.train.tokens import Packed

Tell = Callable[[Step], None]


def train(job: Job, training: Training, tell: Tell | None, predicted_bytes: int | None) -> Trained | None:
    """As one rank: the answer on rank 0, None on the others. tell: called on rank 0 after each step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's, on threads and processes that are as they should be
        transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        return _trained(job, training, tell, predicted_bytes)


def _trained(job: Job, training: Training, tell: Tell | None, predicted_bytes: int | None) -> Trained | None:
    group = distributed.new_group(backend="gloo") if distributed.is_initialized() else None
    rank = distributed.get_rank() if group is not None else 0
    tokens = _tokens(job, training)
    steps = _steps(job, training, tokens)
    with ExitStack() as stack:
        if rank == 0:
            stack.enter_context(claimed(training.out))
        folder = _of_first(lambda: resumed_from(training), group)
        stack.enter_context(limited(training.memory_budget, current_device()))
        if training.memory_budget is None and current_device().type == "cpu":  # a budget counts what is kept
            stack.enter_context(keeping_what_is_freed())
        ready_made = folder is None or job.lora is not None  # no checkpoint has a base
        with explained(training.out, "before the first step", training.memory_budget):
            run = run_of(
                job,
                seed=training.seed,
                lr=training.lr,
                weight_decay=training.weight_decay,
                weights=training.weights if ready_made else None,
            )
        torch.manual_seed(
            training.seed + 1 + rank // job.layout.tp
        )  # tensor-parallel ranks alone drop the same elements
        kept = Checkpoints(run, training, _same(job, training, tokens), group)
        stack.callback(kept.settle)
        begun = kept.restore(folder) if folder is not None else Position()
        metrics = stack.enter_context(Metrics(training.out, begun.step)) if rank == 0 else None
        done = _stepped(run, training, tokens, begun, steps, kept, lambda step: _told(step, metrics, tell))
        exported = None if rank else export(job, training, kept.last)
    return None if exported is None else _answer(run, training, begun, steps, done, exported, predicted_bytes)


def _stepped(
    run: Run,
    training: Training,
    tokens: Packed,
    begun: Position,
    steps: int,
    kept: Checkpoints,
    told: Callable[[Step], None],
) -> _Done:
    job = run.job
    schedule = _schedule(run, training, steps, begun.updates)
    tokens_of_a_step = _sequences(job) * job.data.seq_len
    possible = _flops_per_token_and_s(job) if run.device.type == "cuda" else None
    updates, done = begun.updates, _Done()
    before = perf_counter()
    for number in range(begun.step + 1, steps + 1):
        lr = float(schedule.get_last_lr()[0])
        with explained(training.out, f"step {number}", training.memory_budget):
            stepped = run.step(micro_batches(job, tokens, number - 1))
            loss, *sizes = run.over_ranks(stepped, *held(run.device))
        norm = None if stepped.grad_norm is None else float(stepped.grad_norm)
        _refuse_no_number(number, loss, norm, run, stepped)
        if not stepped.skipped:
            updates += 1
            schedule.step()
        now = perf_counter()
        seconds, before = now - before, now
        one = Step(
            step=number,
            steps=steps,
            loss=loss if math.isfinite(loss) else None,
            lr=lr,
            grad_norm=norm if norm is None or math.isfinite(norm) else None,
            skipped=stepped.skipped,
            loss_scale=None if run.scaler is None else run.scaler.get_scale(),
            tokens=number * tokens_of_a_step,
            step_s=seconds,
            tokens_per_s=tokens_of_a_step / seconds,
            mfu=None if possible is None else possible * tokens_of_a_step / seconds,
            memory_bytes=int(sizes[0]),
            reserved_bytes=int(sizes[1]) if len(sizes) > 1 else None,
        )
        told(one)
        done.add(one)
        kept.check()
        if number % training.save_every == 0 or number == steps:
            kept.save(Position(step=number, updates=updates))
    kept.wait()
    return done


@dataclass(kw_only=True)
class _Done:
    """What the answer tells of the steps of this start."""

    first: Step | None = None
    last: Step | None = None
    memory_bytes: int | None = None
    count: int = 0
    seconds: float = 0.0

    def add(self, step: Step) -> None:
        self.first = self.first or step
        self.last = step
        self.memory_bytes = max(self.memory_bytes or 0, step.memory_bytes)
        self.count += 1
        self.seconds += step.step_s

    @property
    def step_s(self) -> float | None:
        """The mean, without the first step, which warms up."""
        if self.first is None or self.count < 2:
            return None
        return (self.seconds - self.first.step_s) / (self.count - 1)


def _told(step: Step, metrics: Metrics | None, tell: Tell | None) -> None:
    if metrics is not None:
        metrics.add(step)
        if tell is not None:
            tell(step)


# -- what a run goes by


def _tokens(job: Job, training: Training) -> Packed:
    """The same on every rank; a node's first rank makes the token file, where whoever started the ranks has not."""
    found = place()
    if found is None or found.local_rank == 0:
        prepare(job, training)
    if distributed.is_initialized():
        distributed.barrier()
    tokens = tokens_of(job, replace(training, data=token_files(job, training)))
    assert isinstance(tokens, Packed), "there are files"
    return tokens


def _sequences(job: Job) -> int:
    """Of one optimizer step, over all ranks."""
    return job.data.micro_batch * job.data.grad_accum * job.layout.dp


def _steps(job: Job, training: Training, tokens: Packed) -> int:
    if training.steps is not None:
        return training.steps
    epochs, each = training.epochs or 1, _sequences(job)
    steps = epochs * tokens.count // each
    if not steps:
        raise InvalidInput(
            f"{tokens.count} sequences of {job.data.seq_len} tokens, and one step takes {each}",
            key="--data",
            value=", ".join(map(str, training.data))[:200],
            remedy="give --steps, which goes over the data as often as it needs",
        )
    return steps


def _same(job: Job, training: Training, tokens: Packed) -> dict[str, object]:
    """What decides which step sees what, and whose tensors they are: a run of another is another run."""
    marked = hashlib.sha256(str(tokens.count).encode())
    for number in range(0, tokens.count, max(1, tokens.count // 8)):
        marked.update(tokens.sequence(number).numpy().tobytes())
    return {
        "model": job.model.keys.as_dict(),
        "data.seq_len": job.data.seq_len,
        "number of sequences a step": _sequences(job),
        "optimizer": job.optimizer.name,
        "precision of what is stepped": stepped_in(job),
        **adapted(job, training),
        "--seed": training.seed,
        "--data": marked.hexdigest()[:16],
    }


def _schedule(run: Run, training: Training, steps: int, updates: int) -> LambdaLR:
    """Where ``updates`` have been made: what the command says goes, not what a checkpoint's run said."""
    for group in run.optimizer.param_groups:
        group["initial_lr"] = group["lr"] = training.lr
    return LambdaLR(run.optimizer, lambda update: factor(update, training, steps), last_epoch=updates - 1)


def factor(update: int, training: Training, steps: int) -> float:
    """Of the learning rate, for the update of this number from 0: up to 1 over the warm-up, then down to 0 after the last step."""
    warmup = training.warmup_steps
    if update < warmup:
        return (update + 1) / warmup
    if training.lr_schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (update - warmup) / max(1, steps - warmup))))


def _of_first(asked: Callable[[], Any], group: Any) -> Any:
    """Rank 0's answer, on every rank."""
    if group is None:
        return asked()
    answer = [asked() if distributed.get_rank() == 0 else None]
    distributed.broadcast_object_list(answer, src=0, group=group)
    return answer[0]


# -- how it ends


def _refuse_no_number(number: int, loss: float, norm: float | None, run: Run, stepped: Stepped) -> None:
    """A loss or norm that is no number ends the run before it is saved; fp16's scaler skips such a step, until its scale is nothing."""
    if stepped.skipped and run.scaler is not None:
        if run.scaler.get_scale() >= 1:
            return
        what = f"step {number}: fp16 overflows at a loss scale of {run.scaler.get_scale():g}"
    elif not math.isfinite(loss):
        what = f"step {number}: the loss is {loss}"
    elif norm is not None and not math.isfinite(norm):
        what = f"step {number}: the loss is {loss:g}, and the norm of its gradients {norm}"
    elif stepped.skipped:  # by DeepSpeed, which tells no norm where nothing is clipped
        what = f"step {number}: the loss is {loss:g}, and its gradients are no numbers"
    else:
        return
    raise UllageError(what, remedy="lower --lr, lengthen --warmup-steps, or compute in bf16-mixed or fp32")


# -- what it answers


def _flops_per_token_and_s(job: Job) -> float | None:
    """Of a token, over what the job's GPUs can do in a second; None where it is not known."""
    try:
        peak = peak_flops_per_s(job.cluster.device, "bf16")
        return flops_per_token(graph_of(job), job.data.seq_len) / (peak * job.layout.world)
    except Unsupported:
        return None


def _answer(
    run: Run, training: Training, begun: Position, steps: int, done: _Done, exported: Path, predicted: int | None
) -> Trained:
    return Trained(
        device="CPU processes" if run.device.type == "cpu" else torch.cuda.get_device_name(run.device),
        versions=(f"torch {torch.__version__}", f"transformers {transformers.__version__}"),
        ranks=run.job.layout.world,
        steps=steps,
        resumed=begun.step,
        first=done.first,
        last=done.last,
        step_s=done.step_s,
        memory_bytes=done.memory_bytes,
        predicted_bytes=predicted,
        capacity_bytes=run.job.cluster.device.capacity_bytes,
        checkpoint=str(training.out / f"step-{max(steps, begun.step)}"),
        exported=str(exported),
        metrics=str(training.out / "metrics.jsonl"),
    )

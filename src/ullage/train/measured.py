"""What a job's ranks hold in a steady step, and how long one takes: the allocator's own counters on a GPU, storages tracked on the CPU.

Of a CPU's run two things are left out, which no GPU's has: gloo all-reduces a copy of what it is to reduce-scatter, and splits that
(ProcessGroupGloo::reduce_scatter_tensor_coalesced). Of the estimate the workspaces of GPU libraries are.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from statistics import median

import torch
from torch import distributed

from ullage.engines.estimate import Estimate, estimate
from ullage.engines.registry import account, ranks_of
from ullage.errors import Unsupported
from ullage.job.adapted import graph_of
from ullage.job.job import Job
from ullage.memory.ledger import by_category, ledger
from ullage.memory.program import locate_peak
from ullage.timing.step import time_or_why
from ullage.trace.events import Allocation, Trace
from ullage.trace.models import dropouts
from ullage.trace.run import real
from ullage.train.answers import Measured, RankMemory
from ullage.train.batches import micro_batches, tokens_of
from ullage.train.composed import Run, run_of
from ullage.train.settings import Settings

BOUND = 0.02


def measure(job: Job, settings: Settings) -> Measured | None:
    """As one rank: the answer on rank 0, None on the others. Raises Unsupported where the job has no estimate to be held against."""
    if not torch.cuda.is_available():
        _refuse_what_cpus_do_otherwise(job)
    expected = estimate(job)
    tokens = tokens_of(job, settings)
    first = _until_steady(job)
    recorded = first + (0 if torch.cuda.is_available() or job.layout.world == 1 else _MORE)
    batches = [micro_batches(job, tokens, step) for step in range(recorded + settings.steps)]
    if torch.cuda.is_available():
        run = _made(job, settings)
        mine = _on_gpu(run, batches[:recorded])
    else:
        run, mine = _on_cpu(job, settings, batches[:recorded], first)
    seconds = _timed(run, batches[recorded:])
    ranks: list[RankMemory | None] = [mine]
    if distributed.is_initialized():
        ranks = [None] * distributed.get_world_size()
        distributed.all_gather_object(ranks, mine)
        if distributed.get_rank():
            return None
    return _held_against(expected, run, [one for one in ranks if one is not None], seconds)


def _refuse_what_cpus_do_otherwise(job: Job) -> None:
    found: dict[str, tuple[object, str]] = {
        f"offload.{part}": (getattr(job.offload, part), "host and device are one memory on CPU processes")
        for part in ("optimizer", "params")
        if getattr(job.offload, part) != "none"
    }
    for key, share in dropouts(job).items():
        found[key] = (
            share,
            "a CPU keeps its mask in the input's type, a GPU in bytes, and has no fused attention that drops",
        )
    for key, (value, why) in found.items():
        raise Unsupported(why, key=key, value=value, remedy="measure it on GPUs")


_MORE = 2
"""Steady steps that ranks on the CPU run beside the first, the least of which counts: gloo's threads may hold what they have reduced a
moment longer than its wait."""


def _until_steady(job: Job) -> int:
    """Steps up to one like all that follow: the second has optimizer states from its start. DeepSpeed's stage 3 learns in its second
    micro-batch in which order parameters are met (zero/partitioned_param_coordinator.py), and fetches ahead from the third on."""
    learns = job.engine.name == "deepspeed" and job.engine.zero_stage == 3
    return 3 if learns and job.data.grad_accum == 1 else 2


def _made(job: Job, settings: Settings) -> Run:
    return run_of(job, seed=settings.seed, lr=settings.lr, weight_decay=settings.weight_decay, weights=settings.weights)


def _on_cpu(job: Job, settings: Settings, batches: list[list[torch.Tensor]], first: int) -> tuple[Run, RankMemory]:
    """first: the first step that is like all that follow."""
    made: list[Run] = []
    waiting = iter(batches)

    def factory() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], object]]:
        run = _made(job, settings)
        made.append(run)
        return run.model, run.optimizer, lambda: run.step(next(waiting))

    trace = real(factory, steps=len(batches), trusted=True)
    trace = replace(trace, allocations=tuple(one for one in trace.allocations if not _is_gloos(one)))
    steady = [trace.peak(*trace.span(step)) for step in range(first, len(batches) + 1)]
    highest = min(steady, key=lambda one: one.bytes)
    return made[0], RankMemory(
        rank=_rank(),
        allocated_bytes=highest.bytes,
        reserved_bytes=None,
        device_bytes=None,
        moment=f"{highest.phase}: {highest.module or 'the root'}, {highest.op}",
        categories=_categories(trace, highest.at),
    )


def _is_gloos(one: Allocation) -> bool:
    return one.op == "aten.split" and one.category != "activations"


def _categories(trace: Trace, at: int) -> tuple[tuple[str, int], ...]:
    found: Counter[str] = Counter()
    for line in trace.ledger(at):
        found[line.category] += line.bytes
    return tuple(found.most_common())


def _on_gpu(run: Run, batches: list[list[torch.Tensor]]) -> RankMemory:
    for batch in batches[:-1]:
        run.step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run.step(batches[-1])
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return RankMemory(
        rank=_rank(),
        allocated_bytes=torch.cuda.max_memory_allocated(),
        reserved_bytes=torch.cuda.max_memory_reserved(),
        device_bytes=total - free,
        moment="",
        categories=(),
    )


def _timed(run: Run, batches: list[list[torch.Tensor]]) -> float:
    seconds = []
    for batch in batches:
        if distributed.is_initialized():
            distributed.barrier()
        began = time.perf_counter()
        float(run.step(batch).loss)
        if run.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _held_against(expected: Estimate, run: Run, ranks: list[RankMemory], seconds: float) -> Measured:
    on_cpu = run.device.type == "cpu"
    lines, moment = _predicted(expected)
    workspace = lines.pop("workspace", 0) if on_cpu else 0
    data = run.job.data
    return Measured(
        device="CPU processes" if on_cpu else torch.cuda.get_device_name(run.device),
        versions=_versions(run.job),
        ranks=tuple(ranks),
        predicted_bytes=sum(lines.values()),
        predicted_moment=moment,
        predicted=tuple(lines.most_common()),
        workspace_bytes=workspace,
        step_s=seconds,
        predicted_step_s=_predicted_s(run.job, on_cpu=on_cpu),
        tokens_per_s_per_rank=data.micro_batch * data.grad_accum * data.seq_len / seconds,
        bound=BOUND,
    )


def _predicted(expected: Estimate) -> tuple[Counter[str], str]:
    """Bytes by category and the moment of the rank that allocates most; the estimate's own is the one that needs most of its device."""
    job, graph = expected.job, graph_of(expected.job)
    peaks = [locate_peak(account(job, graph, rank).program) for rank in ranks_of(job, graph)]
    index, worst = max(enumerate(peaks), key=lambda one: one[1].bytes)
    return Counter(by_category(ledger(worst))), expected.ranks[index].moment


def _predicted_s(job: Job, *, on_cpu: bool) -> float | None:
    """Of the device that the job is run on, where its time is known."""
    if on_cpu and job.cluster.device.vendor != "cpu":
        return None
    found = time_or_why(job)
    return None if isinstance(found, Unsupported) else found.step_s


def _versions(job: Job) -> tuple[str, ...]:
    libraries = ["torch", "transformers", *(["deepspeed"] if job.engine.name == "deepspeed" else [])]
    return tuple(f"{name} {version(name)}" for name in libraries)


def _rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0

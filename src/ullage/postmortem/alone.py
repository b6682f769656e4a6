"""What the evidence says by itself, without a job: the numbers against each other, the traceback's phase, the log's series."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ullage.postmortem.causes import Kind, Reason
from ullage.postmortem.evidence import Evidence
from ullage.postmortem.hints import hinted
from ullage.postmortem.messages import Numbers
from ullage.postmortem.signs import CONTRADICTION, ENGINE, LARGEST, LIBRARY, QUANTISED
from ullage.units import GIB, format_bytes

_CONTEXT_BYTES = 2 * GIB
"""A context with its libraries and communicators is below this: 0.5 GiB on A100 and H100, and 0.5 to 0.7 GB for each communicator
(hardware/data/overheads.toml; NVIDIA/nccl#964)."""
_SMALL_BYTES = GIB
"""A context by itself is below this (pytorch/pytorch#151030: 520 MB each of seven sibling ranks on the first card)."""
_MUCH_UNUSED = 0.1
_SOME_UNUSED = 0.02
_IMPOSSIBLE_RATIO = 1.5
"""More than the whole card in one tensor: nothing that is given back makes room for it."""
_FULL = 0.85
_MUCH_OF_CARD = 0.1
_LEAST_POINTS = 8
_LEAK_RATIO = 1.2
_RISING = 0.8
_STEADY_RATIO = 1.05
_STEPPING = frozenset(("forward", "attention", "experts", "loss", "backward"))
_ASK = "the job (--job, or --config, --model and --cluster) says which"

_PHASES: dict[str, tuple[Kind, float, str]] = {
    "engine": ("foreign-process", 2.5, "the traceback is inside an inference engine, or hands it weights: it has a share of the card"),
    "pinning": ("host-memory", 3.0, "the traceback is inside the pinning of host memory, which CUDA reports as its own"),
    "unpad": ("config", 3.0, "it came from the code that packs and unpads sequences: a mask or a shape is not what it expects"),
    "save": ("save", 3.5, "the traceback is inside the writing of a checkpoint"),
    "load": ("load", 3.5, "the traceback is inside the loading of weights or a checkpoint"),
    "evaluation": ("evaluation", 3.0, "the traceback is inside evaluation"),
    "optimizer-first-step": ("optimizer-first-step", 3.0, "the optimizer was making its state, which the first step does"),
    "optimizer": ("optimizer-step", 2.5, "the traceback is inside the optimizer's step"),
    "clipping": ("clipping", 3.0, "the traceback is inside gradient clipping"),
    "loss": ("logits", 2.5, "the traceback is inside the head or the loss"),
    "mask": ("padding-mask", 2.5, "the traceback is inside the making of an attention mask, which grows with the square of the length"),
    "attention": ("attention-scores", 1.5, "the traceback is inside the attention's scores"),
    "experts": ("expert-imbalance", 1.5, "the traceback is inside the experts, whose tokens follow the router"),
    "collective": ("communicators", 0.7, "the traceback is inside a collective"),
    "engine-init": ("states", 2.0, "the engine was setting up its states"),
}  # fmt: skip


def alone(evidence: Evidence) -> Iterator[Reason]:
    """Reasons out of the evidence alone. Where it tells of no failure of memory, none but a contradiction in what was configured."""
    if evidence.recognised == "not-oom":
        if evidence.event is not None and evidence.event.what == CONTRADICTION:
            yield Reason(kind="config", weight=6.0, why=CONTRADICTION)
        return
    yield from _by_sign(evidence)
    yield from _too_large(evidence.numbers)
    yield from _fragmented(evidence)
    yield from _outside(evidence.numbers)
    yield from _not_there(evidence.numbers)
    yield from _limit(evidence.numbers)
    yield from _growing(evidence)
    yield from hinted(evidence.hints, seen_by_numbers=evidence.numbers.capacity_bytes is not None)
    for phase in evidence.phases:
        if phase in _PHASES:
            kind, weight, why = _PHASES[phase]
            yield Reason(kind=kind, weight=weight, why=why)
            break  # the most particular speaks for all that it was called from


def _by_sign(evidence: Evidence) -> Iterator[Reason]:
    event = evidence.event
    if event is None:
        return
    if event.recognised == "host-oom":
        weight = 6.0 if event.weight >= 6 else min(3.0, event.weight)
        yield Reason(kind="host-memory", weight=weight, why=event.what)
    elif event.recognised == "nccl-oom":
        yield Reason(
            kind="communicators",
            weight=3.0,
            why="NCCL asks the driver for its buffers, outside torch's allocator, and torch holds the rest of the card",
        )
        yield Reason(
            kind="fragmentation",
            weight=1.0,
            why="what torch caches and does not use is not given back for NCCL: expandable segments or an emptied cache leave it room",
        )

    elif event.what == ENGINE:
        yield Reason(
            kind="foreign-process",
            weight=2.2,
            why=f"{ENGINE} (gpu_memory_utilization): what else is on the card, a training among it, had the rest",
        )
    elif event.what == LARGEST:
        yield Reason(kind="config", weight=1.5, why=f"{LARGEST}, whatever is free of it: in smaller pieces it passes")
    elif event.what == QUANTISED:
        yield Reason(kind="load", weight=2.2, why=QUANTISED)
    elif event.recognised == "cuda-oom" and event.what in LIBRARY:
        yield Reason(
            kind="communicators",
            weight=1.0,
            why=f"{event.what}: it asks the driver, outside torch's allocator, which holds the rest of the card. An index out of range is "
            "reported so too, late: CUDA_LAUNCH_BLOCKING=1 tells them apart",
        )


def _too_large(numbers: Numbers) -> Iterator[Reason]:
    tried, capacity, allocated = numbers.tried_bytes, numbers.capacity_bytes, numbers.allocated_bytes
    exa = 1 << 60
    if tried is None:
        return
    if tried >= exa // 2:
        yield Reason(
            kind="config",
            weight=4.0,
            why="no card has an exabyte: a size was computed wrongly; report it, do not tune memory",
        )
    elif capacity is not None and tried > _IMPOSSIBLE_RATIO * capacity:
        held = (
            f", and only {format_bytes(allocated)} was allocated"
            if allocated is not None and allocated < capacity / 2
            else ""
        )
        yield Reason(
            kind="config",
            weight=2.5,
            why=f"{format_bytes(tried)} in one tensor is more than the whole card{held}: a shape or a mask is wrong, or something grows "
            "with the square of the length",
        )


def _fragmented(evidence: Evidence) -> Iterator[Reason]:
    numbers = evidence.numbers
    held = evidence.split_bytes if evidence.split_bytes is not None else numbers.unused_bytes
    of = numbers.capacity_bytes or numbers.reserved_bytes
    if not held or not of:
        return
    share, tried, free = held / of, numbers.tried_bytes, numbers.sane(numbers.free_bytes) or 0
    enough = tried is not None and held + free >= tried
    why = f"{format_bytes(held)} was reserved and not allocated ({share:.0%} of the card)"
    if enough:
        why += f": with what was free, enough for {format_bytes(tried or 0)} had it been in one piece"
    if share >= _MUCH_UNUSED and (enough or tried is None):
        yield Reason(kind="fragmentation", weight=2.5, why=why)
    elif share >= _MUCH_UNUSED or (enough and share >= _SOME_UNUSED):
        yield Reason(kind="fragmentation", weight=0.8, why=why)


def _outside(numbers: Numbers) -> Iterator[Reason]:
    """Other processes, and what this one holds outside torch's allocator."""
    capacity = numbers.capacity_bytes or numbers.allowed_bytes  # Metal tells no capacity
    free, reserved = numbers.sane(numbers.free_bytes), numbers.reserved_bytes or numbers.allocated_bytes
    others, process = numbers.sane(numbers.other_processes_bytes), numbers.sane(numbers.process_bytes)
    if capacity is None:
        return
    if process is not None and reserved is not None and process < reserved:
        process = None  # a container may hide what processes hold: 0 bytes of each
    if others is not None and others >= GIB:
        whole = others >= capacity / 2
        count = numbers.other_processes_count
        contexts = count > 1 and others < count * _SMALL_BYTES
        yield Reason(
            kind="foreign-process",
            weight=6.0 if whole else 2.5,
            why=f"other processes held {format_bytes(others)} of the card's {format_bytes(capacity)}"
            + (
                f": {count} of them, each no more than a context, as of ranks that opened this card before their own"
                if contexts
                else ""
            ),
        )
    if process is not None and reserved is not None and process - reserved >= _CONTEXT_BYTES:
        elsewhere = process - reserved
        enough = numbers.tried_bytes is not None and elsewhere - _CONTEXT_BYTES >= numbers.tried_bytes
        yield Reason(
            kind="communicators",
            weight=2.2 if enough else 1.5,
            why=f"this process held {format_bytes(elsewhere)} outside torch's allocator: communicators, libraries, the context"
            + (
                f"; a context takes less than {format_bytes(_CONTEXT_BYTES)}, and the rest would have held what was tried"
                if enough
                else ""
            ),
        )
    elif others is None and process is None and free is not None and reserved is not None:
        elsewhere, silent = capacity - free - reserved, numbers.other_processes_count
        if elsewhere >= _CONTEXT_BYTES:
            much = elsewhere >= capacity / 4
            yield Reason(
                kind="foreign-process",
                weight=2.5 if much else 1.2,
                why=f"{format_bytes(elsewhere)} of the card was neither free nor torch's: "
                + (f"{silent} other processes are told of" if silent else "another process, or communicators"),
            )


def _not_there(numbers: Numbers) -> Iterator[Reason]:
    """What torch counts and the card has not got."""
    capacity, allocated = numbers.capacity_bytes, numbers.sane(numbers.allocated_bytes)
    if capacity is None or allocated is None or allocated <= capacity:
        return
    pools = numbers.private_pools_bytes is not None
    yield Reason(
        kind="foreign-process",
        weight=2.2 if pools else 1.5,
        why=f"torch counts {format_bytes(allocated)} as allocated, and the card has {format_bytes(capacity)}: an inference engine in this "
        "process that sleeps (vLLM, SGLang) gives memory back that goes on being counted; or the driver keeps a part on the host, as on "
        "Windows",
    )


def _limit(numbers: Numbers) -> Iterator[Reason]:
    allowed, capacity, tried, free = (
        numbers.allowed_bytes,
        numbers.capacity_bytes,
        numbers.tried_bytes,
        numbers.free_bytes,
    )
    if allowed is not None and capacity is not None and allowed < capacity:
        yield Reason(
            kind="config",
            weight=1.5,
            why=f"torch was allowed {format_bytes(allowed)} of {format_bytes(capacity)}: set_per_process_memory_fraction",
        )
    elif tried is not None and free is not None and tried < free and allowed is None:
        yield Reason(
            kind="foreign-process",
            weight=1.0,
            why=f"{format_bytes(free)} was free when {format_bytes(tried)} failed: another process gave it back in between, or the "
            "container or driver hides a limit",
        )


def _growing(evidence: Evidence) -> Iterator[Reason]:
    """What the log told of memory, step by step: it grew, or stood and one step asked for more."""
    series = evidence.series
    if len(series) < _LEAST_POINTS:
        return
    half = len(series) // 2
    rises = sum(after >= before for before, after in itertools.pairwise(series))
    steady = rises >= _RISING * (len(series) - 1)
    if steady and series[half] > series[0] and series[-1] >= _LEAK_RATIO * series[half]:
        yield Reason(
            kind="leak",
            weight=3.0,
            why=f"allocated memory rose from {format_bytes(series[0])} over {format_bytes(series[half])} to {format_bytes(series[-1])} "
            "in the log: something is kept from step to step",
        )
    elif max(series) <= _STEADY_RATIO * min(series) and evidence.recognised in ("cuda-oom", "hip-oom"):
        yield Reason(
            kind="outlier-length",
            weight=1.2,
            why=f"the log tells of {format_bytes(min(series))} to {format_bytes(max(series))}, {len(series)} times over, and then one step "
            "asked for more: a longer sequence or a larger batch",
        )


def unnamed(evidence: Evidence) -> Iterator[Reason]:
    """What live tensors of a step may be, where no job says which: of a card that they fill, or of one request for much of it.

    Both are named as possible, first what the traceback was in: inside a forward or a backward activations, elsewhere states.
    """
    why = _too_much(evidence.numbers) or _full(evidence.numbers)
    if why is None:
        return
    in_step = not _STEPPING.isdisjoint(evidence.phases)
    yield Reason(kind="states", weight=0.9 if in_step else 1.0, why=why)
    yield Reason(kind="activations", weight=1.0 if in_step else 0.9, why=why)


def _too_much(numbers: Numbers) -> str | None:
    """One tensor that takes much of the card."""
    tried, capacity = numbers.tried_bytes, numbers.capacity_bytes
    if not tried or not capacity or tried < _MUCH_OF_CARD * capacity:
        return None
    share = (
        f"{tried / capacity:.0%} of the card" if tried <= capacity else f"more than the card's {format_bytes(capacity)}"
    )
    return (
        f"{format_bytes(tried)} in one tensor is {share}, as logits are (tokens x vocabulary), attention scores and masks (tokens x "
        f"tokens), or a flat copy of many parameters; {_ASK}"
    )


def _full(numbers: Numbers) -> str | None:
    capacity = numbers.capacity_bytes or numbers.allowed_bytes
    if not numbers.allocated_bytes or not capacity or numbers.allocated_bytes < _FULL * capacity:
        return None
    return (
        f"{format_bytes(numbers.allocated_bytes)} of {format_bytes(capacity)} was allocated to live tensors: neither fragmentation nor "
        f"another process; {_ASK}"
    )

"""--chunked-optimizer-state-offload: states wait on the host between two updates, and are stepped on the GPU.

Source: Megatron-Core's dev branch, optimizer/cpu_offloading/chunked_optimizer_state_offload.py, and training/training.py for when: masters
and the first chunk of moments are fetched as gradients are finished, the rest chunk by chunk through two windows, and all of it leaves on
a stream of its own as the next forward begins. --offload-optimizer-states is its older name, with one chunk for all.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike

from ullage import dtypes
from ullage.engines.base import flag, pinned, sized
from ullage.engines.megatron.hybrid import going
from ullage.errors import Unsupported
from ullage.job.job import Job
from ullage.memory.program import Item, round_up
from ullage.units import MIB

CHUNKED, OLDER = "chunked_optimizer_state_offload", "offload_optimizer_states"
_FRACTION = 1.0
_WINDOWS = 2  # of chunks: one is stepped while the next comes, and goes while that is stepped
_DISTRIBUTED = 1  # zero_stage
MOMENTS = ("exp_avg", "exp_avg_sq")


def is_used(job: Job) -> bool:
    asked = flag(job.engine.options, CHUNKED, False) or flag(job.engine.options, OLDER, False)
    return job.engine.name == "megatron" and asked and fraction(job) > 0


def fraction(job: Job) -> float:
    said = job.engine.options.get("optimizer_state_offload_fraction", _FRACTION)
    assert isinstance(said, float | int), said  # job/options reads it as a number
    return float(said)


def chunk_bytes(job: Job) -> int:
    """Of moments that are fetched together; 0: all of them."""
    said = job.engine.options.get("optimizer_state_offload_chunk_size_mb", 0)
    assert isinstance(said, int), said
    return said * MIB


def refuse(job: Job) -> None:
    """What Megatron asserts too, and what is not modelled."""
    if not is_used(job):
        return
    key = f"engine.options.{CHUNKED if flag(job.engine.options, CHUNKED, False) else OLDER}"
    for stands, what, remedy in (
        (job.offload.optimizer != "none", "excludes the optimizer on the host", "leave offload.optimizer out"),
        (
            job.engine.zero_stage != _DISTRIBUTED,
            "goes with the distributed optimizer alone",
            "set engine.zero_stage: 1",
        ),
        (
            not job.optimizer.name.startswith("adam"),
            f"is modelled of Adam, not of {job.optimizer.name}",
            "set optimizer: adamw",
        ),
    ):
        if stands:
            raise Unsupported(what, key=key, value="true", remedy=remedy)


def opening(job: Job, pieces: ListLike[int], which: str) -> Item | None:
    """Main parameters are made on the GPU, and leave it before the first forward."""
    away, master = pieces[: count(job, pieces)], job.precision.master
    if not away or master is None or master == job.precision.params:
        return None
    what = f"main parameters that go to the host ({which})"
    return sized("optimizer", what, sum(away), master, pieces=away, lives="loading")


def count(job: Job, pieces: ListLike[int]) -> int:
    """How many of a rank's first tensors wait on the host, masters and moments."""
    return going(pieces, fraction(job)) if is_used(job) else 0


def bytes_of(job: Job, numel: float) -> float:
    """What waits of so many elements of which all do: moments, and masters where they are copies."""
    precision = job.precision
    copies = precision.master is not None and precision.master != precision.params
    bits = len(MOMENTS) * dtypes.bits(job.optimizer.state) + (dtypes.bits(precision.master or "") if copies else 0)
    return numel * bits / 8


def host_bytes(job: Job, pieces: ListLike[int]) -> int:
    """Of one rank: a pinned block for each state of each tensor."""
    precision = job.precision
    kinds = [job.optimizer.state] * len(MOMENTS)
    if precision.master is not None and precision.master != precision.params:
        kinds.append(precision.master)
    mine = pieces[: count(job, pieces)]
    return sum(pinned(dtypes.size_bytes(numel, kind)) for numel in mine for kind in kinds)


def window(job: Job, kinds: ListLike[ListLike[int]]) -> list[Item]:
    """What of it an update has on the GPU: masters whole, and moments whole or in windows, of which each optimizer has its own. kinds: of
    each optimizer, the pieces that wait."""
    away = [list(pieces[: count(job, pieces)]) for pieces in kinds]
    numel = sum(map(sum, away))
    if not numel:
        return []
    precision, found = job.precision, []
    lives = "the optimizer's step"
    if precision.master is not None and precision.master != precision.params:
        found.append(sized("optimizer", "main parameters, fetched", numel, precision.master, lives=lives))
    whole = sized("optimizer", "moments, fetched", len(MOMENTS) * numel, job.optimizer.state, lives=lives)
    chunk = chunk_bytes(job)
    if not chunk:
        return [*found, whole]
    largest = dtypes.size_bytes(len(MOMENTS) * max(max(pieces, default=0) for pieces in away), job.optimizer.state)
    windows = _WINDOWS + sum(1 for pieces in away if pieces) - 1  # others hold their first chunk already
    in_windows = min(whole.bytes, round_up(windows * max(chunk, largest)))
    formula = f"{windows} windows of {max(chunk, largest)} B; optimizer_state_offload_chunk_size_mb"
    return [*found, Item(category="optimizer", what=whole.what, bytes=in_windows, formula=formula, lives=lives)]

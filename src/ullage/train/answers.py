"""What runs answer, as plain values. No torch here: a report reads them."""

from __future__ import annotations

from ullage.frozen import frozen


@frozen
class Row:
    """One step on one device and on the ranks."""

    step: int
    loss: float
    loss_on_ranks: float
    grad_norm: float | None
    grad_norm_on_ranks: float | None


@frozen
class Proof:
    """loss_error, norm_error: the largest relative differences over the steps. weight_error: of all final weights together,
    |ranks - one| / |one|; step_error: the same over |one - start|, so that weights that go elsewhere are seen however near they stay.

    tolerance: what loss_error may be; drift_tolerance: norm_error and weight_error; step_tolerance: step_error.
    """

    ranks: int
    rows: tuple[Row, ...]
    loss_error: float
    norm_error: float
    weight_error: float
    step_error: float
    tolerance: float
    drift_tolerance: float
    step_tolerance: float

    @property
    def equal(self) -> bool:
        drifted = max(self.norm_error, self.weight_error)
        near = self.loss_error <= self.tolerance and drifted <= self.drift_tolerance
        return near and self.step_error <= self.step_tolerance


@frozen
class RankMemory:
    """One rank's steady step at its highest. allocated_bytes: on the CPU storages tracked, rounded as CUDA's allocator rounds.

    reserved_bytes, device_bytes: of a GPU, None on the CPU. categories: allocated bytes by the ledger's category, on the CPU.
    """

    rank: int
    allocated_bytes: int
    reserved_bytes: int | None
    device_bytes: int | None
    moment: str
    categories: tuple[tuple[str, int], ...]


@frozen
class Measured:
    """A few steps of a job, held against its estimate. predicted_bytes: allocated, without the workspaces of GPU libraries on the CPU.

    workspace_bytes: what the estimate has of these, 0 on a GPU.
    bound: what the relative error of the rank that holds most may be. step_s: median over the steps after the recorded ones.
    predicted_step_s: of the job's own device; None where the ranks are on another, as CPU processes are unless the job's cluster names
    a calibrated machine.
    """

    device: str
    versions: tuple[str, ...]
    ranks: tuple[RankMemory, ...]
    predicted_bytes: int
    predicted_moment: str
    predicted: tuple[tuple[str, int], ...]
    workspace_bytes: int
    step_s: float
    predicted_step_s: float | None
    tokens_per_s_per_rank: float
    bound: float

    @property
    def worst(self) -> RankMemory:
        return max(self.ranks, key=lambda one: one.allocated_bytes)

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.worst.allocated_bytes - 1

    @property
    def within(self) -> bool:
        return abs(self.error) <= self.bound


@frozen
class Step:
    """One optimizer step of a training: a row of metrics.jsonl.

    loss: mean over all ranks' micro-batches, before the step; None where fp16 overflowed in it. grad_norm: before clipping; None without
    clipping. skipped: fp16's gradients overflowed, and nothing was stepped. tokens: seen since the run began, by all ranks. mfu: model
    FLOPs over what the job's GPUs could do; None on the CPU. memory_bytes: of the rank that holds most: on a GPU the most that was
    allocated in the step, on the CPU the resident size of the process.
    """

    step: int
    steps: int
    loss: float | None
    lr: float
    grad_norm: float | None
    skipped: bool
    loss_scale: float | None
    tokens: int
    step_s: float
    tokens_per_s: float
    mfu: float | None
    memory_bytes: int
    reserved_bytes: int | None


@frozen
class Trained:
    """first, last: the first and the last step of this start; None where none was left to do. resumed: the step that it went on from.

    step_s: mean of its steps but the first; None where it is alone. memory_bytes: the most of any, as in Step. predicted_bytes: the
    estimate's allocated; None: no estimate.
    """

    device: str
    versions: tuple[str, ...]
    ranks: int
    steps: int
    resumed: int
    first: Step | None
    last: Step | None
    step_s: float | None
    memory_bytes: int | None
    predicted_bytes: int | None
    capacity_bytes: int
    checkpoint: str
    exported: str
    metrics: str

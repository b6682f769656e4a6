"""Real DeepSpeed steps on CPU processes: the job that ullage estimates, DeepSpeed's configuration of it, and what a rank held.

What differs from DeepSpeed on GPUs, and what is done about it here:

- The CPU accelerator's streams do nothing, so that a freed buffer is free at once; on CUDA record_stream may hold it a little longer.
- FusedAdam and DeepSpeedCPUAdam are C++ extensions that are compiled at first use. torch's AdamW takes their place: its fused kernel
  makes no temporaries either. DeepSpeed's shared-memory collectives are compiled too: gloo alone is used.
- The accelerator refuses fp16 where oneDNN has no fast kernels for it. torch has slow ones: the answer to that question is changed.
- gloo reduce-scatters a copy of its input; NCCL takes the input itself. It is all-reduced where it lies, and so is the rank's part in it.
- Under offload, host and device are one memory: their sum is measured, and the estimate's two figures are added. Nothing is pinned.
"""

from __future__ import annotations

import gc
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ullage.engines.base import Account, context_of
from ullage.engines.deepspeed import stage12
from ullage.engines.deepspeed.options import knobs
from ullage.engines.deepspeed.partition import held
from ullage.engines.estimate import estimate
from ullage.engines.registry import account, ranks_of
from ullage.frozen import FrozenMap
from ullage.job.adapted import graph_of
from ullage.job.job import Job
from ullage.job.read import read_job
from ullage.memory.chunk import Replayer
from ullage.memory.program import Node, Repeat, Sequence
from ullage.memory.rank import Rank
from ullage.model.graph import Graph

if TYPE_CHECKING:  # torch is for the children alone
    from ullage.trace.recorder import Recorder

LLAMA: Mapping[str, object] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 352,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
STEADY_MICRO_BATCH = 3
"""Of stage 3: its coordinator records a trace in the second (__trace_mode)."""

STEPPING = "stepping"
"""The phase that begins with engine.step(), the last of a step's."""
_EXPECTED_WARNINGS = (
    r"`torch\.distributed\.\w+` is deprecated",  # collectives by names that torch has renamed
)
_OUTSIDE_ZERO = frozenset({"communication_data_type", "grad_accum_dtype"})


class Case(NamedTuple):
    """A job's keys beside the common ones; ``options`` are DeepSpeed's own."""

    stage: int
    options: FrozenMap[str, object] = FrozenMap({})
    keys: FrozenMap[str, object] = FrozenMap({})

    def __str__(self) -> str:
        words = [f"{key}={value}" for key, value in (*self.keys.items(), *self.options.items())]
        return " ".join([f"stage {self.stage}", *words])


class Held(NamedTuple):
    """Live bytes of one rank in a steady step: before it, at the highest point up to engine.step(), and of all of it.

    moment: of the peak. account: what was live there, in lines.
    """

    between: int
    passes: int
    peak: int
    moment: str
    account: tuple[str, ...]


def job_of(case: Case, ranks: int) -> Job:
    keys = {**case.keys}
    data = {name: keys.pop(name) for name in ("seq_len", "micro_batch", "grad_accum") if name in keys}
    return read_job(
        {
            "schema": 1,
            "model": {**LLAMA},
            "cluster": f"{ranks}xH100-SXM-80GB",
            "data": {"seq_len": 16, "micro_batch": 1, **data},
            "engine": {"name": "deepspeed", "zero_stage": case.stage, "options": {**case.options}},
            "optimizer": {"name": "adamw", "impl": keys.pop("impl", "fused")},
            "offload": {"optimizer": keys.pop("offload", "none")},
            **keys,
        }
    )


def estimated(job: Job) -> Held:
    """The rank that needs most, without cuBLAS' workspace; with the host's share under offload."""
    graph = graph_of(job)
    (rank,) = ranks_of(job, graph)
    found = account(job, graph, rank)
    answer = estimate(job, graph)
    beside = found.host_bytes - sum(line.bytes for line in answer.ledger if line.category == "workspace")
    between = answer.ranks[0].static_bytes + beside
    return Held(
        between=between,
        passes=between + max(map(_passes, _steps(job, graph, rank, found))),
        peak=answer.peak.allocated_bytes + beside,
        moment=answer.peak.moment,
        account=tuple(f"{line.bytes:>12,} {line.category:14} {line.what}: {line.formula}" for line in answer.ledger),
    )


def _steps(job: Job, graph: Graph, rank: Rank, found: Account) -> Iterable[Node]:
    """The steps of the ranks that may need most: under stages 1 and 2 they differ, and so do the ranks that are highest when."""
    known = knobs(job, graph)
    if job.engine.zero_stage not in (1, 2) or known.bf16_optimizer:
        return [found.step]
    replayer = Replayer(context=context_of(job, graph), recompute=job.recompute)
    return stage12.steps(job, graph, rank, held(job, rank), known, replayer)


_AFTER_THE_PASSES = frozenset(
    {"overflow check", "gradient norm", "own gradients into fp32", "gradients into fp32", "optimizer step"}
)


def _passes(step: Node) -> int:
    """How high forwards, backwards and reductions rise above the step's beginning."""
    assert isinstance(step, Sequence)
    at = highest = backwards = 0
    for child in step.children:
        ended = backwards == step.backwards and (isinstance(child, Repeat) or _moment(child) in _AFTER_THE_PASSES)
        if ended:
            break
        highest = max(highest, at + child.peak_bytes)
        at += child.delta_bytes
        backwards += child.backwards
    return highest


def _moment(node: Node) -> str | None:
    return node.moment if isinstance(node, Sequence) else None


def configuration(job: Job) -> dict[str, Any]:
    """What a user writes into ds_config.json for this job."""
    options = job.engine.options.as_dict()
    zero = {name: value for name, value in options.items() if name not in _OUTSIDE_ZERO}
    if job.offload.optimizer != "none":
        zero["offload_optimizer"] = {"device": job.offload.optimizer, "pin_memory": zero.pop("pin_memory", True)}
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.data.micro_batch,
        "gradient_accumulation_steps": job.data.grad_accum,
        "gradient_clipping": 1.0 if job.grad_clip else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": job.engine.zero_stage, **zero},
        "steps_per_print": sys.maxsize,
    }
    if job.precision.params == "bf16":
        found["bf16"] = {"enabled": True}
    if job.precision.params == "fp16":
        found["fp16"] = {"enabled": True, "initial_scale_power": 4}  # so small that no step is skipped
    if "grad_accum_dtype" in options:
        found["data_types"] = {"grad_accum_dtype": options["grad_accum_dtype"]}
    if "communication_data_type" in options:
        found["communication_data_type"] = options["communication_data_type"]
    return found


# -- in a child


def measure(case: Case, ranks: int) -> Held:
    """Runs the case as one rank of the process group, and says what it held."""
    from ullage.trace.hooks import watching
    from ullage.trace.recorder import Recorder

    job = job_of(case, ranks)
    steps = _steps_to_a_steady_one(job)
    recorder = Recorder()
    with warnings.catch_warnings(), recorder, watching(recorder):
        _quiet()
        _without_extensions()
        engine, step = _made(job, recorder)
        recorder.begin(engine, None)
        for number in range(1, steps + 1):
            gc.collect()
            recorder.begin_step(number)
            step()
    trace = recorder.trace(str(case))
    start, stop = trace.span(steps)
    highest = trace.peak(start, stop)
    return Held(
        between=trace.live_bytes(start - 1),
        passes=trace.peak(start, trace.span(steps, STEPPING)[0]).bytes,
        peak=highest.bytes,
        moment=f"{highest.phase}, {highest.module}: {highest.op}",
        account=tuple(
            f"{line.bytes:>12,} {line.category:14} {line.what}: {line.formula}" for line in trace.ledger(highest.at)
        ),
    )


def _steps_to_a_steady_one(job: Job) -> int:
    """The second step has optimizer states from its start."""
    micro_batches = STEADY_MICRO_BATCH if job.engine.zero_stage == 3 else 1
    return max(2, -(-micro_batches // job.data.grad_accum))


def _quiet() -> None:
    """Warnings are errors but for those that DeepSpeed is known to cause; it logs what it is about."""
    warnings.simplefilter("error")
    for words in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=words)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    gc.freeze()  # what was imported is no garbage
    gc.disable()  # its moments are its own


def _without_extensions() -> None:
    """See the head of this file."""
    import cpuinfo
    import torch.distributed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.adam import cpu_adam, fused_adam

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    cpuinfo.get_cpu_info = dict
    fused_adam.FusedAdamBuilder = cpu_adam.CPUAdamBuilder = _Kernels
    get_accelerator().is_fp16_supported = lambda: True
    torch.distributed.reduce_scatter_tensor = _reduce_scatter


def _reduce_scatter(output: Any, source: Any, op: Any, group: Any, async_op: bool) -> None:
    import torch.distributed as dist

    assert not async_op
    dist.all_reduce(source, op=op, group=group)
    mine = source.chunk(dist.get_world_size(group))[dist.get_rank(group)]
    if output.data_ptr() != mine.data_ptr():
        output.copy_(mine)


class _Kernels:
    """Stands in for the compiled extensions of DeepSpeed's two Adams: what they do in place, by torch's own fused kernel."""

    def load(self) -> _Kernels:
        return self

    def create_adam(self, *_: object) -> None: ...

    def destroy_adam(self, *_: object) -> None: ...

    def adam_update(
        self,
        _id: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        decay: float,
        _correct: bool,
        param: Any,
        grad: Any,
        exp_avg: Any,
        exp_avg_sq: Any,
    ) -> None:
        import torch

        torch._fused_adamw_(
            [param],
            [grad],
            [exp_avg],
            [exp_avg_sq],
            [],
            [torch.tensor(float(step))],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )

    def multi_tensor_adam(
        self,
        _chunk: int,
        _flag: Any,
        tensors: list[list[Any]],
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        step: int,
        _mode: int,
        correct: bool,
        decay: float,
    ) -> None:
        for grad, param, exp_avg, exp_avg_sq in zip(*tensors, strict=True):
            self.adam_update(0, step, lr, beta1, beta2, eps, decay, correct, param, grad, exp_avg, exp_avg_sq)


def _optimizer(job: Job, params: Any) -> Any:
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    if job.offload.optimizer != "none":
        return DeepSpeedCPUAdam(params, lr=1e-4)
    if job.optimizer.impl == "fused":
        return FusedAdam(params, lr=1e-4)
    return torch.optim.AdamW(params, lr=1e-4, foreach=job.optimizer.impl == "foreach")


def _made(job: Job, recorder: Recorder) -> tuple[Any, Callable[[], None]]:
    import deepspeed
    import torch

    from ullage.trace import models

    torch.manual_seed(0)
    model = models.build(job)
    batch = models.batch_of(job)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=_optimizer(job, [param for param in model.parameters() if param.requires_grad]),
        config=configuration(job),
    )

    def step() -> None:
        for number in range(1, job.data.grad_accum + 1):
            loss = engine(**batch).loss
            engine.backward(loss)
            del loss
            if number == job.data.grad_accum:
                recorder.mark(STEPPING)
            engine.step()

    return engine, step

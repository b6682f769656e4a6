"""torchtitan's graph_trainer: forward, loss and backward in one graph, whose passes are in place of FSDP2's hooks and of checkpointing.

Source: experiments/graph_trainer: trainer.py (make_fwd_bwd_step), passes.py (which passes run), fsdp_passes.py (one gather and one
reduction a layer, the next started beside it), cudagraph.py. Held against the graphs that it makes of Llama 3 8B
(tests/published/test_captured.py).

Ops run one by one, as eager ones do: regional compilation fuses flex attention alone. The graph is traced over plain tensors on one stream,
and captured in turn, with a pool of its own, by CUDA graphs.

SimpleFSDP (experiments/simple_fsdp) is what it came from: torch.compile captures the model, and AOTAutograd cuts forward and backward where
selective checkpointing has marked it. With the backend aot_eager its ops run one by one too. So did graph_trainer's mode "aot" at first.
"""

from __future__ import annotations

from ullage.errors import Infeasible, Unsupported
from ullage.frozen import FrozenMap, replace
from ullage.job.job import Job, Recompute
from ullage.kernels.torchtitan_captured import CAPTURES, POLICIES
from ullage.memory.program import Node, on_stream
from ullage.model.graph import Graph

OPTION, SIMPLE = CAPTURES
POLICY = "memory_policy"

TRACED_SINCE = "2026-04-27"
"""Commit 73680eedb: mode aot_fx_trace. Before, dynamo captured forward and backward for AOTAutograd to cut in two."""

CUT = ("2026-03-10", "2026-04-22")
"""Commits c8d2d7181, f213796fd: between them its pass saved what torchtitan's policy by op does, every second matmul among them."""

GATHERS_SAVED_UNTIL = "2026-04-28"
"""Commit 9ed1a028d of that day: weights are gathered again for the backward. A run named by the day was made before."""

POOL_STREAM = 7
"""Of the simulation alone: what a CUDA graph allocates comes from its own pool."""

GROUPED_MATMULS_CAPTURED_SINCE = (10, 0)
"""Compute capability from which torch's grouped matmul can be captured (is_cudagraph_compatible)."""


def is_captured(job: Job) -> bool:
    return any(job.engine.options.get(option) for option in CAPTURES)


def as_run(job: Job) -> Job:
    """The job in the words that FSDP2's account reads: ops one by one, layers under the memory policy, gathered again or not."""
    if not is_captured(job):
        return job
    _refuse(job)
    if not _is_traced(job):
        return _cut(job)
    policy = _policy(job)
    options = FrozenMap({**job.engine.options, POLICY: policy or "none"})
    recompute = Recompute(kind="none") if policy is None else Recompute(kind="selective")
    engine = replace(job.engine, options=options, zero_stage=3 if _gathers_again(job, policy) else 2)
    return replace(job, engine=engine, recompute=recompute, compile=False)


def _is_traced(job: Job) -> bool:
    version = job.stack_version
    return bool(job.engine.options.get(OPTION)) and (version is None or version >= TRACED_SINCE)


def _cut(job: Job) -> Job:
    """As AOTAutograd cuts it: torchtitan's own policy by op, and a loss that its backend fuses no more than the model."""
    options = job.engine.options
    if options.get("compile_backend", "aot_eager" if options.get(OPTION) else None) != "aot_eager":
        raise Unsupported(
            "is modelled with compile_backend aot_eager alone: inductor fuses and saves by choices of its own",
            key=_key(job),
            value="true",
            remedy="set engine.options.compile_backend: aot_eager, or leave it out",
        )
    if job.recompute.kind not in ("full", "selective"):
        raise Unsupported(
            "leaves what is saved to AOTAutograd's partitioner, whose choices are not modelled",
            key="recompute",
            value=job.recompute.kind,
            allowed="full, selective",
        )
    found = FrozenMap({**options, POLICY: "eager", "compile_loss": False})
    kept = options.get("reshard_after_forward") in ("never", False)
    return replace(job, engine=replace(job.engine, options=found, zero_stage=2 if kept else 3), compile=False)


def _key(job: Job) -> str:
    return f"engine.options.{OPTION if job.engine.options.get(OPTION) else SIMPLE}"


def _policy(job: Job) -> str | None:
    """The memory policy; None: none runs, and all that a backward reads stays."""
    said = job.engine.options.get(POLICY)
    if said is not None and said not in POLICIES:
        raise Unsupported("is not modelled", key=f"engine.options.{POLICY}", value=said, allowed=", ".join(POLICIES))
    kind = job.recompute.kind
    if said is not None and POLICIES[str(said)] != kind:
        wanted = POLICIES[str(said)]
        raise Infeasible(
            f"is recompute: {wanted}, not {kind}",
            key=f"engine.options.{POLICY}",
            value=said,
            allowed=", ".join(POLICIES),
        )
    if kind not in ("none", "full", "selective"):
        raise Unsupported(
            "is no memory policy of graph_trainer", key="recompute", value=kind, allowed="none, full, selective"
        )
    return {"none": None, "full": "full", "selective": "default"}[kind] if said is None else str(said)


def _gathers_again(job: Job, policy: str | None) -> bool:
    """Whether a layer's weights are: the option's "default" is to do so without a pipeline, and ZeRO's stage has no say."""
    if job.engine.options.get("reshard_after_forward") in ("never", False):
        return False
    version = job.stack_version
    return policy is not None and (policy == "full" or version is None or version > GATHERS_SAVED_UNTIL)


def _refuse(job: Job) -> None:
    key, version = _key(job), job.stack_version
    known = _is_traced(job) or not job.engine.options.get(OPTION)
    if not known and version is not None and not CUT[0] <= version < CUT[1]:
        raise Unsupported(
            f"was cut into a forward and a backward by AOTAutograd before {TRACED_SINCE}, whose choices are known from {CUT[0]} to "
            f"{CUT[1]} alone",
            key=key,
            value="true",
            remedy=f"name a stack_version since {TRACED_SINCE}",
        )
    if job.layout.pp > 1 or job.data.grad_accum > 1:
        what = "layout.pp" if job.layout.pp > 1 else "data.grad_accum"
        raise Unsupported(f"is modelled for one pass a step, and {what} asks for more", key=key, value="true")
    if job.precision.compute in ("fp8", "fp4"):
        raise Unsupported(
            "is modelled in 16 and 32 bits alone",
            key="precision.compute",
            value=job.precision.compute,
            remedy="use bf16",
        )


def placed(job: Job, graph: Graph, step: Node) -> Node:
    """A step's allocations, all on one stream, and in a pool of their own where the graph becomes a CUDA graph.

    Raises Unsupported for experts in a graph that AOTAutograd cuts, which no measured run was held against."""
    grouped = any(op.kind == "grouped_linear" for run in graph.runs for op in run.block.ops)
    if not _is_traced(job):
        if grouped:
            raise Unsupported(f"is not modelled for experts before {TRACED_SINCE}", key=_key(job), value="true")
        return on_stream(step, 0)
    return on_stream(step, POOL_STREAM if _becomes_cuda_graph(job, grouped=grouped) else 0)


def _becomes_cuda_graph(job: Job, *, grouped: bool) -> bool:
    capability = job.cluster.device.compute_capability
    return not grouped or (capability is not None and capability >= GROUPED_MATMULS_CAPTURED_SINCE)

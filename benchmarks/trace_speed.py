"""How long a trace takes and how much memory, beside torch's own FSDPMemTracker on the same job, each in a process of its own.

The job: transformers' Llama 3 8B under FSDP2 as rank 0 of 8 of the fake process group, two steps of forward, backward and AdamW on
fake tensors. Both are timed from the end of the imports to the peak, the building of the model included; memory is the process's
highest resident set, told beside what the imports alone have taken. Exits with 1 where the trace is not the faster and the leaner.
Run: python benchmarks/trace_speed.py
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from ullage.api import read_job
from ullage.job.job import Job
from ullage.units import GIB, MIB

STEPS = 2
JOB = {
    "schema": 1,
    "model": "llama-3-8b",
    "cluster": "8xH100-SXM-80GB",
    "stack": "transformers",
    "engine": {"name": "fsdp2"},
    "precision": "bf16-mixed",
    "recompute": "none",
    "grad_clip": False,
    "optimizer": {"name": "adamw", "impl": "foreach"},
    "data": {"seq_len": 2048, "micro_batch": 1},
}
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, getrusage(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one side took. import_rss_bytes, rss_bytes: the highest resident set after the imports, and in all."""

    cpu_s: float
    wall_s: float
    import_rss_bytes: int
    rss_bytes: int
    peak_bytes: int


def measured(peak_of: Callable[[], int]) -> Taken:
    imported = highest_rss_bytes()
    start, cpu_start = time.perf_counter(), time.process_time()
    peak = peak_of()
    return Taken(
        cpu_s=time.process_time() - cpu_start,
        wall_s=time.perf_counter() - start,
        import_rss_bytes=imported,
        rss_bytes=highest_rss_bytes(),
        peak_bytes=peak,
    )


def highest_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT


# -- the two sides: each imports what it needs, so that the imports are its own, and returns what is timed


def ours(job: Job) -> Callable[[], int]:
    """``ullage trace``: every allocation of both steps with its life, its category, its module and its op."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    from ullage.trace.models import factory_of
    from ullage.trace.run import trace

    return lambda: trace(factory_of(job), steps=STEPS, world=job.layout.world).steady.bytes


def theirs(job: Job) -> Callable[[], int]:
    """torch's tracker, as its documentation uses it: the peak by kind, and of each module at its borders."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401
    from torch import distributed
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed import device_mesh
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.fsdp import FSDPModule
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ullage.trace.models import factory_of
    from ullage.trace.patch import replaced

    def peak() -> int:
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=job.layout.world)
        # its ranks are asked for, so before all is fake
        mesh = device_mesh.init_device_mesh("cpu", (job.layout.world,), mesh_dim_names=("dp",))
        with (
            replaced(device_mesh, "init_device_mesh", lambda *_, **__: mesh),
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            model, optimizer, step = factory_of(job)()
            assert isinstance(model, FSDPModule)
            tracker = FSDPMemTracker(model, optimizer)
            with tracker:
                for number in range(STEPS):
                    if number:
                        tracker.reset_mod_stats()
                    step()
        highest: int = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        return highest

    return peak


SIDES = {"FSDPMemTracker": theirs, "ullage trace": ours}


def in_a_process(side: str) -> Taken:
    done = subprocess.run([sys.executable, __file__, side], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side} ended with {done.returncode}:\n{done.stderr}")
    return Taken(**json.loads(done.stdout))


def main() -> int:
    job = read_job(JOB)
    if sys.argv[1:]:
        print(json.dumps(asdict(measured(SIDES[sys.argv[1]](job)))))
        return 0
    print(f"{job.model.name}, {job.engine.name}, rank 0 of {job.layout.world}, {STEPS} steps on fake tensors")
    taken = {side: in_a_process(side) for side in SIDES}
    for side, one in taken.items():
        own = one.rss_bytes - one.import_rss_bytes
        print(
            f"  {side:<16} {one.cpu_s:6.1f} s of the processor, {one.wall_s:6.1f} s   {one.rss_bytes / MIB:7.1f} MiB resident, "
            f"{own / MIB:6.1f} MiB of it after the imports   peak {one.peak_bytes / GIB:.3f} GiB"
        )
    other, mine = taken.values()
    print(
        f"  {'ratio':<16} {mine.cpu_s / other.cpu_s:6.2f}{'':17} {mine.wall_s / other.wall_s:6.2f}"
        f"     {mine.rss_bytes / other.rss_bytes:7.3f}"
    )
    return int(mine.cpu_s >= other.cpu_s or mine.rss_bytes >= other.rss_bytes)


if __name__ == "__main__":
    sys.exit(main())

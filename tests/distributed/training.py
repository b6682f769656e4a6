"""Jobs of a small llama for the trainer's tests, and what the ranks of a shared world do with them."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ullage.errors import UllageError
from ullage.job.job import Job, Recompute
from ullage.job.read import read_job
from ullage.trace.patch import replaced
from ullage.train.settings import Settings, Training

LLAMA: Mapping[str, object] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 160,
    "vocab_size": 384,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
BUCKETS = {"reduce_bucket_size": 200_000}
"""DeepSpeed's default has 500 million elements, which a run on the CPU really holds."""
STAGE_3 = {**BUCKETS, "stage3_param_persistence_threshold": 1000, "stage3_prefetch_bucket_size": 100_000}


def job_of(engine: str, ranks: int, **keys: Any) -> Job:
    """fp32 and two micro-batches of two short sequences, unless the keys say otherwise."""
    options = {name: keys.pop(name) for name in ("zero_stage", "shard_group", "options") if name in keys}
    data = {"seq_len": 24, "micro_batch": 2, "grad_accum": 2, **keys.pop("data", {})}
    model = {**LLAMA, **keys.pop("model", {})}
    return read_job(
        {
            "schema": 1,
            "model": model,
            "cluster": f"{ranks}xH100-SXM-80GB",
            "engine": {"name": engine, **options},
            "data": data,
            "precision": "fp32",
            **keys,
        }
    )


def all_proved(jobs: Mapping[str, Job], settings: Settings) -> dict[str, Any]:
    """As one rank of the process group: the proof of each job by name, on rank 0; the error's text where one is refused."""
    from ullage.train import proof

    with replaced(proof, "_ran", _once_on_one_device(proof._ran)):
        return _each(proof.prove, jobs, settings)


def _once_on_one_device(ran: Callable[[Job, Settings], Any]) -> Callable[[Job, Settings], Any]:
    """Many jobs are the same on one device: it runs each once, and nothing again, which ranks that recompute are held against too."""
    answers: dict[Job, Any] = {}

    def remembered(job: Job, settings: Settings) -> Any:
        if job.layout.world > 1:
            return ran(job, settings)
        alone = replace(job, recompute=Recompute(), defaults=())
        if alone not in answers:
            answers[alone] = ran(alone, settings)
        return answers[alone]

    return remembered


def all_measured(jobs: Mapping[str, Job], settings: Settings) -> dict[str, Any]:
    """What each job's ranks held, in the same form."""
    from ullage.train.measured import measure

    return _each(measure, jobs, settings)


def all_trained(cases: Sequence[tuple[Job, Training]]) -> list[Any]:
    """The answer of each training in order, on rank 0; the error's text where one is refused."""
    from ullage.train.run import train

    found: list[Any] = []
    for job, training in cases:
        try:
            found.append(train(job, training))
        except UllageError as error:
            found.append(str(error))
    return found


def _each(verb: Callable[[Job, Settings], Any], jobs: Mapping[str, Job], settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, job in jobs.items():
            try:
                found[name] = verb(job, settings)
            except UllageError as error:
                found[name] = str(error)
    return found


def ends(job: Job, training: Training) -> dict[str, Any]:
    """As one rank: what a training says that meets a full disk at its second checkpoint, goes on, finds a file corrupt, or diverges."""
    from torch import distributed

    from ullage.train.run import train

    found: dict[str, Any] = {}
    with full_disk(at=2 * training.save_every):
        found["full disk"] = _said(lambda: train(job, training))
    found["gone on"] = _said(lambda: train(job, training))
    file = training.out / f"step-{training.steps}" / "__1_0.distcp"
    if distributed.get_rank() == 0:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 255
        file.write_bytes(content)
    distributed.barrier()
    found["corrupt"] = _said(lambda: train(job, training))
    far = replace(training, out=training.out / "far", lr=1e5, steps=40, save_every=1)
    found["diverged"] = _said(lambda: train(job, far))
    return found


@contextmanager
def full_disk(at: int) -> Iterator[None]:
    """No checkpoint after this step is written to its end."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    opened = FileSystem.create_stream

    @contextmanager
    def full(self: FileSystem, path: Any, mode: str) -> Iterator[Any]:
        with opened(self, path, mode) as file:
            if "w" in mode and f"step-{at}" in str(path):
                file.write(b"some of it")
                raise OSError(errno.ENOSPC, "No space left on device")
            yield file

    with replaced(FileSystem, "create_stream", full):
        yield


def _said(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except UllageError as error:
        return str(error)

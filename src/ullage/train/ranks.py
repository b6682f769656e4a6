"""One function on every rank of a job: as the rank that a launcher has started, or in processes that torchrun's agent starts here."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from ullage.errors import InvalidInput, UllageError
from ullage.train.heap import keep_what_is_freed, keeping_what_is_freed
from ullage.train.places import Place, place

_LINES = 12
_LOUD = ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api", "torch.multiprocessing")


def on_ranks(function: Callable[..., Any], arguments: tuple[object, ...], world: int) -> Any:
    """``function(*arguments)`` on ``world`` ranks: rank 0's answer.

    Where a launcher has set a rank, this process is that rank and returns its own answer. Raises the UllageError of the first rank that
    fails; the agent ends the others within seconds. On the CPU a rank keeps what it frees, a single one for as long as it runs.
    """
    found = place()
    if found is not None:
        with joined(found, world):
            return function(*arguments)
    if world == 1:
        _use_cores(1)
        with keeping_what_is_freed():
            return function(*arguments)
    return _started(function, arguments, world)


def device_of(local_rank: int) -> torch.device:
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def current_device() -> torch.device:
    found = place()
    return device_of(found.local_rank if found is not None else 0)


@contextmanager
def joined(found: Place, world: int) -> Iterator[None]:
    """The process group of all ranks, left at the end: NCCL between GPUs, gloo between CPUs and for what GPUs offload."""
    if found.world != world:
        raise InvalidInput(
            f"the job's layout has {world} ranks",
            key="WORLD_SIZE",
            value=found.world,
            remedy=f"start {world} processes",
        )
    if distributed.is_initialized():  # by whoever calls this
        yield
        return
    device = device_of(found.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        _use_cores(found.local_world)
        keep_what_is_freed()
    os.environ.update(MASTER_ADDR=found.master, MASTER_PORT=str(found.port), LOCAL_RANK=str(found.local_rank))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # gloo reduces what is offloaded
    distributed.init_process_group(backend, rank=found.rank, world_size=found.world)
    try:
        yield
        distributed.barrier()  # what rank 0 says after this is of a run that all have ended
    finally:
        distributed.destroy_process_group()


def _use_cores(processes: int) -> None:
    """Each process has its share of the cores, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))


# -- processes of our own


def _started(function: Callable[..., Any], arguments: tuple[object, ...], world: int) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else None
    if gpus is not None and gpus < world:
        raise InvalidInput(
            f"this machine has {gpus} GPUs",
            key="layout",
            value=f"{world} ranks",
            remedy="start it with torchrun or srun on as many machines as it needs",
        )
    with tempfile.TemporaryDirectory(prefix="ullage-") as name, _quiet():
        folder = Path(name)
        silent = {rank: Std.ALL if rank else Std.NONE for rank in range(world)}
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world,
            run_id="ullage",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=name, redirects=silent),
        )
        try:
            answers = elastic_launch(config, _run)(name, function, arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise _reason(folder, rank, failure.exitcode, str(failure.error_file), world) from None
        except SignalException as error:
            if error.sigval is signal.SIGINT:
                raise KeyboardInterrupt from None
            raise UllageError(f"was told to end by {error.sigval.name}; so were the {world} ranks") from None
    return answers[0]


def _run(folder: str, function: Callable[..., Any], arguments: tuple[object, ...]) -> Any:
    """One rank: an error that a person can cause is left for whoever started it."""
    found = place()
    assert found is not None, "the agent sets it"
    try:
        with joined(found, found.world):
            answer = function(*arguments)
        return answer if found.rank == 0 else None
    except UllageError as error:
        part = Path(folder) / f"{found.rank}.part"
        part.write_bytes(pickle.dumps((type(error), error.what, _told(error))))
        part.rename(Path(folder) / f"{found.rank}.error")
        sys.stdout.flush()
        os._exit(2)  # the others may wait in a collective for this one


def _told(error: UllageError) -> dict[str, object]:
    return {name: getattr(error, name) for name in ("key", "value", "allowed", "remedy", "place")}


def _reason(folder: Path, rank: int, code: int, error_file: str, world: int) -> UllageError:
    """Why the first rank that ended badly did."""
    for path in sorted(folder.glob("*.error")):
        kind, what, rest = pickle.loads(path.read_bytes())
        error: UllageError = kind(what, **rest)
        return error
    how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
    printed = [line for path in folder.rglob("stderr.log") for line in _end(path) if f"/{rank}/" in str(path)]
    said = _raised(Path(error_file)) or (printed[-1].strip() if printed else "")
    last = f": {said[:300]}" if said else ""
    by_kernel = "if nobody did it, the kernel has, for want of host memory" if code == -signal.SIGKILL else None
    return UllageError(f"rank {rank} of {world} {how}{last}; the others were ended", remedy=by_kernel)


def _raised(error_file: Path) -> str:
    """The exception that ended a rank, and the line that raised it, as torch's agent notes them (elastic/multiprocessing/errors)."""
    try:
        told = json.loads(error_file.read_text())["message"]
        raised = [line.strip() for line in told["extraInfo"]["py_callstack"].splitlines() if line.startswith("  File ")]
        return f"{told['message']} ({raised[-1]})"
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return ""


def _end(path: Path) -> list[str]:
    return [line for line in path.read_text(errors="replace").splitlines() if line.strip()][-_LINES:]


@contextmanager
def _quiet() -> Iterator[None]:
    """The agent logs what it does, and a failure's table: the error that is raised says it once."""
    levels = {log: log.level for log in map(logging.getLogger, _LOUD)}
    try:
        for log in levels:
            log.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in levels.items():
            log.setLevel(level)

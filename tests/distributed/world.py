"""Real process groups on this machine: ``run`` calls a function on every rank of a fresh world and returns what each answered.

Every call has processes of its own, so that nothing of one case (a patched function, a leaked tensor) reaches the next; they are forked
from one server that has imported what is slow to import, and start in a fraction of a second.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

_SURROUNDINGS = {
    "OMP_NUM_THREADS": "1",  # several ranks share a core as it is
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
}
_IMPORTS = (
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # brings torch's compiler
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.bf16_optimizer",
    "cpuinfo",
    "transformers.models.llama.modeling_llama",
    "peft",
    "torch._dynamo",
    "torch.profiler",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.utils.tensorboard",
    "ullage.trace.models",
    "ullage.train.deepspeed",
    "ullage.train.loop",
    "ullage.train.measured",
    "ullage.train.proof",
    "ullage.train.run",
    "tests.distributed.deepspeed_runs",
    "tests.distributed.training",
)
"""What is slow to import, and what imports it: one list for all, since a test process has one server, and the first call starts it."""
_LOG_LINES = 20


class Failed(Exception):
    """A rank raised, died or did not answer in time; the message has its traceback and the end of what it printed."""


class _Rank(NamedTuple):
    index: int
    process: ForkServerProcess
    answer: Connection
    log: Path


def _context() -> ForkServerContext:
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(list(_IMPORTS))
    return made


def run(function: Callable[..., Any], arguments: Sequence[Any], *, ranks: int, timeout_s: float) -> list[Any]:
    """``function(*arguments)`` on each of ``ranks`` ranks of a gloo process group: the answers by rank.

    Raises Failed for the first rank that fails; none of the processes outlives the call.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = [_start(function, arguments, rank, ranks, Path(folder)) for rank in range(ranks)]
        try:
            return _answers(started, time.monotonic() + timeout_s, timeout_s)
        finally:
            for one in started:
                one.process.kill()
                one.process.join()
                one.process.close()
                one.answer.close()


def killed(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    ranks: int,
    first: int,
    moment: Callable[[], bool],
    timeout_s: float,
) -> bool:
    """The same, killed (SIGKILL) once ``moment`` says so: rank ``first``, then the others. Whether it came to that before all answered."""
    with tempfile.TemporaryDirectory() as folder:
        started = [_start(function, arguments, rank, ranks, Path(folder)) for rank in range(ranks)]
        deadline = time.monotonic() + timeout_s
        try:
            while not moment():
                if all(one.answer.poll() for one in started):
                    _answers(started, deadline, timeout_s)
                    return False
                if time.monotonic() > deadline:
                    raise Failed(f"nothing to kill in {timeout_s:g} s\n{_logs(started)}")
                time.sleep(0.002)
            return True
        finally:
            for one in (started[first], *started):
                one.process.kill()
            for one in started:
                one.process.join()
                one.process.close()
                one.answer.close()


def _start(function: Callable[..., Any], arguments: Sequence[Any], rank: int, ranks: int, folder: Path) -> _Rank:
    of = _context()
    ours, theirs = of.Pipe(duplex=False)
    log = folder / f"rank{rank}.log"
    process = of.Process(
        target=_serve, args=(function, arguments, rank, ranks, str(folder), str(log), theirs), daemon=True
    )
    with _surroundings():
        process.start()  # the first one starts the server, which keeps these surroundings
    theirs.close()
    return _Rank(rank, process, ours, log)


@contextmanager
def _surroundings() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _SURROUNDINGS}
    os.environ.update(_SURROUNDINGS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _answers(started: Sequence[_Rank], deadline: float, timeout_s: float) -> list[Any]:
    answers: dict[int, Any] = {}
    waiting = {one.answer: one for one in started}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(str(one.index) for one in waiting.values())
            raise Failed(f"rank {late} of {len(started)}: no answer in {timeout_s:g} s\n{_logs(waiting.values())}")
        for connection in ready:
            one = waiting.pop(connection)  # type: ignore[arg-type]
            try:
                raised, answers[one.index] = one.answer.recv()
            except EOFError:
                one.process.join(1)
                raise Failed(f"rank {one.index} died, exit code {one.process.exitcode}\n{_logs([one])}") from None
            if raised:
                raise Failed(f"rank {one.index} of {len(started)}:\n{answers[one.index]}\n{_logs([one])}")
    return [answers[one.index] for one in started]


def _logs(ranks: Any) -> str:
    return "\n".join(line for one in ranks for line in one.log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def _serve(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    rank: int,
    ranks: int,
    folder: str,
    log: str,
    answer: Connection,
) -> None:
    """One rank: what it prints goes into its log, its answer or its traceback to the parent."""
    gc.freeze()  # what the server has imported is no garbage, and takes long to look through
    with open(log, "wb", buffering=0) as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_SIZE=str(ranks))
    try:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        answer.send((False, function(*arguments)))
    except BaseException:  # to be told, whatever it is
        answer.send((True, traceback.format_exc()))
    answer.close()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may wait for a rank that failed

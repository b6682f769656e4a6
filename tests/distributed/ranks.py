"""Runs factories for real as the ranks of one gloo process group, under the recorder, and returns what each rank recorded.

The processes are started once for all factories; whatever goes wrong in one is raised here with its traceback, and none outlives this.
"""

import os
import pickle
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo  # makes a folder for its cache, which a factory may not
from torch import distributed, multiprocessing

from ullage.trace.events import Trace
from ullage.trace.run import Factory, real

TIMEOUT_S = 600
SURROUNDINGS = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def recorded(factories: Mapping[str, Factory], world: int) -> dict[str, list[Trace]]:
    """By the factory's name, a trace of each rank."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, SURROUNDINGS):
        started = multiprocessing.start_processes(
            _run, (world, folder, dict(factories)), nprocs=world, join=False, daemon=True, start_method="spawn"
        )
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not started.join(timeout=5):  # raises what a process raised
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{world} ranks have not ended in {TIMEOUT_S} s")
        finally:
            for process in started.processes:
                process.kill()
                process.join()
        ranks = [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world)]
    return {name: [found[name] for found in ranks] for name in factories}


def _run(rank: int, world: int, folder: str, factories: dict[str, Factory]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        found = {name: real(factory) for name, factory in factories.items()}
        (Path(folder) / str(rank)).write_bytes(pickle.dumps(found))
        distributed.barrier()
    finally:
        distributed.destroy_process_group()

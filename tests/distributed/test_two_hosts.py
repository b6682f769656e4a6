"""A training over two network namespaces, each a host of its own to the other, launched with torchrun as docs/train.md says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tests.distributed.training import LLAMA

STEPS = 3
TIMEOUT_S = 300
PORT = 29517


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces with a wire between them, 10.213.0.1 and .2; skips where this user may not make any."""
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("making network namespaces takes iproute2 and root")
    names = tuple(f"ullage-{os.getpid()}-{side}" for side in "ab")
    ends = tuple(f"ul{os.getpid() % 10**6}{side}" for side in "ab")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "link", "set", end, "name", "wire")
            _ip("-n", name, "addr", "add", f"10.213.0.{number}/24", "dev", "wire")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "wire", "up")
    except subprocess.CalledProcessError as error:
        _remove(names)
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    yield names
    _remove(names)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _remove(names: tuple[str, ...]) -> None:
    for name in names:  # the wire goes with its end
        with suppress(subprocess.CalledProcessError):
            _ip("netns", "delete", name)


def test_two_hosts_train_one_model(hosts: tuple[str, str], tmp_path: Path) -> None:
    job = {
        "schema": 1,
        "model": dict(LLAMA),
        "cluster": "2x1xH100-SXM-80GB",
        "engine": {"name": "fsdp2"},
        "layout": {"dp": 2},
        "data": {"seq_len": 24, "micro_batch": 2},
        "precision": "fp32",
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    np.save(tmp_path / "tokens.npy", np.arange(24 * 4 * STEPS, dtype=np.uint16) % 12)
    ran = [_start(host, number, tmp_path) for number, host in enumerate(hosts)]
    told = [one.communicate(timeout=TIMEOUT_S) for one in ran]
    assert [one.returncode for one in ran] == [0, 0], told
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in metrics] == list(range(1, STEPS + 1))
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert len(list((tmp_path / f"run/step-{STEPS}").glob("*.distcp"))) == 2  # each host wrote its shards
    assert (tmp_path / "run/hf/model.safetensors").is_file()


def _start(host: str, number: int, folder: Path) -> subprocess.Popen[str]:
    command = [
        *("ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(number)),
        *("--master-addr", "10.213.0.1", "--master-port", str(PORT)),
        *("-m", "ullage.cli.main", "train", "job.json", "--data", "tokens.npy", "--out", "run", "--lr", "1e-2"),
    ]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "wire"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

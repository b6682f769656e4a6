"""A job that fits, as a file, and the command run in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from ullage.cli.main import main

JOB = """\
schema: 1
model: llama-3.1-8b
cluster: 8xH100-SXM-80GB
data: {seq_len: 4096, micro_batch: 1, grad_accum: 4}
layout: {tp: 2, pp: 2}
engine: {name: megatron, zero_stage: 1}
"""


class Done(NamedTuple):
    status: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB, encoding="utf-8")
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Done(status, captured.out, captured.err)

    return run

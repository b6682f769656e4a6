"""prove and measure as commands: processes of their own, exit statuses, what is refused before any is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.distributed.training import job_of

from ullage.job.write import job_to_dict

TIMEOUT_S = 200


def command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ullage.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
    )


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "job.json"
    path.write_text(json.dumps(job_to_dict(job_of("fsdp2", 2))))
    return path


def test_prove_starts_its_ranks(job: Path) -> None:
    done = command("prove", job, "--steps", 3, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["equal"]
    assert (found["ranks"], len(found["rows"])) == (2, 3)


def test_measure_writes_a_record_that_validate_reads(job: Path, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    done = command("measure", job, "--steps", 1, "--out", file)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("WITHIN")
    (row,) = json.loads(command("validate", file, "--json").stdout)["records"]
    assert row["quantity"] == "allocated"
    assert abs(row["error_ratio"]) < 0.02


def test_a_rank_says_what_is_wrong_with_the_data(job: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.bin").touch()
    done = command("prove", job, "--data", tmp_path / "empty.bin")
    assert done.returncode == 2
    assert done.stderr == f"ullage: --data = {tmp_path / 'empty.bin'}: is empty\n"


@pytest.mark.parametrize("verb", ["prove", "measure"])
def test_what_is_not_run_is_refused_at_once(verb: str, job: Path) -> None:
    done = command(verb, job, "--attention", "mem-efficient")
    assert done.returncode == 2
    assert "attention = mem-efficient: is not run yet" in done.stderr


def test_a_launcher_with_another_number_of_ranks(job: Path) -> None:
    done = command("prove", job, RANK="0", WORLD_SIZE="3", LOCAL_RANK="0")
    assert done.returncode == 2
    assert "WORLD_SIZE = 3: the job's layout has 2 ranks" in done.stderr

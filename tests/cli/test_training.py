"""prove, measure and train as commands: processes of their own, exit statuses, what is refused before any is started."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.distributed.training import job_of
from tests.train.texts import tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

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


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_prove_starts_its_ranks(engine: str, job: Path) -> None:
    options = "{reduce_bucket_size: 200000}" if engine == "deepspeed" else "{}"
    done = command(
        "prove", job, "--steps", 3, "--json", "--set", f"engine.name={engine}", "--set", f"engine.options={options}"
    )
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


def test_a_record_that_cannot_be_written_is_told_before_it_is_measured(job: Path, tmp_path: Path) -> None:
    file = tmp_path / "none" / "record.json"
    done = command("measure", job, "--out", file, "--data", tmp_path / "missing.npy")
    assert done.returncode == 2
    assert f"--out = {file}: cannot be written: No such file or directory" in done.stderr


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


# -- train


def kill_a_rank(process: subprocess.Popen[str]) -> None:
    """SIGKILL for one of the processes that it has started as ranks."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            command_line = (path / "cmdline").read_bytes()
        except (OSError, IndexError):
            continue
        if parent == process.pid and b"spawn_main" in command_line:
            os.kill(int(path.name), signal.SIGKILL)
            return
    raise AssertionError("no rank")


def test_a_killed_training_goes_on(job: Path, tmp_path: Path) -> None:
    """From a folder: a text, two ranks, kill -9 midway, the same command again, the model loaded."""
    folder, text, out = tokenizer(tmp_path / "tokenizer"), tmp_path / "a.txt", tmp_path / "out"
    text.write_text((Path(__file__).parents[2] / "README.md").read_text())
    arguments = ["train", job, "--data", text, "--out", out, "--tokenizer", folder, "--steps", 400, "--save-every", 2]
    surroundings = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "ullage.cli.main", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **surroundings},
    ) as process:
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not [*out.glob("step-?")]:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            kill_a_rank(process)
            at = time.monotonic()
            _, said = process.communicate(timeout=60)
            assert time.monotonic() - at < 15
        finally:
            process.kill()
    assert process.returncode == 2
    assert re.search(r"ullage: rank [01] of 2 was killed by signal 9; the others were ended; if nobody did", said), said
    assert "trained on 2 CPU processes with gloo, one for each GPU of the job" in said

    arguments[arguments.index(400)] = 12
    done = command(*arguments, "--json", **surroundings)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 2 <= found["resumed"] < 400
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    model = AutoModelForCausalLM.from_pretrained(out / "hf", local_files_only=True)
    words = AutoTokenizer.from_pretrained(out / "hf", local_files_only=True)("ullage", return_tensors="pt")
    assert model.generate(**words, max_new_tokens=4, do_sample=False).shape[1] > 4


def test_a_plan_is_trained(tmp_path: Path) -> None:
    job = job_to_dict(job_of("fsdp2", 2))
    wanted = {"schema": 1, "model": job["model"], "cluster": job["cluster"], "data": {"seq_len": 24, "global_batch": 4}}
    file, data = tmp_path / "job.json", tmp_path / "tokens.npy"
    file.write_text(json.dumps(wanted))
    np.save(data, np.arange(24 * 8, dtype=np.uint16))
    done = command("train", file, "--auto", "--data", data, "--out", tmp_path / "out", "--json", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("planned: ")
    assert json.loads(done.stdout)["last"]["step"] == 2  # once over eight sequences


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "out"], "--data: names no file"),
        (["--data", "a.npy"], "--out: names no folder"),
        (["--data", "a.csv", "--out", "out"], "--data = a.csv: is no text that is read"),
        (["--data", "a.txt", "--out", "out"], "--data = a.txt: cannot be read: No such file"),
        (["--data", "a.npy", "--out", "out", "--steps", "2", "--epochs", "1"], "--steps: says how long to train"),
    ],
)
def test_what_train_is_told_wrongly(arguments: list[str], said: str, job: Path) -> None:
    done = command("train", job, *arguments)
    assert done.returncode == 2
    assert said in done.stderr

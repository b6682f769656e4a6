"""How a training ends that cannot go on: each with one error, and with the last whole checkpoint as it was."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed.training import job_of
from torch.distributed.checkpoint.filesystem import FileSystem

from ullage.cli.main import main
from ullage.errors import Contradiction, Infeasible, InvalidInput, OutOfMemory, UllageError
from ullage.job.job import Job
from ullage.job.write import job_to_dict
from ullage.train.checkpoint_files import claimed, complete
from ullage.train.composed import Run, Stepped
from ullage.train.loop import factor
from ullage.train.run import train
from ullage.train.settings import Training
from ullage.units import GIB

JOB = job_of("single", 1, model={"num_hidden_layers": 1})
OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.50 GiB is free. "
    "Including non-PyTorch memory, this process has 77.60 GiB memory in use. Of the allocated memory 76.00 GiB is allocated by "
    "PyTorch, and 600.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.npy"
    np.save(path, np.random.Generator(np.random.PCG64(1)).integers(0, 384, 24 * 12, dtype=np.uint16))
    return path


@pytest.fixture
def training(tmp_path: Path, data: Path) -> Training:
    return Training(data=(data,), out=tmp_path / "out", steps=4, save_every=2, keep=5)


@pytest.fixture
def begun(training: Training) -> Training:
    """Two steps of four, ended as by a kill."""
    with pytest.raises(_Killed), _ending(3, _Killed()):
        train(JOB, training)
    assert _steps(training) == [2]
    return training


class _Killed(BaseException):
    pass


@contextmanager
def _ending(at: int, error: BaseException) -> Iterator[None]:
    """Run.step raises the error at this step of the process."""
    with pytest.MonkeyPatch.context() as patch:
        step, count = Run.step, 0

        def stepped(self: Run, micro_batches: Any) -> Stepped:
            nonlocal count
            count += 1
            if count == at:
                raise error
            return step(self, micro_batches)

        patch.setattr(Run, "step", stepped)
        yield


def _steps(training: Training) -> list[int]:
    return [step for step, _ in complete(training.out)]


def test_a_loss_that_is_no_number(begun: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "over_ranks", lambda self, stepped, *figures: (float("nan"), *figures))
    with pytest.raises(UllageError, match=r"step 3: the loss is nan; lower --lr"):
        train(JOB, begun)
    assert _steps(begun) == [2]


def test_gradients_that_are_no_numbers_are_not_saved(training: Training) -> None:
    """The loss of the step before they are stepped is fine."""
    with pytest.raises(UllageError, match=r"step \d+: the loss is .*"):
        train(JOB, replace(training, lr=1e5, save_every=1, steps=40))
    for _, path in complete(training.out):
        assert all(bool(torch.isfinite(value).all()) for value in _weights(path).values())


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, folder / "all.pt")
    found: dict[str, torch.Tensor] = torch.load(folder / "all.pt", weights_only=True)
    return found


def test_overflows_of_fp16_are_skipped(training: Training) -> None:
    job = job_of("single", 1, model={"num_hidden_layers": 1}, precision="fp16-mixed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.amp.GradScaler, "__init__", _with_scale(2.0**40))
        train(job, replace(training, steps=30))
    rows = [json.loads(line) for line in (training.out / "metrics.jsonl").read_text().splitlines()]
    skipped = [row["skipped"] for row in rows]
    assert skipped[0]
    assert not skipped[-1]
    assert rows[0]["lr"] == rows[skipped.index(False)]["lr"]  # the schedule counts updates
    assert rows[0]["grad_norm"] is None


def _with_scale(scale: float) -> Any:
    made = torch.amp.GradScaler.__init__

    def init(self: torch.amp.GradScaler, device: str) -> None:
        made(self, device, init_scale=scale)

    return init


def test_a_full_disk(begun: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def full(self: FileSystem, path: Any, mode: str) -> Iterator[Any]:
        with open(path, mode) as file:
            if "w" in mode:
                file.write(b"some of it")
                raise OSError(errno.ENOSPC, "No space left on device")
            yield file

    monkeypatch.setattr(FileSystem, "create_stream", full)
    with pytest.raises(UllageError, match=r"step-4: cannot be written: No space left on device.*; step-2 is whole"):
        train(JOB, begun)
    assert _steps(begun) == [2]
    monkeypatch.undo()
    found = train(JOB, begun)
    assert found is not None
    assert found.resumed == 2
    assert _steps(begun) == [2, 4]
    assert not [*begun.out.glob("*.part")]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "run.json"])
def test_a_corrupt_file_is_named(name: str, training: Training) -> None:
    assert train(JOB, training) is not None
    file = training.out / "step-4" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)
    with pytest.raises(InvalidInput) as caught:
        train(JOB, training)
    assert name in str(caught.value)
    assert f"--resume {training.out}/step-2 goes on from the one before" in str(caught.value)
    found = train(JOB, replace(training, resume=training.out / "step-2"))
    assert found is not None
    assert found.resumed == 2
    assert _steps(training) == [2, 4]  # written again
    assert (training.out / "step-4.abandoned-1").is_dir()


@pytest.mark.parametrize(
    ("content", "said"), [("{}", "run.json: has no key 'files'"), ("[]", "run.json: list"), ("", "run.json: ")]
)
def test_what_is_said_of_a_checkpoint_that_is_none_is_told(content: str, said: str, training: Training) -> None:
    assert train(JOB, training) is not None
    (training.out / "step-4" / "run.json").write_text(content)
    with pytest.raises(InvalidInput, match=rf"step-4: cannot be gone on from: {said}.*--resume .*step-2"):
        train(JOB, training)


def test_a_missing_file_is_named(training: Training) -> None:
    assert train(JOB, training) is not None
    (training.out / "step-4" / "__0_0.distcp").unlink()
    with pytest.raises(InvalidInput, match=r"__0_0.distcp: No such file"):
        train(JOB, training)


def test_nothing_left_to_do_is_no_error(training: Training) -> None:
    first, again = train(JOB, training), train(JOB, training)
    assert first is not None
    assert again is not None
    assert (first.resumed, again.resumed, again.last) == (0, 4, None)
    assert [*(training.out / "tensorboard").iterdir()]
    longer = train(JOB, replace(training, steps=6))
    assert longer is not None
    assert longer.resumed == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 1}, "holds a run of another --seed: 0, here 1"),
        ({"resume": "never"}, "holds checkpoints up to step-4"),
        ({"resume": Path("nowhere")}, "is no checkpoint"),
    ],
)
def test_another_run_is_not_gone_on_with(changes: dict[str, object], said: str, training: Training) -> None:
    train(JOB, training)
    with pytest.raises(InvalidInput, match=said):
        train(JOB, replace(training, **changes))  # type: ignore[arg-type]


def test_another_job_or_data_is_another_run(training: Training, data: Path) -> None:
    train(JOB, training)
    other = job_of("single", 1, model={"num_hidden_layers": 1}, data={"micro_batch": 1})
    with pytest.raises(InvalidInput, match="another number of sequences a step: 4, here 2"):
        train(other, training)
    np.save(data, np.arange(24 * 12, dtype=np.uint16))
    with pytest.raises(InvalidInput, match="holds a run of another --data"):
        train(JOB, training)


def test_two_runs_do_not_write_into_one_folder(training: Training) -> None:
    with claimed(training.out), pytest.raises(InvalidInput, match="is being written by another run"):
        train(JOB, training)
    assert train(JOB, training) is not None


def test_a_file_where_the_folder_should_be(training: Training, data: Path) -> None:
    with pytest.raises(InvalidInput, match=r"--out = .*tokens.npy: cannot be written: it is a file; name a folder"):
        train(JOB, replace(training, out=data))


def test_a_tokenizer_that_is_none_is_told_with_token_files_too(training: Training, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"--tokenizer = .*nowhere: is no folder; allowed: one with tokenizer.json"):
        train(JOB, replace(training, tokenizer=tmp_path / "nowhere"))
    assert not training.out.exists()


def test_once_over_the_data(training: Training, data: Path) -> None:
    """Twelve sequences, four of them a step."""
    for changes, steps in ({"steps": None}, 3), ({"steps": None, "epochs": 2}, 6):
        found = train(JOB, replace(training, out=training.out / str(steps), **changes))  # type: ignore[arg-type]
        assert found is not None
        assert found.steps == steps
    with pytest.raises(InvalidInput, match="12 sequences of 24 tokens, and one step takes 20"):
        train(job_of("single", 1, data={"grad_accum": 10}), replace(training, steps=None))


def test_the_learning_rate(training: Training) -> None:
    cosine = replace(training, warmup_steps=4)
    rates = [factor(update, cosine, 12) for update in range(13)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[8] == pytest.approx(0.5)
    assert rates[12] == 0
    constant = replace(cosine, lr_schedule="constant")
    assert [factor(update, constant, 12) for update in (0, 4, 11)] == [0.25, 1.0, 1.0]


def test_what_is_out_of_range(training: Training) -> None:
    with pytest.raises(Contradiction, match="--epochs"):
        replace(training, epochs=2)
    for changes in (
        {"save_every": 0},
        {"keep": 0},
        {"warmup_steps": -1},
        {"lr": 0.0},
        {"lr_schedule": "linear"},
        {"data": ()},
    ):
        with pytest.raises(InvalidInput):
            replace(training, **changes)  # type: ignore[arg-type]


def test_what_does_not_fit_is_not_started(
    training: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"device": {"memory": "256MiB", "name": "small"}, "gpus_per_node": 1}
    job = job_of("single", 1, cluster=small, data={"micro_batch": 64, "grad_accum": 1}, model={"vocab_size": 60000})
    with pytest.raises(Infeasible, match=r"does not fit, even by the low estimate.*--force"):
        train(job, training)
    command = [*_command(job, training, tmp_path), "--steps", "1"]
    command.remove("--json")
    assert main(command) == 1
    said = capsys.readouterr()
    assert "OUT OF MEMORY" in said.out
    assert "not started" in said.err
    assert main([*command, "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["last"]["step"] == 1


def test_a_gpus_error_is_explained(training: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OutOfMemory, match=r"step 2: CUDA out of memory"), _ending(2, torch.OutOfMemoryError(OOM)):
        train(JOB, training)
    command = _command(JOB, training, tmp_path)
    with _ending(2, torch.OutOfMemoryError(OOM)):
        assert main(command) == 4
    said = capsys.readouterr()
    assert json.loads(said.out)["recognised"] == "cuda-oom"
    assert json.loads(said.out)["numbers"]["tried_bytes"] == 2 * 2**30
    assert "oom-rank-0.log: step 2: CUDA out of memory" in said.err


LOGITS = 4 * 256 * 30000 * 4
LARGE = job_of(
    "single",
    1,
    model={"num_hidden_layers": 1, "vocab_size": 30000, "max_position_embeddings": 256},
    data={"seq_len": 256, "micro_batch": 4, "grad_accum": 1},
)


def test_memory_that_really_runs_out(training: Training, tmp_path: Path, data: Path) -> None:
    """A budget that the system enforces: which tensor it was, and a plan that goes on within it. In processes of their own: what one has
    freed before is no part of its budget."""
    np.save(data, np.arange(256 * 16, dtype=np.uint16))
    command = [*_command(LARGE, training, tmp_path), "--force", "--memory-budget", str(LOGITS * 5 // 2)]
    stopped = _run(command)
    assert stopped.returncode == 4, stopped.stderr
    found = json.loads(stopped.stdout)
    assert found["causes"][0]["kind"] == "logits"
    assert found["causes"][0]["tensor"]["shape"] == [4, 256, 30000]
    assert found["causes"][0]["tensor"]["bytes"] == LOGITS
    gone_on = _run([*command, "--on-oom", "replan"])
    assert gone_on.returncode == 0, gone_on.stderr
    assert json.loads(gone_on.stdout)["last"]["step"] == 4
    assert "goes on with another plan: data.micro_batch = " in gone_on.stderr


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ullage.cli.main", *command], capture_output=True, text=True, timeout=200, check=False
    )


def test_python_that_finds_no_memory_is_told_of(training: Training) -> None:
    """Its error has no words of its own."""
    with (
        pytest.raises(OutOfMemory, match=r"step 2: no memory for Python's own objects within the budget of 8\.00 GiB$"),
        _ending(2, MemoryError()),
    ):
        train(JOB, replace(training, memory_budget=8 * GIB))


def test_what_ends_at_memory_may_be(training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = _command(JOB, training, tmp_path)
    assert main([*command, "--on-oom", "retry"]) == 2
    assert main([*command, "--memory-budget", "0"]) == 2
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main([*command, "--on-oom", "replan"]) == 2


def _command(job: Job, training: Training, tmp_path: Path) -> list[str]:
    file = tmp_path / "job.json"
    file.write_text(json.dumps(job_to_dict(job)))
    return ["train", str(file), "--data", str(training.data[0]), "--out", str(training.out), "--steps", "4", "--json"]


def test_weights_go_on_from_an_export(training: Training, tmp_path: Path) -> None:
    first = train(JOB, training)
    assert first is not None
    assert first.last is not None
    assert first.last.loss is not None
    weights = Path(first.exported)
    again = train(JOB, replace(training, out=tmp_path / "again", weights=weights, steps=1))
    fresh = train(JOB, replace(training, out=tmp_path / "fresh", steps=1))
    assert again is not None
    assert fresh is not None
    assert again.first != fresh.first
    (tmp_path / "none").mkdir()
    for name, said in ("none", "holds no .safetensors"), ("nowhere", "is no folder"):
        with pytest.raises(InvalidInput, match=rf"--weights = .*{name}: {said}; name a folder that"):
            train(JOB, replace(training, out=tmp_path / "b", weights=tmp_path / name))
    for changes in ({"num_hidden_layers": 2}, {"intermediate_size": 96}):
        other = job_of("single", 1, model={"num_hidden_layers": 1, **changes})
        with pytest.raises(InvalidInput, match=r"is of another model: .* tensors are missing or have another shape"):
            train(other, replace(training, out=tmp_path / "c", weights=weights))

"""Logs: long ones, many ranks', cut, changed and meaningless ones."""

import gzip
import io
import json
import os
import random
import time
from pathlib import Path

import pytest

from ullage.errors import InvalidInput
from ullage.postmortem.log import PIECE_BYTES, read_log
from ullage.postmortem.source import read_input
from ullage.postmortem.why import advised, why
from ullage.report.console import plain
from ullage.report.why import why_report
from ullage.units import GIB, MIB

MESSAGES = [case["text"] for case in json.loads((Path(__file__).parent / "data" / "messages.json").read_text())]
BARE = "torch.cuda.OutOfMemoryError: CUDA out of memory."
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.14 GiB. GPU 5 has a total capacity of 31.75 GiB of which "
    "1.95 GiB is free. Of the allocated memory 28.28 GiB is allocated by PyTorch, and 1.00 MiB is reserved by PyTorch but unallocated."
)
TRACEBACK = """\
[rank5]: Traceback (most recent call last):
[rank5]:   File "/home/u/train.py", line 90, in main
[rank5]:     optimizer.step()
[rank5]:   File "/env/torch/optim/adam.py", line 432, in _single_tensor_adam
[rank5]:     denom = (exp_avg_sq.sqrt() / bias_correction2_sqrt).add_(eps)
[rank5]: """
MUTATIONS = int(os.environ.get("ULLAGE_MUTATIONS", "3000"))


def test_a_message_anywhere_in_a_long_log() -> None:
    filler = b"step 1 loss 2.3 lr 1e-9 memory fine\n"
    for offset in (0, PIECE_BYTES - len(TRACEBACK) - 60, PIECE_BYTES - 5, 2 * PIECE_BYTES - 200):
        lines = offset // len(filler)
        text = filler * lines + (TRACEBACK + OOM + "\n").encode() + filler * (3 * PIECE_BYTES // len(filler))
        found = read_log(io.BytesIO(text), "log")
        assert found.event is not None
        assert found.numbers.tried_bytes == int(3.14 * GIB)
        assert found.event.line == lines + 6
        assert found.phases[0] == "optimizer"
        assert found.ranks == (5,)
        assert found.event.rank == 5


def test_the_cause_is_told_from_what_follows_it() -> None:
    log = f"Signal 9 (SIGKILL) received by PID 1\n{OOM}\nexitcode: -9\nRuntimeError: CUDA error: device-side assert triggered\n"
    found = read_log(io.BytesIO(log.encode()), "log")
    assert found.recognised == "cuda-oom"
    assert dict(found.failures) == {"host-oom": 2, "cuda-oom": 1, "not-oom": 1}


def test_a_failure_that_is_none_of_memory() -> None:
    found = read_input("Traceback (most recent call last):\nValueError: too many values to unpack (expected 2)\n")
    assert found.recognised == "not-oom"
    assert not found.ran_out
    assert read_input("all is well here").recognised == "unknown"


def test_a_launcher_that_ends_the_other_ranks_is_no_kill() -> None:
    """DeepSpeed's launcher calls a handler of its own sigkill_handler, whatever the first rank died of."""
    log = (
        "ValueError: too many values to unpack (expected 2)\n[INFO] [launch.py:318:sigkill_handler] Killing subprocess 1840\n"
        "[ERROR] [launch.py:324:sigkill_handler] ['python', '-u', 'train.py'] exits with return code = "
    )
    assert read_input(f"{log}1").recognised == "not-oom"
    assert read_input(f"{log}-9").recognised == "host-oom"


@pytest.mark.parametrize(
    ("line", "recognised"),
    [
        ("command terminated with exit code 137", "host-oom"),
        ("exits with return code = -7", "host-oom"),
        ("RuntimeError: DataLoader worker (pid 12) is killed by signal: Bus error.", "host-oom"),
        ("RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed.", "host-oom"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", "cuda-oom"),
        ("RuntimeError: Unable to find a valid cuDNN algorithm to run convolution", "cuda-oom"),
        ("RuntimeError: Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)", "cuda-oom"),
        ("ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM", "cuda-oom"),
        ("ValueError: Free memory on device (21.3/79.1 GiB) on startup is less than desired GPU memory utilization", "cuda-oom"),
        ("ValueError: No available memory for the cache blocks.", "cuda-oom"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.", "not-oom"),
        ("ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'initialization error'", "not-oom"),
        ("subprocess.CalledProcessError: Command '['python', '-u']' returned non-zero exit status 1.", "not-oom"),
        ("subprocess.CalledProcessError: Command '['python', '-u']' died with <Signals.SIGKILL: 9>.", "host-oom"),
    ],
)  # fmt: skip
def test_what_else_tells_of_memory(line: str, recognised: str) -> None:
    assert read_input(line).recognised == recognised


RICH = """\
+----- Traceback (most recent call last) -----+
\u2502 /home/u/FastChat/train.py:263 in train                                               \u2502
\u2502 \u2771 263 \u2502   safe_save_model_for_hf_trainer(trainer=trainer)                        \u2502
\u2502 /env/lib/python3.10/site-packages/torch/distributed/fsdp/_ \u2502
\u2502 unshard_param_utils.py:171 in _unshard_params              \u2502
"""
IPYTHON = """\
OutOfMemoryError                          Traceback (most recent call last)
Cell In[21], line 2
----> 2 eval_metrics = trainer.evaluate()

File /env/transformers/trainer.py:2113, in Trainer.evaluate(self, eval_dataset)
   2112 eval_loop = self.evaluation_loop
-> 2113 output = eval_loop(
"""
IPYTHON_7 = """\
OutOfMemoryError                          Traceback (most recent call last)
[<ipython-input-7-3d62>](https://localhost:8080/#) in <cell line: 1>()
----> 1 trainer_stats = trainer.train()

[/usr/lib/python3.10/dist-packages/accelerate/utils/operations.py](https://localhost:8080/#) in _convert_to_fp32(tensor)
    780     def _convert_to_fp32(tensor):
--> 781         return tensor.float()
    782
"""
CUT = "gpu-13: ret = input.softmax(dim, dtype=dtype)\n"
PYTEST = """\
.venv/lib/python3.14/site-packages/transformers/trainer.py:1412: in train
    return inner_training_loop(
.venv/lib/python3.14/site-packages/torch/optim/adamw.py:88: in step
    denom = exp_avg_sq.sqrt()
"""


@pytest.mark.parametrize(
    ("traceback", "phase", "file", "code"),
    [
        (RICH, "save", "/env/lib/python3.10/site-packages/torch/distributed/fsdp/_unshard_param_utils.py", ""),
        (IPYTHON, "evaluation", "/env/transformers/trainer.py", "output = eval_loop("),
        (
            IPYTHON_7,
            "loss",
            "/usr/lib/python3.10/dist-packages/accelerate/utils/operations.py",
            "return tensor.float()",
        ),
        (CUT, "attention", "", "ret = input.softmax(dim, dtype=dtype)"),
        (PYTEST, "optimizer", ".venv/lib/python3.14/site-packages/torch/optim/adamw.py", "denom = exp_avg_sq.sqrt()"),
    ],
)
def test_tracebacks_as_others_print_them(traceback: str, phase: str, file: str, code: str) -> None:
    """rich's of lm-sys/FastChat#693, IPython's of NVIDIA-Merlin/Transformers4Rec#693 and unslothai/unsloth#465 (version 7), one cut
    down to its last statement of deepspeedai/DeepSpeed#2899, pytest's of huggingface/trl#5207."""
    found = read_input(traceback + OOM)
    assert found.event is not None
    assert (found.phases[0], found.event.called[-1].frame.file, found.event.called[-1].code) == (phase, file, code)


def test_hints_of_a_log() -> None:
    """What a library printed long before the failure; each once, wherever a piece ends."""
    filler = b"step 1 loss 2.3 lr 1e-9 memory fine\n"
    hint = b"There are currently no Liger kernels supported for model type: qwen9.\n"
    for offset in (0, PIECE_BYTES - 30, PIECE_BYTES - 5000):
        text = (
            (filler * (offset // len(filler) + 1))[:offset]
            + hint * 3
            + filler * (2 * PIECE_BYTES // len(filler))
            + OOM.encode()
        )
        found = read_log(io.BytesIO(text), "log")
        assert [one.kind for one in found.hints] == ["logits"]
        assert any("Liger" in one.why for one in why(found).causes if one.kind == "logits")


def test_gzip_on_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(gzip.compress((TRACEBACK + OOM).encode()))

    monkeypatch.setattr("sys.stdin", Stdin)
    assert read_input("-").numbers.tried_bytes == int(3.14 * GIB)
    Stdin.buffer = io.BytesIO(b"\x80\x04.")
    with pytest.raises(InvalidInput, match="path"):
        read_input("-")


def test_a_log_in_utf_16(tmp_path: Path) -> None:
    """As PowerShell writes what is sent to a file."""
    path = tmp_path / "train.txt"
    path.write_bytes((TRACEBACK + OOM).encode("utf-16"))
    found = read_input(str(path))
    assert found.numbers == read_input(TRACEBACK + OOM).numbers
    assert found.phases[0] == "optimizer"


def test_colours_and_json_around_a_message() -> None:
    """Python 3.13 paints tracebacks, rich numbers, and containers keep lines as JSON."""
    painted = TRACEBACK.replace('"/env', '\x1b[35m"/env').replace('adam.py"', 'adam.py"\x1b[0m')
    painted += OOM.replace("3.14 GiB", "\x1b[1;36m3.14\x1b[0m GiB").replace("CUDA", "\x1b[35mCUDA")
    bare = read_input(TRACEBACK + OOM)
    found = read_input(painted)
    assert (found.numbers, found.phases) == (bare.numbers, bare.phases)
    logged = "".join(
        json.dumps({"log": f"{line}\n", "stream": "stderr"}) + "\n" for line in (TRACEBACK + OOM).splitlines()
    )
    found = read_input(logged)
    assert (found.numbers, found.phases[0]) == (bare.numbers, "optimizer")
    assert read_input(json.dumps({"error": TRACEBACK + OOM})).phases[0] == "optimizer"


def test_nothing_and_what_is_no_text(tmp_path: Path) -> None:
    for empty in ("", " \n"):
        with pytest.raises(InvalidInput, match="is empty"):
            read_input(empty)
    (tmp_path / "bin.log").write_bytes(b"\x80\xff" + bytes(range(256)) * 20)
    assert read_input(str(tmp_path / "bin.log")).event is None


@pytest.mark.parametrize("name", ["rank3.log", "worker-rank_3.out", "attempt_0/3/stderr.log"])
def test_a_file_that_is_named_for_a_rank(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OOM)
    (tmp_path / "rank7.log").write_text(f"[rank5]: {OOM.replace('3.14', '3.15')}")
    assert read_input(str(path)).ranks == (3,)
    assert read_input(str(tmp_path)).ranks == (3, 5)
    assert read_input(str(tmp_path / "rank7.log")).ranks == (5,)


def test_a_file_of_a_folder_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "rank1.log.gz").write_bytes(gzip.compress(OOM.encode())[:40])
    with pytest.raises(InvalidInput, match=r"holds no log that can be read: .*rank1"):
        read_input(str(tmp_path))
    (tmp_path / "rank0.log").write_text(OOM)
    found = read_input(str(tmp_path))
    assert found.recognised == "cuda-oom"
    assert len(found.unread) == 1
    assert "Not read: " in plain(why_report(advised(why(found))))


def test_a_message_over_several_lines() -> None:
    broken = "[rank0]: " + OOM.replace(". GPU", ".\n[rank0]:   GPU").replace("of which ", "of which\n[rank0]: ")
    assert read_input(broken).numbers == read_input(OOM).numbers


def test_two_messages_in_one_line_keep_their_numbers() -> None:
    found = read_input(f"CUDA out of memory. Tried to allocate 2.00 GiB. {OOM}")
    assert found.numbers.tried_bytes == 2 * GIB
    assert found.numbers.capacity_bytes is None


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("MA 1.5 GB         Max_MA 2.0 GB         CA 3 GB         Max_CA 3 GB\n x MA 2.5 GB Max_MA", [1.5, 2.5]),
        ("(after 10 iterations) memory (MB) | allocated: 2048.0 | max allocated: 4096.0 |", [2.0]),
        ("step: 1  loss: 2.1  memory: 12.50GiB(15.80%)  tps: 1\nstep: 2  memory: 13.00GiB(1%)", [12.5, 13.0]),
    ],
)
def test_series_of_memory(lines: str, expected: list[float]) -> None:
    found = read_log(io.BytesIO(f"[log] {lines}\n".encode()), "log")
    assert [size / GIB for size in found.series] == expected


def test_files_gzip_and_folders(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text("nothing here\n")
    with gzip.open(tmp_path / "rank1.log.gz", "wt") as file:
        file.write(OOM)
    assert read_input(str(tmp_path / "rank1.log.gz")).recognised == "cuda-oom"
    assert read_input(str(tmp_path / "rank0.log")).recognised == "unknown"
    assert read_input(str(tmp_path)).numbers.tried_bytes == int(3.14 * GIB)
    (tmp_path / "cut.gz").write_bytes((tmp_path / "rank1.log.gz").read_bytes()[:40])
    with pytest.raises(InvalidInput, match="gzip"):
        read_input(str(tmp_path / "cut.gz"))
    with pytest.raises(InvalidInput, match="is no file"):
        read_input(str(tmp_path / "missing.log"))


@pytest.mark.parametrize("word", ["Killed", "OOMKilled"])
def test_one_word_that_tells_of_a_failure_is_no_path(word: str) -> None:
    assert read_input(word).recognised == "host-oom"
    with pytest.raises(InvalidInput, match="is no file"):
        read_input(f"{word}.log")


def test_settings_beside_logs_speak_of_the_cause(tmp_path: Path) -> None:
    (tmp_path / "oom.txt").write_text(OOM)
    assert read_input(str(tmp_path)).hints == ()
    (tmp_path / "grpo.yaml").write_text("use_vllm: true\nvllm_gpu_memory_utilization: 0.8\n")
    assert [one.kind for one in read_input(str(tmp_path)).hints] == ["foreign-process"]


@pytest.mark.parametrize(
    ("text", "kind", "certainty"),
    [
        ("vllm_gpu_memory_utilization: 0.8\n" + BARE, "foreign-process", "likely"),
        ('{"gpu_memory_utilization": 0.85}\n' + BARE, "foreign-process", "likely"),
        ("gpu_memory_utilization=0.3\n" + BARE, "foreign-process", "possible"),
        ("vllm_gpu_memory_utilization: 0.8\n" + OOM.replace("28.28", "29.70"), "foreign-process", "possible"),
        ("distributed_type: FSDP\nmixed_precision: bf16\n" + BARE, "config", "possible"),
        ("distributed_type: FSDP\nmixed_precision: 'no'\n" + BARE, "config", None),
        ("distributed_type: MULTI_GPU\nmixed_precision: bf16\n" + BARE, "config", None),
    ],
)
def test_settings_that_speak_where_no_number_does(text: str, kind: str, certainty: str | None) -> None:
    """An engine's share of half a card and more (huggingface/trl#2864: 0.8 of 32 GiB), and accelerate's fp32 under FSDP (trl#1980)."""
    found = {one.kind: one.certainty for one in why(read_input(text)).causes}
    assert found.get(kind) == certainty


def test_a_memory_summary() -> None:
    text = """\
|===========================================================================|
|                  PyTorch CUDA memory summary, device ID 1                 |
|---------------------------------------------------------------------------|
|            CUDA OOMs: 1            |        cudaMalloc retries: 2         |
|===========================================================================|
|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |
|---------------------------------------------------------------------------|
| Allocated memory      |  10240 MiB |  20480 MiB |  99999 MiB |  11111 MiB |
|       from large pool |  10000 MiB |  20000 MiB |  99999 MiB |  11111 MiB |
|---------------------------------------------------------------------------|
| GPU reserved memory   |  30720 MiB |  40960 MiB |  99999 MiB |  11111 MiB |
| Non-releasable memory |   4096 MiB |   5000 MiB |  99999 MiB |  11111 MiB |
"""
    found = read_input(text)
    assert found.recognised == "cuda-oom"
    assert (found.numbers.allocated_bytes, found.numbers.reserved_bytes) == (20 * GIB, 40 * GIB)
    assert (found.numbers.device, found.split_bytes) == (1, 4096 * MIB)


def test_nothing_that_is_read_can_break_the_reader_or_the_answer() -> None:
    """ULLAGE_MUTATIONS=200000 for the whole count."""
    random.seed(7)
    alphabet = [chr(n) for n in range(256)] + [
        "\n",
        " ",
        "9" * 30,
        "Process 1 has ",
        "GiB",
        "\ud800",
        "-9",
        "rank99999999",
    ]
    for _ in range(MUTATIONS):
        text = random.choice([*MESSAGES, TRACEBACK + OOM])
        for _ in range(random.randrange(1, 12)):
            at = random.randrange(len(text) + 1)
            kind = random.randrange(4)
            if kind == 0:
                text = text[:at] + random.choice(alphabet) + text[at:]
            elif kind == 1:
                text = text[:at] + text[at + random.randrange(20) :]
            elif kind == 2:
                text = text[:at] + text[: random.randrange(200)]
            else:
                text = text[:at]
        found = read_log(io.BytesIO(text.encode("utf-8", "replace")), "mutated")
        assert found.numbers.tried_bytes is None or found.numbers.tried_bytes >= 0
        assert found.event is None or found.event.line <= text.count("\n") + 1
        assert advised(why(found)).evidence is found


@pytest.mark.parametrize(
    "line",
    [
        b"CUDA out of memory. Tried to allocate 1.00 GiB\n",
        b"killed ",
        b"out of memory",
        b"\n",
        b'File "a", line 1, in f\n',
        b"9" * 50,
    ],
)
def test_time_is_linear_in_what_repeats(line: bytes) -> None:
    """Eight times the length takes no more than twenty times as long, whatever stands in it."""

    def seconds(size: int) -> float:
        text = line * (size // len(line))
        start = time.process_time()
        read_log(io.BytesIO(text), "log")
        return time.process_time() - start

    seconds(MIB)
    assert seconds(16 * MIB) < 20 * max(seconds(2 * MIB), 0.02)

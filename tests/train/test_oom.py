"""An error that a loop met, explained from its message, its traceback and the job."""

import pickle

import ullage
from ullage.report.console import plain
from ullage.report.why import why_report
from ullage.train.oom import explained

MESSAGE = (  # hiyouga/LlamaFactory#1221
    "CUDA out of memory. Tried to allocate 3.14 GiB (GPU 5; 31.75 GiB total capacity; 28.28 GiB already allocated; 1.95 GiB free; "
    "28.28 GiB reserved in total by PyTorch)"
)
JOB = {
    "model": "llama-2-7b",
    "cluster": "8xV100-SXM-32GB",
    "data": {"seq_len": 1024},
    "engine": {"name": "deepspeed", "zero_stage": 2},
    "precision": "fp16-mixed",
}


def raised(message: str, *, file: str, function: str) -> RuntimeError:
    """A real error with a frame of another library's file."""
    space: dict[str, object] = {}
    exec(compile(f"def {function}():\n    raise RuntimeError({message!r})\n", file, "exec"), space)
    try:
        space[function]()  # type: ignore[operator]
    except RuntimeError as error:
        return error
    raise AssertionError


def test_the_traceback_of_an_error_says_the_moment() -> None:
    error = raised(MESSAGE, file="/env/torch/optim/adam.py", function="_single_tensor_adam")
    found = explained(error, ullage.read_job(JOB))
    assert found is not None
    assert found.causes[0].kind == "optimizer-step"
    assert found.advice[-1].verdict_after == "fits"
    assert "3.14 GiB" in plain(why_report(found))
    assert pickle.loads(pickle.dumps(found)) == found  # a rank hands it to whoever started it


def test_an_error_of_another_kind_has_no_explanation() -> None:
    assert explained(ValueError("rank 3 has no data")) is None
    assert explained(RuntimeError("CUDA error: device-side assert triggered")) is None

"""Loops that are not ours: a plain one, and the Hugging Face Trainer. What they hold is predicted; what they run out of is explained."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ullage
from ullage.watching.huggingface import UllageCallback

MODEL = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 64,
}
JOB = {
    "model": MODEL,
    "cluster": "1xA100-SXM-80GB",
    "data": {"seq_len": 64, "micro_batch": 2, "grad_accum": 2},
    "engine": {"name": "single"},
    "precision": "fp32",
    "optimizer": {"name": "adamw", "impl": "fused"},
}
WITHIN = 0.02
MESSAGE = (  # hiyouga/LlamaFactory#1221, as torch 2.0 printed it
    "CUDA out of memory. Tried to allocate 3.14 GiB (GPU 5; 31.75 GiB total capacity; 28.28 GiB already allocated; 1.95 GiB free; "
    "28.28 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb to avoid "
    "fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
OF_MESSAGE = {
    "model": "llama-2-7b",
    "cluster": "8xV100-SXM-32GB",
    "data": {"seq_len": 1024},
    "engine": {"name": "deepspeed", "zero_stage": 2},
    "precision": "fp16-mixed",
}


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 1000, (64,))
        return {"input_ids": ids, "labels": ids}


def model(*, fails: bool = False) -> LlamaForCausalLM:
    """fails: runs out of memory in its second forward, as a GPU says it."""
    torch.manual_seed(0)
    net = LlamaForCausalLM(LlamaConfig(**MODEL))
    calls = itertools.count(1)

    def fail(*_: Any) -> None:
        if next(calls) == 2:
            raise torch.OutOfMemoryError(MESSAGE)

    if fails:
        net.register_forward_pre_hook(fail)
    return net


def trained(out: Path, callback: UllageCallback | None, *, fails: bool = False) -> None:
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    callbacks = [callback] if callback is not None else []
    Trainer(model=model(fails=fails), args=arguments, train_dataset=Tokens(), callbacks=callbacks).train()


def plain_loop(net: LlamaForCausalLM, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        for _ in range(2):
            ids = torch.randint(0, 1000, (2, 64))
            (net(input_ids=ids, labels=ids, use_cache=False).loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def test_a_plain_loop_holds_what_is_predicted() -> None:
    told: list[str] = []
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    with ullage.watch(JOB, net, optimizer, say=told.append) as seen:
        plain_loop(net, optimizer)
    found = seen.watched
    assert found is not None
    assert (found.how, found.steps, found.notes) == ("storages", 2, ())
    assert found.error is not None
    assert abs(found.error) <= WITHIN
    assert "predicted" in told[0]
    assert "MiB" in told[0]


def test_without_a_model_nothing_is_measured_and_it_is_said() -> None:
    told: list[str] = []
    with ullage.watch({**JOB, "engine": {"name": "ddp"}, "cluster": "4xA100-SXM-80GB"}, say=told.append) as seen:
        pass
    assert seen.watched is not None
    assert (seen.watched.how, seen.watched.actual, seen.watched.error) == ("nothing", None, None)
    assert "nothing was measured" in told[0]
    assert "the job has 4 ranks, and the run has 1" in told[0]


def test_a_job_without_an_account_is_watched_all_the_same() -> None:
    told: list[str] = []
    with ullage.watch({**OF_MESSAGE, "loss": "fused-linear", "stack": "litgpt"}, say=told.append):
        pass
    assert "no prediction: " in told[0]


def test_a_loop_that_runs_out_of_memory_is_explained() -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised, ullage.watch(OF_MESSAGE) as seen:
        raise torch.OutOfMemoryError(MESSAGE)
    assert seen.why is not None
    assert {one.kind for one in seen.why.causes} >= {"replica-not-shard", "optimizer-step"}
    (note,) = raised.value.__notes__
    assert "What helps" in note
    assert "engine.zero_stage = 3" in note


def test_what_is_no_failure_of_memory_has_no_note() -> None:
    with pytest.raises(ValueError, match="no data") as raised, ullage.watch(JOB):
        raise ValueError("no data")
    assert not hasattr(raised.value, "__notes__")


def test_the_trainer_holds_what_is_predicted(tmp_path: Path) -> None:
    told: list[str] = []
    callback = UllageCallback(JOB, say=told.append)
    before = sys.excepthook
    trained(tmp_path, callback)
    found = callback.watched
    assert found is not None
    assert (found.how, found.steps) == ("storages", 2)
    assert found.error is not None
    assert abs(found.error) <= WITHIN
    assert len(told) == 1
    assert sys.excepthook is before


def test_a_trainer_that_runs_out_of_memory_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the callback where nothing catches it; twice over, since a training may begin again after an exception."""
    uncaught: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda _kind, error, _traceback: uncaught.append(error))
    callback = UllageCallback(OF_MESSAGE, say=lambda _: None)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError) as raised:
            trained(tmp_path, callback, fails=True)
    sys.excepthook(raised.type, raised.value, None)
    assert uncaught == [raised.value]
    (note,) = raised.value.__notes__
    assert "replica-not-shard" in note
    with pytest.raises(torch.OutOfMemoryError) as raised, ullage.watch(OF_MESSAGE):
        trained(tmp_path, None, fails=True)
    assert "What helps" in raised.value.__notes__[0]

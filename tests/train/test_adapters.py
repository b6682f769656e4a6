"""A run with adapters trains them and nothing else; what a run of CPUs cannot show is refused."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed.training import job_of

from ullage.errors import InvalidInput, Unsupported
from ullage.job.job import Job
from ullage.train.batches import micro_batches, tokens_of
from ullage.train.checkpoints import weights_in
from ullage.train.composed import run_of
from ullage.train.measured import measure
from ullage.train.proof import prove
from ullage.train.run import train
from ullage.train.settings import Settings, Training


def job(**lora: Any) -> Job:
    return job_of("single", 1, lora={"rank": 4, **lora}, precision="bf16-mixed")


def test_adapters_alone_are_trained() -> None:
    made = job(dropout=0.1)
    run = run_of(made)
    before = run.weights()
    for step in range(2):  # A has a gradient once B is not zero any more
        run.step(micro_batches(made, tokens_of(made, Settings()), step))
    after = run.weights()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if ".lora_" in name}
    assert len(moved) == 2 * 2 * 3  # A and B of q_proj and v_proj, in three layers


def test_dropout_is_not_proved_and_on_cpus_not_measured() -> None:
    with pytest.raises(Unsupported, match="each rank drops"):
        prove(job(dropout=0.1), Settings(steps=1))
    with pytest.raises(Unsupported, match="keeps its mask"):
        measure(job(dropout=0.1), Settings(steps=1))


def test_what_is_on_the_host_is_not_measured_on_cpus() -> None:
    with pytest.raises(Unsupported, match="one memory"):
        measure(job_of("fsdp2", 2, offload={"params": "cpu", "optimizer": "cpu"}), Settings(steps=1))


@pytest.fixture
def training(tmp_path: Path) -> Training:
    data = tmp_path / "tokens.npy"
    np.save(data, np.random.Generator(np.random.PCG64(1)).integers(0, 384, 24 * 12, dtype=np.uint16))
    return Training(data=(data,), out=tmp_path / "out", steps=4, save_every=2, lr=1e-2, keep=5)


def losses(training: Training) -> list[float]:
    return [json.loads(line)["loss"] for line in (training.out / "metrics.jsonl").read_text().splitlines()]


def test_adapters_are_kept_and_their_base_is_named(training: Training, tmp_path: Path) -> None:
    """They go on where they were, and load beside the base that the run was of, drawn or given."""
    made = job(dropout=0.1)
    train(made, training)
    again = replace(training, out=tmp_path / "again", resume=training.out / "step-2")
    train(made, again)
    assert losses(again) == losses(training)[2:]
    kept = (training.out / "step-4" / "__0_0.distcp").stat().st_size
    base = training.out / "base"
    assert kept < (base / "model.safetensors").stat().st_size / 2

    given = replace(training, out=tmp_path / "given", weights=base)
    train(made, given)
    train(made, replace(given, steps=6))
    assert not (given.out / "base").exists()
    for out, of in ((training.out, base), (again.out, again.out / "base"), (given.out, base)):
        assert json.loads((out / "hf" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(of)
    trained = logits(base, training.out / "hf")
    assert torch.equal(logits(again.out / "base", again.out / "hf"), trained)
    assert not torch.equal(logits(base), trained)


def logits(base: Path, adapters: Path | None = None) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, local_files_only=True)
    if adapters is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by a name that it gives up
            model = PeftModel.from_pretrained(model, str(adapters))
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(24)[None]).logits
    return found


def test_adapters_of_another_base_are_not_gone_on_with(training: Training, tmp_path: Path) -> None:
    made = job()
    train(made, training)
    base = training.out / "base"
    for changes, said in (
        ({"weights": base}, "a run of another --weights: None, here "),
        ({}, r"a run of another lora: \[4, .*, here \[8, "),
    ):
        with pytest.raises(InvalidInput, match=said):
            train(job(rank=4 if changes else 8), replace(training, **changes))  # type: ignore[arg-type]
    given = replace(training, out=tmp_path / "given", weights=base, steps=2)
    train(made, given)
    content = bytearray((base / "model.safetensors").read_bytes())
    content[len(content) // 2] ^= 1  # in a sample: they are evenly spaced
    (base / "model.safetensors").write_bytes(content)
    with pytest.raises(InvalidInput, match="a run of another --weights"):
        train(made, replace(given, steps=4))
    with pytest.raises(InvalidInput, match=r"a run of another lora: .*, here None"):
        train(job_of("single", 1), replace(given, steps=4))


def test_what_is_trained_in_full_is_exported_with_its_adapters(training: Training) -> None:
    from peft import AutoPeftModelForCausalLM

    train(job(dora=True, modules_to_save=["embed_tokens", "lm_head"]), training)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded: Any = AutoPeftModelForCausalLM.from_pretrained(training.out / "hf")
        kept = weights_in(training.out / "step-4")
    found = dict(loaded.named_parameters())
    assert len(kept) == 3 * 2 * 3 + 2  # A, B and DoRA's magnitudes of two linears in three layers, and the two ends
    for name, value in kept.items():
        assert torch.equal(found[name], value.to(found[name].dtype))

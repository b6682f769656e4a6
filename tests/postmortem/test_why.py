"""From a message and a job to the tensor, the cause and what helps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ullage
from ullage.engines.changes import changed
from ullage.errors import InvalidInput
from ullage.postmortem.tried import learnt_otherwise
from ullage.report.console import plain
from ullage.report.why import why_report
from ullage.report.why_json import why as as_json
from ullage.units import GIB, MIB

STEP = (  # hiyouga/LlamaFactory#1221: LLaMA-7B, ZeRO-2 on eight V100, inside Adam's step
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.14 GiB (GPU 5; 31.75 GiB total capacity; 28.28 GiB already "
    "allocated; 1.95 GiB free; 28.28 GiB reserved in total by PyTorch)"
)
LLAMA = {
    "model": "llama-2-7b",
    "cluster": "8xV100-SXM-32GB",
    "data": {"seq_len": 1024, "micro_batch": 1},
    "engine": {"name": "deepspeed", "zero_stage": 2},
    "precision": "fp16-mixed",
}
LONG = {
    "model": "gemma-3-4b",
    "cluster": "8xH100-SXM-80GB",
    "data": {"seq_len": 65536, "micro_batch": 1},
    "engine": {"name": "fsdp2"},
    "recompute": "full",
}


def kinds(answer: ullage.Why) -> list[str]:
    return [one.kind for one in answer.causes]


def test_a_size_is_the_fingerprint_of_a_tensor() -> None:
    answer = ullage.why(STEP, ullage.read_job(LLAMA))
    shares = [one for one in answer.answer.candidates if one.made.kind == "optimizer-step"]
    assert shares
    assert all(abs(one.made.bytes - 3.14 * GIB) < 8 * MIB for one in answer.answer.candidates)
    assert sum(one.likelihood for one in answer.answer.candidates) == pytest.approx(1, abs=0.01)
    assert {"replica-not-shard", "optimizer-step"} <= set(kinds(answer))


def test_a_traceback_says_which_of_equal_tensors_it_was() -> None:
    traceback = 'Traceback (most recent call last):\n  File "/env/torch/optim/adam.py", line 432, in _single_tensor_adam\n    denom = x\n'
    answer = ullage.why(traceback + STEP, ullage.read_job(LLAMA))
    assert kinds(answer)[0] == "optimizer-step"
    assert answer.causes[0].tensor is not None
    assert "optimizer" in answer.causes[0].tensor.moment


def test_logits_of_a_long_sequence() -> None:
    answer = ullage.why("CUDA out of memory. Tried to allocate 64.02 GiB.", ullage.read_job(LONG))
    assert kinds(answer)[0] == "logits"
    tensor = answer.causes[0].tensor
    assert tensor is not None
    assert tensor.bytes == 65536 * 262208 * 4


def test_a_size_that_the_job_contradicts_is_no_more_than_possible() -> None:
    """64.00 GiB is 8 x 65536 x 65536 x 2 B: scores that flash attention never makes, whatever the size says."""
    answer = ullage.why("CUDA out of memory. Tried to allocate 64.00 GiB.", ullage.read_job(LONG))
    scores = next(one for one in answer.causes if one.kind == "attention-scores")
    assert scores.certainty == "possible"
    assert "never makes" in scores.why


@pytest.mark.parametrize("size", ["2.00 MiB", "20.00 MiB"])
def test_a_size_that_any_tensor_asks_for_names_none(size: str) -> None:
    answer = ullage.why(f"CUDA out of memory. Tried to allocate {size}.", ullage.read_job(LLAMA))
    assert answer.answer.candidates == ()


def test_no_tensor_of_that_size() -> None:
    job = ullage.read_job(
        {"model": "gpt2", "cluster": "1xH100-SXM-80GB", "data": {"seq_len": 128}, "engine": {"name": "single"}}
    )
    answer = ullage.why("CUDA out of memory. Tried to allocate 1.23 GiB.", job)
    assert answer.answer.candidates == ()
    assert kinds(answer) == ["unknown"]


def test_advice_ends_with_the_first_that_fits_and_is_true() -> None:
    job = ullage.read_job(LLAMA)
    answer = ullage.why(STEP, job)
    found = answer.advice
    first = [one.verdict_after for one in found].index("fits")
    best, beside = found[first], found[first + 1 :]
    assert "offload.optimizer" in best.change
    assert ["cluster" in one.change for one in beside] == [True]  # more GPUs, beside what waits on the host
    again = ullage.read_job(LLAMA, tuple(f"{key}={json.dumps(value)}" for key, value in best.change.as_dict().items()))
    estimate = ullage.estimate(again)
    assert (estimate.verdict, estimate.peak.low_bytes + answer.beyond_bytes) == ("fits", best.low_bytes)
    assert best.frees_bytes == ullage.estimate(job).peak.device_bytes - estimate.peak.device_bytes


def test_advice_is_a_diff_of_their_file(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(
        '{\n  "train_micro_batch_size_per_gpu": 1,\n  "fp16": {"enabled": true},\n  "zero_optimization": {"stage": 2}\n}\n'
    )
    answer = ullage.why(
        STEP, config=config, overrides=("model=llama-2-7b", "cluster=8xV100-SXM-32GB", "data.seq_len=1024")
    )
    edit = next(one.edit for one in answer.advice if one.change.get("engine.zero_stage") == 3)
    assert edit is not None
    assert '+  "zero_optimization": {"stage": 3}' in edit


def test_what_their_file_contradicts_is_a_cause(tmp_path: Path) -> None:
    """Parameters are offloaded at stage 3 alone: at stage 2 they stay on the card, and nothing says so."""
    config = tmp_path / "ds.json"
    config.write_text(
        '{"fp16": {"enabled": true}, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}'
    )
    answer = ullage.why(
        STEP, config=config, overrides=("model=llama-2-7b", "cluster=8xV100-SXM-32GB", "data.seq_len=1024")
    )
    found = next(one for one in answer.causes if one.kind == "config")
    assert found.certainty == "likely"
    assert "offload_param" in found.why


def test_a_file_for_another_number_of_gpus_is_no_cause(tmp_path: Path) -> None:
    """Accelerate's and DeepSpeed's files are shipped for some number of GPUs, and launchers overrule it (--num_processes)."""
    accelerate = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nmixed_precision: bf16\nnum_processes: 2\n"
    deepspeed = '{"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}'
    for name, text in (("two.yaml", accelerate), ("ds.json", deepspeed)):
        (tmp_path / name).write_text(text)
        overrides = ("model=llama-3.1-8b", "cluster=8xA100-SXM-80GB", "data.seq_len=4096")
        answer = ullage.why("CUDA out of memory.", config=tmp_path / name, overrides=overrides).answer
        assert "config" not in [one.kind for one in answer.causes]
        assert any("without it" in one for one in answer.doubts)


def test_sharding_over_one_rank_shards_nothing() -> None:
    job = ullage.read_job({**LLAMA, "cluster": "1xA100-SXM-80GB", "engine": {"name": "deepspeed", "zero_stage": 3}})
    found = ullage.why("CUDA out of memory.", job).causes
    assert found[0].kind == "states"
    assert any(one.kind == "replica-not-shard" and "there is one" in one.why for one in found)


def message(**sizes: float) -> str:
    return (
        f"CUDA out of memory. Tried to allocate {sizes['tried']:.2f} GiB (GPU 0; 80.00 GiB total capacity; {sizes['allocated']:.2f} GiB "
        f"already allocated; {sizes['free']:.2f} GiB free; {sizes['reserved']:.2f} GiB reserved in total by PyTorch)"
    )


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (message(tried=2, allocated=50, free=1, reserved=77), "fragmentation"),
        (message(tried=2, allocated=38, free=1, reserved=39), "foreign-process"),
        (message(tried=341, allocated=6, free=73, reserved=6), "config"),
        (message(tried=2, allocated=78, free=0.5, reserved=78.2), "states"),
        (message(tried=32, allocated=50, free=28, reserved=51), "states"),
        ('  File "/x/y.py", line 1, in forward\n    f(x)\n' + message(tried=2, allocated=78, free=0.5, reserved=78.2), "activations"),
        ("Cuda failure 2 'out of memory'", "communicators"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "communicators"),
        ("ValueError: No available memory for the cache blocks.", "foreign-process"),
        ("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62", "foreign-process"),
        ("Current platform can NOT allocate memory block with size larger than 4GB! Tried to allocate 6.85 GiB", "config"),
        ('  File "/env/vllm/worker/worker.py", line 1, in init\n    x = y\nCUDA out of memory.', "foreign-process"),
        ("Upcasted low precision parameters in Llama because mixed precision turned on in FSDP.\nCUDA out of memory.", "config"),
        ("LlamaSdpaAttention. Falling back to the manual attention implementation\nCUDA out of memory.", "attention-scores"),
        ('  File "/x/modeling_llama.py", line 94, in _expand_mask\n    return mask\nCUDA out of memory.', "padding-mask"),
        ('  File "/x/trainer.py", line 77, in val_one_epoch\n    loss = model(x)\nCUDA out of memory.', "evaluation"),
        ("Loading shards: " + "#" * 300 + " 3/4 [00:08<00:02,  2.83s/it]Killed\n", "host-memory"),
        ("Disabling sequence parallelism because tensor model parallelism is disabled\nCUDA out of memory.", "activations"),
        ("ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM", "load"),
        ('  File "a.py", line 1, in f\n    return tensor.pin_memory()\nRuntimeError: CUDA error: out of memory', "host-memory"),
        ('  File "a.py", line 1, in f\n    entropy = entropy_from_logits(logits)\nCUDA out of memory.', "logits"),
        ("Memory cgroup out of memory: Killed process 1 (python)", "host-memory"),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", "config"),
        ("\n".join(f"| allocated: {1000 + 100 * n}.0 |" for n in range(30)) + "\nCUDA out of memory. Tried", "leak"),
    ],
)  # fmt: skip
def test_what_the_numbers_alone_say(text: str, kind: str) -> None:
    assert kinds(ullage.why(text))[0] == kind


def test_what_was_no_failure_of_memory_has_no_cause() -> None:
    answer = ullage.why("RuntimeError: CUDA error: device-side assert triggered", ullage.read_job(LLAMA))
    assert (answer.evidence.recognised, answer.causes, answer.advice) == ("not-oom", (), ())


def ran(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ullage", "why", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def test_the_command() -> None:
    flags = ("--model", "llama-2-7b", "--cluster", "8xV100-SXM-32GB", "--engine", "deepspeed", "--zero-stage", "2")
    done = ran("-", *flags, "--json", text=STEP)
    assert (done.returncode, done.stderr) == (1, "")
    answer = json.loads(done.stdout)
    assert answer["recognised"] == "cuda-oom"
    assert answer["numbers"]["tried_bytes"] == int(3.14 * GIB)
    assert answer["causes"][0]["certainty"] in ("certain", "likely", "possible")
    assert answer["advice"][-1]["verdict_after"] == "fits"
    assert ran(STEP).stdout.count("3.14 GiB") >= 1
    assert ran("nothing to see").returncode == 0
    missing = ran("no-such.log")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "is no file" in missing.stderr


def test_wrong_input() -> None:
    with pytest.raises(InvalidInput):
        ullage.why("x.log")
    assert ran(STEP, "--tp", "2").returncode == 2


def test_a_replica_is_told_to_be_a_shard(tmp_path: Path) -> None:
    """Under DDP every rank holds 100 GiB of states; the same job under FSDP2 is estimated, and written into their own file."""
    config = tmp_path / "accelerate.yaml"
    config.write_text("distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n")
    answer = ullage.why(
        STEP, config=config, overrides=("model=llama-2-7b", "cluster=8xA100-SXM-40GB", "data.seq_len=4096")
    )
    assert "replica-not-shard" in kinds(answer)
    shard = next(one for one in answer.advice if one.change.get("engine.name") == "fsdp2")
    assert shard.frees_bytes > 80 * 2**30
    fits = next(one for one in answer.advice if one.verdict_after == "fits")
    assert fits.edit is not None
    assert "+distributed_type: FSDP" in fits.edit
    assert "mixed_precision: no" not in fits.edit


ON_HOST = {
    "model": "qwen2.5-72b",
    "cluster": {"device": "A100-SXM-80GB", "gpus_per_node": 8, "host_memory": "1.4TB"},
    "engine": {"name": "deepspeed", "zero_stage": 3},
    "offload": {"optimizer": "cpu"},
    "recompute": "full",
    "data": {"seq_len": 2048},
}


def test_what_frees_the_host() -> None:
    """OpenRLHF/OpenRLHF#632: pinned blocks, rounded up to powers of two, passed the node's memory; not to pin them was the fix."""
    found = ullage.why("Memory cgroup out of memory: Killed process 1 (python)", ullage.read_job(ON_HOST))
    assert found.causes[0].kind == "host-memory"
    unpinned = next(one for one in found.advice if one.change.as_dict() == {"engine.options.pin_memory": False})
    assert unpinned.frees_host_bytes > 400e9
    assert unpinned.host_bytes < 1.4e12
    assert unpinned.verdict_after == "tight"
    assert all(one.frees_host_bytes > 0 for one in found.advice)


def test_more_nodes_share_what_a_host_has_no_room_for() -> None:
    """As of pytorch/torchtune#1871, on larger cards: 565 GB of states in bf16 on a node with 500 GB."""
    job = {
        "model": "llama-3.1-70b",
        "cluster": {"device": "A100-SXM-40GB", "gpus_per_node": 8, "host_memory": "500GB"},
        "engine": {"name": "fsdp2"},
        "precision": "bf16",
        "stack": "torchtune",
        "offload": {"optimizer": "cpu", "params": "cpu"},
        "recompute": "full",
        "data": {"seq_len": 1024},
    }
    found = ullage.why("Killed", ullage.read_job(job))
    assert found.causes[0].kind == "host-memory"
    last = found.advice[-1]
    assert last.verdict_after == "fits"
    assert last.change["layout.dp"] == 16
    assert 250e9 < last.host_bytes < 350e9


def test_nothing_is_put_on_a_host_that_has_no_room_for_it() -> None:
    alone = {**LLAMA, "engine": {"name": "deepspeed", "zero_stage": 2}}
    poor, rich = (
        ullage.why(
            STEP,
            ullage.read_job({**alone, "cluster": {"device": "A100-SXM-40GB", "gpus_per_node": 1, "host_memory": host}}),
        )
        for host in ("64GB", "2TB")
    )
    assert not [one for one in poor.advice if "offload.optimizer" in one.change]
    offloaded = [one for one in rich.advice if "offload.optimizer" in one.change]
    assert offloaded
    assert all(one.host_bytes > 100e9 for one in offloaded)


def test_a_contradiction_is_named_though_no_memory_ran_out() -> None:
    found = ullage.why("ValueError: DeepSpeed Zero-3 is not compatible with passing a `device_map`.")
    assert found.evidence.recognised == "not-oom"
    assert [(one.kind, one.certainty) for one in found.causes] == [("config", "certain")]
    assert any("device_map" in one.what for one in found.in_words)


FITS = ("recompute=full", "data.seq_len=512", "engine.zero_stage=3")


def test_a_run_that_failed_needed_more_than_the_card() -> None:
    """The account says that it fits and the message that it did not: what is missing is added to each estimate."""
    job = ullage.read_job(LLAMA, FITS)
    before = ullage.estimate(job)
    assert before.peak.device_bytes < before.capacity_bytes
    bare = ullage.why("CUDA out of memory.", job)
    assert bare.beyond_bytes == before.capacity_bytes - before.peak.device_bytes
    told = ullage.why(STEP, job)
    assert told.beyond_bytes >= bare.beyond_bytes
    for one in bare.advice:
        if one.low_bytes is not None:
            keys = tuple(f"{key}={json.dumps(value)}" for key, value in one.change.as_dict().items())
            after = ullage.estimate(ullage.read_job(LLAMA, (*FITS, *keys)))
            assert one.low_bytes == after.peak.low_bytes + bare.beyond_bytes


def test_pieces_that_could_not_have_held_it_are_no_fragmentation() -> None:
    """1.95 GiB was free and nothing reserved was unused: expandable segments have nothing to join."""
    assert not any(
        "engine.options.expandable_segments" in one.change for one in ullage.why(STEP, ullage.read_job(LLAMA)).advice
    )


def test_a_step_that_fits_is_not_changed_where_it_was_saved() -> None:
    traceback = 'Traceback (most recent call last):\n  File "/env/transformers/trainer.py", line 1, in save_model\n    state_dict = x\n'
    found = ullage.why(traceback + "CUDA out of memory.", ullage.read_job(LLAMA, FITS))
    assert found.causes[0].kind == "save"
    assert found.advice == ()
    assert any("offload_to_cpu=True" in one.what for one in found.in_words)


def advised(job: dict[str, object], *changed: str) -> list[dict[str, object]]:
    return [one.change.as_dict() for one in ullage.why("CUDA out of memory.", ullage.read_job(job, changed)).advice]


def test_another_run_comes_last_and_is_estimated() -> None:
    """8 bits of moments, adapters, a cut sequence and another machine: each a job of its own, after what leaves the run as it is."""
    small = {
        **LONG,
        "model": "llama-3.1-8b",
        "cluster": "1xRTX-3090-24GB",
        "engine": {"name": "single"},
        "data": {"seq_len": 1024},
    }
    job = ullage.read_job(small, ("optimizer.impl=foreach",))
    found = ullage.why("CUDA out of memory.", job)
    keys = [next(iter(one.change)) for one in found.advice]
    assert "cluster" in keys
    for one in found.advice:
        if one.low_bytes is not None:
            again = changed(job, one.change.as_dict())
            assert again is not None
            assert ullage.estimate(again).peak.low_bytes + found.beyond_bytes == one.low_bytes
    assert list(learnt_otherwise(job)) == [
        {"optimizer": "adamw-8bit"},
        {"precision": "bf16"},
        {"lora": {"rank": 16, "targets": "all-linear"}},
    ]
    adapted = ullage.read_job(small, ("lora.rank=8",))
    assert {"lora.base": "nf4"} in list(learnt_otherwise(adapted))
    for change in learnt_otherwise(job):
        other = changed(job, change)
        assert other is not None
        assert ullage.estimate(other).peak.device_bytes < ullage.estimate(job).peak.device_bytes


def test_sequences_are_cut_where_they_are_the_cause() -> None:
    long = {**LONG, "model": "llama-3.1-8b", "loss": "fused-linear", "data": {"seq_len": 262144, "grad_accum": 2}}
    assert {"layout.cp": 2, "layout.dp": 4, "data.grad_accum": 4} in advised(long)
    states = {**LONG, "model": "llama-3.1-405b", "data": {"seq_len": 1023}}
    assert not [one for one in advised(states) if "layout.cp" in one]


def test_a_job_that_is_not_the_one_that_ran() -> None:
    """Another card: causes and advice are of the one that failed. Another model: it is asked whether it is this job."""
    right = ullage.why(STEP, ullage.read_job(LLAMA))
    assert right.answer.doubts == ()
    large = ullage.why(STEP, ullage.read_job(LLAMA, ("cluster=8xA100-SXM-80GB",)))
    assert [one.kind for one in large.causes] == kinds(right)
    assert "31.75 GiB, and the job's A100-SXM-80GB" in large.answer.doubts[0]
    assert all(
        one.high_bytes is None or one.high_bytes < 31.75 * GIB for one in large.advice if one.verdict_after == "fits"
    )
    assert large.advice
    other = ullage.why(STEP, ullage.read_job(LLAMA, ("model=gpt2",)))
    assert len(other.answer.doubts) == 1
    assert "28.28 GiB was allocated" in other.answer.doubts[0]
    assert as_json(other)["warnings"] == list(other.answer.doubts)
    assert "Is it this job?" in plain(why_report(other))


def test_one_tensor_that_is_much_of_the_card_is_said_to_be() -> None:
    """hpcaitech/ColossalAI#4537: 32 GiB of scores, and no job."""
    large = ullage.why(message(tried=32, allocated=55, free=23.5, reserved=55.5)).causes[0]
    assert (large.kind, large.certainty) == ("states", "possible")
    assert "40% of the card" in large.why
    assert "of the card" not in ullage.why("CUDA out of memory. Tried to allocate 32.00 GiB.").causes[0].why


def test_what_is_estimated_is_not_told_in_words() -> None:
    found = ullage.why(
        "CUDA out of memory.", ullage.read_job({**LONG, "recompute": "none", "data": {"seq_len": 32768}})
    )
    assert any("recompute" in one.change for one in found.advice)
    assert "activation checkpointing" not in [one.what for one in found.in_words]
    alone = ullage.why('  File "/env/m.py", line 1, in f\n    attn_weights = x\nCUDA out of memory.')
    assert "attn_implementation sdpa or flash_attention_2" in [one.what for one in alone.in_words]


def test_what_a_job_has_is_not_told_in_words() -> None:
    """artidoro/qlora#17: adapters, recomputation of all, and a card that the base fills."""
    job = {
        "model": {"base": "llama-2-70b", "num_key_value_heads": 64, "intermediate_size": 22016},
        "cluster": "1xRTX-A6000-48GB",
        "engine": {"name": "single"},
        "precision": "fp32",
        "lora": {"rank": 64, "base": "nf4-double", "targets": "all-linear"},
        "recompute": "full",
        "data": {"seq_len": 512, "micro_batch": 4},
    }
    text = (
        "CUDA out of memory. Tried to allocate 688.00 MiB (GPU 0; 47.54 GiB total capacity; 45.09 GiB already allocated; 79.12 MiB free; "
        "46.45 GiB reserved in total by PyTorch)"
    )
    found = ullage.why(text, ullage.read_job(job))
    assert {"states", "activations"} <= {cause.kind for cause in found.causes[:2]}
    told = " ".join(one.what for one in found.in_words)
    assert "LoRA" not in told
    assert "activation checkpointing" not in told
    assert any("data.micro_batch" in one.change and one.verdict_after == "tight" for one in found.advice)
    assert not any("micro-batch" in one.what for one in found.useless)


def test_attention_is_advised_that_the_card_has_a_kernel_for() -> None:
    """torch's flash kernels want compute capability 8.0 (sdp_utils.cpp); a V100 has 7.0."""
    job = {
        "model": "llama-3.1-8b",
        "cluster": "8xV100-SXM-32GB",
        "engine": {"name": "fsdp2"},
        "precision": "fp16-mixed",
        "attention": "eager",
        "data": {"seq_len": 8192},
    }
    advice = [dict(one.change) for one in ullage.why("CUDA out of memory.", ullage.read_job(job)).advice]
    assert {"attention": "mem-efficient"} in advice
    assert {"attention": "flash"} not in advice

"""Each kind of cause on an input that has its evidence and nothing else, and not on the same input without it."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from tests.postmortem.test_snapshot import block, segment

import ullage
from ullage.postmortem.useless import useless
from ullage.report.console import plain
from ullage.report.why import why_report
from ullage.report.why_json import why as as_json
from ullage.units import GIB, MIB

OOM = "torch.OutOfMemoryError: CUDA out of memory."
FULL = (
    "CUDA out of memory. Tried to allocate {tried:.2f} GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.00 GiB is free. {others}"
    "Including non-PyTorch memory, this process has {process:.2f} GiB memory in use. Of the allocated memory {allocated:.2f} GiB is "
    "allocated by PyTorch, and {unallocated:.2f} GiB is reserved by PyTorch but unallocated."
)
ON_NODE = {
    "model": "llama-3.1-8b",
    "cluster": "8xH100-SXM-80GB",
    "engine": {"name": "fsdp2"},
    "data": {"seq_len": 4096},
}
ALONE = {**ON_NODE, "cluster": "1xA100-SXM-80GB", "recompute": "full", "data": {"seq_len": 512}}
STAGES = {  # four stages of two ranks
    **ON_NODE,
    "cluster": "8xA100-SXM-80GB",
    "engine": {"name": "megatron", "zero_stage": 1},
    "stack": "megatron",
    "layout": {"pp": 4, "dp": 2},
    "data": {"seq_len": 8192, "grad_accum": 8},
}


def told(
    tried: float = 2, others: str = "", process: float = 78.1, allocated: float = 76, unallocated: float = 0.5
) -> str:
    return FULL.format(tried=tried, others=others, process=process, allocated=allocated, unallocated=unallocated)


def called(file: str, function: str, code: str = "x") -> str:
    return f'Traceback (most recent call last):\n  File "{file}", line 1, in {function}\n    {code}\n'


LIVE = {"states": "possible", "activations": "possible"}


def kinds(text: str, job: dict[str, Any] | None = None, *changed: str) -> dict[str, str]:
    found = ullage.why(text, ullage.read_job(job, changed) if job is not None else None)
    return {one.kind: one.certainty for one in found.causes}


def first(text: str, job: dict[str, Any] | None = None, *changed: str) -> str:
    return next(iter(kinds(text, job, *changed)))


@pytest.mark.parametrize(
    ("kind", "file", "function", "code"),
    [
        ("load", "/env/transformers/modeling_utils.py", "from_pretrained", "x"),
        ("load", "/env/torch/nn/modules/module.py", "to", "return self._apply(convert)"),
        ("load", "/env/torch/nn/modules/module.py", "cuda", "return self._apply(lambda t: t.cuda(device))"),
        ("load", "/env/transformers/trainer.py", "_load_optimizer_and_scheduler", "self.optimizer.load_state_dict(x)"),
        ("load", "/env/accelerate/utils/fsdp_utils.py", "load_fsdp_optimizer", "x"),
        ("load", "/env/torch/distributed/checkpoint/state_dict_loader.py", "load", "x"),
        ("save", "/env/torch/distributed/fsdp/_state_dict_utils.py", "_full_post_state_dict_hook", "x"),
        ("save", "/env/deepspeed/runtime/engine.py", "_zero3_consolidated_16bit_state_dict", "x"),
        ("save", "/env/torch/distributed/checkpoint/state_dict.py", "get_state_dict", "x"),
        ("save", "/env/lightning/pytorch/callbacks/model_checkpoint.py", "_save_checkpoint", "x"),
        ("save", "/env/peft/utils/save_and_load.py", "get_peft_model_state_dict", "x"),
        ("evaluation", "/env/transformers/trainer_pt_utils.py", "nested_concat", "return torch.cat((x, y))"),
        ("evaluation", "/env/lightning/pytorch/loops/evaluation_loop.py", "_evaluation_step", "x"),
        ("evaluation", "/w/megatron/training/training.py", "evaluate", "x"),
        ("evaluation", "/w/torchtitan/components/validate.py", "validate", "x"),
        ("clipping", "/env/torch/nn/utils/clip_grad.py", "clip_grad_norm_", "x"),
        ("clipping", "/env/deepspeed/runtime/zero/stage3.py", "unscale_and_clip_grads", "x"),
        ("clipping", "/w/megatron/core/optimizer/clip_grads.py", "get_grad_norm_fp32", "x"),
        ("optimizer-first-step", "/env/torch/optim/adamw.py", "_init_group", "state['exp_avg'] = torch.zeros_like(p)"),
        ("optimizer-step", "/env/torch/optim/adamw.py", "_multi_tensor_adamw", "x = torch._foreach_sqrt(y)"),
        ("padding-mask", "/env/transformers/models/llama/modeling_llama.py", "_update_causal_mask", "x"),
        ("logits", "/env/torch/nn/functional.py", "cross_entropy", "x"),
        ("logits", "/env/accelerate/utils/operations.py", "_convert_to_fp32", "return tensor.float()"),
        ("attention-scores", "/w/ldm/modules/attention.py", "forward", "sim = einsum('b i d, b j d -> b i j', q, k) * self.scale"),
        ("attention-scores", "/env/transformers/models/llama/modeling_llama.py", "eager_attention_forward", "x"),
        ("expert-imbalance", "/env/transformers/models/mixtral/modeling_mixtral.py", "forward", "x = expert_layer(y)"),
        ("expert-imbalance", "/w/megatron/core/transformer/moe/token_dispatcher.py", "token_permutation", "x"),
        ("foreign-process", "/env/verl/workers/sharding_manager/fsdp_vllm.py", "update_weights", "x"),
        ("host-memory", "/env/deepspeed/runtime/zero/stage3.py", "_create_fp32_partitions", "x.pin_memory()"),
        ("states", "/env/deepspeed/runtime/zero/stage_1_and_2.py", "__init__", "x"),
    ],
)  # fmt: skip
def test_where_it_failed(kind: str, file: str, function: str, code: str) -> None:
    """No engine's functions but these speak for it: a plain forward names none."""
    assert first(called(file, function, code) + OOM) == kind
    assert kinds(called("/w/model.py", "forward") + OOM) == {"unknown": "possible"}


def test_sharding_over_one_rank() -> None:
    for engine in ({"name": "deepspeed", "zero_stage": 3}, {"name": "fsdp2"}):
        assert "replica-not-shard" in list(kinds(OOM, {**ALONE, "engine": engine}))[:2]
    assert "replica-not-shard" not in kinds(OOM, {**ALONE, "engine": {"name": "single"}})


def test_whole_weights_under_zero_2() -> None:
    job = {
        **ON_NODE,
        "model": "llama-2-13b",
        "cluster": "8xA100-SXM-40GB",
        "data": {"seq_len": 512},
        "recompute": "full",
    }
    assert first(OOM, {**job, "engine": {"name": "deepspeed", "zero_stage": 2}}) == "replica-not-shard"
    assert "replica-not-shard" not in kinds(OOM, {**job, "engine": {"name": "deepspeed", "zero_stage": 3}})


def test_parameters_that_accelerate_makes_fp32_of() -> None:
    job = {
        **ON_NODE,
        "model": "llama-2-13b",
        "cluster": "4xA100-SXM-40GB",
        "recompute": "full",
        "data": {"seq_len": 1024},
    }
    found = ullage.why(OOM, ullage.read_job(job))
    upcast = next(one for one in found.causes if one.kind == "config")
    assert upcast.certainty == "possible"
    assert "accelerate" in upcast.why
    for changed in ("precision=bf16", "engine.name=ddp", "stack=torchtitan"):
        assert not any("accelerate" in one.why for one in ullage.why(OOM, ullage.read_job(job, (changed,))).causes)


def test_quantised_weights_under_zero_3() -> None:
    job = {**ON_NODE, "model": "llama-3.1-70b", "cluster": "8xA100-SXM-40GB", "lora": {"rank": 8, "base": "nf4"}}
    found = ullage.why(OOM, ullage.read_job({**job, "engine": {"name": "deepspeed", "zero_stage": 3}}))
    assert found.causes[0].kind == "replica-not-shard"
    assert "quantised weights" in found.causes[0].why
    assert "replica-not-shard" not in kinds(OOM, job)


def test_a_frozen_base_that_is_loaded_whole() -> None:
    """Llama-3-70B in 4 bits: 9 GiB a card once FSDP shares it among four, 37 GiB before that."""
    small = {"data": {"seq_len": 512}, "recompute": "full", "precision": "bf16"}
    job = {
        **ON_NODE,
        **small,
        "model": "llama-3-70b",
        "cluster": "4xRTX-3090-24GB",
        "lora": {"rank": 8, "base": "nf4-double"},
    }
    assert first(OOM, job) == "load"
    assert "load" not in kinds(OOM, {**job, "cluster": "4xA100-SXM-80GB"})
    on_host = {**job, "engine": {"name": "fsdp2", "options": {"cpu_ram_efficient_loading": True}}}
    assert (
        kinds(OOM, on_host)["load"] == "possible"
    )  # hiyouga/LlamaFactory#4071: its Accelerate file says so, and it failed in a step


CUT = {**ON_NODE, "model": "qwen2.5-7b", "layout": {"cp": 8, "dp": 1}, "recompute": "full", "data": {"seq_len": 65536}}


def test_sequences_that_no_rank_cuts() -> None:
    """The residual stream of 65,536 tokens x 3584 in 16 bits, 56 MiB where eight ranks share a sequence."""
    text = "CUDA out of memory. Tried to allocate 448.00 MiB."
    found = ullage.why(text, ullage.read_job(CUT))
    assert found.causes[0].kind == "replica-not-shard"
    assert "not in effect" in found.causes[0].why
    assert "replica-not-shard" not in kinds("CUDA out of memory. Tried to allocate 56.00 MiB.", CUT)
    assert "replica-not-shard" not in kinds(text, {**CUT, "layout": {"dp": 8}})


def test_sequences_that_megatron_gathers_tell_nothing() -> None:
    """Under its sequence parallelism each layer gathers 16384 x 4096 in 16 bits."""
    job = {**STAGES, "layout": {"tp": 4, "sp": True, "dp": 2}, "data": {"seq_len": 16384}}
    assert "replica-not-shard" not in kinds("CUDA out of memory. Tried to allocate 128.00 MiB.", job)
    hint = "Disabling sequence parallelism because tensor model parallelism is disabled\n"
    assert "activations" in kinds(hint + OOM)


@pytest.mark.parametrize(("each", "named"), [(448 * MIB, True), (56 * MIB, False)])
def test_a_snapshot_of_whole_sequences(tmp_path: Path, each: int, named: bool) -> None:
    path = tmp_path / "taken.pickle"
    blocks = [segment(n * GIB, block(each)) for n in range(28)]
    path.write_bytes(pickle.dumps({"segments": blocks, "device_traces": [[]]}))
    found = ullage.why(str(path), ullage.read_job(CUT))
    assert any("context parallelism is asked for" in one.why for one in found.causes) == named


def test_logits_that_a_fused_loss_never_makes() -> None:
    """Liger asked for and not in effect: the size is all that tells."""
    job = {**ON_NODE, "model": "gemma-3-4b", "recompute": "full", "loss": "fused-linear", "data": {"seq_len": 65536}}
    found = ullage.why("CUDA out of memory. Tried to allocate 64.02 GiB.", ullage.read_job(job))
    assert (found.causes[0].kind, found.causes[0].certainty) == ("logits", "possible")
    assert "not in effect" in found.causes[0].why


def test_eager_attention() -> None:
    job = {**ON_NODE, "attention": "eager", "data": {"seq_len": 16384}}
    assert first(OOM, job) == "attention-scores"
    assert "attention-scores" not in kinds(OOM, job, "attention=flash")


def test_one_size_of_two_tensors() -> None:
    """8192 tokens x 128256 x 2 B of logits are 128256 x 8192 x 2 B of embedding: both are listed; length and traceback reject."""
    job = {**ON_NODE, "model": "llama-3.1-70b", "cluster": "8x8xH100-SXM-80GB", "data": {"seq_len": 8192}}
    text = "CUDA out of memory. Tried to allocate 1.96 GiB."

    def kinds_of(text: str, *changed: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for one in ullage.why(text, ullage.read_job(job, changed)).answer.candidates:
            found[one.made.kind] = found.get(one.made.kind, 0) + one.likelihood
        return found

    both = kinds_of(text)
    assert both["logits"] > 0 < both["states"]
    assert "logits" not in kinds_of(text, "data.seq_len=2048")
    assert kinds_of(called("/env/torch/nn/functional.py", "cross_entropy") + text)["logits"] > 2 * both["logits"]


def test_candidates_are_listed() -> None:
    """In the report and in JSON, with what is allocated before each; one alone is the cause's own tensor."""
    found = ullage.why(
        told(tried=1.96), ullage.read_job({**ON_NODE, "model": "llama-3.1-70b", "cluster": "8x8xH100-SXM-80GB"})
    )
    listed = as_json(found)["candidates"]
    assert isinstance(listed, list)
    assert sum(one["likelihood"] for one in listed) == pytest.approx(1, abs=0.1)  # eight are listed
    text = plain(why_report(found))
    assert "Tensors of that size" in text
    assert "76.00 GiB was allocated" in text
    inside = next(one.made for one in found.answer.candidates if one.made.low_bytes is not None)
    assert f"beside {(inside.low_bytes or 0) / GIB:.2f} GiB to" in text
    assert "Tensors of that size" not in plain(why_report(ullage.why(told(tried=1.96))))


def test_what_was_allocated_rejects() -> None:
    """The same size is made early and late: the moment whose total agrees is the likelier."""
    job = {
        "model": "llama-2-7b",
        "cluster": "8xV100-SXM-32GB",
        "engine": {"name": "deepspeed", "zero_stage": 2},
        "data": {"seq_len": 1024},
    }
    text = "CUDA out of memory. Tried to allocate 3.14 GiB. (GPU 0; 31.75 GiB total capacity; {} GiB already allocated; 1.00 GiB free)"
    low, high = (
        ullage.why(text.format(size), ullage.read_job(job)).answer.candidates[0] for size in ("15.00", "29.00")
    )
    assert low.made != high.made
    assert low.made.low_bytes is None or low.made.low_bytes < 20 * GIB
    assert high.made.high_bytes is not None
    assert high.made.high_bytes > 20 * GIB


def test_the_rank_that_failed_says_which_stage() -> None:
    """Of four stages the first holds what three more micro-batches keep, the last the logits."""
    found = kinds(f"[rank0]: {OOM}", STAGES)
    assert "logits" not in found
    assert "pipeline-end" in found
    last = kinds(f"[rank7]: {OOM}", STAGES)
    assert "logits" in last
    logits = "CUDA out of memory. Tried to allocate 3.91 GiB."  # 8192 x 128256 x 4 B
    assert first(f"[rank6]: {logits}", STAGES) == "logits"
    assert "logits" not in kinds(f"[rank2]: {logits}", STAGES)


def test_an_end_of_a_pipeline_that_alone_does_not_fit() -> None:
    job = {**STAGES, "cluster": {"device": {"memory": "56GiB"}, "gpus_per_node": 8}}
    found = ullage.why(OOM, ullage.read_job(job))
    assert found.causes[0].kind == "pipeline-end"
    assert "the first stage" in found.causes[0].why
    assert "every other fits" in found.causes[0].why
    assert "pipeline-end" not in kinds(f"[rank2]: {OOM}", job)


def test_what_stands_outside_of_torch() -> None:
    sibling = "".join(f"Process {n} has 520.00 MiB memory in use. " for n in range(11, 18))
    contexts = ullage.why(told(others=sibling, process=74.5, allocated=73))
    assert contexts.causes[0].kind == "foreign-process"
    assert "7 of them, each no more than a context" in contexts.causes[0].why
    assert any("set_device" in one.what for one in contexts.in_words)
    one = ullage.why(told(others="Process 11 has 30.00 GiB memory in use. ", process=48.1, allocated=46))
    assert one.causes[0].kind == "foreign-process"
    assert "context" not in one.causes[0].why
    assert kinds(told(allocated=70)) == {"communicators": "likely"}
    assert kinds(told(tried=8, allocated=70)) == {"communicators": "possible", **LIVE}
    assert "communicators" not in kinds(told(allocated=77))


def test_what_torch_counts_and_the_card_has_not_got() -> None:
    """An engine that sleeps in the same process: no other holds the card (verl-project/verl#3366)."""
    text = (
        "CUDA out of memory. Tried to allocate 260.00 MiB. GPU 0 has a total capacity of 79.14 GiB of which 49.75 MiB is free. Process 626 "
        "has 79.04 GiB memory in use. Of the allocated memory {allocated} GiB is allocated by PyTorch, with 86.34 MiB allocated in private "
        "pools (e.g., CUDA Graphs), and 261.95 MiB is reserved by PyTorch but unallocated."
    )
    assert kinds(text.format(allocated=94.21)) == {"foreign-process": "likely"}
    assert kinds(text.format(allocated=78.10)) == LIVE


def test_ranks_on_one_card_of_which_the_driver_says_nothing() -> None:
    """huggingface/trl#3172: each of eight ranks takes its model to the first card."""
    siblings = "".join(f"Process {n} has 0 bytes memory in use. " for n in range(11, 18))
    found = ullage.why(told(tried=0.13, others=siblings, process=0, allocated=10.47, unallocated=0.09))
    assert (found.causes[0].kind, found.causes[0].certainty) == ("foreign-process", "likely")
    assert "7 other processes" in found.causes[0].why


def test_what_metal_holds_outside_of_torch() -> None:
    """Comfy-Org/ComfyUI#11584: MPSAllocator tells no capacity, and what Metal holds for this process besides."""
    text = "MPS backend out of memory (MPS allocated: {} GiB, other allocations: {}, max allowed: 18.00 GiB). Tried to allocate 2.00 GiB"
    assert kinds(text.format("4.00", "13.00 GiB")) == {"communicators": "likely"}
    assert kinds(text.format("17.00", "1.00 MiB")) == LIVE


def test_a_worker_of_which_ray_knows_no_cause() -> None:
    """The text names host memory first among three causes, and every death brings it (verl-project/verl, ypwang61/One-Shot-RLVR#14)."""
    text = (
        "The actor is dead because its worker process has died. Worker exit detail: Worker unexpectedly exits with a connection error code "
        "2. End of file. There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory "
        "usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly due to SIGSEGV or other unexpected errors.\n"
    )
    assert kinds(text) == {"host-memory": "possible"}
    assert first(text + told(allocated=70)) == "communicators"


def test_pieces() -> None:
    assert kinds(told(tried=4, allocated=60, unallocated=17)) == {"fragmentation": "likely"}
    assert "fragmentation" not in kinds(told(tried=4, allocated=76.6, unallocated=0.4))


def test_live_tensors_of_which_no_job_says_what_they_are() -> None:
    """Said by the numbers alone, in the contract's kinds; of a job, its tensors are named instead."""
    small = "CUDA out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 14.76 GiB of which 14.50 GiB is free."
    assert kinds(small) == LIVE
    full = told(tried=4, allocated=76.6, unallocated=0.4, process=77.5)
    assert kinds(full) == LIVE
    assert "the job (--job" not in "".join(cause.why for cause in ullage.why(full, ullage.read_job(ON_NODE)).causes)
    assert list(kinds('  File "a.py", line 1, in backward\n    loss.backward()\n' + full)) == ["activations", "states"]


@pytest.mark.parametrize(
    "line",
    [
        "[INFO] [utils.py:782:see_memory_usage] MA {:.1f} GB         Max_MA 70.0 GB         CA 70 GB",
        "memory (MB) | allocated: {:.1f} | max allocated: 70000.0 |",
        "step: 7  loss: 2.1  memory: {:.2f}GiB(15.80%)",
        "Step 7 | loss:1.6 lr:2e-05 peak_memory_active:{:.4f} peak_memory_alloc:70.1",
        "torch.cuda.memory_allocated(): {:.0f}000000000",
        "memory_allocated={:.2f}GiB max_memory_allocated=70.00GiB",
    ],
)
def test_a_leak_in_a_log(line: str) -> None:
    """One that grows is a leak, one that stands is not."""
    grows = "".join(line.format(30 + n) + "\n" for n in range(30))
    stands = "".join(line.format(30 + n % 2 / 10) + "\n" for n in range(30))
    assert first(grows + OOM) == "leak"
    assert "leak" not in kinds(stands + OOM)


def test_what_does_not_help_is_said_of_each_likely_cause() -> None:
    found = ullage.why(told(tried=4, allocated=60, unallocated=17))
    assert [one.what for one in found.useless] == ["torch.cuda.empty_cache()"]
    leak = ullage.why("".join(f"| allocated: {30000 + 1000 * n}.0 |\n" for n in range(30)) + OOM)
    assert any("a larger card" in one.what for one in leak.useless)
    assert all(useless(leak.evidence, (cause,))[1:] for cause in leak.causes)
    assert useless(ullage.why("Killed python").evidence, ()) == ()

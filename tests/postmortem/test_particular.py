"""Causes of jobs whose steps are not all alike."""

import ullage

TRACEBACK = 'Traceback (most recent call last):\n  File "/env/megatron/core/transformer/moe/experts.py", line 220, in forward\n    x = y\n'
OOM = "torch.OutOfMemoryError: CUDA out of memory."
ACCUMULATED = {  # 26B parameters on 16 GPUs, 3.25 GB of sharded gradients for 52 GB (pytorch/tnt#1057)
    "model": "gemma-2-27b",
    "cluster": "2x8xA100-SXM-80GB",
    "engine": {"name": "fsdp2"},
    "precision": "bf16",
    "recompute": "full",
    "data": {"seq_len": 2048, "grad_accum": 8},
}
LENGTHS = {
    "model": "llama-3.1-8b",
    "cluster": "8xA100-SXM-80GB",
    "engine": {"name": "fsdp2"},
    "data": {"seq_len": 32768, "seq_len_mean": 2000},
}
ROUTED = {
    "model": "qwen3-30b-a3b",
    "cluster": "4x8xH100-SXM-80GB",
    "engine": {"name": "megatron", "zero_stage": 1},
    "stack": "megatron",
    "layout": {"ep": 8},
    "data": {"seq_len": 4096},
}


def kinds(answer: ullage.Why) -> dict[str, str]:
    return {one.kind: one.certainty for one in answer.causes}


def test_gradients_that_wait_for_the_last_micro_batch() -> None:
    job = ullage.read_job(ACCUMULATED)
    found = ullage.why(OOM, job)
    assert (found.causes[0].kind, found.causes[0].certainty) == ("unsynced-accumulation", "likely")
    synced = next(one for one in found.advice if "engine.options.sync_each_batch" in one.change)
    whole = ullage.estimate(job).parameters * 2 * 15 / 16
    assert whole < synced.frees_bytes < 1.25 * whole  # with what one more micro-batch makes beside them
    assert synced.verdict_after == "fits"
    for changed in ("data.grad_accum=1", "engine.options.sync_each_batch=true", "engine.name=ddp"):
        assert "unsynced-accumulation" not in kinds(ullage.why(OOM, ullage.read_job(ACCUMULATED, (changed,))))


def test_the_longest_sequence_of_many() -> None:
    found = ullage.why(OOM, ullage.read_job(LENGTHS))
    assert found.causes[0].kind == "outlier-length"
    assert "2,000 tokens, the mean" in found.causes[0].why
    assert "outlier-length" not in kinds(ullage.why(OOM, ullage.read_job(LENGTHS, ("data.seq_len_mean=null",))))
    assert "outlier-length" not in kinds(ullage.why(OOM, ullage.read_job(LENGTHS, ("data.seq_len=4096",))))


def test_a_log_that_was_steady_until_it_failed() -> None:
    steady = "".join(f"| allocated: {60000 + 7 * (n % 3)}.0 |\n" for n in range(30))
    assert kinds(ullage.why(steady + OOM)) == {"outlier-length": "possible"}
    assert "outlier-length" not in kinds(ullage.why(steady))


def test_experts_that_the_router_fills() -> None:
    """By the traceback; by the account where balanced routing nearly fills the card; never where no tokens come from other ranks."""
    assert kinds(ullage.why(TRACEBACK + OOM)) == {"expert-imbalance": "possible"}
    named = ullage.why(TRACEBACK + OOM, ullage.read_job(ROUTED))
    assert kinds(named)["expert-imbalance"] == "likely"
    assert "taken balanced" in next(one for one in named.causes if one.kind == "expert-imbalance").why
    assert kinds(ullage.why(OOM, ullage.read_job(ROUTED, ("data.seq_len=5120",))))["expert-imbalance"] == "possible"
    assert "expert-imbalance" not in kinds(ullage.why(OOM, ullage.read_job(ROUTED, ("data.seq_len=2048",))))
    alone = ullage.why(TRACEBACK + OOM, ullage.read_job(ROUTED, ("layout.ep=1", "engine.zero_stage=3")))
    assert "taken balanced" not in " ".join(one.why for one in alone.causes)


def test_all_experts_in_one_tensor() -> None:
    """modelscope/ms-swift#9403: 26.44 GiB, 128 experts of 3 x 4096 x 1536 over ep 8, in 47 of 94 layers, in 16 bits; adapters aside."""
    message = "RuntimeError: NPU out of memory. Tried to allocate 26.44 GiB (NPU 2; 60.96 GiB total capacity; 30.23 GiB already allocated)"
    job = {
        "model": "qwen3-235b-a22b",
        "cluster": {"device": "Ascend-910B2-64GB", "gpus_per_node": 8, "nodes": 4},
        "engine": {"name": "megatron"},
        "stack": "megatron",
        "layout": {"tp": 4, "pp": 2, "ep": 8, "etp": 1, "sp": True},
        "lora": {"rank": 8, "targets": "all-linear"},
        "data": {"seq_len": 1024, "global_batch": 16},
    }
    found = ullage.why(message, ullage.read_job(job)).causes[0]
    assert (found.kind, found.certainty) == ("states", "likely")
    assert found.tensor is not None
    assert found.tensor.shape == (128 // 8 * 3 * 4096 * 1536 * 94 // 2,)

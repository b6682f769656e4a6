"""The jobs of which the estimate is held against real DeepSpeed steps: each option that moves memory, alone and with its neighbours."""

from __future__ import annotations

from tests.distributed.deepspeed_runs import Case

from ullage.frozen import FrozenMap

RANKS = (2, 4)
BUCKET = 200_000  # elements; the model has five times as many, its largest parameter 128,000
_HOST = {"pin_memory": False}
_STAGE_3 = {"stage3_param_persistence_threshold": 1000, "stage3_prefetch_bucket_size": 100_000}
_LORA = FrozenMap({"rank": 8, "targets": ("q_proj", "v_proj")})
_SAVED = FrozenMap({**_LORA, "modules_to_save": ("embed_tokens", "lm_head")})
_DORA = FrozenMap({"rank": 8, "targets": "all-linear", "dora": True})
_LATE = ("*embed_tokens*", "model.layers.[01].*")
_ALL = FrozenMap({"rank": 8, "targets": "all-linear"})


def _case(stage: int, options: dict[str, object] | None = None, **keys: object) -> Case:
    common = {"reduce_bucket_size": BUCKET} if stage else {}
    if stage == 3:
        common |= _STAGE_3
    return Case(stage, FrozenMap({**common, **(options or {})}), FrozenMap(keys))


CASES: tuple[Case, ...] = (
    _case(0),
    _case(0, impl="foreach"),
    _case(0, impl="for-loop", grad_accum=2),
    _case(0, precision="fp32", recompute="full", seq_len=64),
    _case(1),
    _case(1, {"overlap_comm": True}, precision="fp16-mixed"),
    _case(1, {"overlap_comm": True}, precision="fp32", grad_accum=2),
    _case(1, {"grad_accum_dtype": "fp32"}, grad_accum=2),
    _case(1, {"round_robin_gradients": True}, precision="fp32"),
    _case(1, _HOST, offload="cpu"),
    _case(2),
    _case(2, {"reduce_bucket_size": 50_000}, impl="foreach"),
    _case(2, {"reduce_bucket_size": 2_000_000}, seq_len=64, micro_batch=2),
    _case(2, {"overlap_comm": True}, precision="fp16-mixed"),
    _case(2, {"grad_accum_dtype": "fp32"}, grad_accum=2),
    _case(2, {"communication_data_type": "fp32"}, recompute="full", seq_len=64),
    _case(2, {"round_robin_gradients": True}),
    _case(2, precision="fp32"),
    _case(2, _HOST, offload="cpu", grad_accum=2),
    _case(3),
    _case(3, {"stage3_prefetch_bucket_size": 1, "stage3_max_reuse_distance": 0}),
    _case(3, {"stage3_prefetch_bucket_size": 1, "stage3_max_reuse_distance": 994_432}),
    _case(3, {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}),
    _case(3, {"stage3_max_live_parameters": 300_000, "stage3_max_reuse_distance": 0}),
    _case(3, {"stage3_prefetch_bucket_size": 5_000_000}),
    _case(3, {"stage3_param_persistence_threshold": 20_000, "stage3_max_reuse_distance": 0}),
    _case(3, {"sub_group_size": 100_000, "reduce_bucket_size": 50_000}),
    _case(3, {"overlap_comm": False}, impl="foreach", precision="fp16-mixed"),
    _case(3, {"grad_accum_dtype": "fp32"}, grad_accum=2),
    _case(3, precision="fp32"),
    _case(3, {"stage3_max_reuse_distance": 0}, recompute="full", seq_len=64),
    _case(3, _HOST, offload="cpu"),
    _case(2, lora=_LORA),
    _case(3, lora=_LORA, recompute="full", seq_len=64),
    _case(2, lora=_ALL, recompute="full", seq_len=64),
    _case(
        3, {"stage3_prefetch_bucket_size": 1, "stage3_max_reuse_distance": 0}, lora=_ALL, recompute="full", seq_len=64
    ),
    _case(3, lora=_LORA),
    _case(2, lora=_SAVED, grad_accum=2),
    _case(3, lora=_SAVED),
    _case(2, freeze=_LATE),
    _case(3, freeze=_LATE),
    _case(3, freeze=_LATE, recompute="full", seq_len=64),
    _case(2, lora=_DORA, recompute="full", seq_len=64),
    _case(3, lora=_DORA),
    _case(3, {"zero_hpz_partition_size": 2}, grad_accum=2),
    _case(3, {"zero_hpz_partition_size": 2}),
    _case(
        3,
        {"zero_hpz_partition_size": 2, "stage3_prefetch_bucket_size": 1, "stage3_max_reuse_distance": 0},
        grad_accum=2,
    ),
)

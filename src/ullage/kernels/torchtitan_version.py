"""When torchtitan, or the torch that its users ran, changed what is kept. Dates compare as text; no version means the newest."""

from __future__ import annotations

from ullage.kernels.step import Context

OWN_NORM_UNTIL = "2025-03-19"  # commit 3b39d7ab0: nn.RMSNorm instead of torchtitan's own class
FUSED_NORM_SINCE = "2025-08-01"  # torch 2.9 nightlies: aten::_fused_rms_norm on CUDA (pytorch/pytorch#153666)
LOSS_UPCASTS_SINCE = "2024-10-22"  # before, the model itself returned output(h).float()
LOGITS_DROPPED_SINCE = "2024-06-12"  # commit e29b6b4d4: del pred before the backward
KV_REPEATED_UNTIL = "2026-01-27"  # commit ff0829c10: enable_gqa instead of repeat_kv
QKV_FUSED_SINCE = "2026-06-24"  # commit 3396a4b37: one matmul for q, k and v
ABS_SAVED = ("2024-11-26", "2025-02-06")  # commits bcebc0de5, 88247277c: aten.abs among the ops that selective saves
CUDNN_ON_BLACKWELL_SINCE = "2025-05-14"  # commit 3b85aa31f
CUDNN_FIRST_SINCE = "2025-10-09"  # commit 6a3a9da95: on every card
CUDNN_SAVED_SINCE = "2025-12-01"  # commit b39377f9f: cuDNN's attention among the ops that selective saves
FLEX_SAVED_SINCE = "2025-08-22"  # commit f738a03bf: flex attention among them
EARLY_STOP_UNTIL = "2025-08-29"  # commit 25413d224: checkpoint_wrapper(early_stop=False)
ALL_TO_ALL_SAVED_SINCE = "2025-09-06"  # commit c4e229115


def before(context: Context, date: str) -> bool:
    """Whether the stack's version is older than ``date``."""
    return context.version is not None and context.version < date


def saves_abs(context: Context) -> bool:
    since, until = ABS_SAVED
    asked = context.option("sac_saves_abs")
    return bool(asked) or (not before(context, since) and before(context, until))


def runs_cudnn(version: str | None, backend: object, compute_capability: tuple[int, int] | None) -> bool:
    """Whether scaled_dot_product_attention takes cuDNN's kernel, which stands first in ScaledDotProductAttention's list; cuDNN's needs
    Ampere (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_cudnn_hardware_support)."""
    if backend is not None or compute_capability is None or compute_capability < (8, 0):
        return False
    since = CUDNN_ON_BLACKWELL_SINCE if compute_capability[0] >= 10 else CUDNN_FIRST_SINCE
    return version is None or version >= since


def saves_attention(context: Context) -> bool:
    """Selective saves what flash and memory-efficient attention return; flex attention's and cuDNN's only since they were listed too."""
    if context.option("attention_backend") == "flex":
        return not before(context, FLEX_SAVED_SINCE)
    cudnn = runs_cudnn(context.version, context.option("attention_backend"), context.compute_capability)
    return not cudnn or not before(context, CUDNN_SAVED_SINCE)

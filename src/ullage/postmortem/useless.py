"""What is often tried against an OOM and does not help with this one."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from ullage.frozen import frozen
from ullage.postmortem.causes import Cause
from ullage.postmortem.evidence import Evidence

_EMPTY_CACHE = (
    "torch.cuda.empty_cache()",
    "torch gives back its whole cache and tries again before it raises (CUDACachingAllocator.cpp, release_cached_blocks)",
)
_LESS_WORK = ("data.micro_batch", "data.seq_len")
# What, why, and the keys that say the same.
_BY_KIND: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "states": (("a smaller micro-batch or shorter sequences", "states do not depend on them", *_LESS_WORK),),
    "replica-not-shard": (
        ("more data-parallel GPUs", "each of them holds the same copy"),
        ("a smaller micro-batch", "the copy does not depend on it", *_LESS_WORK),
    ),
    "logits": (
        ("activation checkpointing", "the logits lie outside of the layers that it recomputes"),
        ("more data-parallel GPUs", "each has the logits of its own sequences"),
    ),
    "activations": (
        (
            "ZeRO, FSDP or more data-parallel GPUs alone",
            "they share out states; each rank has activations of its own tokens",
        ),
    ),
    "padding-mask": (("activation checkpointing", "the mask is made before the first layer, and all layers read it"),),
    "outlier-length": (("grouping by length", "the longest sequences are then together, in one batch"),),
    "unsynced-accumulation": (
        ("more and smaller micro-batches", "what waits to be reduced has the size of all gradients"),
    ),
    "clipping": (("a smaller micro-batch", "activations are gone when gradients are clipped", *_LESS_WORK),),
    "evaluation": (("a smaller training micro-batch", "evaluation has a batch size of its own"),),
    "leak": (("a smaller micro-batch or a larger card", "what is kept fills it later", *_LESS_WORK),),
    "foreign-process": (("a smaller job", "what another process holds is not this one's to free"),),
    "attention-scores": (
        (
            "activation checkpointing alone",
            "it makes the scores of one layer again, and one layer's are what did not fit",
        ),
    ),
    "optimizer-step": (("a smaller micro-batch", "activations are gone when the optimizer steps", *_LESS_WORK),),
    "save": (("a smaller micro-batch", "activations are gone when a checkpoint is written", *_LESS_WORK),),
    "load": (("a smaller micro-batch", "nothing has run yet when weights are loaded", *_LESS_WORK),),
    "host-memory": (("a smaller micro-batch or a larger card", "it was the host's memory that ran out", *_LESS_WORK),),
    "config": (("a larger card", "what was asked for is no need of the job"),),
}


@frozen
class Useless:
    what: str
    why: str


def useless(
    evidence: Evidence, causes: tuple[Cause, ...], helping: AbstractSet[str] = frozenset()
) -> tuple[Useless, ...]:
    """For the first cause, where it is at least likely, and what helps with no failure of torch's allocator.

    helping: the job's keys by which some change was found to help: none of them is called useless beside it.
    """
    found = [_EMPTY_CACHE] if evidence.recognised in ("cuda-oom", "hip-oom") else []
    if causes and causes[0].certainty != "possible":
        found += [(what, why) for what, why, *keys in _BY_KIND.get(causes[0].kind, ()) if helping.isdisjoint(keys)]
    return tuple(Useless(what=what, why=why) for what, why in found)

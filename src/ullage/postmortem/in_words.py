"""What helps and is no key of a job, or of a job that no account models: in the words of the libraries that have it. Not estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ullage.frozen import frozen
from ullage.job.adapted import QUANTISED
from ullage.job.job import Job
from ullage.postmortem.causes import Cause, Kind
from ullage.postmortem.messages import Numbers

_FIRST = 2


@frozen
class InWords:
    """kind: of the cause that it is against."""

    kind: Kind
    what: str
    why: str


_ELSEWHERE = ("host-memory", "communicators", "config", "unknown")
_NO_STEP = "what a step takes is not what ran out"
# What, why, and the key that says the same where a job has one.
_OF: dict[Kind, tuple[tuple[str, ...], ...]] = {
    "states": (
        (
            "more GPUs that share the states (ZeRO-3, FSDP; tensor or pipeline parallelism), or the optimizer on the host",
            "each holds less",
            "cluster",
        ),
        ("LoRA in place of training all parameters", "gradients and optimizer states are of the adapters alone", "lora"),
        ("QLoRA: adapters beside a base in 4 bits", "half a byte for each weight in place of 2", "lora.base"),
        ("a smaller model", "Adam in mixed precision takes 16 bytes for each parameter"),
        ("optimizer: adamw-8bit", "2 bytes of states for each parameter in place of 8", "optimizer"),
    ),
    "replica-not-shard": (
        ("ZeRO-3 or FSDP: parameters sharded", "a replica does not shrink with more GPUs", "engine.zero_stage"),
        ("of a quantised base: FSDP, with bnb_4bit_quant_storage as the parameters' type", "ZeRO cannot shard it"),
    ),
    "logits": (
        ("shorter sequences or a smaller micro-batch", "logits have a row of the vocabulary for each token"),
        ("a fused or chunked loss (Liger's fused linear cross-entropy, torchtune's chunked loss)", "never holds all of them", "loss"),
    ),
    "attention-scores": (
        ("attn_implementation sdpa or flash_attention_2", "scores are never written to memory", "attention"),
        (
            "states on the host (offload; ColossalAI's offload_optim_frac=1.0 and offload_param_frac=1.0), or shorter sequences",
            "leaves scores what states take; they grow with the square of the length",
        ),
    ),
    "padding-mask": (("packed sequences with position_ids in place of a mask", "no mask is made"),),
    "activations": (
        ("a smaller micro-batch, or shorter sequences (max_seq_length, cutoff_len)", "activations grow with both"),
        ("activation checkpointing", "a layer's input is kept in place of all that it makes", "recompute"),
        ("sequence or context parallelism", "each GPU has a part of every sequence", "layout.cp"),
    ),
    "outlier-length": (
        ("cut or pack sequences to one length", "every step is then alike, and the first fails if any does"),
        ("the longest batch first", "what would fail late fails at once"),
    ),
    "unsynced-accumulation": (
        (
            "GradientAccumulationPlugin(sync_each_batch=True) of accelerate",
            "gradients are reduced to shards in each micro-batch",
            "engine.options.sync_each_batch",
        ),
    ),
    "optimizer-first-step": (("count on the second step", "its activations meet the states that the first has made"),),
    "optimizer-step": (("a fused optimizer, or foreach=False", "makes no temporaries as large as its states", "optimizer.impl"),),
    "clipping": (("clip_grad_norm_(foreach=False), or max_grad_norm off", "norms are then taken one by one, or not at all"),),
    "load": (
        ("zero3_init_flag: true (deepspeed.zero.Init), or fsdp_cpu_ram_efficient_loading with fsdp_sync_module_states", _NO_STEP),
        ("torch.load(map_location='cpu') for a checkpoint that is resumed", "the optimizer's states are not there twice"),
    ),
    "save": (
        ("a state dict gathered on the host (FullStateDictConfig(offload_to_cpu=True, rank0_only=True)), or in shards", _NO_STEP),
    ),
    "evaluation": (
        ("eval_accumulation_steps, prediction_loss_only or preprocess_logits_for_metrics", "logits of all batches are gathered otherwise"),
        ("a smaller per_device_eval_batch_size", "it is 8 where nobody says otherwise"),
    ),
    "pipeline-end": (("fewer layers on the first and last stage (layout.pp_split)", "they hold the embedding, the head and the loss"),),
    "expert-imbalance": (
        ("a capacity factor (moe_expert_capacity_factor), or a balancing loss that is large enough", "bounds the tokens of an expert"),
    ),
    "fragmentation": (
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "free pieces become one", "engine.options.expandable_segments"),
    ),
    "communicators": (
        ("expandable_segments:True, or empty_cache() before the first collective", "NCCL cannot have what torch caches"),
        ("torch.cuda.set_per_process_memory_fraction below 1", "leaves the driver what NCCL will ask for"),
    ),
    "foreign-process": (
        ("torch.cuda.set_device(local_rank) before the first CUDA call, where they are ranks of this job", "a rank opens card 0 otherwise"),
        ("a smaller share for the other process (vllm_gpu_memory_utilization where it is vLLM), or a card of its own", _NO_STEP),
    ),
    "leak": (("keep numbers, not tensors (loss.item(), .detach()), and drop outputs after each backward", "a tensor keeps its graph"),),
    "host-memory": (
        ("pin_memory: false, or fewer bytes for each parameter on the host (bf16 states), or NVMe", "pinned blocks are powers of two"),
        ("more nodes, or fewer ranks and dataloader workers on each", "every process has its own"),
    ),
    "config": (
        ("versions and shapes before memory: what was asked for is no need of the job", "a smaller job would ask for it too"),
        ("no device_map, low_cpu_mem_usage or quantised base under ZeRO-3", "it shards parameters as it makes them"),
        ("accelerate's mixed precision off where parameters are 16-bit", "it casts trainable FSDP parameters to fp32", "precision"),
    ),
}  # fmt: skip


_UNSEEN = InWords(
    kind="foreign-process",
    what="a smaller share for another process on the card, if there is one (vllm_gpu_memory_utilization where it is vLLM)",
    why="the message's numbers would tell, and none were given",
)


_HAS: Mapping[str, Callable[[Job], bool]] = {
    "lora": lambda job: job.lora is not None,
    "lora.base": lambda job: job.lora is not None and job.lora.base in QUANTISED,
    "optimizer": lambda job: job.optimizer.state == "8bit",
    "engine.zero_stage": lambda job: job.engine.zero_stage == 3,
    "loss": lambda job: job.loss.kind in ("chunked", "fused-linear"),
    "attention": lambda job: job.attention in ("flash", "mem-efficient"),
    "recompute": lambda job: job.recompute.kind == "full",
    "optimizer.impl": lambda job: job.optimizer.impl == "fused",
    "engine.options.expandable_segments": lambda job: bool(job.engine.options.get("expandable_segments")),
    "engine.options.sync_each_batch": lambda job: bool(job.engine.options.get("sync_each_batch")),
}
"""By key, what a job that has it already needs no one to tell."""


def in_words(
    causes: tuple[Cause, ...], numbers: Numbers, job: Job | None, advised: Iterable[str] = ()
) -> tuple[InWords, ...]:
    """Against the first causes; and against what no number excludes. advised: job keys that an advice has changed: what says the same in
    words is left out, as is what the job has."""
    keys = set(advised)
    if job is not None:
        keys |= {key for key, has in _HAS.items() if has(job)}
    found = tuple(
        InWords(kind=cause.kind, what=what, why=why)
        for cause in causes[:_FIRST]
        for what, why, *key in _OF.get(cause.kind, ())
        if keys.isdisjoint(key)
    )
    on_card = causes and causes[0].kind not in (*_ELSEWHERE, "foreign-process")
    return (*found, _UNSEEN) if on_card and numbers.capacity_bytes is None else found

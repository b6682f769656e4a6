"""Loops around torch's engines and DeepSpeed as an engineer writes them by hand, with nothing of ullage's: train_speed.py runs them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

RANKS = 2
SEQ_LEN, MICRO_BATCH, VOCAB = 256, 2, 4096
LR, WEIGHT_DECAY = 1e-3, 0.01
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 704,
    "vocab_size": VOCAB,
    "max_position_embeddings": SEQ_LEN,
    "tie_word_embeddings": False,
}
BUCKETS = {  # as transformers' Trainer fills in "auto" from the hidden size: the defaults are larger than the model
    "reduce_bucket_size": 256 * 256,
    "stage3_prefetch_bucket_size": 256 * 256 * 9 // 10,
    "stage3_param_persistence_threshold": 10 * 256,
}

Step = Callable[[torch.Tensor], torch.Tensor]
"""One optimizer step on a rank's (micro_batch, seq_len) tokens: its loss."""
Made = tuple[torch.nn.Module, Any, Step]


def llama() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    keys: dict[str, Any] = {name: value for name, value in LLAMA.items() if name != "model_type"}
    of: Any = AutoModelForCausalLM
    model: torch.nn.Module = of.from_config(LlamaConfig(**keys), attn_implementation="sdpa", dtype=torch.float32)
    return model.train()


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


def stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def ddp(precision: str) -> Made:
    model = torch.nn.parallel.DistributedDataParallel(llama(), gradient_as_bucket_view=True)
    optimizer = adamw(model)

    def step(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32"):
            loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return stepped(model, optimizer, loss)

    return model, optimizer, step


def fsdp2(precision: str) -> Made:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = MixedPrecisionPolicy() if precision == "fp32" else mixed
    model: Any = llama()
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = adamw(model)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return stepped(model, optimizer, loss)

    return model, optimizer, step


def deepspeed(precision: str, stage: int) -> Made:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # type: ignore[import-untyped]

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # compiles itself; all have gloo
    model = llama()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision != "fp32"},
        "zero_optimization": {"stage": stage, **(BUCKETS if stage else {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": sys.maxsize,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return engine, engine.basic_optimizer, step

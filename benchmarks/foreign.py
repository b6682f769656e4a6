"""Modules that no one here wrote: what ``ullage trace FACTORY --estimate JOB`` says of them, and what the real code does.

Each is traced once, plain and on one rank, and its graph estimated under four jobs: plain, every layer recomputed, ZeRO-3 over eight
ranks, both. Then the real thing is traced: torch's checkpoint around every layer, ``fully_shard`` on every layer and on the root.

    python -m benchmarks.foreign [part of a name ...]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ullage.engines.registry import account, ranks_of
from ullage.job.read import read_job
from ullage.memory.ledger import by_category
from ullage.memory.program import locate_peak
from ullage.model.graph import Graph
from ullage.trace.cut import layer_modules
from ullage.trace.events import Trace
from ullage.trace.graph import graph_of
from ullage.trace.run import Factory, trace

WORLD = 8
OUTSIDE = ("input", "workspace", "buffers")
"""Categories that a traced module and its job do not share: the batch is the module's own, cuBLAS is no op."""


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A class of a library, how it is configured, and one batch. head: of transformers, the class of the configuration."""

    library: str
    kind: str
    keys: dict[str, Any] = field(default_factory=dict)
    batch: Callable[[], dict[str, Any]]

    def __str__(self) -> str:
        return f"{self.library} {self.kind}"

    def module(self) -> nn.Module:
        if self.library == "diffusers":
            import diffusers

            made: nn.Module = getattr(diffusers, self.kind)(**self.keys)
            return made.train()
        import transformers

        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        kind: Any = getattr(transformers, self.kind)
        return kind(kind.config_class(**self.keys)).train()  # type: ignore[no-any-return]


def images(side: int, batch: int = 2, **more: Callable[[], Any]) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, side, side), **{name: made() for name, made in more.items()}}


def tokens(vocab: int, length: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(1, vocab, (batch, length))


def labels(classes: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, classes, (batch,))


def _diffusion(
    channels: int, side: int, *, text: tuple[int, int] | None = None, batch: int = 2, **more: Any
) -> dict[str, Any]:
    given = {"sample": torch.randn(batch, channels, side, side), "timestep": labels(1000, batch), "return_dict": False}
    if text is not None:
        given["encoder_hidden_states"] = torch.randn(batch, *text)
    return given | more


def _two(vocab: int, length: int, **more: Any) -> dict[str, Any]:
    return {"input_ids": tokens(vocab, length), "labels": tokens(vocab, length), **more}


_CROSS = {
    "block_out_channels": (64, 128, 256),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "cross_attention_dim": 256,
    "attention_head_dim": 4,
}

MODULES = (
    Foreign(
        library="diffusers",
        kind="UNet2DModel",
        keys={
            "sample_size": 64,
            "block_out_channels": (64, 128),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        batch=lambda: _diffusion(3, 64),
    ),
    Foreign(
        library="diffusers",
        kind="UNet2DConditionModel",
        keys=_CROSS
        | {
            "sample_size": 32,
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        },
        batch=lambda: _diffusion(4, 32, text=(77, 256)),
    ),
    Foreign(
        library="diffusers",
        kind="ControlNetModel",
        keys=_CROSS,
        batch=lambda: _diffusion(4, 32, text=(77, 256), controlnet_cond=torch.randn(2, 3, 256, 256)),
    ),
    Foreign(
        library="diffusers",
        kind="AutoencoderKL",
        keys={
            "block_out_channels": (64, 128),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "layers_per_block": 1,
            "sample_size": 64,
        },
        batch=lambda: {"sample": torch.randn(2, 3, 64, 64)},
    ),
    Foreign(
        library="diffusers",
        kind="PixArtTransformer2DModel",
        keys={
            "num_attention_heads": 8,
            "attention_head_dim": 64,
            "num_layers": 2,
            "in_channels": 4,
            "sample_size": 32,
            "cross_attention_dim": 512,
            "caption_channels": 1024,
            "use_additional_conditions": False,
        },
        batch=lambda: {
            "hidden_states": torch.randn(2, 4, 32, 32),
            "encoder_hidden_states": torch.randn(2, 120, 1024),
            "timestep": labels(1000),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
            "return_dict": False,
        },
    ),
    Foreign(
        library="diffusers",
        kind="SD3Transformer2DModel",
        keys={
            "sample_size": 32,
            "in_channels": 16,
            "num_layers": 3,
            "attention_head_dim": 64,
            "num_attention_heads": 8,
            "joint_attention_dim": 1024,
            "caption_projection_dim": 512,
            "pooled_projection_dim": 512,
            "pos_embed_max_size": 32,
        },
        batch=lambda: {
            "hidden_states": torch.randn(2, 16, 32, 32),
            "encoder_hidden_states": torch.randn(2, 154, 1024),
            "pooled_projections": torch.randn(2, 512),
            "timestep": labels(1000),
            "return_dict": False,
        },
    ),
    Foreign(
        library="diffusers",
        kind="FluxTransformer2DModel",
        keys={
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 3,
            "attention_head_dim": 64,
            "num_attention_heads": 8,
            "joint_attention_dim": 512,
            "pooled_projection_dim": 512,
            "axes_dims_rope": (16, 24, 24),
        },
        batch=lambda: {
            "hidden_states": torch.randn(2, 256, 16),
            "encoder_hidden_states": torch.randn(2, 128, 512),
            "pooled_projections": torch.randn(2, 512),
            "timestep": torch.rand(2),
            "img_ids": torch.randn(256, 3),
            "txt_ids": torch.randn(128, 3),
            "return_dict": False,
        },
    ),
    Foreign(
        library="transformers",
        kind="ViTForImageClassification",
        keys={"hidden_size": 384, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 1536},
        batch=lambda: images(224, labels=lambda: labels(2)),
    ),
    Foreign(
        library="transformers",
        kind="SwinForImageClassification",
        keys={"embed_dim": 96, "depths": [1, 1, 2], "num_heads": [3, 6, 12], "window_size": 7},
        batch=lambda: images(224, labels=lambda: labels(2)),
    ),
    Foreign(
        library="transformers",
        kind="ConvNextForImageClassification",
        keys={"hidden_sizes": [64, 128, 256, 512], "depths": [1, 1, 2, 1]},
        batch=lambda: images(224, labels=lambda: labels(2)),
    ),
    Foreign(
        library="transformers",
        kind="ResNetForImageClassification",
        keys={"embedding_size": 64, "hidden_sizes": [128, 256, 512, 1024], "depths": [1, 1, 2, 1]},
        batch=lambda: images(224, labels=lambda: labels(2)),
    ),
    Foreign(
        library="transformers",
        kind="SegformerForSemanticSegmentation",
        keys={"hidden_sizes": [32, 64, 160, 256], "depths": [1, 1, 1, 1], "num_labels": 20},
        batch=lambda: images(256, labels=lambda: torch.randint(0, 20, (2, 256, 256))),
    ),
    Foreign(
        library="transformers",
        kind="BertForMaskedLM",
        keys={"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 2048},
        batch=lambda: _two(30000, 128, attention_mask=torch.ones(2, 128, dtype=torch.long)),
    ),
    Foreign(
        library="transformers",
        kind="GPT2LMHeadModel",
        keys={"n_embd": 512, "n_layer": 3, "n_head": 8},
        batch=lambda: _two(50000, 256, use_cache=False),
    ),
    Foreign(
        library="transformers",
        kind="MixtralForCausalLM",
        keys={
            "vocab_size": 8000,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
        batch=lambda: _two(8000, 256, use_cache=False),
    ),
    Foreign(
        library="transformers",
        kind="T5ForConditionalGeneration",
        keys={"d_model": 512, "d_ff": 2048, "num_layers": 2, "decoder_start_token_id": 0},
        batch=lambda: _two(32000, 256, use_cache=False),
    ),
    Foreign(
        library="transformers",
        kind="BartForConditionalGeneration",
        keys={
            "d_model": 512,
            "encoder_layers": 3,
            "decoder_layers": 3,
            "encoder_ffn_dim": 2048,
            "decoder_ffn_dim": 2048,
            "encoder_attention_heads": 8,
            "decoder_attention_heads": 8,
        },
        batch=lambda: _two(50000, 256, use_cache=False),
    ),
    Foreign(
        library="transformers",
        kind="WhisperForConditionalGeneration",
        keys={
            "d_model": 384,
            "encoder_layers": 3,
            "decoder_layers": 3,
            "encoder_ffn_dim": 1536,
            "decoder_ffn_dim": 1536,
            "encoder_attention_heads": 6,
            "decoder_attention_heads": 6,
        },
        batch=lambda: {
            "input_features": torch.randn(2, 80, 3000),
            "labels": tokens(50000, 200),
            "use_cache": False,
        },
    ),
    Foreign(
        library="transformers",
        kind="Wav2Vec2ForCTC",
        keys={
            "hidden_size": 384,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "intermediate_size": 1536,
            "mask_time_prob": 0.0,
            "mask_feature_prob": 0.0,
            "layerdrop": 0.0,
        },
        batch=lambda: {"input_values": torch.randn(2, 16000)},
    ),
    Foreign(
        library="transformers",
        kind="MambaForCausalLM",
        keys={"vocab_size": 8000, "hidden_size": 256, "num_hidden_layers": 3},
        batch=lambda: _two(8000, 64, use_cache=False),
    ),
)


# -- the module in a training step


def factory(foreign: Foreign, *, layers: Iterable[str] = (), recompute: bool = False, shard: bool = False) -> Factory:
    """One AdamW step of a module. layers: qualified names of those that are checkpointed, or sharded each by itself."""
    names = tuple(layers)

    def made() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
        model = foreign.module()
        for name in names:
            layer = model.get_submodule(name)
            if recompute:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
            if shard:
                fully_shard(layer, mesh=init_device_mesh("cpu", (WORLD,)))
        if shard:
            fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        batch = foreign.batch()

        def step() -> None:
            loss(model(**batch)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    return made


def loss(output: Any) -> torch.Tensor:
    """The model's own, or the mean squares of all that it returns."""
    own = getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    return torch.stack([one.pow(2).mean() for one in tree_leaves(output) if isinstance(one, torch.Tensor)]).sum()


# -- what is compared


JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"recompute": "full"},
    "ZeRO-3": {"shard": True},
    "ZeRO-3, recompute": {"shard": True, "recompute": "full"},
}


class Peak(NamedTuple):
    """Allocated bytes at the peak, library workspaces, the batch and the model's buffers aside."""

    estimated: int
    traced: int

    @property
    def difference(self) -> float:
        return self.estimated / self.traced - 1


def compared(foreign: Foreign, jobs: Iterable[str] = JOBS) -> dict[str, Peak]:
    """The peak of a module under each of some jobs, by the estimate of its graph and by a trace of the real thing."""
    plain = trace(factory(foreign), ops=True)
    graph = graph_of(plain)
    layers = sorted(layer_modules(plain.modules))
    found = {}
    for name in jobs:
        asked = JOBS[name]
        shard, recompute = bool(asked.get("shard")), "recompute" in asked
        real = plain
        if asked:
            real = trace(factory(foreign, layers=layers, recompute=recompute, shard=shard), world=WORLD if shard else 1)
        found[name] = Peak(estimated(graph, **asked), measured(real))
    return found


def estimated(graph: Graph, *, shard: bool = False, recompute: str = "none") -> int:
    keys: dict[str, Any] = {
        "model": "llama-3.2-1b",
        "cluster": f"{WORLD if shard else 1}xH100-SXM-80GB",
        "engine": {"name": "fsdp2", "zero_stage": 3} if shard else {"name": "single"},
        "precision": "fp32",
        "optimizer": {"name": "adamw", "impl": "fused"},
        "recompute": recompute,
        "grad_clip": False,
        "data": {"seq_len": 1, "micro_batch": 1},
    }
    job = replace(read_job(keys), stack="traced")
    found = account(job, graph, ranks_of(job, graph)[0])
    outside = sum(item.bytes * count for item, count in found.static if item.category in OUTSIDE)
    return locate_peak(found.program).bytes - outside


def measured(found: Trace) -> int:
    lines = by_category(found.ledger(found.steady.at))
    return found.steady.bytes - sum(lines.get(category, 0) for category in OUTSIDE)


HEAD = "| module | job | estimated | traced | difference |\n|---|---|---|---|---|\n"


def main(words: list[str]) -> int:
    sys.stdout.write(HEAD)
    for foreign in MODULES:
        if words and not any(word.lower() in str(foreign).lower() for word in words):
            continue
        for job, peak in compared(foreign).items():
            sys.stdout.write(f"| {foreign} | {job} | {peak.estimated:,} | {peak.traced:,} | {peak.difference:+.2%} |\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

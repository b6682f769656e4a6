"""Transformer decoders as a Graph: one description (spec.py), one builder. A family maps its config.json onto the description."""

from __future__ import annotations

from collections.abc import Iterator

from ullage.frozen import FrozenMap
from ullage.model.embedding import embedding
from ullage.model.graph import Block, Graph, Run
from ullage.model.head import head
from ullage.model.layer import layer
from ullage.model.spec import DecoderSpec, Delta, Kind, kind_of
from ullage.model.task import has_words


def build(spec: DecoderSpec) -> Graph:
    """The graph of a decoder: embedding, layers (equal neighbours in one run), head with loss (and multi-token prediction)."""
    runs: list[Run] = [Run(block=embedding(spec))]
    kinds: dict[Kind, Block] = {}
    for index in range(spec.layers):
        kind = kind_of(spec, index)
        block = kinds[kind] = kinds.get(kind) or layer(spec, kind)
        if runs[-1].block == block:
            runs[-1] = Run(block=block, repeat=runs[-1].repeat + 1)
        else:
            runs.append(Run(block=block))
    runs.append(Run(block=head(spec)))
    tied = [("embedding.embed_tokens.weight", "head.lm_head.weight")] if spec.tied and has_words(spec.task) else []
    tied += [*_repeated(spec, runs[-1].block), *_embeddings_of_predictions(spec)]
    return Graph(name=spec.name, runs=tuple(runs), sizes=sizes_of(spec), tied=tuple(tied))


def _repeated(spec: DecoderSpec, last: Block) -> Iterator[tuple[str, str]]:
    """The parameters that multi-token prediction modules have from the first of them."""
    for depth in range(1, spec.mtp_layers if spec.mtp_repeated else 0):
        prefix = f"mtp{depth}_"
        for name in (param.name for param in last.params if param.name.startswith(prefix)):
            yield f"head.mtp0_{name.removeprefix(prefix)}", f"head.{name}"


def _embeddings_of_predictions(spec: DecoderSpec) -> Iterator[tuple[str, str]]:
    """One embedding serves all multi-token prediction modules: the first stage's where they are on it, the head's where that is it."""
    own = "embed_tokens.weight"
    for depth in range(1, 1 if spec.mtp_repeated else spec.mtp_layers):
        yield f"head.mtp0_{own}", f"head.mtp{depth}_{own}"
    if spec.mtp_layers:
        yield f"embedding.{own}", f"head.mtp0_{own}"
        if spec.tied:
            yield "head.lm_head.weight", f"head.mtp0_{own}"


def sizes_of(spec: DecoderSpec) -> FrozenMap:
    sizes: dict[str, object] = {
        "hidden": spec.hidden,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "v_head_dim": spec.head_dim,
        "ffn": spec.ffn,
        "vocab": spec.vocab,
        "positions": spec.max_positions + spec.position_offset,
    }
    if spec.patches is not None:
        del sizes["vocab"]
        height, width = spec.patches.image
        sizes["patches"] = spec.patches.count
        sizes |= {"channels": spec.patches.channels, "image_height": height, "image_width": width}
    elif spec.task is not None:
        sizes["token_types"] = spec.token_types
    if spec.mtp_layers:
        sizes["mtp_out"] = spec.hidden
    if spec.latent is not None:
        latent = spec.latent
        sizes |= {
            "head_dim": latent.qk_nope_dim + latent.qk_rope_dim,
            "nope_dim": latent.qk_nope_dim,
            "rope_dim": latent.qk_rope_dim,
            "v_head_dim": latent.v_dim,
            "q_rank": latent.q_rank or 0,
            "kv_rank": latent.kv_rank,
            "kv_rank_rope": latent.kv_rank + latent.qk_rope_dim,
            "kv_up_dim": latent.qk_nope_dim + latent.v_dim,
        }
    if spec.experts is not None:
        experts = spec.experts
        sizes |= {
            "experts": experts.count,
            "router": experts.count,
            "top_k": experts.top_k,
            "expert_ffn": experts.ffn,
            "shared_ffn": experts.shared_ffn,
        }
        if experts.latent:
            sizes["latent"] = experts.latent
    if spec.mamba is not None:
        mamba = spec.mamba
        inner = mamba.heads * mamba.head_dim
        conv = inner + 2 * mamba.groups * mamba.state
        sizes |= {
            "ssm_heads": mamba.heads,
            "ssm_groups": mamba.groups,
            "ssm_state": mamba.state,
            "ssm_inner": inner,
            "ssm_conv": conv,
            "ssm_in": inner + conv + mamba.heads,
        }
    if spec.delta is not None:
        sizes |= _delta_sizes(spec.delta)
    if spec.gated:
        sizes["q_and_gate"] = 2 * spec.head_dim
    return FrozenMap(sizes)


def _delta_sizes(delta: Delta) -> dict[str, object]:
    keys, values = delta.k_heads * delta.k_dim, delta.v_heads * delta.v_dim
    return {
        "delta_k_heads": delta.k_heads,
        "delta_heads": delta.v_heads,
        "delta_k_dim": delta.k_dim,
        "delta_v_dim": delta.v_dim,
        "delta_keys": keys,
        "delta_values": values,
        "delta_qkv": 2 * keys + values,
        "delta_qkvz": 2 * (keys + values),
        "delta_rates": 2 * delta.v_heads,
    }

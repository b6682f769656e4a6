"""The keys that most architectures share, and the patterns by which their layers differ. A family starts here and says what is its own."""

from __future__ import annotations

from collections.abc import Callable

from ullage.model.keys import REQUIRED, Keys, Required
from ullage.model.spec import DecoderSpec


def standard(
    keys: Keys,
    *,
    activation: str = "silu",
    activation_key: str = "hidden_act",
    layers_key: str = "num_hidden_layers",
    heads: int | Required = REQUIRED,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    vocab: int | Required = REQUIRED,
    ffn: int | Required = REQUIRED,
    tied: bool = False,
    rope_fraction: float = 1.0,
) -> DecoderSpec:
    """A pre-norm decoder in Llama's keys. The arguments are the family's defaults for keys that config.json leaves out."""
    hidden = keys.size("hidden_size")
    n_heads = keys.size("num_attention_heads", default=heads)
    act = keys.activation(activation_key, "hidden_act", default=activation)
    return DecoderSpec(
        name="",
        layers=keys.layers(layers_key, "num_hidden_layers"),
        hidden=hidden,
        heads=n_heads,
        kv_heads=keys.size("num_key_value_heads", default=kv_heads or n_heads),
        head_dim=head_size(keys, hidden, n_heads, head_dim),
        ffn=keys.size("intermediate_size", default=ffn),
        vocab=keys.size("vocab_size", default=vocab),
        mlp=act.act,
        mlp_form=act.form,
        max_positions=keys.context("max_position_embeddings"),
        rope_fraction=rope_share(keys, rope_fraction),
        tied=keys.flag("tie_word_embeddings", default=tied),
        attention_dropout=keys.rate("attention_dropout"),
    )


def head_size(keys: Keys, hidden: int, heads: int, default: int | None = None, key: str = "num_attention_heads") -> int:
    """head_dim, or hidden / heads where neither config.json nor the family (``default``) has one."""
    if default is None and keys.optional("head_dim") is None and hidden % heads:
        raise keys.wrong(key, f"a divisor of the hidden size {hidden}", "or give head_dim")
    return keys.size("head_dim", default=default or max(hidden // heads, 1))


def rope_share(keys: Keys, default: float) -> float:
    """The share of a head's dimensions that rotate; newer files keep it among rope_parameters."""
    nested = keys.nested("rope_parameters")
    return keys.rate(
        "partial_rotary_factor", "rotary_pct", default=nested.rate("partial_rotary_factor", default=default)
    )


def sliding_window(keys: Keys, default: int | None = None) -> int | None:
    """sliding_window: null or 0 switches it off, absent takes the family's default."""
    return keys.count("sliding_window", default=0) or None if keys.has("sliding_window") else default


def windows(
    keys: Keys, layers: int, window: int | None, slides: Callable[[int], bool] = lambda index: True
) -> tuple[int | None, ...]:
    """The window of each layer: by layer_types, or else where the family's pattern ``slides``. Empty: none anywhere."""
    kinds = keys.per_layer("layer_types", layers)
    if window is None:
        return ()
    if kinds is None:
        return tuple(window if slides(index) else None for index in range(layers))
    known = ("full_attention", "sliding_attention", "chunked_attention")
    for kind in kinds:
        if kind not in known:
            raise keys.wrong("layer_types", f"a list of {' | '.join(known)}")
    return tuple(None if kind == "full_attention" else window for kind in kinds)


def rope_layers(keys: Keys, layers: int) -> tuple[bool, ...]:
    """no_rope_layers (1: rotates, its name notwithstanding), or every layer but each no_rope_layer_interval-th."""
    interval = keys.size("no_rope_layer_interval", default=4)
    if keys.has("no_rope_layers") and keys.per_layer("no_rope_layers", 0):
        flags = keys.per_layer("no_rope_layers", layers) or ()
        return tuple(bool(flag) for flag in flags)
    return tuple((index + 1) % interval != 0 for index in range(layers))


def dense_layers(layers: int, sparse: Callable[[int], bool]) -> tuple[int, ...]:
    """Indices of the layers without experts."""
    return tuple(index for index in range(layers) if not sparse(index))


def capped(keys: Keys, name: str, *, default: bool) -> bool:
    """Whether logits are soft-capped: a number caps, null does not, absent takes the family's default."""
    if not keys.has(name):
        return default
    return keys.number(name, default=0.0) > 0

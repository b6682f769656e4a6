"""A decoder described: what a family makes of a config.json, and what decoder.py builds a Graph from."""

from __future__ import annotations

from typing import NamedTuple

from ullage.frozen import frozen


@frozen
class Experts:
    """A mixture of experts: ``dense_layers`` leading layers (and those off the frequency) stay dense.

    normed: a token's routing weights are made to sum to one (config.json's norm_topk_prob).
    """

    count: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()  # indices of layers without experts
    normed: bool = True
    router_bias: bool = False
    expert_bias: bool = False
    latent: int | None = (
        None  # the experts' own width, between a projection down and one up (Megatron-Core moe_latent_size)
    )
    score_bias: bool = False  # a buffer that balances the load without a loss (DeepSeek-V3's e_score_correction_bias)


@frozen
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_rank: int | None
    kv_rank: int
    qk_nope_dim: int
    qk_rope_dim: int
    v_dim: int
    norms: bool = True
    down_bias: bool = False


@frozen
class Mamba:
    """A Mamba-2 mixer (arXiv 2405.21060, section 7): ``heads`` of ``head_dim`` channels, whose states of ``state`` elements are written
    and read by vectors that ``heads / groups`` of them share; ``conv`` taps; the scan runs in chunks of ``chunk`` tokens.
    """

    heads: int
    head_dim: int
    state: int
    groups: int
    conv: int
    chunk: int
    conv_bias: bool = True
    proj_bias: bool = False


@frozen
class Task:
    """What an encoder is trained for, where that is no next token.

    kind: "masked" (hidden tokens) | "pretraining" (hidden tokens, and whether one sentence follows the other) | "sequence" (a class of
    each sequence) | "tokens" (a class of each token). labels: of a classifier, before which elements drop at the rate ``dropout``.
    pooled: it reads the first token through a dense layer and ``pooler_act``; drops_first: behind another dropout (RoBERTa).
    problem: "classes" | "numbers" | "several-classes" (any of them may hold).
    """

    kind: str
    labels: int = 0
    dropout: float = 0.0
    pooled: bool = True
    pooler_act: str = "tanh"
    drops_first: bool = False
    problem: str = "classes"


@frozen
class Patches:
    """Images in the place of tokens: cut into patches, each a token, behind one that stands for the whole (arXiv 2010.11929, section 3.1).
    Sizes in pixels: (height, width)."""

    channels: int
    image: tuple[int, int]
    patch: tuple[int, int]

    @property
    def count(self) -> int:
        return (self.image[0] // self.patch[0]) * (self.image[1] // self.patch[1])

    @property
    def tokens(self) -> int:
        return self.count + 1


@frozen
class Delta:
    """Gated DeltaNet (arXiv 2412.06464): ``v_heads`` states of ``k_dim x v_dim``, of which as many as come to each of ``k_heads`` are read
    and written by one query and key; ``conv`` taps before them.

    joined: queries, keys, values and gate come of one projection, both rates of another (Qwen3-Next), where others have four.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int
    joined: bool


@frozen
class Encoder:
    """An encoder in front, of layers like the decoder's own but for the causal order; every decoder layer attends to its output too.

    buckets: of relative positions, each with a learned term for every head (arXiv 1910.10683, section 2.1). scaled_head: the head reads
    the stream times hidden ** -0.5.
    """

    layers: int
    buckets: int
    scaled_head: bool


@frozen
class DecoderSpec:
    """A decoder's architecture, or an encoder's. Names are config.json's; dims are before any layout.

    mlp: the activation ("silu", "gelu", "relu", "squared-relu"); glu: gated by a second projection.
    mlp_form: its name in config.json where that is another ("gelu_new" is composed of small ops, "gelu" is one kernel).
    qk_norm: None | "head" (over head_dim) | "all" (over all heads at once) | "heads" (over head_dim, a weight for each head)
    | "unscaled" (over head_dim, no weight, roped layers only). post_norms: norms after attention and MLP too (gemma2).
    gated: attention's output is multiplied by a sigmoid of what the query's projection makes beside the query.
    rope_scaled: rotary cosines and sines are multiplied by a factor (YaRN's, arXiv 2309.00071, section 3.4).
    parallel_residual: attention and MLP read the same stream and are added together (gpt_neox); shared_norm: by one norm.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    family: str = ""
    mlp: str = "silu"
    mlp_form: str = ""
    glu: bool = True
    norm: str = "rmsnorm"
    norm_bias: bool | None = None  # None: layernorm has one, rmsnorm has not
    norm_affine: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: str | None = None
    pre_norms: bool = True
    post_norms: bool = False
    stream_norms: bool = False  # of the sum of the stream and a branch, in pre_norms' place (BERT)
    parallel_residual: bool = False
    shared_norm: bool = False
    final_norm: bool = True
    embedding_norm: bool = False
    positions: str = "rope"  # rope | learned | alibi | none
    rope_fraction: float = 1.0
    rope_scaled: bool = False
    rope_layers: tuple[bool, ...] = ()  # per layer, empty: every layer, where positions is rope
    max_positions: int = 0
    position_offset: int = 0
    tied: bool = False
    hidden_dropout: float = 0.0
    attention_out_dropout: bool = True  # of hidden_dropout, behind the attention too
    embedding_dropout: float | None = None  # None: hidden_dropout
    attention_dropout: float = 0.0
    causal: bool = True
    attention_softcap: bool = False
    logits_softcap: bool = False
    windows: tuple[int | None, ...] = ()  # per layer, empty: no window anywhere
    experts: Experts | None = None
    latent: Latent | None = None
    fused_qkv: bool = False
    fused_gate_up: bool = False
    mixers: tuple[str, ...] = ()  # per layer of a hybrid, one branch each: mamba | attention | mlp | moe
    mamba: Mamba | None = None
    gated: bool = False
    linear_layers: tuple[bool, ...] = ()  # per layer, delta in the place of attention; empty: attention everywhere
    delta: Delta | None = None
    mtp_layers: int = 0
    mtp_mixers: tuple[str, ...] = ()  # of one multi-token prediction module of a hybrid
    mtp_repeated: bool = False  # one module's weights serve all of them
    token_types: int = 0
    attention_sinks: bool = False
    types_first: bool = False  # token types are added before positions
    patches: Patches | None = None
    task: Task | None = None
    encoder: Encoder | None = None
    bert_head: bool = False  # dense layer and norm before the vocabulary; pooler and sentence classifier beside it


class Kind(NamedTuple):
    """What layers may differ in. mixer: the one branch of a hybrid's layer; "" where there are two, attention and MLP. linear: a recurrence
    stands in the place of attention."""

    sparse: bool
    window: int | None
    roped: bool
    mixer: str = ""
    linear: bool = False


def kind_of(spec: DecoderSpec, index: int) -> Kind:
    if spec.mixers:
        return hybrid_kind(spec.mixers[index])
    return Kind(
        sparse=spec.experts is not None and index not in spec.experts.dense_layers,
        window=spec.windows[index] if spec.windows else None,
        roped=spec.positions == "rope" and (not spec.rope_layers or spec.rope_layers[index]),
        linear=bool(spec.linear_layers) and spec.linear_layers[index],
    )


def hybrid_kind(mixer: str) -> Kind:
    return Kind(sparse=mixer == "moe", window=None, roped=False, mixer=mixer)

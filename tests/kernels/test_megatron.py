"""What a Megatron-Core layer saves, against sums traced on Megatron-Core's own code (bytes per sequence x batch x hidden).

The traces ran the real layers on CPU with the fused norm and the attention core stubbed; they give the same sums as the source.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ullage.engines.base import context_of
from ullage.engines.registry import ranks_of
from ullage.frozen import FrozenMap
from ullage.job.adapted import graph_of
from ullage.job.bind import local_sizes
from ullage.job.job import Data, Job, Layout, Recompute
from ullage.job.read import read_job
from ullage.kernels.megatron_attention import runs_flash
from ullage.kernels.stacks import lower, segments
from ullage.kernels.step import Context
from ullage.memory.block import GradRule
from ullage.memory.chunk import CHECKPOINT, PLAIN, SELECTIVE, Replayer
from ullage.model.decoder import DecoderSpec, build

HIDDEN, HEADS, SEQ, BATCH = 4096, 32, 2048, 2
UNIT = SEQ * BATCH * HIDDEN


def saved(
    *,
    tp: int = 1,
    sp: bool = False,
    kv_heads: int = HEADS,
    ffn: int = 3 * HIDDEN,
    glu: bool = True,
    mode: str = PLAIN,
    recompute: Recompute = Recompute(),
    attention: str = "flash",
    dropout: float = 0.0,
    positions: str = "rope",
    batch: int = BATCH,
    **options: object,
) -> float:
    """Bytes that one layer's forward leaves, in units of sequence x batch x hidden."""
    spec = DecoderSpec(
        name="test",
        layers=1,
        hidden=HIDDEN,
        heads=HEADS,
        kv_heads=kv_heads,
        head_dim=HIDDEN // HEADS,
        ffn=ffn,
        vocab=512,
        mlp="silu" if glu else "gelu",
        glu=glu,
        norm="rmsnorm",
        positions=positions,
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )
    graph = build(spec)
    layout = Layout(tp=tp, sp=sp)
    sizes = local_sizes(graph, layout, Data(seq_len=SEQ, micro_batch=batch))
    context = Context(sizes=sizes, stack="megatron", tp=tp, sp=sp, attention=attention, options=FrozenMap(options))
    layer = next(run.block for run in graph.runs if run.block.role == "layer")
    replayer = Replayer(context=context, recompute=recompute, early_stop=False)
    return replayer.program(layer, mode, GradRule(mode="fused")).forward.delta_bytes / UNIT


def statistics(tp: int = 1, sp: bool = False) -> float:
    """Two fp32 norm statistics and the fp32 log-sum-exp of each head."""
    share = tp if sp else 1
    return (2 * 4 / share + 4 * HEADS / tp) / HIDDEN


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (4, True)])
@pytest.mark.parametrize("kv_heads", [HEADS, HEADS // 2])
def test_transformer_engine_layer(tp: int, sp: bool, kv_heads: int) -> None:
    g = kv_heads / HEADS
    expected = (12 + 4 * g + 6 * 3) / tp + statistics(tp, sp)
    assert saved(tp=tp, sp=sp, kv_heads=kv_heads) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("batch", "copy"), [(1, 0), (2, 1)])
def test_flash_attention_keeps_its_output_beside_the_projections_copy(batch: int, copy: int) -> None:
    """TE backends.py, FlashAttention.forward: transposed to (batch, sequence) and back, each contiguous; Megatron-LM's test
    gpt3_7b_tp4_pp1_memory_speed at 2795ebde97 holds 32 outputs of 32 MiB more on an A100 than on an H100 (and 28 MiB of workspace less)."""
    more = saved(batch=batch, attention_backend="flash") - saved(batch=batch, attention_backend="fused")
    assert more == pytest.approx(2 * copy * batch / BATCH)


@pytest.mark.parametrize(("backend", "expanded"), [("flash", 2), ("fused", 0)])
def test_flash_attention_makes_key_and_value_gradients_of_every_query_head(backend: str, expanded: int) -> None:
    """csrc/flash_attn/flash_api.cpp, mha_bwd: dk_expanded and dv_expanded where num_heads_k != num_heads."""
    job = read_job(
        {
            "schema": 1,
            "model": "llama-3.2-1b",
            "cluster": "8xH100-SXM-80GB",
            "engine": {"name": "megatron", "options": {"attention_backend": backend}},
            "data": {"seq_len": 256},
        }
    )
    graph = graph_of(job)
    layer = next(run.block for run in graph.runs if run.block.role == "layer")
    (step,) = [one for one in lower(layer, context_of(job, graph)) if one.name == "attention"]
    sizes = [buffer.bytes for buffer in step.backward_scratch if "expanded" in buffer.name]
    assert sizes == [2 * 256 * 32 * 64] * expanded


@pytest.mark.parametrize(
    ("capability", "options", "dropout", "flash"),
    [
        ((8, 0), {}, False, True),
        ((9, 0), {"deterministic_mode": True}, True, False),
        ((9, 0), {"attention_backend": "flash"}, False, True),
        ((10, 0), {}, True, False),
        ((10, 0), {"deterministic_mode": True}, True, True),
        ((10, 0), {"deterministic_mode": True}, False, False),
    ],
)
def test_which_attention_transformer_engine_takes(
    capability: tuple[int, int], options: dict[str, object], dropout: bool, flash: bool
) -> None:
    """get_attention_backend prefers cuDNN from Hopper on; nvte_get_fused_attn_backend refuses dropout where it is to be deterministic on
    Blackwell."""
    context = Context(sizes=FrozenMap({}), stack="megatron", compute_capability=capability, options=FrozenMap(options))
    assert runs_flash(context, dropout=dropout) == flash


def test_without_sequence_parallelism_the_stream_is_whole() -> None:
    expected = 8 + (4 + 4 + 6 * 3) / 4 + statistics(4)
    assert saved(tp=4) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (4, True)])
def test_local_layer_keeps_the_whole_projection_alive_through_v(tp: int, sp: bool) -> None:
    expected = (14 + 6 + 6 * 3) / tp + statistics(tp, sp)
    assert saved(tp=tp, sp=sp, transformer_impl="local") == pytest.approx(expected, rel=1e-4)


def test_gelu_layer() -> None:
    expected = 12 + 4 + 4 * 4 + statistics()
    assert saved(ffn=4 * HIDDEN, glu=False) == pytest.approx(expected, rel=1e-4)


def test_unfused_swiglu_keeps_the_activated_gate_and_frees_nothing_else() -> None:
    assert saved(bias_swiglu_fusion=False) - saved() == pytest.approx(2 * 3, rel=1e-4)


@pytest.mark.parametrize(
    ("modules", "impl", "less"),
    [
        (("layernorm",), "local", 4.0),
        (("mlp",), "local", 6 * 3.0),
        (("layernorm",), "transformer_engine", 0.0),
        (("mlp",), "transformer_engine", 2 + 6 * 3.0),
    ],
)
def test_recomputed_modules_are_not_saved(modules: tuple[str, ...], impl: str, less: float) -> None:
    """Transformer Engine's linears make the norms before them, in modules of their own."""
    recompute = Recompute(kind="modules", modules=modules)
    difference = saved(transformer_impl=impl) - saved(mode=SELECTIVE, recompute=recompute, transformer_impl=impl)
    assert difference == pytest.approx(less, abs=0.01)


def test_the_norm_before_experts_or_latent_attention_stands_by_itself() -> None:
    model = {"base": "deepseek-v3", "num_nextn_predict_layers": 0}
    job = read_job({"schema": 1, "model": model, "cluster": "8xH100-SXM-80GB", "engine": {"name": "megatron"}})
    graph = graph_of(job)
    context = context_of(job, graph)
    norms = [[step.name for step in lower(run.block, context) if step.module == "layernorm"] for run in graph.runs]
    assert norms == [[], ["input_norm"], ["input_norm", "post_attention_norm"], []]


@pytest.mark.parametrize("modules", [("moe",), ("moe", "moe_act"), ("moe", "moe_act", "shared_experts")])
def test_the_layer_of_experts_runs_again_whole(modules: tuple[str, ...]) -> None:
    """megatron/core/transformer/moe/moe_layer.py, forward: custom_forward has the experts' activation and the shared experts inside."""
    job = read_job(
        {
            "schema": 1,
            "model": "deepseek-v3",
            "cluster": "8xH100-SXM-80GB",
            "engine": {"name": "megatron"},
            "data": {"seq_len": 64},
        }
    )
    graph = graph_of(job)
    sparse = graph.runs[2].block
    context = context_of(job, graph)
    (segment,) = segments(sparse, context, Recompute(kind="modules", modules=modules))
    names = [step.name for step in lower(sparse, context)[segment.start : segment.stop]]
    assert names[0] == "router"
    assert names[-1] == "shared_down_proj"
    assert not segment.discards_output


def test_full_recompute_keeps_the_input_alone() -> None:
    assert saved(mode=CHECKPOINT, recompute=Recompute(kind="full")) == 2.0


def test_korthikanti_layer() -> None:
    """34 sbh + 5 as^2b: Korthikanti et al., arXiv 2205.05198, equation 1 (GELU, dropout everywhere, unfused attention).

    Norm statistics are left out there.
    """
    heads_term = 5 * HEADS * SEQ / HIDDEN
    found = saved(
        ffn=4 * HIDDEN,
        glu=False,
        attention="eager",
        dropout=0.1,
        positions="learned",
        transformer_impl="local",
    )
    assert found == pytest.approx(34 + heads_term, rel=2e-3)


def test_korthikanti_layer_with_tensor_and_sequence_parallelism() -> None:
    """(34 + 5 as/h) sbh / t: the same paper, equation 4."""
    heads_term = 5 * HEADS * SEQ / HIDDEN
    found = saved(
        tp=8,
        sp=True,
        ffn=4 * HIDDEN,
        glu=False,
        attention="eager",
        dropout=0.1,
        positions="learned",
        transformer_impl="local",
    )
    assert found == pytest.approx((34 + heads_term) / 8, rel=2e-3)


def hybrid(**options: object) -> Job:
    """A Mamba-2 mixer, an attention and experts narrower than the stream, and two modules that predict further tokens."""
    return read_job(
        {
            "schema": 1,
            "model": {
                "model_type": "nemotron_h",
                "hidden_size": 256,
                "num_hidden_layers": 3,
                "hybrid_override_pattern": "M*E",
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 512,
                "vocab_size": 1024,
                "n_routed_experts": 8,
                "moe_intermediate_size": 192,
                "moe_shared_expert_intermediate_size": 320,
                "moe_latent_size": 64,
                "num_nextn_predict_layers": 2,
            },
            "cluster": "8xH100-SXM-80GB",
            "engine": {"name": "megatron", "options": options},
            "layout": {"ep": 8},
            "data": {"seq_len": 64},
        }
    )


def test_modules_that_predict_tokens_keep_tensors_of_their_own() -> None:
    job = hybrid()
    graph = graph_of(job)
    context = context_of(job, graph)
    steps = lower(graph.runs[-1].block, context)
    sizes = {buffer.name: buffer.bytes for step in steps for buffer in step.writes}
    for prefix in ("mtp0_", "mtp1_"):
        assert sizes[f"{prefix}lse"] == 4 * 4 * 64
        assert sizes[f"{prefix}rows"] == sizes[f"{prefix}combine.all_to_all_back"] == 2 * 2 * 64 * 64
        assert sizes[f"{prefix}latent_out"] == 2 * 64 * 64
        assert sizes[f"{prefix}routed_out"] == 2 * 64 * 256


@pytest.mark.parametrize("tied", [False, True])
def test_the_stage_that_predicts_tokens_has_the_embedding_too(tied: bool) -> None:
    """gpt_model.py: an embedding where pre_process or mtp_process, whose weight the output layer takes where they are tied."""
    job = read_job(
        {
            "schema": 1,
            "model": {
                "base": "deepseek-v3",
                "num_hidden_layers": 4,
                "num_nextn_predict_layers": 2,
                "tie_word_embeddings": tied,
            },
            "cluster": "8xH100-SXM-80GB",
            "engine": {"name": "megatron"},
            "layout": {"pp": 2, "tp": 2, "ep": 4},
        }
    )
    graph = graph_of(job)
    vocabulary = [[one.name for one in rank.params if "vocab" in one.param.dims] for rank in ranks_of(job, graph)]
    first = ["embedding.embed_tokens.weight"]
    assert vocabulary == [
        first,
        ["head.lm_head.weight"] if tied else ["head.mtp0_embed_tokens.weight", "head.lm_head.weight"],
    ]
    alone = ranks_of(replace(job, layout=replace(job.layout, pp=1)), graph)[0]
    assert [one.name for one in alone.params if "vocab" in one.param.dims] == first + ["head.lm_head.weight"] * (
        not tied
    )


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)])
def test_the_projection_before_a_prediction_is_cut_and_gathered(tp: int, sp: bool) -> None:
    """multi_token_prediction.py, _concat_embeddings: column-parallel, gathered over the features; each rank then views its rows."""
    job = replace(hybrid(), layout=replace(hybrid().layout, tp=tp, sp=sp))
    graph = graph_of(job)
    steps = {step.name: step for step in lower(graph.runs[-1].block, context_of(job, graph))}
    (weight,) = steps["mtp0_eh_proj"].weights
    assert weight.numel == 2 * 256 * 256 / tp
    (part,) = steps["mtp0_eh_proj"].writes
    assert part.bytes == 2 * 64 * 256 / tp
    made = [buffer.bytes for buffer in steps["mtp0_gather"].writes]
    assert made == ([] if tp == 1 else [2 * 64 * 256])
    assert steps["mtp0_enorm"].reads == ("mtp0_next_embedded",)


@pytest.mark.parametrize("fused", [False, True])
def test_squared_relu_and_its_weighting_are_one_function_where_asked_for(fused: bool) -> None:
    """The function saves its input alone (fusions/fused_weighted_squared_relu.py); else the activation's output is weighted in fp32."""
    job = hybrid(use_fused_weighted_squared_relu=fused)
    graph = graph_of(job)
    sparse = next(run.block for run in graph.runs if run.block.name == "layer-moe")
    saved = [step.saves for step in lower(sparse, context_of(job, graph)) if step.module == "moe_act"]
    assert saved == ([("expert_up",)] if fused else [("expert_up",), ("expert_product.plain",)])


def test_experts_without_a_gate_offload_their_rows_too() -> None:
    job = hybrid(fine_grained_activation_offloading=True, offload_modules=["expert_fc1"])
    job = replace(job, data=replace(job.data, seq_len=16384))
    graph = graph_of(job)
    sparse = next(run.block for run in graph.runs if run.block.name == "layer-moe")
    offloads = {step.name: step.offloads for step in lower(sparse, context_of(job, graph)) if step.offloads}
    assert offloads == {"experts.up_proj": ("rows",)}


def test_without_bf16_everything_but_matmuls_is_fp32() -> None:
    """Megatron-LM's test deepseek_proxy_fsdp_ep2_fsdp2 passes no --bf16: modules of fp32 under te.fp8_autocast, whose outputs have the
    inputs' type; .float() of fp32 logits copies nothing (tensor_parallel/cross_entropy.py), and all that follows is in place."""
    job = read_job(
        {
            "schema": 1,
            "model": "llama-3.2-1b",
            "cluster": "8xH100-SXM-80GB",
            "engine": {"name": "megatron"},
            "data": {"seq_len": 64},
            "precision": {"params": "fp32", "compute": "fp8"},
        }
    )
    graph = graph_of(job)
    context = context_of(job, graph)
    assert (context.compute, context.residual) == ("fp32", "fp32")
    steps = lower(graph.runs[-1].block, context)
    assert steps[-1].saves == steps[-1].reuses == steps[-1].reads == ("logits",)
    assert [buffer.bytes for buffer in steps[-1].writes] == [4]
    # maximum, subtraction, exponential, sum and division; back the product with the loss's gradient
    assert steps[-1].moves == (64 * 128256 * (4 + 8 + 8 + 4 + 8), 64 * 128256 * (4 + 4))
    assert next(step for step in steps if step.made == ("logits",)).writes[0].bytes == 4 * 64 * 128256

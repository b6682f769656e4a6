"""The waist, proved with three producers: Llama and DeepSeek-V3 from config.json, and a convolutional network without names."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ullage.errors import InvalidInput
from ullage.frozen import FrozenMap
from ullage.model.build import graph
from ullage.model.catalogue import model_config, names
from ullage.model.graph import BATCH, ROUTED, SEQ, SEQ_SP, TARGET, Block, Graph, Op, Param, Run, Tensor

JOB_DIMS = {BATCH, SEQ, SEQ_SP, TARGET, ROUTED}  # their sizes belong to the job


def convolutional_network() -> Graph:
    """What a trace of a small ResNet-like classifier gives: shapes but no names. Images are 3 x 32 x 32, the batch alone is named."""

    def op(
        name: str, kind: str, source: str, result: str, dims: tuple[int, ...], params: dict[str, tuple[int, ...]]
    ) -> Op:
        return Op(
            name=name,
            kind=kind,
            inputs=(source,),
            outputs=(Tensor(name=result, dims=(BATCH, *dims)),),
            params=tuple(Param(name=f"{name}.{key}", dims=shape) for key, shape in params.items()),
        )

    def stage(name: str, channels_in: int, channels: int, size: int) -> Block:
        shape = (channels, size, size)
        return Block(
            name=name,
            role="any",
            input=Tensor(name="x", dims=(BATCH, channels_in, size, size)),
            ops=(
                op("conv", "conv2d", "x", "c", shape, {"weight": (channels, channels_in, 3, 3)}),
                Op(
                    name="bn",
                    kind="batchnorm",
                    inputs=("c",),
                    outputs=(Tensor(name="n", dims=(BATCH, *shape)),),
                    params=(
                        Param(name="bn.weight", dims=(channels,)),
                        Param(name="bn.bias", dims=(channels,)),
                        Param(name="bn.running_mean", dims=(channels,), buffer=True),
                        Param(name="bn.running_var", dims=(channels,), buffer=True),
                    ),
                ),
                op("relu", "activation", "n", "r", shape, {}),
                op("pool", "pool", "r", "y", (channels, size // 2, size // 2), {}),
            ),
            output=Tensor(name="y", dims=(BATCH, channels, size // 2, size // 2)),
        )

    head = Block(
        name="head",
        role="any",
        input=Tensor(name="x", dims=(BATCH, 32, 8, 8)),
        ops=(
            op("pool", "pool", "x", "features", (32,), {}),
            op("fc", "linear", "features", "logits", (10,), {"weight": (10, 32), "bias": (10,)}),
            Op(
                name="loss", kind="loss", inputs=("logits",), outputs=(Tensor(name="loss", dims=(1,), elements="fp32"),)
            ),
        ),
        output=Tensor(name="loss", dims=(1,), elements="fp32"),
    )
    return Graph(
        name="convnet",
        runs=(Run(block=stage("stem", 3, 16, 32)), Run(block=stage("body", 16, 32, 16)), Run(block=head)),
        sizes=FrozenMap(),
    )


HYBRID = {
    "model_type": "nemotron_h",
    "hidden_size": 2688,
    "num_hidden_layers": 9,
    "hybrid_override_pattern": "MEM*-EMME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "intermediate_size": 1856,
    "mamba_num_heads": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "moe_latent_size": 1024,
    "num_nextn_predict_layers": 2,
}

REPEATED = FrozenMap({"mtp_use_repeated_layer": True})

PRODUCERS = {
    "hybrid": lambda: graph(model_config(HYBRID), mtp=True),
    "repeated": lambda: graph(model_config(HYBRID), mtp=True, arguments=REPEATED),
    "llama": lambda: graph(model_config("llama-3.1-8b")),
    "deepseek-v3": lambda: graph(model_config("deepseek-v3"), mtp=True),
    "convnet": convolutional_network,
    **{name: (lambda name=name: graph(model_config(name))) for name in names()},
}


@pytest.mark.parametrize("producer", PRODUCERS)
def test_every_input_is_made_before_it_is_read(producer: str) -> None:
    lent = {}
    for run in PRODUCERS[producer]().runs:
        block = run.block
        for tensor in block.beside:
            assert lent[tensor.name].dims == tensor.dims, (
                f"{block.name} reads {tensor.name}, which no block before lends"
            )
        made = {block.input.name: block.input, **{tensor.name: tensor for tensor in block.beside}}
        for op in block.ops:
            for name in op.inputs:
                assert name in made, f"{block.name}.{op.name} reads {name}"
            for tensor in op.outputs:
                assert tensor.name not in made, f"{block.name}.{op.name} makes {tensor.name} again"
                made[tensor.name] = tensor
        assert made[block.output.name] == block.output
        lent |= {name: made[name] for name in block.lends}


@pytest.mark.parametrize("producer", PRODUCERS)
def test_every_name_is_sized_and_used_once(producer: str) -> None:
    model = PRODUCERS[producer]()
    for run in model.runs:
        block = run.block
        assert len({op.name for op in block.ops}) == len(block.ops)
        assert len({param.name for param in block.params}) == len(block.params)
        dims = {dim for op in block.ops for item in (*op.outputs, *op.params) for dim in item.dims}
        assert all(model.size(dim) > 0 for dim in dims - JOB_DIMS)
    assert len({run.block.name for run in model.runs}) == len({run.block for run in model.runs})
    qualified = {f"{run.block.name}.{param.name}" for run in model.runs for param in run.block.params}
    assert {name for pair in model.tied for name in pair} <= qualified


@pytest.mark.parametrize("producer", PRODUCERS)
def test_neighbours_stand_in_one_run(producer: str) -> None:
    runs = PRODUCERS[producer]().runs
    assert all(left.block != right.block for left, right in pairwise(runs))


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "mixtral-8x7b", "gpt2", "gpt-oss-20b", "bloom"])
def test_what_a_layout_divides_has_a_name(name: str) -> None:
    """Tensor parallelism: each column-parallel weight has one divided output dimension, each row-parallel one a divided input."""
    divided = {"heads", "kv_heads", "ffn", "shared_ffn", "vocab"}
    model = graph(model_config(name))
    for op in (op for run in model.runs for op in run.block.ops if op.kind == "linear"):
        out, inner = op.attrs["out"], op.attrs["in"]
        assert isinstance(out, tuple)
        assert isinstance(inner, tuple)
        assert len(divided & set(out)) == (op.attrs["parallel"] == "column"), op.name
        assert len(divided & set(inner)) == (op.attrs["parallel"] == "row"), op.name
        (result,) = op.outputs
        token = SEQ if op.attrs["parallel"] == "column" else SEQ_SP
        assert result.dims[:2] == (BATCH, token), op.name
    for op in (op for run in model.runs for op in run.block.ops if op.kind == "grouped_linear"):
        assert all(param.dims[0] == "experts" for param in op.params)
        assert op.outputs[0].dims[0] == ROUTED


def test_llama() -> None:
    model = graph(model_config("llama-3.1-8b"))
    assert [(run.block.role, run.repeat) for run in model.runs] == [("embedding", 1), ("layer", 32), ("head", 1)]
    kinds = [op.kind for op in model.runs[1].block.ops]
    assert kinds == [
        *("norm", "linear", "linear", "linear", "rope", "attention", "linear", "residual"),
        *("norm", "linear", "linear", "activation", "linear", "residual"),
    ]
    assert model.tied == ()
    assert graph(model_config("llama-3.2-1b")).tied == (("embedding.embed_tokens.weight", "head.lm_head.weight"),)


def test_deepseek_v3() -> None:
    model = graph(model_config("deepseek-v3"), mtp=True)
    assert [(run.block.name, run.repeat) for run in model.runs] == [
        ("embedding", 1),
        ("layer-dense", 3),
        ("layer-sparse", 58),
        ("head", 1),
    ]
    sparse = {op.name for op in model.runs[2].block.ops}
    assert {"q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj", "mla_assemble"} <= sparse
    assert {"router", "dispatch", "experts.gate_proj", "combine", "shared_up_proj", "shared_add"} <= sparse
    assert "mtp0_eh_proj" in {op.name for op in model.runs[3].block.ops}
    assert model.size("head_dim") == 192
    assert model.size("v_head_dim") == 128
    (bias,) = (param for param in model.runs[2].block.params if param.buffer)
    assert bias.dims == ("router",)


def test_convolutional_network() -> None:
    model = convolutional_network()
    assert model.parameter_count() == 16 * 3 * 9 + 2 * 16 + 32 * 16 * 9 + 2 * 32 + 10 * 32 + 10
    assert model.layers == 0
    assert [block.name for block in model.blocks()] == ["stem", "body", "head"]


def test_layers_that_differ() -> None:
    """Gemma 2 has a window on every second layer; SmolLM3 leaves every fourth without rotary embedding."""
    gemma = graph(model_config("gemma-2-2b"))
    assert [run.block.name for run in gemma.runs[1:-1]] == ["layer-dense-window", "layer-dense"] * 13
    smollm = graph(model_config("smollm3-3b"))
    assert [(run.block.name, run.repeat) for run in smollm.runs[1:3]] == [("layer", 3), ("layer-nope", 1)]
    plain = smollm.runs[2].block
    assert "rope" not in {op.kind for op in plain.ops}


def test_a_graph_is_built_once() -> None:
    assert graph(model_config("llama-3.1-8b")) is graph(model_config("LLAMA-3.1-8B"))


def test_a_hybrid_has_one_branch_to_a_layer() -> None:
    model = graph(model_config(HYBRID))
    layers = [(run.block.name, run.repeat) for run in model.runs if run.block.role == "layer"]
    mamba, moe, attention = "layer-mamba", "layer-moe", "layer-attention"
    assert layers == [
        (mamba, 1), (moe, 1), (mamba, 1), (attention, 1), ("layer-mlp", 1), (moe, 1), (mamba, 2), (moe, 1)
    ]  # fmt: skip
    kinds = {run.block.name: [op.kind for op in run.block.ops] for run in model.runs}
    assert kinds[mamba] == ["norm", "linear", "ssm", "ssm_norm", "linear", "residual"]
    assert "rope" not in kinds[attention]


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"hybrid_override_pattern": "MEMX-EMME"}, "model.hybrid_override_pattern"),
        ({"hybrid_override_pattern": "ME"}, "model.hybrid_override_pattern"),
        ({"layers_block_type": ["mamba"] * 8 + ["conv"]}, "model.layers_block_type"),
        ({"n_groups": 7}, "model.n_groups"),
        ({"mtp_hybrid_override_pattern": "ME"}, "model.mtp_hybrid_override_pattern"),
    ],
)
def test_a_hybrid_that_cannot_be(keys: dict[str, object], key: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        graph(model_config({**HYBRID, **keys}))
    assert caught.value.key == key


def test_a_hybrid_is_told_by_a_pattern_or_by_a_list() -> None:
    words = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
    listed = {key: value for key, value in HYBRID.items() if key != "hybrid_override_pattern"}
    listed["layers_block_type"] = [words[letter] for letter in str(HYBRID["hybrid_override_pattern"])]
    assert graph(model_config(listed)) == graph(model_config(HYBRID))


def test_a_repeated_module_has_its_weights_once() -> None:
    one = model_config({**HYBRID, "num_nextn_predict_layers": 1})
    alone, twice = graph(one, mtp=True), graph(model_config(HYBRID), mtp=True)
    repeated = graph(model_config(HYBRID), mtp=True, arguments=REPEATED)
    assert repeated.parameter_count() == alone.parameter_count() < twice.parameter_count()
    assert repeated.runs == twice.runs
    elsewhere = {"head.mtp0_embed_tokens.weight"}  # the embedding's, or a copy of it
    assert repeated.again() == {second for _, second in repeated.tied} - elsewhere


def test_positions_and_norms_of_a_hybrid_are_arguments() -> None:
    keys = {**HYBRID, "max_position_embeddings": 1024}
    arguments = FrozenMap({"position_embedding_type": "learned_absolute", "normalization": "LayerNorm"})
    plain, told = graph(model_config(keys)), graph(model_config(keys), arguments=arguments)
    norms = len(str(HYBRID["hybrid_override_pattern"])) + 1
    assert told.parameter_count() - plain.parameter_count() == 1024 * 2688 + norms * 2688
    llama = model_config("llama-3.2-1b")
    assert graph(llama, arguments=arguments) == graph(llama)


def test_norms_of_queries_and_keys_are_an_argument_of_a_model_of_type_gpt() -> None:
    sizes = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 1024}
    keys = {"model_type": "gpt", "position": "rope", "norm": "rmsnorm", **sizes}
    arguments = FrozenMap({"qk_layernorm": True})
    plain, normed = (graph(model_config(keys), arguments=some) for some in (FrozenMap(), arguments))
    assert normed.parameter_count() - plain.parameter_count() == 2 * 2 * 64
    latent = {**keys, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    assert graph(model_config(latent), arguments=arguments) == graph(model_config(latent))

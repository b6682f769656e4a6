"""A traced module as a Graph: what ullage then says of a step is what the trace saw."""

from dataclasses import replace

import pytest
import torch
from tests.trace import factories
from tests.trace.helpers import language_model

from ullage.engines.registry import account, ranks_of
from ullage.errors import Unsupported
from ullage.job.job import Recompute
from ullage.job.read import read_job
from ullage.memory.ledger import by_category
from ullage.memory.program import locate_peak
from ullage.trace.cut import layer_modules
from ullage.trace.graph import graph_of, told_apart
from ullage.trace.run import trace

OUTSIDE = ("input", "workspace", "buffers")


def estimated(graph, **changes):
    keys = {
        "model": "llama-3.2-1b",
        "cluster": "1xH100-SXM-80GB",
        "engine": {"name": "single"},
        "precision": "fp32",
        "grad_clip": False,
        "data": {"seq_len": 1, "micro_batch": 1},
    }
    job = replace(read_job(keys | changes), stack="traced")
    found = account(job, graph, ranks_of(job, graph)[0])
    return locate_peak(found.program).bytes - sum(
        item.bytes * count for item, count in found.static if item.category in OUTSIDE
    )


def measured(found):
    lines = by_category(found.ledger(found.steady.at))
    return found.steady.bytes - sum(lines.get(category, 0) for category in OUTSIDE)


def encoder_decoder():
    import transformers

    config = transformers.T5Config(
        d_model=64, d_ff=128, d_kv=16, num_heads=4, num_layers=2, vocab_size=500, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(1, 500, (2, 24))

    def step():
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def vision():
    import transformers

    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, image_size=64, patch_size=16
    )
    model = transformers.ViTForImageClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.tensor([0, 1])}

    def step():
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


MODULES = {
    "language model": language_model("llama", precision="fp32", optimizer={"fused": True}),
    "recomputed": language_model("llama", precision="fp32", optimizer={"fused": True}, recompute="non-reentrant"),
    "encoder-decoder": encoder_decoder,
    "vision transformer": vision,
    "convolutional": factories.convolutional,
    "recurrent": factories.recurrent,
}


@pytest.mark.parametrize("name", MODULES)
def test_a_traced_step_is_estimated_to_the_byte(name: str) -> None:
    found = trace(MODULES[name], ops=True)
    assert estimated(graph_of(found)) == measured(found)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_recompute_of_a_traced_graph_is_recompute_of_the_module(family: str) -> None:
    plain = language_model(family, precision="fp32", optimizer={"fused": True}, num_hidden_layers=12, n_layer=12)
    checkpointed = language_model(
        family, precision="fp32", optimizer={"fused": True}, recompute="non-reentrant", num_hidden_layers=12, n_layer=12
    )
    graph = graph_of(trace(plain, ops=True))
    assert estimated(graph, recompute="full") == pytest.approx(measured(trace(checkpointed)), rel=0.01)


def test_equal_layers_are_one_run() -> None:
    graph = graph_of(trace(factories.convolutional, ops=True))
    assert [(run.block.role, run.repeat) for run in graph.runs] == [
        ("embedding", 1),
        ("layer", 1),  # saves its input; those of the others are saved by the ReLU that made them
        ("layer", 3),
        ("head", 1),
        ("loss", 1),
    ]
    assert graph.parameter_count() == 3 * 16 * 9 + 16 + 4 * 2 * (16 * 16 * 9 + 16) + 4 * 32 + 170


def test_sharding_divides_states() -> None:
    graph = graph_of(trace(factories.convolutional, ops=True))
    one = estimated(graph)
    engine = {"name": "fsdp2", "zero_stage": 3}
    eight = estimated(graph, cluster="8xH100-SXM-80GB", engine=engine)
    assert eight < one


def test_tensor_parallelism_needs_a_placement_table() -> None:
    graph = graph_of(trace(factories.convolutional, ops=True))
    with pytest.raises(Unsupported, match="placement table"):
        estimated(graph, cluster="2xH100-SXM-80GB", engine={"name": "fsdp2"}, layout={"tp": 2})


def test_a_lone_sequential_is_no_layer_and_its_children_are() -> None:
    """As examples/convnet.py: convolution, a Sequential of composed blocks, pooling, a linear layer."""
    names = {"": "Sequential", "0": "Conv2d", "1": "Sequential", "2": "Linear"}
    blocks = {f"1.{block}": "Sequential" for block in range(3)} | {f"1.{block}.0": "Conv2d" for block in range(3)}
    assert layer_modules(tuple((names | blocks).items())) == {"1.0", "1.1", "1.2"}


def test_recompute_of_a_module_without_layers_is_told() -> None:
    graph = graph_of(trace(factories.mlp, ops=True))
    job = read_job({"model": "llama-3.2-1b", "cluster": "1xH100-SXM-80GB", "recompute": "full"})
    assert graph.layers == 0
    assert "nothing is recomputed" in told_apart(job, graph).warnings[-1]
    assert told_apart(replace(job, recompute=Recompute()), graph).warnings == job.warnings


def test_a_step_without_a_backward() -> None:
    with pytest.raises(Unsupported, match="no backward"):
        graph_of(trace(factories.forward_only, ops=True))

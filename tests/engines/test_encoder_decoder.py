"""An encoder and its decoder under each engine: what goes beside the stream is freed once, and what no account reads is refused by name."""

from __future__ import annotations

import pytest

from ullage.engines.estimate import estimate
from ullage.engines.registry import account, ranks_of
from ullage.errors import Contradiction, Infeasible, InvalidInput, Unsupported
from ullage.job.adapted import graph_of
from ullage.job.job import Job
from ullage.job.read import read_job
from ullage.memory.ledger import Line
from ullage.memory.program import net
from ullage.model.build import graph
from ullage.model.catalogue import model_config
from ullage.model.count import flops_per_token
from ullage.timing.step import step_time


def job(
    model: str = "flan-t5-small", engine: str = "single", options: dict[str, object] | None = None, **keys: object
) -> Job:
    return read_job(
        {
            "schema": 1,
            "model": model,
            "cluster": f"{1 if engine == 'single' else 4}xA100-SXM-80GB",
            "stack": "transformers",
            "engine": {"name": engine, "options": options or {}},
            "data": {"seq_len": 512, "micro_batch": 8},
            **keys,
        }
    )


@pytest.mark.parametrize("engine", ["single", "ddp", "zero1", "fsdp1", "fsdp2"])
@pytest.mark.parametrize("model", ["t5-small", "flan-t5-small"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_a_step_leaves_nothing(model: str, engine: str, recompute: str) -> None:
    """The table of three uses, or of two beside a head of its own, and several micro-batches."""
    data = {"seq_len": 512, "micro_batch": 8, "grad_accum": 3}
    told = job(model, engine, {"max_target_length": 128}, recompute=recompute, data=data)
    mine = graph_of(told)
    (rank,) = ranks_of(told, mine)
    assert not {item.what: count for item, count in net(account(told, mine, rank).step).items() if count}


def _line(told: Job, what: str) -> Line:
    return next(line for line in estimate(told).ledger if line.what == what)


def test_the_output_of_the_encoder_is_held_through_the_decoder() -> None:
    """bf16: it is what the keys' and values' projections save, once for all layers (models/t5/modeling_t5.py)."""
    assert _line(job(precision="bf16"), "the encoder's output").bytes == 8 * 512 * 512 * 2


def test_positions_have_one_gradient_for_all_layers() -> None:
    """(1, heads, queries, keys): six heads of flan-t5-small, which the encoder's layers add up until the first of them uses it."""
    data = {"seq_len": 1024, "micro_batch": 4}
    told = job(precision="bf16", recompute="full", attention="eager", data=data, options={"max_target_length": 16})
    assert _line(told, "gradient of a tensor that skips blocks").bytes == 6 * 1024 * 1024 * 2


def test_the_target_length_is_the_sequence_unless_said() -> None:
    assert "engine.options.max_target_length = 512" in job().defaults
    said = job(options={"max_target_length": 64})
    assert not [one for one in said.defaults if "max_target_length" in one]
    assert estimate(said).peak.allocated_bytes < estimate(job()).peak.allocated_bytes
    assert estimate(job(options={"max_target_length": 512})).peak == estimate(job()).peak


def test_flops_count_each_text_by_its_own_length() -> None:
    """T5-small by hand: a layer's matrices, scores against both texts, and the head, 6 a weight and token."""
    wide, inner, ffn, vocab, layers = 512, 8 * 64, 2048, 32128, 6
    attention, mlp = 4 * wide * inner, 2 * wide * ffn
    encoder = layers * (6 * (attention + mlp) + 12 * inner * 512)
    crossing = layers * 6 * 2 * wide * inner  # keys and values, of the encoder's tokens
    own = layers * (6 * (attention + attention // 2 + mlp) + 12 * inner * (128 + 512)) + 6 * wide * vocab
    told = graph_of(job("t5-small", options={"max_target_length": 128}))
    assert flops_per_token(told, 512) == encoder + crossing + own * 128 // 512


def test_seconds_follow_both_lengths() -> None:
    times = [step_time(job("flan-t5-xl", options={"max_target_length": target})).step_s for target in (64, 128, 512)]
    assert times == sorted(times)
    assert times[-1] > 1.4 * times[0]


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"lora": {"rank": 8}}, "lora"),
        ({"loss": "fused-linear"}, "loss"),
        ({"recompute": {"layers": 2}}, "recompute"),
        ({"data": {"seq_len": 512, "micro_batch": 8, "padding_mask": True}}, "data.padding_mask"),
        ({"stack": "liger"}, "stack"),
        ({"compile": True}, "compile"),
    ],
)
def test_what_is_not_modelled_is_refused(keys: dict[str, object], named: str) -> None:
    with pytest.raises(Unsupported, match="not modelled of t5, a decoder behind an encoder") as caught:
        estimate(job(**keys))  # type: ignore[arg-type]
    assert named in str(caught.value)


def test_only_data_is_parallel() -> None:
    with pytest.raises(Infeasible, match="data parallelism alone"):
        job(engine="fsdp2", layout={"tp": 2})


def test_a_target_length_needs_an_encoder() -> None:
    with pytest.raises(Contradiction, match=r"llama-3\.2-1b has none"):
        job("llama-3.2-1b", options={"max_target_length": 128})
    with pytest.raises(InvalidInput, match="max_target_length"):
        job(options={"max_target_length": 0})


def test_a_saved_config_of_v1_1_says_so_in_another_key() -> None:
    """transformers 5 writes tie_word_embeddings: true beside scale_decoder_outputs: false (configuration_t5.py)."""
    keys = {**model_config("flan-t5-small").keys, "tie_word_embeddings": True, "scale_decoder_outputs": False}
    assert graph(model_config(keys)).parameter_count() == 76961152

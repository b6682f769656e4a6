"""Lengths that vary: their distribution, and what they leave of the allocator's blocks."""

from __future__ import annotations

from typing import Any

import pytest

from ullage.engines.estimate import Estimate, estimate
from ullage.engines.lengths import padded_lengths
from ullage.job.job import Data
from ullage.job.read import read_job
from ullage.units import GIB

JOB: dict[str, Any] = {
    "schema": 1,
    "model": {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 128256,
    },
    "cluster": "1xA100-SXM-80GB",
    "data": {"seq_len": 2048, "grad_accum": 2},
    "engine": {"name": "single"},
    "stack": "transformers",
    "precision": "bf16",
    "optimizer": "adamw",
    "recompute": "full",
}


def found(mean: int | None = None, **changed: Any) -> Estimate:
    return estimate(read_job({**JOB, "data": {**JOB["data"], "seq_len_mean": mean}, **changed}))


@pytest.mark.parametrize("mean", [40, 300, 1024, 1700, 2030])
def test_lengths_have_their_mean_and_none_is_longer_than_the_longest(mean: int) -> None:
    lengths = padded_lengths(Data(seq_len=2048, seq_len_mean=mean))
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.04)
    assert 1 <= min(lengths) <= max(lengths) <= 2048
    assert len(set(lengths)) > len(lengths) / 2


def test_a_micro_batch_is_as_long_as_its_longest_sequence() -> None:
    """Of two numbers spread evenly over 0..1 the larger is two thirds in the mean, of eight eight ninths."""
    for sequences in (2, 8):
        lengths = padded_lengths(Data(seq_len=3000, micro_batch=sequences, seq_len_mean=1500))
        assert sum(lengths) / len(lengths) == pytest.approx(3000 * sequences / (sequences + 1), rel=0.02)


def test_lengths_that_do_not_vary() -> None:
    assert set(padded_lengths(Data(seq_len=2048, seq_len_mean=2048))) == {2048}
    assert found(2048).peak.reserved_bytes == found().peak.reserved_bytes


def test_cut_sequences_are_padded_to_what_can_be_cut() -> None:
    lengths = padded_lengths(Data(seq_len=2048, seq_len_mean=500), multiple=16)
    assert all(length % 16 == 0 for length in lengths)


def test_varying_lengths_waste_what_one_length_does_not() -> None:
    """The longest allocates as much as ever; blocks that shorter ones have left in pieces do not serve it, unless segments expand."""
    one, many = found(), found(1200)
    assert many.peak.allocated_bytes == one.peak.allocated_bytes
    assert many.peak.reserved_bytes - one.peak.reserved_bytes > GIB
    expandable: dict[str, Any] = {"engine": {"name": "single", "options": {"expandable_segments": True}}}
    assert found(1200, **expandable).peak.reserved_bytes == found(**expandable).peak.reserved_bytes


def test_where_steps_free_what_was_there_before_them_one_length_stands_for_all() -> None:
    sharded: dict[str, Any] = {
        "cluster": "2xA100-SXM-80GB",
        "engine": {"name": "deepspeed", "zero_stage": 3},
        "layout": {"dp": 2},
    }
    assert found(1200, **sharded).peak.reserved_bytes == found(**sharded).peak.reserved_bytes

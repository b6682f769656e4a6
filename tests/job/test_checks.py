"""checks.py as a search uses it: violations of a job that no reader made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ullage.errors import Infeasible
from ullage.job.checks import divisors_of, violations
from ullage.job.job import Job
from ullage.job.read import read_job


@pytest.fixture
def job(minimal) -> Job:
    return read_job(minimal(engine={"name": "megatron"}, cluster="16x8xH100-SXM-80GB"))


def found(job: Job, **layout: object) -> list[tuple[str, str]]:
    changed = replace(job.layout, **layout)
    dp = 128 // (changed.tp * changed.cp * changed.pp)
    return [(violation.code, violation.key) for violation in violations(replace(job, layout=replace(changed, dp=dp)))]


def test_a_possible_layout_has_none(job: Job):
    assert found(job, tp=4, sp=True, cp=2) == []


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"tp": 64}, ("infeasible", "layout.tp")),
        ({"tp": 16}, ("warning", "layout.tp")),
        ({"ep": 2}, ("infeasible", "layout.ep")),
        ({"pp": 64}, ("infeasible", "layout.pp")),
        ({"pp": 4}, ("warning", "data.grad_accum")),
        ({"vpp": 4}, ("contradiction", "layout.vpp")),
        ({"pp": 2, "schedule": "zbv"}, ("contradiction", "layout.vpp")),
        ({"pp": 2, "schedule": "dualpipe"}, ("infeasible", "data.grad_accum")),
        ({"pp": 2, "vpp": 2, "pp_split": (8, 8, 8)}, ("infeasible", "layout.pp_split")),
    ],
)
def test_what_is_found(job: Job, layout: dict[str, object], expected: tuple[str, str]):
    assert expected in found(job, **layout)


def test_a_split_may_be_per_rank_or_per_virtual_stage(job: Job):
    interleaved = {"pp": 2, "vpp": 2, "schedule": "interleaved-1f1b"}
    job = replace(job, data=replace(job.data, grad_accum=4))
    assert found(job, **interleaved, pp_split=(15, 17)) == []
    assert found(job, **interleaved, pp_split=(7, 8, 8, 9)) == []


def test_a_violation_becomes_the_error_that_a_search_counts(job: Job):
    violation = next(violations(replace(job, layout=replace(job.layout, tp=3))))
    error = violation.error()
    assert isinstance(error, Infeasible)
    assert str(error) == str(violation)


def test_divisors():
    assert divisors_of(1) == "use 1"
    assert divisors_of(6) == "use 1, 2, 3 or 6"
    assert divisors_of(128256).endswith("...")


@pytest.mark.parametrize(("compute", "cluster"), [("fp8", "8xA100-SXM-80GB"), ("fp4", "8xH100-SXM-80GB")])
def test_a_card_without_units_for_a_type_is_refused(compute: str, cluster: str) -> None:
    precision = {"params": "bf16", "compute": compute}
    with pytest.raises(Infeasible, match=f"has no {compute} units"):
        read_job({"schema": 1, "model": "llama-3.1-8b", "cluster": cluster, "precision": precision})


@pytest.mark.parametrize(
    ("model", "most"),
    [
        ("gpt2", 1024),  # n_positions, openai-community/gpt2
        ("opt-1.3b", 2048),  # its table has two rows more, that OPTLearnedPositionalEmbedding's offset takes
        ({"base": "gpt2", "n_positions": 32}, 32),
        ("bloom-560m", None),
        ("llama-2-7b", None),
    ],
)
def test_a_sequence_ends_where_a_learned_table_of_positions_does(minimal, model: object, most: int | None):
    def of(length: int) -> Job:
        return read_job(minimal(model=model, data={"seq_len": length}))

    assert of(most or 1 << 20).data.seq_len == (most or 1 << 20)
    if most is not None:
        with pytest.raises(Infeasible, match=rf"data.seq_len = {most + 1}: is longer than .* use up to {most}"):
            of(most + 1)


def test_a_default_length_beyond_the_table_is_no_ones_claim(minimal):
    job = read_job(minimal(model="gpt2"))
    assert job.data.seq_len == 4096
    assert any("data.seq_len = 4096: the default" in warning for warning in job.warnings)


def test_a_micro_batch_has_no_more_tokens_than_kernels_count(minimal):
    """FlashAttention's cu_seqlens are int32."""
    with pytest.raises(Infeasible, match=r"data\.seq_len = 99999999999: .* more than kernels count"):
        read_job(minimal(data={"seq_len": 99_999_999_999}))
    with pytest.raises(Infeasible, match=r"data\.micro_batch = 1000000: .* more than kernels count"):
        read_job(minimal(data={"seq_len": 4096, "micro_batch": 1_000_000}))
    assert read_job(minimal(data={"seq_len": 1 << 30})).data.seq_len == 1 << 30


def test_more_layers_to_run_again_than_there_are_is_said(minimal):
    job = read_job(minimal(recompute={"layers": 33}))
    assert job.warnings == ("recompute.layers = 33: the model has 32, all of which run again; write full",)
    assert read_job(minimal(recompute={"layers": 32})).warnings == ()

"""How each engine groups the micro-batches of an interleaved pipeline."""

import pytest

from ullage.engines.pipeline import actions_of
from ullage.job.checks_pipeline import GROUP_OPTIONS
from ullage.job.read import read_job
from ullage.schedule import in_flight

BASE = {
    "model": {"base": "llama-3.2-1b", "num_hidden_layers": 16},
    "cluster": "4xH100-SXM-80GB",
    "layout": {"pp": 4, "vpp": 2, "schedule": "interleaved-1f1b"},
    "data": {"seq_len": 1024, "micro_batch": 1, "grad_accum": 8},
}
MEGATRON = BASE | {"stack": "megatron", "precision": "bf16"}


@pytest.mark.parametrize("name", GROUP_OPTIONS)
def test_megatrons_option_is_read_by_either_name(name: str) -> None:
    plain = read_job(MEGATRON | {"engine": {"name": "megatron"}})
    grouped = read_job(MEGATRON | {"engine": {"name": "megatron", "options": {name: 8}}})
    # (v - 1) G + 2 (p - 1 - r) + 1: the groups are of four micro-batches by default
    assert (in_flight(actions_of(plain, 0)), in_flight(actions_of(grouped, 0))) == (11, 15)


def test_torch_makes_equal_rounds() -> None:
    """Ten micro-batches over four stages are two rounds of five (torch/distributed/pipelining/schedules.py); Megatron refuses them."""
    data = BASE["data"] | {"grad_accum": 10}
    job = read_job(BASE | {"stack": "torchtitan", "engine": {"name": "fsdp2"}, "data": data})
    assert len(actions_of(job, 0)) == 2 * 2 * 10

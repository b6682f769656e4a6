"""DistributedDataParallel against traces of torch 2.13 on two processes, in bytes per parameter with activations next to nothing."""

from __future__ import annotations

from typing import Any

import pytest

from ullage.engines.base import Account
from ullage.engines.ddp.partition import fullest
from ullage.engines.optimizer import Group, Stepped
from ullage.engines.registry import account
from ullage.job.read import read_job
from ullage.memory.program import net
from ullage.memory.rank import ranks
from ullage.model.build import graph
from ullage.units import MIB


def account_of(**changes: Any) -> tuple[Account, int]:
    """One short sequence through a wide model: states outweigh activations."""
    engine = {"name": changes.pop("name", "ddp"), "options": changes.pop("options", {})}
    read = read_job(
        {
            "schema": 1,
            "model": {"base": "llama-3.1-8b", "vocab_size": 512, "num_hidden_layers": 8},
            "cluster": "2xH200-SXM-141GB",
            "layout": {"dp": 2},
            "data": {"seq_len": 16, "micro_batch": 1, "grad_accum": changes.pop("grad_accum", 1)},
            "precision": "fp32",
            "engine": engine,
            "grad_clip": False,
            **changes,
        }
    )
    model = graph(read.model)
    (rank,) = ranks(model, read.layout)
    return account(read, model, rank), model.parameter_count()


FOREACH = {"name": "adamw", "impl": "foreach"}
IN_PLACE = {"reduce_in_place": True}
VIEW = {"gradient_as_bucket_view": True}


@pytest.mark.parametrize(
    ("changes", "steady", "peak"),
    [
        ({"optimizer": FOREACH}, 16, 24),
        ({"optimizer": FOREACH, "precision": "bf16"}, 8, 12),
        ({"optimizer": FOREACH, "options": VIEW}, 16, 20),
        ({"optimizer": {"name": "adamw", "impl": "fused"}}, 16, 20),
        ({"optimizer": {"name": "adamw", "impl": "fused"}, "options": IN_PLACE}, 12, 16),
        ({"name": "zero1", "optimizer": FOREACH}, 12, 18),
    ],
    ids=["fp32", "bf16", "bucket view", "fused", "in place", "zero1"],
)
def test_bytes_per_parameter(changes: dict[str, Any], steady: float, peak: float) -> None:
    """Parameters, buckets and states between steps; at the peak gradients of their own and the optimizer's temporaries too."""
    found, parameters = account_of(**changes)
    assert found.static_bytes / parameters == pytest.approx(steady, rel=0.01)
    assert found.program.peak_bytes / parameters == pytest.approx(peak, rel=0.02)
    assert not net(found.step)


def test_accumulation_brings_ordinary_gradients_back_in_spite_of_bucket_views() -> None:
    """no_sync with zero_grad(set_to_none=True): + 4 bytes a parameter until the last backward ends."""
    fused = {"name": "adamw", "impl": "fused"}
    once, parameters = account_of(options=VIEW, optimizer=fused)
    several, _ = account_of(options=VIEW, optimizer=fused, grad_accum=3)
    assert (several.program.peak_bytes - once.program.peak_bytes) / parameters == pytest.approx(4, rel=0.1)
    assert not net(several.step)


def test_gradients_that_are_reduced_in_place_are_those_of_one_device() -> None:
    """But for a block's small ones, which are put together, next to nothing here: norms."""
    reduced, parameters = account_of(options=IN_PLACE, grad_accum=2)
    alone, _ = account_of(name="single", grad_accum=2, cluster="1xH200-SXM-141GB", layout={"dp": 1})
    assert reduced.static_bytes == alone.static_bytes
    assert 0 <= reduced.program.peak_bytes - alone.program.peak_bytes < parameters / 100
    assert not net(reduced.step)


def test_buckets_close_with_the_parameter_that_fills_them() -> None:
    """Bytes are the parameters' own; only the first bucket may be as small as 1 MiB."""
    found, parameters = account_of()
    (bucket,) = [item for item, _ in found.static if item.what == "DDP reducer buckets"]
    assert sum(bucket.pieces) == bucket.bytes >= 4 * parameters
    assert all(piece >= 25 * MIB for piece in bucket.pieces[1:-1])


def test_zero1_gives_whole_parameters_to_the_emptiest_rank() -> None:
    tensors = tuple(Stepped(name=str(numel), shape=(numel,), dtype="fp32") for numel in (5, 4, 3, 3, 3))
    (mine,) = fullest((Group(tensors=tensors),), 2)
    assert sum(tensor.numel for tensor in mine.tensors) == 10  # 5 + 3 against 4 + 3 + 3


def test_one_rank_of_zero1_is_ddp() -> None:
    groups = (Group(tensors=(Stepped(name="w", shape=(4,), dtype="fp32"),), repeat=3),)
    assert fullest(groups, 1) == groups

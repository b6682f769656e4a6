"""ZeRO's parts of a parameter, and the plain number of steps that DeepSpeed's own Adam counts, which needs a GPU to run.

tests/distributed/test_training.py has the real engines, with torch's optimizers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ullage.train.partitions import Partitions
from ullage.train.pieces import Piece


def engine(master: torch.Tensor, state: dict[str, Any]) -> Any:
    """The last 5 of 6 elements of a weight are the first of a master that is padded by 3."""
    model = nn.Linear(3, 2, bias=False)
    model.weight._hp_mapping = SimpleNamespace(  # type: ignore[assignment]
        param_group_index=0,
        lp_fragment_address=SimpleNamespace(start=1, numel=5),
        hp_fragment_address=SimpleNamespace(start=0, numel=5),
    )
    zero = SimpleNamespace(
        param_groups=[{"params": [master]}],
        optimizer=SimpleNamespace(state={master: state}),
        update_lp_params=lambda: None,
    )
    return SimpleNamespace(module=model, optimizer=zero, zero_optimization_stage=lambda: 2)


def test_a_plain_number_of_steps_is_kept() -> None:
    master = torch.arange(8.0)
    state: dict[str, Any] = {"step": 3, "exp_avg": torch.arange(8.0) * 10}
    partitions = Partitions(engine(master, state))
    found = partitions.states(made=False)
    assert found.keys() == {
        "model.weight",
        "optimizer.state.weight.step",
        "optimizer.state.weight.exp_avg",
    }
    weight, moment = found["model.weight"], found["optimizer.state.weight.exp_avg"]
    assert isinstance(weight, Piece)
    assert (weight.shape, weight.start, weight.flat.tolist()) == ((2, 3), 1, [0, 1, 2, 3, 4])
    assert moment.flat.tolist() == [0, 10, 20, 30, 40]
    assert found["optimizer.state.weight.step"] == 3

    found["optimizer.state.weight.step"].fill_(7)
    weight.flat.fill_(-1)
    partitions.restored()
    assert state["step"] == 7
    assert isinstance(state["step"], int)
    assert master.tolist() == [-1] * 5 + [5, 6, 7]

"""What DeepSpeed's ZeRO keeps on a rank, as pieces of the parameters that they are of: masters and the optimizer's states of them.

ZeRO 1 and 2 flatten a group of parameters and cut it into equal parts, one a rank, wherever that falls; ZeRO-3 cuts each parameter so, and
flattens a rank's parts (runtime/zero/stage_1_and_2.py, bf16_optimizer.py, stage3.py of 0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ullage.frozen import frozen
from ullage.train.pieces import Piece
from ullage.train.states import MODEL, OPTIMIZER


@frozen
class Part:
    """length elements of a parameter from start on in its flat order, which are those of master from offset on."""

    name: str
    shape: tuple[int, ...]
    start: int
    master: torch.Tensor
    offset: int
    length: int


class Partitions:
    """Of one engine under ZeRO 1 to 3."""

    def __init__(self, engine: Any) -> None:
        self.module: nn.Module = engine.module
        self.zero: Any = engine.optimizer
        self.stage: int = engine.zero_optimization_stage()
        self._counted: dict[torch.Tensor, torch.Tensor] = {}

    def states(self, *, made: bool) -> dict[str, Any]:
        """In the form of states.py. A number of steps that is a plain one is told as a tensor, and set by ``restored``."""
        optimizer = self.zero.optimizer
        if made and not optimizer.state:
            self._make_states()
        found = {f"{MODEL}{name}": value for name, value in self._buffers()}
        self._counted = {}
        for part in self._parts():
            found[f"{MODEL}{part.name}"] = _piece(part, part.master)
            for key, value in optimizer.state.get(part.master, {}).items():
                name = f"{OPTIMIZER}{part.name}.{key}"
                if isinstance(value, int):  # DeepSpeed's own Adam counts so
                    found[name] = self._counted.setdefault(part.master, torch.tensor(float(value)))
                elif isinstance(value, torch.Tensor):
                    found[name] = _piece(part, value) if value.shape == part.master.shape else value
        return found

    @torch.no_grad()
    def restored(self) -> None:
        """Makes the parameters that are computed with of the masters, as each step does."""
        for master, count in self._counted.items():
            self.zero.optimizer.state[master]["step"] = int(count)
        if self.stage < 3:
            self.zero.update_lp_params()
            return
        self.zero._partition_all_parameters()
        for group in range(len(self.zero.fp16_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(group)
        if persistent := self.zero.persistent_parameters:
            persistent[0].all_gather(persistent)

    def _parts(self) -> Iterator[Part]:
        of = self._of_zero_3 if self.stage == 3 else self._of_zero_1_and_2
        trained = ((name, param) for name, param in self.module.named_parameters() if param.requires_grad)
        return (part for name, param in trained if (part := of(name, param)) is not None)

    def _of_zero_1_and_2(self, name: str, param: Any) -> Part | None:
        mapping = param._hp_mapping
        if mapping is None:  # all of it is on other ranks
            return None
        (master,) = self.zero.param_groups[mapping.param_group_index]["params"]
        here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Part(
            name=name,
            shape=tuple(param.shape),
            start=there.start,
            master=master,
            offset=here.start,
            length=here.numel,
        )

    def _of_zero_3(self, name: str, param: Any) -> Part | None:
        group, offset, each = self.zero.grad_position[self.zero.get_param_id(param)]
        start = self.zero._get_param_partition_rank(param) * each
        length = min(each, param.ds_numel - start)  # the last ranks' are padded
        if length <= 0:
            return None
        return Part(
            name=name,
            shape=tuple(param.ds_shape),
            start=start,
            master=self.zero.fp32_partitioned_groups_flat[group],
            offset=offset,
            length=length,
        )

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        every = self.module.state_dict(keep_vars=True).items()
        return ((name, value) for name, value in every if not isinstance(value, nn.Parameter))

    def _make_states(self) -> None:
        """By a step with gradients of zero, as torch's own checkpoints do; whatever it makes of the masters is written over."""
        masters = self.zero.fp32_partitioned_groups_flat if self.stage == 3 else _stepped(self.zero.param_groups)
        before = [master.grad for master in masters]
        for master in masters:
            master.grad = torch.zeros_like(master)
        if self.stage == 3:  # its groups are empty between steps
            for group in range(len(masters)):
                self.zero._optimizer_step(group)
        else:
            self.zero.optimizer.step()
        for master, grad in zip(masters, before, strict=True):
            master.grad = grad


def _stepped(groups: list[dict[str, Any]]) -> list[torch.Tensor]:
    return [master for group in groups for master in group["params"]]


def _piece(part: Part, flat: torch.Tensor) -> Piece:
    return Piece(part.shape, part.start, flat.detach()[part.offset : part.offset + part.length])

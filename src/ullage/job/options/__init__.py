"""``engine.options``: every knob that is known, whose it is, and whether an estimate accounts for it.

To change a status, move the name to another row of its table. A name that no table holds is an error.
"""

from __future__ import annotations

from collections.abc import Mapping

from ullage.errors import Contradiction, UnknownKey
from ullage.frozen import FrozenMap
from ullage.job.fields import hint, show
from ullage.job.options import anywhere, deepspeed, megatron, torch_native
from ullage.job.options.spec import Option, Status

__all__ = ["OPTIONS", "Option", "Status", "not_modelled", "read_options"]


# The value at which an option that is not modelled changes nothing, where that is not false: its engine's own default.
_AT_REST: Mapping[str, object] = {
    "allgather_partitions": True,
    "auto_wrap_policy": "Block",
    "autocast_adapter_dtype": True,
    "backward_prefetch": "backward_pre",
    "batch_p2p_comm": True,
    "contiguous_gradients": True,
    "cuda_graph_impl": "none",
    "limit_all_gathers": True,
    "norm_type": "low_precision_layernorm",
    "num_distributed_optimizer_instances": 1,
    "persist_layer_norm": True,
    "ratio": 1.0,
    "reduce_scatter": True,
    "reshard_after_backward": True,
    "use_multi_rank_bucket_allreduce": True,
    "use_torch_fsdp2": True,
    "zero_hpz_partition_size": 1,
}


def _by_name() -> dict[str, tuple[Option, ...]]:
    """A name may stand in several tables (``optimizer`` of one engine, of another): the owners tell which is meant."""
    found: dict[str, tuple[Option, ...]] = {}
    for option in anywhere.OPTIONS + torch_native.OPTIONS + deepspeed.OPTIONS + megatron.OPTIONS:
        found[option.name] = (*found.get(option.name, ()), option)
    return found


OPTIONS: Mapping[str, tuple[Option, ...]] = _by_name()


def find_option(name: str, engine: str, stack: str) -> Option | None:
    """The option called ``name`` of this engine or stack; None where it is not theirs."""
    return next((option for option in OPTIONS.get(name, ()) if option.belongs_to(engine, stack)), None)


def read_options(values: Mapping[str, object], path: str, engine: str, stack: str) -> FrozenMap:
    """The options, checked and in one spelling. UnknownKey for a name nobody knows, Contradiction for another engine's."""
    checked: dict[str, object] = {}
    for name, value in values.items():
        option = find_option(name, engine, stack)
        if option is None:
            raise _stranger(name, value, f"{path}.{show(name)}", engine, stack)
        checked[name] = option.read(value, f"{path}.{name}")
    return FrozenMap(checked)


def not_modelled(options: Mapping[str, object], engine: str, stack: str) -> tuple[str, ...]:
    """The options known to matter that no estimate accounts for, except those left at rest."""
    return tuple(
        name
        for name, value in options.items()
        if value != _AT_REST.get(name, False)
        and (option := find_option(name, engine, stack)) is not None
        and option.status is Status.NOT_MODELLED
    )


def _stranger(name: str, value: object, key: str, engine: str, stack: str) -> UnknownKey | Contradiction:
    if name in OPTIONS:
        owners = " or ".join(option.owners for option in OPTIONS[name])
        return Contradiction(
            f"is an option of {owners}, and this job runs engine {engine} with stack {stack}",
            key=key,
            value=show(value),
            remedy="leave it out, or change engine.name",
        )
    mine = [known for known in OPTIONS if find_option(known, engine, stack)]
    return UnknownKey(
        "is no option that is known",
        key=key,
        value=show(value),
        allowed=f"the options of engine {engine} and stack {stack}",
        remedy=hint(name, mine) or hint(name, OPTIONS),
    )

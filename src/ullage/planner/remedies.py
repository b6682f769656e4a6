"""Where nothing fits: the smallest change of what was asked for that makes something fit, found by planning again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ullage.frozen import FrozenMap, frozen, replace
from ullage.job.write import cluster_to_dict
from ullage.planner.wanted import Base, Wanted, bases, cluster_of, with_keys

MOST_NODES_FACTOR = 64
LEAST_SEQUENCE = 128
_EVERY_NODE = 8
"""Between two doublings so close each number of nodes is tried."""

Fits = Callable[[Wanted, list[Base]], bool]


@frozen
class Remedy:
    """change: dotted job keys with what they would be; None: left out, and so free."""

    what: str
    change: FrozenMap


def remedies(want: Wanted, fits: Fits) -> Iterator[Remedy]:
    """Each kind of change that helps by itself: GPUs, sequence, batch, and each key that the job fixes."""
    yield from _more_gpus(want, fits)
    yield from _shorter(want, fits)
    yield from _freed(want, fits)


def _planned(want: Wanted, change: dict[str, object], fits: Fits) -> bool:
    other = with_keys(want, change)
    found, _ = bases(other)
    return bool(found) and fits(other, found)


def _more_gpus(want: Wanted, fits: Fits) -> Iterator[Remedy]:
    """Doubled until it fits, then as few nodes more as are needed."""
    cluster = cluster_of(want)

    def change(nodes: int) -> dict[str, object]:
        return {"cluster": cluster_to_dict(replace(cluster, nodes=nodes))}

    low, high = cluster.nodes, 2 * cluster.nodes
    while not _planned(want, change(high), fits):
        low, high = high, 2 * high
        if high > MOST_NODES_FACTOR * cluster.nodes:
            return
    for nodes in range(low + 1, high) if high - low <= _EVERY_NODE else ():
        if _planned(want, change(nodes), fits):
            high = nodes
            break
    gpus = high * cluster.gpus_per_node
    what = f"{gpus} GPUs ({high} nodes) in place of {cluster.gpus}"
    yield Remedy(what=what, change=FrozenMap(change(high)))


def _shorter(want: Wanted, fits: Fits) -> Iterator[Remedy]:
    """Halved until it fits, then lengthened again by eighths."""
    found, _ = bases(want)
    whole = found[0].job.data.seq_len if found else 0
    seq_len = whole // 2
    if not _planned(want, {"data.seq_len": LEAST_SEQUENCE}, fits):
        return  # what is too large has nothing to do with the sequence
    while seq_len >= LEAST_SEQUENCE:
        if _planned(want, {"data.seq_len": seq_len}, fits):
            longest = seq_len
            for eighths in range(9, 16):
                longer = seq_len * eighths // 8
                if not _planned(want, {"data.seq_len": longer}, fits):
                    break
                longest = longer
            yield Remedy(
                what=f"sequences of {longest} tokens in place of {whole}", change=FrozenMap({"data.seq_len": longest})
            )
            return
        seq_len //= 2


_FREE = (
    "layout.tp", "layout.pp", "layout.cp", "layout.ep", "layout.dp", "layout.vpp", "data.micro_batch", "engine.zero_stage",
    "engine.name", "recompute", "loss", "offload",
)  # fmt: skip


def _freed(want: Wanted, fits: Fits) -> Iterator[Remedy]:
    for key in _FREE:
        if key in want.written and _planned(want, {key: None}, fits):
            yield Remedy(what=f"{key} left free", change=FrozenMap({key: None}))

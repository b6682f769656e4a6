"""Every collective of a rank's step: who, how often, how many bytes, by which algorithm, how long, and what of it is waited for."""

from __future__ import annotations

from collections.abc import Iterable

from ullage.job.job import Job
from ullage.techniques.exchanges import COLUMNS, PAYLOAD, SECONDS, kind, of, row, wire_bytes
from ullage.techniques.rank import OneRank
from ullage.techniques.told import Column, Part, Shown, unused
from ullage.timing.stage import Stage
from ullage.timing.transfers import Transfer

JOINTLY = "jointly"
NAMES = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "dp": "data parallel",
    "expert_dp": "data parallel, experts",
    "pp": "pipeline",
    "shard": "shards of the parameters",
    "replica": "replicas of the shards",
    "expert_shard": "shards of the experts",
    "expert_replica": "replicas of the experts' shards",
}
_SHARDS = ("shard", "replica", "expert_shard", "expert_replica")


def told(job: Job, index: int | None) -> Shown:
    if job.layout.world == 1:
        raise unused(
            "communication", key="cluster", value="one GPU", remedy="give it more, as in cluster: 8xH100-SXM-80GB"
        )
    one = OneRank(job, index)
    found = one.transfers
    return Shown(
        technique="collectives",
        job=job,
        stage=one.stage,
        parts=(_axes(one.timed, found), _what(found), _seconds(found)),
        notes=(
            PAYLOAD,
            SECONDS,
            "jointly: overlapped with others, so that only their sum is known: of shards in the table of axes, of sends in the bubble.",
            "All axes of shards share one line of waiting.",
            "An exchange that recomputation runs again is waited for in the recomputation.",
        ),
    )


def _axes(stage: Stage, found: Iterable[Transfer]) -> Part:
    """Seconds and bytes by axis; what is waited for is the time's own part."""
    waited = dict(stage.parts.items)
    columns = (
        Column(name="axis", head="axis"),
        Column(name="ranks", head="ranks", unit="count"),
        Column(name="domains", head="domains", unit="count"),
        Column(name="link", head="slowest link"),
        Column(name="wire_bytes", head="wire, a step", unit="bytes", summed=True),
        Column(name="sent_s", head="on the wire", unit="seconds", summed=True),
        Column(name="waited_s", head="waited for", unit="seconds", summed=True),
    )
    rows = []
    axes = list(dict.fromkeys(one.exchange.axis for one in found))
    for axis in axes:
        mine = [one for one in found if one.exchange.axis == axis]
        group, link = mine[0].group, mine[0].cost.link
        wait = _waited(axis, mine, waited.get("shard", 0.0) if axis == _first_shard(axes) else None)
        rows.append(
            (NAMES[axis], group.ranks, group.domains, link, wire_bytes(mine), sum(one.sent_s for one in mine), wait)
        )
    return Part(
        title="By axis",
        about="Domains: of GPUs joined by NVLink or its like, a node as a rule. What is not waited for is hidden behind computing.",
        columns=columns,
        rows=tuple(rows),
    )


def _first_shard(axes: list[str]) -> str | None:
    return next((axis for axis in axes if axis in _SHARDS), None)


def _waited(axis: str, found: Iterable[Transfer], of_shards: float | None) -> float | None:
    """Seconds of a step that the rank waits on an axis; None where it is in another line (shards) or in the bubble (sends)."""
    if axis in _SHARDS:
        return of_shards
    if axis == "pp":
        return None
    return sum(one.count * one.wait_s for one in found if one.wait_s is not None)


def _what(found: Iterable[Transfer]) -> Part:
    return Part(title="Bytes", about="By phase of the step.", columns=COLUMNS, rows=tuple(map(row, found)))


def _behind(one: Transfer) -> str:
    """What runs while it is on the wire."""
    if one.wait_s is None:
        return JOINTLY
    return one.exchange.behind or ("a pass" if one.wait_s < one.cost.seconds else "nothing")


def _seconds(found: Iterable[Transfer]) -> Part:
    columns = (
        Column(name="phase", head="phase"),
        Column(name="of", head="of"),
        Column(name="kind", head="collective"),
        Column(name="algorithm", head="algorithm"),
        Column(name="each_s", head="each", unit="seconds"),
        Column(name="sent_s", head="a step", unit="seconds", summed=True),
        Column(name="behind", head="behind"),
        Column(name="waited_s", head="waited for", unit="seconds", summed=True),
    )
    rows = tuple(
        (
            one.phase,
            of(one),
            kind(one),
            one.cost.algorithm,
            one.cost.seconds,
            one.sent_s,
            _behind(one),
            None if one.wait_s is None else one.count * one.wait_s,
        )
        for one in found
    )
    return Part(
        title="Seconds",
        about="Each by itself, and what of it the rank waits for past what it runs behind.",
        columns=columns,
        rows=rows,
    )

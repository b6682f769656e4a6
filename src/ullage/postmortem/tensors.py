"""Every tensor of a job with its moment and with what is live before it; and those that a job of this model makes elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ullage.engines.base import Account
from ullage.frozen import frozen
from ullage.memory.program import Change, Item, Node, Repeat, Sequence
from ullage.postmortem.causes import Kind

_Key = tuple[Item, str]
_Spans = dict[_Key, tuple[int, int]]


@frozen
class Made:
    """A tensor at one of its moments. low_bytes..high_bytes: what is allocated just before, over all times that it is made;
    in_step: False for one that the modelled run does not make (low and high are then unknown, None); against: the job says that it
    is not made."""

    kind: Kind
    category: str
    what: str
    bytes: int
    moment: str
    shape: tuple[int, ...] = ()
    low_bytes: int | None = None
    high_bytes: int | None = None
    note: str = ""
    against: bool = False

    @property
    def in_step(self) -> bool:
        return self.low_bytes is not None


def made(account: Account, wanted: Callable[[int], bool] = lambda _: True) -> Iterator[Made]:
    """Every allocation of a run: loading, the first step, and a later one; the tensors of an item in pieces one by one.

    wanted: whether tensors of a size are asked for.
    """
    late = set(account.late)
    for (item, moment), (low, high) in _Walk(wanted).of(account.history).items():
        when = moment or ("the first optimizer step" if item in late else "load")
        kind = kind_of(item, when, late=item in late)
        for size in filter(wanted, set(item.pieces) or {item.bytes}):
            yield Made(
                kind=kind,
                category=item.category,
                what=item.what,
                bytes=size,
                moment=when,
                low_bytes=low,
                high_bytes=high,
                note=item.formula,
            )


class _Walk:
    """What is live before each allocation of a program that is asked for, relative to its start: equal parts are looked at once."""

    def __init__(self, wanted: Callable[[int], bool]) -> None:
        self._known: dict[int, _Spans] = {}
        self._wanted = wanted

    def of(self, node: Node) -> _Spans:
        known = self._known.get(id(node))
        if known is None:
            known = self._known[id(node)] = self._looked(node)
        return known

    def _looked(self, node: Node) -> _Spans:
        if isinstance(node, Change):
            if node.count <= 0 or not any(map(self._wanted, node.item.pieces or (node.item.bytes,))):
                return {}
            return {(node.item, ""): (0, max(0, (node.count - 1) * node.item.bytes))}
        if isinstance(node, Repeat):
            drift = max(0, node.times - 1) * node.child.delta_bytes
            spans = self.of(node.child) if node.times else {}
            return {key: (low + min(0, drift), high + max(0, drift)) for key, (low, high) in spans.items()}
        assert isinstance(node, Sequence)
        found: _Spans = {}
        at = 0
        for child in node.children:
            for (item, moment), (low, high) in self.of(child).items():
                key = (item, moment or node.moment or "")
                known = found.get(key, (at + low, at + high))
                found[key] = (min(known[0], at + low), max(known[1], at + high))
            at += child.delta_bytes
        return found


def highest(node: Node, category: str) -> int:
    """The most bytes of one category that a program holds at a time, whatever else it holds then."""
    known: dict[int, tuple[int, int]] = {}

    def fold(node: Node) -> tuple[int, int]:
        if id(node) not in known:
            known[id(node)] = folded(node)
        return known[id(node)]

    def folded(node: Node) -> tuple[int, int]:
        if isinstance(node, Change):
            delta = node.delta_bytes if node.item.category == category else 0
            return delta, max(0, delta)
        if isinstance(node, Repeat):
            delta, peak = fold(node.child)
            return node.times * delta, max(0, node.times - 1) * max(0, delta) + peak if node.times else 0
        assert isinstance(node, Sequence)
        at = most = 0
        for child in node.children:
            delta, peak = fold(child)
            most = max(most, at + peak)
            at += delta
        return at, most

    return fold(node)[1]


_LOGITS = ("logits", "lm_head output", "loss")
_SCORES = (
    "attention.scores",
    "attention scores",
    "attention prob",
    "attention.scaled",
    "attention.masked",
    "attention.probs",
    "softmax",
)


def kind_of(item: Item, moment: str, *, late: bool) -> Kind:
    """The kind of cause that an allocation would be."""
    if any(word in item.what for word in _LOGITS):
        return "logits"
    if any(word in item.what for word in _SCORES):
        return "attention-scores"
    if "mask" in item.what:
        return "padding-mask"
    if late:
        return "optimizer-first-step"
    if ("norm" in moment and "gradient" in moment) or "clip" in moment:
        return "clipping"
    if item.category == "transient" and ("optimizer" in moment or "into fp32" in moment):
        return "optimizer-step"
    if item.category == "transient" and moment == "load":
        return "load"
    if item.category == "communication":
        return "config"
    return "activations" if item.category in ("activations", "transient", "input") else "states"

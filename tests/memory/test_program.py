"""The fold of a program equals its replay, allocation by allocation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ullage.memory.ledger import ledger
from ullage.memory.program import Item, Node, Repeat, Sequence, alloc, events, free, is_closed, locate_peak, net

SIZES = (512, 1024, 1536, 4096)


def item(size: int, name: str = "") -> Item:
    return Item(category="activations", what=name or f"{size} bytes", bytes=size)


ITEMS = [item(size) for size in SIZES]


def balanced(depth: int) -> st.SearchStrategy[Node]:
    """Programs that free nothing they have not allocated: a pair around an inner program, or an allocation that stays."""
    leaf = st.sampled_from(ITEMS).map(alloc)
    if not depth:
        return leaf
    inner = balanced(depth - 1)
    around = st.tuples(st.sampled_from(ITEMS), inner).map(lambda p: Sequence([alloc(p[0]), p[1], free(p[0])]))
    several = st.lists(inner, max_size=4).map(Sequence)
    repeated = st.tuples(st.integers(0, 4), inner).map(lambda p: Repeat(p[0], p[1]))
    return st.one_of(leaf, around, several, repeated)


def replayed(program: Node) -> tuple[int, int]:
    """Peak and final live bytes, event by event."""
    live = peak = 0
    for event in events(program):
        live += event.item.bytes if event.alive else -event.item.bytes
        peak = max(peak, live)
    return peak, live


@given(balanced(4))
def test_the_fold_equals_the_replay(program: Node) -> None:
    assert replayed(program) == (program.peak_bytes, program.delta_bytes)


@given(balanced(4))
def test_what_is_live_at_the_peak_adds_up_to_it(program: Node) -> None:
    peak = locate_peak(program)
    assert peak.bytes == program.peak_bytes
    assert sum(line.bytes for line in ledger(peak)) == program.peak_bytes


@given(balanced(4))
def test_the_net_of_a_program_is_its_delta(program: Node) -> None:
    assert sum(one.bytes * count for one, count in net(program).items()) == program.delta_bytes


@given(balanced(3))
def test_every_handle_is_freed_at_most_once_and_after_its_allocation(program: Node) -> None:
    live: set[int] = set()
    for event in events(program):
        if event.alive:
            assert event.handle not in live
            live.add(event.handle)
        else:
            live.remove(event.handle)


def test_a_growing_repeat_peaks_in_its_last_round_and_a_level_one_in_its_first() -> None:
    small, large = item(512, "kept"), item(4096, "passing")
    growing = Repeat(3, Sequence([alloc(small), alloc(large), free(large)]))
    assert growing.peak_bytes == 3 * 512 + 4096
    assert locate_peak(growing).live[small] == 3
    level = Repeat(3, Sequence([alloc(small), free(small)]))
    assert (level.peak_bytes, level.delta_bytes) == (512, 0)


@given(balanced(3))
def test_a_program_is_closed_where_it_leaves_nothing_and_takes_nothing(program: Node) -> None:
    assert is_closed(program) == (not net(program))
    one = ITEMS[0]
    assert is_closed(Sequence([program, *(free(item, count) for item, count in net(program).items())]))
    assert not is_closed(Sequence([free(one), program, alloc(one)]))


def test_a_shrinking_repeat_peaks_in_its_first_round() -> None:
    kept, passing = item(512, "kept"), item(4096, "passing")
    program = Sequence([alloc(kept, 3), Repeat(3, Sequence([alloc(passing), free(passing), free(kept)]))])
    peak = locate_peak(program)
    assert program.peak_bytes == 3 * 512 + 4096
    assert peak.live[kept] == 3


def test_the_micro_batch_of_a_peak_is_counted_over_what_ran_before_it() -> None:
    kept, large = item(512, "kept"), item(4096, "large")
    forward = Sequence([alloc(kept)], "forward", ("F", 0))
    backward = Sequence([free(kept)], "backward", ("B", 0))
    last = Sequence([alloc(kept), alloc(large), free(large)], "forward", ("F", 0))
    program = Sequence([Repeat(2, forward), backward, last, Repeat(2, backward)])
    peak = locate_peak(program)
    assert (peak.moments[-1], peak.micro_batch) == ("forward", 3)


def test_a_backward_frees_the_allocations_of_its_own_micro_batch() -> None:
    """1F1B: the oldest micro-batch goes first, within it the youngest tensor."""
    kept = item(512, "kept")
    forward = Sequence([alloc(kept), alloc(kept)], "forward", ("F", 0))
    backward = Sequence([free(kept), free(kept)], "backward", ("B", 0))
    freed = [event.handle for event in events(Sequence([forward, forward, backward, backward])) if not event.alive]
    assert freed == [1, 0, 3, 2]

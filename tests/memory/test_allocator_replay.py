"""The fast replay of a whole program answers what the allocator's simulation answers, event by event."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ullage.memory.allocator import FREE_EVENT, CachingAllocator
from ullage.memory.allocator_ops import OWN_PART
from ullage.memory.allocator_replay import Replay
from ullage.memory.program import Item, Node, Repeat, Sequence, alloc, events, free
from ullage.memory.reserved import simulate
from ullage.units import KIB, MIB

SIZES = (0, 512, 3 * KIB, 700 * KIB, MIB, MIB + 512, 2 * MIB, 9 * MIB, 10 * MIB, 21 * MIB)


def item(size: int, stream: int = 0, pieces: tuple[int, ...] = ()) -> Item:
    return Item(category="activations", what=f"{size} bytes", bytes=size, stream=stream, pieces=pieces)


ITEMS = [
    *(item(size) for size in SIZES),
    item(MIB, stream=1),
    item(12 * MIB, stream=1),
    item(13 * MIB, pieces=(9 * MIB, 3 * MIB, MIB)),
]
items = st.sampled_from(ITEMS)


def changes(depth: int) -> st.SearchStrategy[Node]:
    """What one micro-batch does inside: temporaries, nested, one after another or overlapping, and repeats of them."""
    pair = items.map(lambda one: Sequence([alloc(one), free(one)]))
    if not depth:
        return pair
    inner = changes(depth - 1)
    around = st.tuples(items, inner).map(lambda p: Sequence([alloc(p[0]), p[1], free(p[0])]))
    crossing = st.tuples(items, items, inner).map(
        lambda p: Sequence([alloc(p[0]), p[2], alloc(p[1]), free(p[0]), p[2], free(p[1])])
    )
    several = st.lists(inner, max_size=4).map(Sequence)
    repeated = st.tuples(st.integers(0, 3), inner).map(lambda p: Repeat(p[0], p[1]))
    return st.one_of(pair, in_a_row(), around, crossing, several, repeated)


@st.composite
def in_a_row(draw: st.DrawFn) -> Node:
    """Some allocations, then their frees in any order."""
    found = draw(st.lists(items, min_size=2, max_size=5))
    return Sequence([*map(alloc, found), *map(free, draw(st.permutations(found)))])


def layer(parts: list[Node], moment: str) -> Node:
    """Long enough to be compiled by itself, as its pairs of a small allocation and its free cost no memory."""
    small = Sequence([alloc(ITEMS[1]), free(ITEMS[1])])
    return Sequence([*parts, *[small] * (OWN_PART // 2)], moment)


@st.composite
def runs(draw: st.DrawFn) -> Node:
    """Steps of a pipeline's rank: some forwards, forwards and backwards in turn, the backwards that are left; then once more."""
    kept = draw(st.lists(items, max_size=3))
    before, between, after = (draw(changes(2)) for _ in range(3))
    layers = {one: (layer([alloc(one), between], "forward"), layer([between, free(one)], "backward")) for one in kept}
    keep = Sequence([layers[one][0] for one in kept])
    give_up = Sequence([layers[one][1] for one in reversed(kept)])
    forward = Sequence([before, Repeat(draw(st.integers(1, 2)), before), keep], "forward", ("F", 0))
    backward = Sequence([give_up, after], "backward", ("B", 0))
    ahead = draw(st.integers(0, 3))
    in_turn = Repeat(draw(st.integers(1, 7)), Sequence([forward, backward]))
    step = Sequence([Repeat(ahead, forward), in_turn, Repeat(ahead, backward)])
    return Sequence([alloc(draw(items), draw(st.integers(0, 3))), step, alloc(draw(items)), step])


def triples(program: Node) -> list[tuple[int, int, int]]:
    """Events for the allocator, each tensor of an item that has pieces with an id of its own."""
    found = []
    for event in events(program):
        for index, size in enumerate(event.item.pieces or (event.item.bytes,)):
            found.append((event.handle * 100 + index, size if event.alive else FREE_EVENT, event.item.stream))
    return found


@given(runs(), st.one_of(st.none(), st.integers(0, 200)), st.booleans())
@example(Repeat(3, Sequence([alloc(ITEMS[0]), free(ITEMS[0])])), None, False)
def test_the_replay_answers_what_the_allocator_answers(
    program: Node, capacity_mib: int | None, expandable: bool
) -> None:
    capacity_bytes = None if capacity_mib is None else capacity_mib * MIB
    allocator = CachingAllocator(expandable_segments=expandable)
    assert allocator.replay(triples(program)) is None
    if capacity_bytes is not None and allocator.peak_reserved_bytes > capacity_bytes:
        limited = CachingAllocator(capacity_bytes=capacity_bytes, expandable_segments=expandable)
        if limited.replay(triples(program)) is None:
            allocator = limited
    found = simulate(program, expandable_segments=expandable, capacity_bytes=capacity_bytes)
    assert found.allocated_bytes == allocator.peak_allocated_bytes
    assert found.reserved_bytes == allocator.peak_reserved_bytes


@given(runs())
def test_the_replay_ends_as_the_allocator_ends(program: Node) -> None:
    allocator = CachingAllocator()
    allocator.replay(triples(program))
    replay = Replay()
    replay.play(program)
    assert replay.allocated_bytes == allocator.allocated_bytes
    assert replay.reserved_bytes == allocator.reserved_bytes


def test_micro_batches_that_repeat_cost_no_more_than_a_few() -> None:
    activation, temporary = item(21 * MIB), item(9 * MIB)
    forward = Sequence([alloc(temporary), alloc(activation), free(temporary)], "forward", ("F", 0))
    backward = Sequence([alloc(temporary), free(activation), free(temporary)], "backward", ("B", 0))
    endless = Repeat(10**12, Sequence([forward, backward]))
    assert simulate(endless) == simulate(Repeat(3, endless.child))


def cached(*sizes_mib: int) -> list[Node]:
    """Free blocks of these sizes, and beside them, on another stream, a peak that nothing comes near."""
    found = [item(size * MIB) for size in sizes_mib]
    high = item(500 * MIB, stream=1)
    return [alloc(high), free(high), *map(alloc, found), *map(free, found)]


def both(*sizes_mib: int) -> list[Node]:
    found = [item(size * MIB) for size in sizes_mib]
    return [*map(alloc, found), *map(free, found)]


@pytest.mark.parametrize(
    ("free_mib", "asked_mib", "segment_mib"),
    [
        ((60,), (30, 20), 0),  # one block holds both
        ((42,), (30, 20), 20),  # 12 MiB are left of it
        ((42, 22), (30, 20), 0),  # a block for each
        ((42, 22), (20, 30), 0),
        ((42, 22), (30, 12, 11), 0),  # 12 are left of 42, and 22 gives 11
        ((42, 22), (30, 14, 13), 14),  # 12 and 8 are left
        ((22, 22), (30, 12), 30),
    ],
)
def test_what_is_allocated_in_a_row_takes_a_segment_where_the_free_blocks_do_not_hold_it(
    free_mib: tuple[int, ...], asked_mib: tuple[int, ...], segment_mib: int
) -> None:
    """What best fit does with blocks of these sizes, by hand: only the cached blocks and a new segment are on the default stream."""
    program = Sequence([*cached(*free_mib), *both(*asked_mib)])
    assert simulate(program).reserved_bytes == (500 + sum(free_mib) + segment_mib) * MIB


def test_a_new_peak_is_seen_where_the_free_blocks_hold_what_is_allocated() -> None:
    kept, first, second = item(30 * MIB), item(60 * MIB), item(62 * MIB)
    program = Sequence([alloc(first), free(first), alloc(second), free(second), alloc(kept), *both(40, 20)])
    found = simulate(program)
    assert found.reserved_bytes == (60 + 62) * MIB
    assert found.allocated_bytes == (30 + 40 + 20) * MIB


def test_a_full_device_flushes_the_cache() -> None:
    first, second = item(21 * MIB), item(25 * MIB)
    program = Sequence([alloc(first), free(first), alloc(second), free(second)])
    assert simulate(program).reserved_bytes == 48 * MIB
    assert simulate(program, capacity_bytes=30 * MIB).reserved_bytes == 26 * MIB
    assert simulate(program, capacity_bytes=25 * MIB).reserved_bytes == 48 * MIB


def test_a_backward_frees_what_its_own_forward_kept() -> None:
    """The first kept block lies in front of the second: freed first, it leaves a hole too small for the temporary."""
    big, kept, temporary = item(42 * MIB), item(15 * MIB), item(20 * MIB)
    forward = Sequence([alloc(kept)], "forward", ("F", 0))
    backward = Sequence([free(kept), alloc(temporary), free(temporary)], "backward", ("B", 0))
    program = Sequence([alloc(big), free(big), Repeat(2, forward), Repeat(2, backward)])
    assert simulate(program).reserved_bytes == (42 + 20) * MIB

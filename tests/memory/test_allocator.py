"""The caching allocator: sequences worked out by hand from torch's source, and what must hold for any sequence.

By hand: c10/cuda/CUDACachingAllocator.cpp, malloc -> get_free_block -> alloc_block -> should_split, free_block,
release_cached_blocks. Each test says the step that decides it.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.errors import InvalidInput
from ullage.memory.allocator import FREE_EVENT, NULL, CachingAllocator, OutOfMemory
from ullage.memory.allocator_blocks import ALLOCATED, FREE, PENDING, round_bytes, segment_bytes
from ullage.units import MIB

PAGE = 20 * MIB


def blocks(allocator: CachingAllocator) -> list[list[tuple[float, str]]]:
    """Every segment's blocks as (MiB, state)."""
    return [[(size / MIB, state) for size, state in segment.blocks] for segment in allocator.segments()]


@pytest.mark.parametrize(
    ("asked", "divisions", "size"),
    [
        (1, 0, 512),
        (512, 0, 512),
        (513, 0, 1024),
        (1200, 4, 1536),  # at most 512 x divisions: multiples of 512 as ever
        (1200 * MIB, 4, 1280 * MIB),  # 1024, 1280, 1536, 1792, 2048: the source's own example, scaled
        (1024 * MIB, 4, 1024 * MIB),  # a power of two stays
        (1793 * MIB, 4, 2048 * MIB),
    ],
)
def test_rounding(asked: int, divisions: int, size: int) -> None:
    assert round_bytes(asked, divisions) == size


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),  # the largest small request
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),  # from here on a segment of its own
        (10 * MIB + 512, 12 * MIB),
    ],
)
def test_segment_size(size: int, segment: int) -> None:
    assert segment_bytes(size) == segment
    allocator = CachingAllocator()
    allocator.malloc(size)
    assert allocator.reserved_bytes == allocator.peak_reserved_bytes == segment


def test_zero_bytes_hold_nothing() -> None:
    allocator = CachingAllocator()
    assert allocator.malloc(0) == NULL
    allocator.free(NULL)
    assert allocator.segments() == ()


@pytest.mark.parametrize(
    ("asked", "allocated"),
    [
        (19 * MIB, 20 * MIB),  # a 20 MiB segment leaves exactly 1 MiB, which is not more than 1 MiB: handed out whole
        (19 * MIB - 512, 19 * MIB - 512),  # leaves 512 B more: split
        (11 * MIB + 1, 12 * MIB),
        (MIB - 512, MIB - 512),  # the small pool splits for 512 B
        (MIB, MIB),
    ],
)
def test_what_is_too_small_to_split_counts_as_allocated(asked: int, allocated: int) -> None:
    allocator = CachingAllocator()
    handle = allocator.malloc(asked)
    assert allocator.allocated_bytes == allocated
    allocator.free(handle)
    assert allocator.allocated_bytes == 0
    assert allocator.peak_allocated_bytes == allocated


def test_expandable_segments_split_for_512_bytes() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    allocator.malloc(19 * MIB)
    assert allocator.allocated_bytes == 19 * MIB


def test_small_and_large_requests_share_no_segment() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(5 * MIB))
    allocator.malloc(MIB)
    assert blocks(allocator) == [[(20, FREE)], [(1, ALLOCATED), (1, FREE)]]


def test_best_fit_is_the_smallest_block_then_the_lowest_address() -> None:
    """30, 24 and 24 MiB are cached; 16 MiB goes to the first of the 24s and leaves 8."""
    allocator = CachingAllocator()
    handles = [allocator.malloc(size * MIB) for size in (30, 24, 24)]
    for handle in reversed(handles):
        allocator.free(handle)
    assert allocator.malloc(16 * MIB) == handles[1]
    assert blocks(allocator) == [[(30, FREE)], [(16, ALLOCATED), (8, FREE)], [(24, FREE)]]


def test_neighbours_merge_within_a_segment_only() -> None:
    """Four of 5 MiB fill a 20 MiB segment, a fifth opens another. Free order: 2nd, 1st, 4th, 3rd, 5th."""
    allocator = CachingAllocator()
    handles = [allocator.malloc(5 * MIB) for _ in range(5)]
    allocator.free(handles[1])
    allocator.free(handles[0])
    assert blocks(allocator)[0] == [(10, FREE), (5, ALLOCATED), (5, ALLOCATED)]
    allocator.free(handles[3])
    assert blocks(allocator)[0] == [(10, FREE), (5, ALLOCATED), (5, FREE)]
    allocator.free(handles[2])
    allocator.free(handles[4])
    assert blocks(allocator) == [[(20, FREE)], [(20, FREE)]]


def test_a_hole_too_small_for_the_next_request_is_fragmentation() -> None:
    """15 MiB are cached in a 20 MiB segment that a 5 MiB tensor holds: 16 MiB need a segment of their own."""
    allocator = CachingAllocator()
    allocator.malloc(5 * MIB)
    allocator.malloc(16 * MIB)
    assert allocator.reserved_bytes == 36 * MIB
    assert allocator.allocated_bytes == 21 * MIB


def test_streams_share_nothing() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(12 * MIB, stream=0))
    allocator.malloc(12 * MIB, stream=7)
    assert allocator.reserved_bytes == 24 * MIB
    assert [segment.stream for segment in allocator.segments()] == [0, 7]


def test_a_block_used_by_another_stream_waits_for_it() -> None:
    """Freed while stream 7 may still read it: not allocated any more, not free either, until the event has fired."""
    allocator = CachingAllocator()
    handle = allocator.malloc(12 * MIB)
    allocator.record_stream(handle, 0)  # its own stream: ignored
    allocator.record_stream(handle, 7)
    allocator.record_stream(handle, 8)
    allocator.free(handle)
    assert allocator.allocated_bytes == 0
    assert blocks(allocator) == [[(12, PENDING)]]
    allocator.synchronize(7)
    assert (second := allocator.malloc(12 * MIB)) != handle
    allocator.synchronize(8)
    assert allocator.malloc(12 * MIB) == handle
    assert second != handle
    assert allocator.reserved_bytes == 24 * MIB


def test_own_stream_needs_no_waiting() -> None:
    allocator = CachingAllocator()
    handle = allocator.malloc(12 * MIB, stream=3)
    allocator.record_stream(handle, 3)
    allocator.free(handle)
    assert allocator.malloc(12 * MIB, stream=3) == handle


def test_empty_cache_returns_unsplit_segments_only() -> None:
    allocator = CachingAllocator()
    first, second, third = (allocator.malloc(size * MIB) for size in (5, 5, 30))
    waiting = allocator.malloc(40 * MIB)
    allocator.record_stream(waiting, 1)
    for handle in (first, third, waiting):
        allocator.free(handle)
    allocator.empty_cache()  # it waits for stream 1
    assert blocks(allocator) == [[(5, FREE), (5, ALLOCATED), (10, FREE)]]
    allocator.free(second)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


# --- capacity -----------------------------------------------------------------------------------------------------


def test_a_full_device_flushes_the_cache_and_retries() -> None:
    """20 cached + 30 asked > 40: release_cached_blocks, then the second try has room."""
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    allocator.free(allocator.malloc(20 * MIB))
    allocator.malloc(30 * MIB)
    assert allocator.num_alloc_retries == 1
    assert allocator.reserved_bytes == allocator.peak_reserved_bytes == 30 * MIB


def test_out_of_memory_names_the_segment_and_leaves_the_state_usable() -> None:
    """7 MiB ask for a 20 MiB segment; 5 of the 20 reserved are held, so nothing can be flushed."""
    allocator = CachingAllocator(capacity_bytes=30 * MIB)
    held = [allocator.malloc(5 * MIB) for _ in range(3)]
    with pytest.raises(OutOfMemory, match=r"tried to allocate 20\.00 MiB with 15\.00 MiB allocated") as failure:
        allocator.malloc(7 * MIB)
    assert failure.value.tried_bytes == 20 * MIB
    assert failure.value.requested_bytes == 7 * MIB
    assert failure.value.reserved_bytes == 20 * MIB
    assert allocator.num_alloc_retries == 1
    allocator.free(held[1])
    allocator.free(held[2])
    allocator.malloc(7 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_a_memory_fraction_limits_like_a_smaller_device() -> None:
    allocator = CachingAllocator(allowed_bytes=30 * MIB)
    allocator.malloc(20 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(12 * MIB)


def test_oversize_blocks_are_kept_whole() -> None:
    """max_split 32: a cached 64 serves neither 20 (a block >= max_split) nor 40 (64 >= 40 + 20), but 50, whole."""
    allocator = CachingAllocator(max_split_size_bytes=32 * MIB)
    oversize = allocator.malloc(64 * MIB)
    allocator.free(oversize)
    assert allocator.malloc(20 * MIB) != oversize
    assert allocator.malloc(40 * MIB) != oversize
    assert allocator.malloc(50 * MIB) == oversize
    assert allocator.allocated_bytes == (20 + 40 + 64) * MIB


def test_oversize_blocks_go_first_on_a_full_device() -> None:
    """40, 50 and 22 are cached of 112. 34 more do not fit: the smallest oversize block of at least 34 (the 40) goes.

    Then 60 do not fit and no cached block is that large: the largest go, 50 and 34, until they are 60. No flush either time.
    """
    allocator = CachingAllocator(
        max_split_size_bytes=32 * MIB, capacity_bytes=112 * MIB, max_non_split_rounding_bytes=0
    )
    for handle in [allocator.malloc(size * MIB) for size in (40, 50, 21)]:
        allocator.free(handle)
    allocator.free(allocator.malloc(34 * MIB))
    assert [sum(size for size, _ in segment) for segment in blocks(allocator)] == [50, 22, 34]
    assert allocator.num_alloc_retries == 0
    allocator.malloc(60 * MIB)
    assert allocator.num_alloc_retries == 0
    assert [sum(size for size, _ in segment) for segment in blocks(allocator)] == [22, 60]


@pytest.mark.parametrize(
    ("allowed", "left"),
    [
        (150, [30, 40, 46]),  # 90 reserved, 75 is the threshold: the older 20 is enough
        (100, [40, 46]),  # threshold 50: the 20 first (age 2, mean 1.5), then the 30
    ],
)
def test_garbage_collector_releases_what_was_unused_longest(allowed: int, left: list[int]) -> None:
    allocator = CachingAllocator(allowed_bytes=allowed * MIB, garbage_collection_threshold=0.5)
    oldest, older = allocator.malloc(20 * MIB), allocator.malloc(30 * MIB)
    allocator.free(oldest)
    allocator.malloc(40 * MIB)
    allocator.free(older)
    allocator.malloc(45 * MIB)
    assert [sum(size for size, _ in segment) for segment in blocks(allocator)] == left
    assert allocator.num_alloc_retries == 0


# --- expandable segments ------------------------------------------------------------------------------------------


def test_an_expandable_segment_grows_from_its_free_end() -> None:
    """5 MiB map one 20 MiB page; 30 MiB use the 15 free ones and map ceil(15 / 20) = 1 page more."""
    allocator = CachingAllocator(expandable_segments=True)
    first = allocator.malloc(5 * MIB)
    assert allocator.malloc(30 * MIB) == first + 5 * MIB
    assert allocator.reserved_bytes == 40 * MIB
    assert blocks(allocator) == [[(5, ALLOCATED), (30, ALLOCATED), (5, FREE)]]


def test_an_expandable_segment_fills_its_holes_before_it_grows() -> None:
    """A hole of 6 MiB and an open end of 4: 3 MiB go into the hole, though the end is the tighter fit."""
    allocator = CachingAllocator(expandable_segments=True)
    hole, _ = allocator.malloc(6 * MIB), allocator.malloc(10 * MIB)
    allocator.free(hole)
    assert blocks(allocator) == [[(6, FREE), (10, ALLOCATED), (4, FREE)]]
    assert allocator.malloc(3 * MIB) == hole


def test_expandable_segments_return_whole_pages_and_map_the_lowest_first() -> None:
    """25 | 50 | 5 MiB on 4 pages. The 50 cover page 2 alone (from 40 to 60) whole: 20 go back.

    Then 30 fit between 25 and 75 only with that page mapped again: it starts at 25, and nothing is mapped at the end.
    """
    allocator = CachingAllocator(expandable_segments=True)
    first, middle, last = (allocator.malloc(size * MIB) for size in (25, 50, 5))
    assert allocator.reserved_bytes == 80 * MIB
    allocator.free(middle)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 60 * MIB
    assert blocks(allocator) == [[(25, ALLOCATED), (15, FREE)], [(15, FREE), (5, ALLOCATED)]]
    assert allocator.malloc(30 * MIB) == first + 25 * MIB
    assert allocator.reserved_bytes == 80 * MIB
    assert blocks(allocator) == [[(25, ALLOCATED), (30, ALLOCATED), (20, FREE), (5, ALLOCATED)]]
    allocator.free(last)


def test_expandable_out_of_memory_maps_nothing() -> None:
    """One page is left and 30 MiB need two: cuMemCreate fails for the second, the first is undone."""
    allocator = CachingAllocator(expandable_segments=True, capacity_bytes=70 * MIB)
    allocator.malloc(40 * MIB)
    with pytest.raises(OutOfMemory) as failure:
        allocator.malloc(30 * MIB)
    assert failure.value.tried_bytes == 30 * MIB
    assert allocator.reserved_bytes == 40 * MIB
    allocator.malloc(20 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


# --- any sequence -------------------------------------------------------------------------------------------------

SIZES = st.one_of(
    st.integers(0, 4096), st.integers(1, 3 * MIB), st.integers(MIB, 24 * MIB), st.integers(10 * MIB, 80 * MIB)
)
STEPS = st.lists(st.tuples(st.sampled_from(("malloc", "malloc", "free", "share", "flush")), SIZES, st.integers(0, 2)))


@st.composite
def allocators(draw: st.DrawFn) -> CachingAllocator:
    return CachingAllocator(
        capacity_bytes=draw(st.sampled_from((None, 200 * MIB))),
        expandable_segments=draw(st.booleans()),
        max_split_size_bytes=draw(st.sampled_from((None, 30 * MIB))),
        roundup_power2_divisions=draw(st.sampled_from((0, 4))),
        allowed_bytes=draw(st.sampled_from((None, 150 * MIB))),
        garbage_collection_threshold=draw(st.sampled_from((0.0, 0.4))),
    )


def check(allocator: CachingAllocator, live: dict[int, int]) -> None:
    segments = allocator.segments()
    held = {}
    end = 0
    for segment in segments:
        assert segment.address >= end  # no overlap between segments; within one, blocks follow each other
        address = segment.address
        for size, state in segment.blocks:
            assert size > 0
            assert size % 512 == 0
            if state == ALLOCATED:
                held[address] = size
            address += size
        end = address
        states = [state for _, state in segment.blocks]
        assert (FREE, FREE) not in pairwise(states)
    assert held.keys() == live.keys()
    assert all(held[handle] >= asked for handle, asked in live.items())
    assert allocator.allocated_bytes == sum(held.values()) <= allocator.peak_allocated_bytes
    assert allocator.reserved_bytes == sum(segment.size for segment in segments) <= allocator.peak_reserved_bytes
    assert allocator.allocated_bytes <= allocator.reserved_bytes


@given(allocators(), STEPS)
def test_no_byte_is_lost_or_given_twice(allocator: CachingAllocator, steps: list[tuple[str, int, int]]) -> None:
    live: dict[int, int] = {}
    for step, size, stream in steps:
        if step == "malloc" and size:
            with suppress(OutOfMemory):
                live[allocator.malloc(size, stream)] = size
        elif step == "flush":
            allocator.empty_cache()
        elif live:
            handle = sorted(live)[size % len(live)]
            if step == "share":
                allocator.record_stream(handle, stream)
            del live[handle]
            allocator.free(handle)
            allocator.synchronize((stream + 1) % 3)
        check(allocator, live)
    for handle in live:
        allocator.free(handle)
    assert allocator.allocated_bytes == 0
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.segments() == ()


@given(st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 1))))
def test_every_block_is_the_best_fit(steps: list[tuple[bool, int, int]]) -> None:
    """An oracle by search: the smallest free block of the stream and size class, else a new segment above all others."""
    allocator = CachingAllocator()
    live: list[int] = []
    for frees, asked, stream in steps:
        if frees and live:
            allocator.free(live.pop(asked % len(live)))
            continue
        size = round_bytes(asked)
        fits = []
        for segment in allocator.segments():
            address = segment.address
            for block_size, state in segment.blocks:
                same_kind = segment.stream == stream and segment.is_small == (size <= MIB)
                if state == FREE and same_kind and block_size >= size:
                    fits.append((block_size, address))
                address += block_size
        reserved = allocator.reserved_bytes
        handle = allocator.malloc(asked, stream)
        if asked == 0:
            assert handle == NULL
        elif fits:
            assert handle == min(fits)[1]
            assert allocator.reserved_bytes == reserved
        else:
            assert handle == allocator.segments()[-1].address
            assert allocator.reserved_bytes == reserved + segment_bytes(size)
        live.append(handle)


@given(st.lists(st.one_of(st.none(), st.integers(MIB + 1, 90 * MIB))))
def test_an_expandable_segment_under_a_stack_wastes_less_than_a_page(steps: list[int | None]) -> None:
    """Last in, first out: the segment is the stack. Plain segments may need less by less than a page, never by more."""
    expandable, plain = CachingAllocator(expandable_segments=True), CachingAllocator()
    stacks: list[list[int]] = [[], []]
    for size in steps:
        for allocator, stack in zip((expandable, plain), stacks, strict=True):
            if size is not None:
                stack.append(allocator.malloc(size))
            elif stack:
                allocator.free(stack.pop())
    assert expandable.peak_reserved_bytes == -(-expandable.peak_allocated_bytes // PAGE) * PAGE
    assert expandable.peak_reserved_bytes < plain.peak_reserved_bytes + PAGE


# --- replay -------------------------------------------------------------------------------------------------------


def test_replay_is_malloc_and_free_and_remembers_ids_between_calls() -> None:
    allocator = CachingAllocator()
    assert allocator.replay([(1, 12 * MIB, 0), (2, 100, 0), (1, FREE_EVENT, 0)]) is None
    assert allocator.allocated_bytes == 512
    assert allocator.replay([(2, FREE_EVENT, 0)]) is None
    assert allocator.allocated_bytes == 0
    allocator.reset_peaks()
    assert allocator.peak_allocated_bytes == 0
    assert allocator.peak_reserved_bytes == 14 * MIB


def test_replay_stops_at_the_first_failure() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    failure = allocator.replay([(1, 30 * MIB, 0), (2, 12 * MIB, 0), (1, FREE_EVENT, 0)])
    assert failure is not None
    assert failure.tried_bytes == 12 * MIB
    assert allocator.allocated_bytes == 30 * MIB


def test_settings_that_torch_refuses() -> None:
    with pytest.raises(InvalidInput, match="20 MiB"):
        CachingAllocator(max_split_size_bytes=20 * MIB)
    with pytest.raises(InvalidInput, match="power of two"):
        CachingAllocator(roundup_power2_divisions=3)

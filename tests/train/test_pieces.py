"""A flat range of a tensor as blocks: together they are the range, and DCP writes and reads them as parts of the whole."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ullage.train.pieces import Piece, blocks

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_blocks_are_the_range_in_its_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole = torch.arange(size).view(shape)
    found = [*blocks(shape, start, stop)]
    taken = [whole[tuple(slice(at, at + n) for at, n in zip(*one, strict=True))].flatten() for one in found]
    assert torch.equal(torch.cat([*taken, torch.arange(0)]), torch.arange(start, stop))
    assert len(found) <= 2 * len(shape) - 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pieces_are_written_and_read_as_parts_of_the_whole(tmp_path: Path) -> None:
    """What is written in two pieces is read in two others, and what they do not have is left as it was."""
    whole = torch.arange(4.0 * 3 * 5).view(4, 3, 5)
    for number, (start, stop) in enumerate([(0, 22), (22, 60)]):
        folder = tmp_path / str(number)
        piece = Piece((4, 3, 5), start, whole.flatten()[start:stop].clone())
        save({"a": piece.copied()}, storage_writer=FileSystemWriter(folder), no_dist=True)
        assert FileSystemReader(folder).read_metadata().state_dict_metadata["a"].size == whole.shape  # type: ignore[union-attr]
        for begin, end in ((0, 7), (7, 31), (20, 24), (31, 60)):
            flat = torch.full((end - begin,), -1.0)
            load({"a": Piece((4, 3, 5), begin, flat)}, storage_reader=FileSystemReader(folder), no_dist=True)
            there = torch.arange(begin, end)
            assert torch.equal(flat, torch.where((there >= start) & (there < stop), there.float(), -1.0))

"""A flat range of a tensor, in the form that torch.distributed.checkpoint writes and reads.

DeepSpeed cuts tensors anywhere in their flat order; DCP knows of blocks, each with an offset and a size in every dimension. A range is a
few of them: of a matrix the rest of a row, whole rows, and the beginning of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Block = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def blocks(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Block]:
    """Of the elements ``start`` to ``stop`` of a tensor in its flat order, in that order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    rows, inner = shape[1:], prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # the whole rows
    if first > last:  # within one row
        yield from _in_row(last, rows, start - last * inner, stop - last * inner)
        return
    if start < first * inner:
        yield from _in_row(first - 1, rows, start - (first - 1) * inner, inner)
    if first < last:
        yield (first, *(0 for _ in rows)), (last - first, *rows)
    if stop > last * inner:
        yield from _in_row(last, rows, 0, stop - last * inner)


def _in_row(row: int, shape: tuple[int, ...], start: int, stop: int) -> Iterator[Block]:
    return (((row, *offsets), (1, *sizes)) for offsets, sizes in blocks(shape, start, stop))


class Piece(torch.Tensor):
    """flat: the elements of a tensor of ``shape`` from ``start`` on in its flat order, (elements,), as they lie in memory.

    DCP asks for its three methods (torch.distributed._checkpointable); of a tensor it has the size and the type alone.
    """

    start: int
    flat: torch.Tensor
    blocks: dict[tuple[int, ...], tuple[tuple[int, ...], torch.Tensor]]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], start: int, flat: torch.Tensor) -> Piece:
        made: Piece = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=flat.dtype, device=flat.device)
        made.start, made.flat, made.blocks = start, flat, {}
        done = 0
        for offsets, sizes in blocks(shape, start, start + flat.numel()):
            made.blocks[offsets] = sizes, flat[done : done + prod(sizes)].view(sizes)
            done += prod(sizes)
        return made

    def copied(self) -> Piece:
        """In memory of its own, on the CPU."""
        return Piece(tuple(self.shape), self.start, self.flat.detach().to("cpu", copy=True))

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of a part of a tensor")

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=TensorProperties(self.dtype), size=self.shape),
            )
            for offsets, chunk in zip(self.blocks, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, (sizes, _) in self.blocks.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None, "DCP asks for a block"
        return self.blocks[tuple(index.offset)][1]

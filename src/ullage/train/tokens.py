"""Where tokens come from: files of token numbers, or a seed.

A token file is a flat array of token numbers: ``.npy`` of uint16, uint32, int32 or int64, or ``.bin``, little-endian without a head, of
uint16 where the vocabulary has at most 65,536 tokens and of uint32 where it has more. It is mapped, not read. Sequences of seq_len
tokens follow each other without gaps; each epoch has an order of its own, drawn from the seed, so that a step's number says what it sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ullage.errors import InvalidInput

TOKEN_FILES = (".bin", ".npy")
LARGEST_UINT16 = 65536
_TYPES = ("uint16", "uint32", "int32", "int64")


class Tokens(Protocol):
    """Sequences by number, the same on every rank: (seq_len,) int64."""

    def sequence(self, number: int) -> torch.Tensor: ...


class Random:
    """Tokens drawn from the seed and the sequence's number."""

    def __init__(self, vocab: int, seq_len: int, seed: int) -> None:
        self.vocab, self.seq_len, self.seed = vocab, seq_len, seed

    def sequence(self, number: int) -> torch.Tensor:
        drawn = np.random.Generator(np.random.PCG64([self.seed, number])).integers(0, self.vocab, self.seq_len)
        return torch.from_numpy(drawn)


class Packed:
    """Token files, one behind the other, cut into sequences; what is left at a file's end is not used."""

    def __init__(self, paths: Sequence[Path], vocab: int, seq_len: int, seed: int) -> None:
        self.files = [(path, opened(path, vocab)) for path in paths]
        self.vocab, self.seq_len, self.seed = vocab, seq_len, seed
        self.ends = np.cumsum([len(array) // seq_len for _, array in self.files])
        self.count = int(self.ends[-1])
        if not self.count:
            raise too_short(paths, sum(len(array) for _, array in self.files), seq_len)

    def sequence(self, number: int) -> torch.Tensor:
        epoch, place = divmod(number, self.count)
        chosen = int(_order(self.count, self.seed, epoch)[place])
        of = int(np.searchsorted(self.ends, chosen, side="right"))
        start = (chosen - (int(self.ends[of - 1]) if of else 0)) * self.seq_len
        path, array = self.files[of]
        found = torch.from_numpy(array[start : start + self.seq_len].astype(np.int64))
        low, high = int(found.min()), int(found.max())
        if low < 0 or high >= self.vocab:
            raise InvalidInput(
                f"token {low if low < 0 else high} between the tokens {start} and {start + self.seq_len}",
                key="--data",
                value=str(path),
                allowed=f"0 to {self.vocab - 1}, the model's vocabulary",
            )
        return found


@lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> Any:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count)


def too_short(paths: Sequence[Path], count: int, seq_len: int) -> InvalidInput:
    return InvalidInput(
        f"{count} tokens, which make no sequence of data.seq_len = {seq_len}",
        key="--data",
        value=", ".join(map(str, paths))[:200],
        remedy="give it more, or set a smaller data.seq_len",
    )


def type_of_bin(vocab: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocab <= LARGEST_UINT16 else "<u4")


def opened(path: Path, vocab: int) -> Any:
    """A token file as a mapped array; InvalidInput where it is none."""
    try:
        if path.suffix == ".npy":
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            size = path.stat().st_size
            kind = type_of_bin(vocab)
            if size % kind.itemsize:
                raise InvalidInput(f"has {size} bytes, no whole number of {kind.name}", key="--data", value=str(path))
            array = np.memmap(path, dtype=kind, mode="r") if size else np.empty(0, kind)
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or f"it is no {path.suffix} file of numbers"
        raise InvalidInput(f"cannot be read: {reason}", key="--data", value=str(path)) from None
    if array.ndim != 1 or array.dtype.name not in _TYPES:
        shown = f"{' x '.join(map(str, array.shape))} {array.dtype.name}"
        raise InvalidInput(
            f"holds {shown}", key="--data", value=str(path), allowed=f"a flat array of {', '.join(_TYPES)}"
        )
    if not len(array):
        raise InvalidInput("is empty", key="--data", value=str(path))
    return array

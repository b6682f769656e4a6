"""Token files: which sequences come in which order, and what a wrong file is told."""

from pathlib import Path

import numpy as np
import pytest

from ullage.errors import InvalidInput
from ullage.train.tokens import Packed, Random


def written(path: Path, values: object, dtype: str) -> Path:
    array = np.asarray(values, dtype=dtype)
    if path.suffix == ".npy":
        np.save(path, array)
    else:
        array.tofile(path)
    return path


def test_each_sequence_comes_once_in_an_epoch(tmp_path: Path) -> None:
    files = [written(tmp_path / "a.npy", range(10), "int64"), written(tmp_path / "b.bin", range(10, 21), "<u2")]
    tokens = Packed(files, vocab=100, seq_len=4, seed=0)
    epochs = [[tuple(tokens.sequence(n).tolist()) for n in range(start, start + 4)] for start in (0, 4, 8)]
    whole = {(0, 1, 2, 3), (4, 5, 6, 7), (10, 11, 12, 13), (14, 15, 16, 17)}
    assert [set(epoch) for epoch in epochs] == [whole] * 3
    assert len({tuple(epoch) for epoch in epochs}) > 1  # not always in one order


def test_a_large_vocabulary_has_wide_tokens(tmp_path: Path) -> None:
    file = written(tmp_path / "a.bin", [70000, 1, 2, 3], "<u4")
    assert Packed([file], vocab=100_000, seq_len=4, seed=0).sequence(0).tolist() == [70000, 1, 2, 3]


def test_the_seed_draws_the_same_again() -> None:
    one, two, other = (Random(1000, 32, seed).sequence(7) for seed in (1, 1, 2))
    assert one.equal(two)
    assert not one.equal(other)
    assert not one.equal(Random(1000, 32, 1).sequence(8))


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("empty.bin", b"", "is empty"),
        ("odd.bin", b"abc", "no whole number of uint16"),
        ("torn.npy", b"\x93NUMPY\x01", "cannot be read"),
        ("short.bin", b"\0\0\0\0", "short.bin: 2 tokens, which make no sequence of data.seq_len = 4; give it more"),
        ("large.bin", b"\xff\xff" * 8, "token 65535"),
        ("missing.bin", None, "No such file"),
    ],
)
def test_a_wrong_file_is_told(name: str, content: bytes | None, told: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidInput, match=told):
        Packed([path], vocab=100, seq_len=4, seed=0).sequence(0)


def test_a_table_is_no_token_file(tmp_path: Path) -> None:
    for values, dtype in ([[1, 2], [3, 4]], "int64"), ([1.0, 2.0], "float32"):
        with pytest.raises(InvalidInput, match="flat array"):
            Packed([written(tmp_path / "a.npy", values, dtype)], vocab=100, seq_len=2, seed=0)

"""Layers of virtual stages, against what Megatron-Bridge publishes of its layouts."""

from __future__ import annotations

import pytest

from ullage.job.job import Layout
from ullage.memory.rank import layers_per_chunk


@pytest.mark.parametrize(
    ("layers", "split", "vpp", "ends"),
    [
        (61, (16, 16, 16, 13), 4, (4, 1)),  # DeepSeek-V3: embedding + 4 decoders, ..., 1 decoder + MTP + loss
        (61, (7, 8, 8, 8, 8, 8, 8, 6), 4, (1, 0)),  # Et|(tt|)*30mL
        (
            126,
            (15, 16, 16, 16, 16, 16, 16, 15),
            8,
            (1, 1),
        ),  # Llama 3.1 405B: account_for_embedding_in_pipeline_split, account_for_loss
        (32, (8, 8, 8, 8), 2, (4, 4)),
        (34, (9, 8, 8, 9), 8, (1, 2)),  # one more than even: no chunk is left empty for it
    ],
)
def test_what_is_missing_is_missing_at_the_ends(
    layers: int, split: tuple[int, ...], vpp: int, ends: tuple[int, int]
) -> None:
    found = layers_per_chunk(layers, Layout(pp=len(split), vpp=vpp, schedule="interleaved-1f1b", pp_split=split))
    assert (found[0], found[-1]) == ends
    assert sum(found) == layers
    if max(split) == split[1]:
        assert set(found[1:-1]) == {split[1] // vpp}

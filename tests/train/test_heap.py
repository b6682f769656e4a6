"""Freed memory that a process keeps, or gives back: seen in what the system says is resident."""

from __future__ import annotations

import subprocess
import sys

import pytest

_RESIDENT = """
import sys
from ullage.train import heap

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def kept():
    before = resident()
    held = [bytearray(64 << 20) for _ in range(4)]
    del held
    return resident() - before

if sys.argv[1] == "on_ranks":
    from ullage.train.ranks import on_ranks
    print(on_ranks(kept, (), 1))
elif getattr(heap, sys.argv[1])():
    print(kept())
else:
    sys.exit(77)
"""


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("keep_what_is_freed", 250, 300), ("give_back_what_is_freed", -50, 10), ("on_ranks", 250, 300)],
)
def test_what_was_freed(name: str, least: int, most: int) -> None:
    done = subprocess.run([sys.executable, "-c", _RESIDENT, name], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("another C library")
    assert done.returncode == 0, done.stderr
    assert least << 20 <= int(done.stdout) <= most << 20

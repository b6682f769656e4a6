"""Garbage collection and threads, as the tests of this repository need them.

A collection looks at all that is alive: with torch, transformers and the tests themselves loaded that is 600,000 objects and half a
second, and each trace begins with one. What there is once the tests are collected lives as long as the session, so it is looked at once
and then frozen; nothing is garbage while they are collected.

Each test process, and each that it starts, has one thread: two would wait for each other on cores that other tests use.
"""

from __future__ import annotations

import gc
import os

gc.disable()
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()

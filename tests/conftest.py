"""Garbage collection, as the tests of this repository need it.

A collection looks at all that is alive: with torch, transformers and the tests themselves loaded that is 600,000 objects and half a
second, and each trace begins with one. What there is once the tests are collected lives as long as the session, so it is looked at once
and then frozen; nothing is garbage while they are collected.
"""

from __future__ import annotations

import gc

gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()

"""Python's garbage, during a search."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_later() -> Iterator[None]:
    """Without cyclic garbage collection: a search keeps nearly all that it makes, and going through it again and again takes a third of its
    time. At its end all of it is told to be old (frozen and thawed): the next collection, of young objects, does not go through it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.unfreeze()
            gc.enable()

from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"


@pytest.fixture
def data() -> Path:
    """Configurations that people posted; SOURCES.md says where."""
    return DATA

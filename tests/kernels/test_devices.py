"""What differs between CUDA's code and the CPU's stands in one table."""

from pathlib import Path

import ullage.kernels.devices
from ullage.kernels.devices import DIFFERENCES

KERNELS = Path(ullage.kernels.devices.__file__).parent


def test_kernels_ask_the_table_alone() -> None:
    found = [path.name for path in KERNELS.glob("*.py") if "context.device" in path.read_text()]
    assert found == ["devices.py"]


def test_every_row_is_used_and_says_why() -> None:
    code = "".join(path.read_text() for path in KERNELS.glob("*.py") if path.name != "devices.py")
    for name, difference in DIFFERENCES.items():
        assert f'"{name}"' in code, name
        assert all(difference), name

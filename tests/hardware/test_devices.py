"""The device and node files: all load, obey the rules of the catalogue, and hold what was measured."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ullage.errors import InvalidInput, UnknownName
from ullage.hardware import catalogue
from ullage.hardware.store import DATA
from ullage.units import GIB, MIB

DEVICE_FILES = sorted((DATA / "devices").glob("*.toml"))
NODE_FILES = sorted((DATA / "clusters").glob("*.toml"))
ALL_FILES = [*DEVICE_FILES, *NODE_FILES, *sorted(DATA.glob("*.toml"))]
FLOPS_DTYPES = {"fp32", "tf32", "bf16", "fp16", "fp8", "fp4"}


def tables(data: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    for value in data.values():
        if isinstance(value, dict):
            yield value
            yield from tables(value)
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, dict):
                    yield item


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@pytest.mark.parametrize("file", ALL_FILES, ids=lambda file: file.stem)
def test_every_number_has_its_source_and_date(file: Path) -> None:
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    for table in tables(data):
        # A table that holds numbers says where they are from; aliases hold none.
        if any(is_number(value) for value in table.values()):
            assert table.get("source"), table
            if "date" in table or file.parent.name != "data":
                assert str(table["date"]).startswith("20"), table


@pytest.mark.parametrize("file", DEVICE_FILES, ids=lambda file: file.stem)
def test_a_device_file_obeys_the_rules(file: Path) -> None:
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    memory = data["memory"]
    assert data["name"] == file.stem
    assert data["name"].endswith(f"-{memory['label_gb']}GB")
    assert memory["provenance"] in {"measured", "default"}
    assert memory["low_bytes"] <= memory["capacity_bytes"] <= memory["high_bytes"] <= memory["label_gb"] * GIB
    # Less than 85 % of the label was never seen: it would be another card.
    assert memory["capacity_bytes"] > 0.85 * memory["label_gb"] * GIB
    assert set(data.get("flops", {})) <= FLOPS_DTYPES
    assert ("compute_capability" in data) == (data["vendor"] == "nvidia")
    device = catalogue.device(file.stem)
    assert device.name == file.stem
    assert hash(device) == hash(catalogue.device(file.stem))
    if "node" in data:
        assert data["node"] in catalogue.node_types()


@pytest.mark.parametrize("file", NODE_FILES, ids=lambda file: file.stem)
def test_a_node_file_obeys_the_rules(file: Path) -> None:
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    assert data["name"] == file.stem
    node = catalogue.node_type(file.stem)
    assert node.device.name == data["device"]
    assert node.nodes == 1
    inter = data.get("inter")
    if inter:
        shared_bytes_per_s = inter["nics_per_node"] * inter["nic_bits_per_s"] / 8 / data["gpus_per_node"]
        assert inter["bytes_per_s"] == pytest.approx(shared_bytes_per_s)


@pytest.mark.parametrize(
    ("name", "capacity_bytes"),
    [
        ("H100-SXM-80GB", int(79.11 * GIB)),  # NVIDIA-NeMo/Automodel#2673
        ("H100-SXM-96GB", int(95.0396 * GIB)),  # pytorch/torchtitan@83c879f
        ("A100-SXM-80GB", int(79.15 * GIB)),  # hiyouga/LLaMA-Factory#5590
        ("V100-SXM-32GB", int(31.74 * GIB)),  # NVIDIA/Megatron-LM#525
        ("B200-SXM-180GB", 182631 * MIB),  # torch device properties
        ("A10G-24GB", 22587 * MIB),  # torch device properties
        ("RTX-6000-Ada-48GB", 50865307648),  # unslothai/unsloth-zoo#1053
        ("MI300X-192GB", int(191.98 * GIB)),  # ROCm/TransformerEngine#79
    ],
)
def test_capacity_is_what_torch_printed(name: str, capacity_bytes: int) -> None:
    device = catalogue.device(name)
    assert device.capacity_bytes == capacity_bytes
    assert device.provenance == "measured"


@pytest.mark.parametrize(
    ("name", "capability", "bf16", "memory", "link"),
    [
        # stas00/ml-engineering@744d01e compute/accelerator/README.md and network/README.md
        ("H100-SXM-80GB", (9, 0), 989e12, 3.35e12, 450e9),
        ("A100-SXM-80GB", (8, 0), 312e12, 2.039e12, 300e9),
        ("B200-SXM-180GB", (10, 0), 2250e12, 8e12, 900e9),
        ("GB300-288GB", (10, 3), 2500e12, 8e12, 900e9),
        ("H800-SXM-80GB", (9, 0), 989e12, 3.35e12, 200e9),
        ("RTX-4090-24GB", (8, 9), 165.2e12, 1.008e12, None),
        ("V100-SXM-32GB", (7, 0), None, 0.9e12, 150e9),
        ("MI300X-192GB", None, 1307.4e12, 5.3e12, 448e9),
    ],
)
def test_published_facts(
    name: str, capability: tuple[int, int] | None, bf16: float | None, memory: float, link: float | None
) -> None:
    device = catalogue.device(name)
    assert device.compute_capability == capability
    assert dict(device.flops_per_s).get("bf16") == bf16
    assert device.memory_bytes_per_s == memory
    assert device.link_bytes_per_s == link


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("h100 sxm 80gb", "H100-SXM-80GB"),
        ("H100_SXM_80GB", "H100-SXM-80GB"),
        ("H100", "H100-SXM-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("A100-80GB", "A100-SXM-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("Tesla V100-SXM2-32GB", "V100-SXM-32GB"),
        ("4090", "RTX-4090-24GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090-24GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada-48GB"),
        ("B200-SXM-192GB", "B200-SXM-180GB"),
        ("AMD Instinct MI300X", "MI300X-192GB"),
    ],
)
def test_other_spellings(spelling: str, name: str) -> None:
    assert catalogue.device(spelling).name == name


def test_every_alias_names_devices_and_hides_none() -> None:
    names = {name.casefold() for name in catalogue.devices()}
    for spelling, candidates in catalogue.aliases().items():
        assert set(candidates) <= set(catalogue.devices()), spelling
        assert spelling.casefold() not in names, spelling


@pytest.mark.parametrize("spelling", ["A100", "V100", "RTX 6000", "A100-PCIe"])
def test_an_ambiguous_spelling_lists_its_candidates(spelling: str) -> None:
    with pytest.raises(UnknownName) as caught:
        catalogue.device(spelling)
    for candidate in catalogue.aliases()[spelling.replace(" ", "-")]:
        assert candidate in str(caught.value)


def test_an_unknown_device_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean H100-SXM-80GB"):
        catalogue.device("H100-SMX-80GB", "cluster.device")


@pytest.mark.parametrize("name", ["", "  ", "../../etc/passwd", "x" * 100_000, 7, None, ["H100"]])
def test_what_is_no_name_is_refused(name: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        catalogue.device(name)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 1000


def test_a_look_up_opens_the_one_file_it_needs() -> None:
    code = (
        "import sys, ullage.hardware.catalogue as c; opened = []\n"
        "sys.addaudithook(lambda event, args: event == 'open' and str(args[0]).endswith('.toml') and opened.append(1))\n"
        "c.device('h100-sxm-80gb'); print(len(opened))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "1"

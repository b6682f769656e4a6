"""One clear message for each thing that traced code may do and a trace cannot, and nothing done to the world on the way."""

from pathlib import Path

import pytest
import torch
from tests.trace import factories

from ullage.errors import InvalidInput, UllageError, Unsupported
from ullage.job.read import read_job
from ullage.trace.models import build
from ullage.trace.run import factory_named, trace

CASES = {
    "asks": (Unsupported, "step: asks for the value of a tensor"),
    "branches": (Unsupported, "step: asks for the value of a tensor"),
    "selects": (Unsupported, "step: makes a tensor whose shape depends on data"),
    "reads": (InvalidInput, "step: reads a file: open('/etc/hostname')"),
    "writes": (InvalidInput, "factory: writes to the disk: open('must-not-exist.txt')"),
    "saves": (InvalidInput, "factory: writes to the disk: PyTorchFileWriter('must-not-exist.pt')"),
    "saves_safetensors": (InvalidInput, "factory: writes to the disk: serialize_file('must-not-exist.safetensors')"),
    "maps": (InvalidInput, "factory: writes to the disk: from_file('must-not-exist.bin')"),
    "makes_a_folder": (InvalidInput, "factory: changes files: os.mkdir('must-not-exist')"),
    "connects_to_a_database": (InvalidInput, "factory: changes files: sqlite3.connect('must-not-exist.db')"),
    "connects": (InvalidInput, "factory: uses the network"),
    "spawns": (InvalidInput, "factory: starts a process"),
    "raises": (InvalidInput, "factory: raises ValueError: no such thing"),
    "leaves": (InvalidInput, "factory: raises SystemExit: 3"),
    "returns_a_number": (InvalidInput, "factory: returned an int"),
    "returns_no_model": (InvalidInput, "factory: returned an int as the model"),
    "has_no_fake_kernel": (Unsupported, "step: runs an op that has no fake kernel"),
}


@pytest.mark.parametrize("name", CASES)
def test_message(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kind, words = CASES[name]
    with pytest.raises(UllageError) as caught:
        trace(getattr(factories, name))
    assert type(caught.value) is kind
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
    if name not in ("returns_a_number", "returns_no_model"):
        assert "factories.py, line " in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_saving_to_memory_is_no_write() -> None:
    assert trace(factories.saves_to_memory).steady.bytes == trace(factories.mlp).steady.bytes


def test_every_door_is_open_again(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        trace(factories.saves)
    torch.save({"size": 4}, tmp_path / "saved.pt")
    assert torch.load(tmp_path / "saved.pt") == {"size": 4}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch knows cuda")
def test_another_device_than_torch_was_built_for() -> None:
    with pytest.raises(Unsupported, match="built without cuda"):
        trace(factories.asks_for_cuda)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nothing", "names no factory"),
        ("module:", "names no factory"),
        ("no_such_module_here:f", "there is no such module"),
        ("no/such/file.py:f", "there is no such file"),
        ("json:no_such", "json has no no_such"),
    ],
)
def test_factory_that_is_not_there(spec: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        factory_named(spec)


def test_file_that_does_not_import(tmp_path: Path) -> None:
    path = tmp_path / "broken_factory.py"
    path.write_text("import torch\n\nraise RuntimeError('at import')\n")
    with pytest.raises(InvalidInput, match=r"import: raises RuntimeError: at import .*broken_factory.py, line 3"):
        factory_named(f"{path}:f")


def test_rank_outside_of_the_world() -> None:
    with pytest.raises(InvalidInput, match="0 to 1"):
        trace(factories.mlp, rank=2, world=2)


def test_the_text_part_of_a_multimodal_model_is_no_model_of_its_own() -> None:
    text = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    }
    model = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}, **text}
    job = read_job({"schema": 1, "model": model, "cluster": "1xH100-SXM-80GB", "engine": {"name": "single"}})
    with pytest.raises(Unsupported, match=r"text part of a multimodal model, .*; write a factory"):
        build(job)

"""A pickle is read as data or refused: nothing in it runs, and a small one cannot cost much."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.errors import InvalidInput
from ullage.postmortem import snapshot_pickle
from ullage.postmortem.snapshot import read_snapshot, summarise
from ullage.postmortem.snapshot_pickle import loads

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(-(1 << 59), 1 << 59), inner)
    ),
    max_leaves=40,
)


@given(PLAIN, st.sampled_from([3, 4, 5]))
def test_plain_containers_are_read_as_python_reads_them(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol=protocol)
    found = loads(data)
    assert found == value
    assert repr(found) == repr(value)  # True is not 1, a tuple no list


def test_one_object_named_twice_is_one_object() -> None:
    frame = {"name": "forward"}
    found = loads(pickle.dumps([[frame], [frame], "x" * 300, "x" * 300]))
    assert isinstance(found, list)
    assert found[0][0] is found[1][0]


def test_long_containers_and_many_references() -> None:
    many = [f"text {number}" for number in range(5000)]
    value = {
        "a": list(range(70_000)),
        "b": {str(number): number for number in range(3000)},
        "c": many,
        "d": many[::-1] * 3,
    }
    for protocol in (2, 3, 4, 5):
        assert loads(pickle.dumps(value, protocol=protocol)) == value


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


def attacks(marker: Path) -> dict[str, bytes]:
    command = f"touch {marker}"
    text = command.encode()
    return {
        "reduce": pickle.dumps({"segments": [Evil(command)]}),
        "reduce-2": pickle.dumps(Evil(command), protocol=2),
        "global": b"\x80\x02cos\nsystem\n(X" + struct.pack("<I", len(text)) + text + b"tR.",
        "stack-global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c" + bytes([len(text)]) + text + b"\x85R.",
        "inst": b"\x80\x02(X" + struct.pack("<I", len(text)) + text + b"ios\nsystem\n.",
        "obj": b"\x80\x02(cos\nsystem\nX" + struct.pack("<I", len(text)) + text + b"o.",
        "newobj": b"\x80\x02cbuiltins\nint\n)\x81.",
        "build": b"\x80\x02}}b.",
        "persistent": b"\x80\x02X\x01\x00\x00\x00aQ.",
        "extension": b"\x80\x02\x82\x01.",
        "set": pickle.dumps({1, 2}),
        "bytearray": pickle.dumps(bytearray(3), protocol=5),
        "buffer": b"\x80\x05\x97.",
        "reduce-of-a-text": b"\x80\x04\x8c\x01a)R.",
    }


@pytest.mark.parametrize("name", attacks(Path("x")))
def test_what_could_run_is_refused_and_does_not_run(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(attacks(marker)[name])
    with pytest.raises(
        InvalidInput, match="more than plain containers; refused, and nothing was run; allowed: "
    ) as caught:
        read_snapshot(file)
    assert not marker.exists()
    assert "opcode" in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(attacks(tmp_path / "ran")["global"])
    done = subprocess.run(
        [sys.executable, "-m", "ullage", "timeline", "--snapshot", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "opcode GLOBAL" in done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no pickle"),
        (b"\x80", "no pickle"),
        (b"PK\x03\x04 a zip file, as torch.save writes", "no pickle"),
        (b"(lp0\n.", "no pickle"),  # protocol 0
        (b"\x80\x09N.", "unknown pickle protocol"),
        (b"\x80\x04", "ends in the middle"),
        (b"\x80\x04N", "ends in the middle"),
        (b"\x80\x04.", "containers open"),
        (b"\x80\x04NN.", "containers open"),
        (b"\x80\x04(N.", "containers open"),
        (b"\x80\x04e.", "ends in the middle"),
        (b"\x80\x04a.", "ends in the middle"),
        (b"\x80\x04]a.", "ends in the middle"),
        (b"\x80\x04]](a.", "ends in the middle"),  # takes what lies below a mark
        (b"\x80\x04\x94.", "ends in the middle"),
        (b"\x80\x04h\x05.", "refers to what it never said"),
        (b"\x80\x04j\xff\xff\xff\xff.", "refers to what it never said"),
        (b"\x80\x04j\xff\xff", "ends in the middle"),
        (b"\x80\x04K", "ends in the middle"),
        (b"\x80\x04NNa.", "appends to what is no list"),
        (b"\x80\x04NNNs.", "what is no dict"),
        (b"\x80\x04}(Nu.", "what is no dict"),
        (b"\x80\x04}NNs.", "neither str nor int"),
        (b"\x80\x04})Ns.", "neither str nor int"),
        (b"\x80\x04}\x88Ns.", "neither str nor int"),
        (b"\x80\x04\x8c\xffabc", "ends in the middle"),
        (b"\x80\x04X\xff\xff\xff\xffabc.", "ends in the middle"),
        (b"\x80\x04\x8d" + b"\xff" * 8 + b".", "ends in the middle"),
        (b"\x80\x04\x8e" + b"\xff" * 8 + b".", "ends in the middle"),
        (b"\x80\x04\x8b\xff\xff\xff\x7f.", "ends in the middle"),
        (b"\x80\x04\x8b\x00\x01\x00\x00" + b"\x01" * 256 + b".", "beyond 64 bits"),
        (b"\x80\x04\xff.", "opcode 0xff"),
        (b"\x80\x04" + b"(" * 100, "nested too deep"),
        (b"\x80\x04" + b"N" * 100_000, "too many values at once"),
        (b"\x80\x04K" + b"\x01K" * 100_000, "too many values at once"),
    ],
)
def test_bad_files_are_named(data: bytes, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        loads(data)


def test_every_truncation_is_refused() -> None:
    data = pickle.dumps({"segments": [{"address": 1 << 40, "blocks": [{"size": 512, "frames": [("a", 1.5)]}] * 3}]})
    for length in range(len(data)):
        with pytest.raises(InvalidInput):
            loads(data[:length])


@given(st.binary(max_size=60))
def test_noise_is_refused_or_read_and_never_fails_otherwise(noise: bytes) -> None:
    with suppress(InvalidInput):
        loads(b"\x80\x04" + noise)


@given(st.binary(min_size=1, max_size=4), st.integers(0, 400))
def test_a_damaged_snapshot_is_refused_or_read(damage: bytes, at: int) -> None:
    data = bytearray(pickle.dumps(small_snapshot()))
    data[at % len(data) : at % len(data) + len(damage)] = damage
    try:
        found = loads(bytes(data))
        if isinstance(found, dict):
            summarise(found)
    except InvalidInput:
        pass


def small_snapshot() -> dict[str, Any]:
    frames = [{"filename": "model.py", "line": 3, "name": "forward"}]
    blocks = [
        {"size": 512, "requested_size": 500, "state": "active_allocated", "frames": frames},
        {"size": 1536, "requested_size": 0, "state": "inactive", "frames": []},
    ]
    segment = {"device": 0, "address": 4096, "total_size": 2048, "stream": 0, "segment_type": "small", "blocks": blocks}
    event = {"action": "alloc", "addr": 4096, "size": 500, "stream": 0, "frames": frames}
    return {"segments": [segment], "device_traces": [[event]]}


# -- small files that would cost much


def test_a_container_nested_deep_by_references_is_harmless() -> None:
    """A million lists, each in the next: no recursion, neither to read nor to forget. As a key it would be hashed, so it is refused."""
    deep = b"\x80\x04)" + b"\x85" * 1_000_000
    assert loads(deep + b".") is not None
    with pytest.raises(InvalidInput, match="neither str nor int"):
        loads(b"\x80\x04}" + deep[2:] + b"Ns.")


def test_a_bomb_of_references_is_counted_where_it_is_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand times one segment of ten thousand times one block of ten thousand times one frame: 10^12 in a small file."""
    frame = {"filename": "x.py", "line": 1, "name": "f"}
    block = {"size": 512, "requested_size": 512, "state": "active_allocated", "frames": [frame] * 10_000}
    segment = {"device": 0, "address": 0, "total_size": 512 * 10_000, "stream": 0, "blocks": [block] * 10_000}
    file = tmp_path / "bomb.pickle"
    file.write_bytes(pickle.dumps({"segments": [segment] * 10_000, "device_traces": []}))
    assert file.stat().st_size < 200_000
    monkeypatch.setattr("ullage.postmortem.snapshot.MOST_VISITED", 100_000)
    start = time.perf_counter()
    with pytest.raises(InvalidInput, match="names too many objects"):
        summarise(read_snapshot(file))
    assert time.perf_counter() - start < 10


def test_lists_of_lists_by_reference_stay_small() -> None:
    """Billion laughs: 60 lists, each ten times the one before. Read as 60 lists, and no snapshot."""
    value: list[Any] = []
    for _ in range(60):
        value = [value] * 10
    found = loads(pickle.dumps(value))
    assert isinstance(found, list)
    assert len(found) == 10


def test_containers_and_references_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_pickle, "MOST_CONTAINERS", 1000)
    with pytest.raises(InvalidInput, match="too many containers"):
        loads(b"\x80\x04" + b"](" * 30 + (b"]" * 900 + b"e") * 30)
    monkeypatch.setattr(snapshot_pickle, "MOST_MEMO", 1000)
    with pytest.raises(InvalidInput, match="remembers too many"):
        loads(b"\x80\x04N" + b"\x94" * 10_000)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "large"
    file.write_bytes(b"\x80\x04N.")
    monkeypatch.setattr("ullage.postmortem.snapshot.LARGEST_FILE_BYTES", 3)
    with pytest.raises(InvalidInput, match="is too large to read; allowed: at most 3 B; record fewer events"):
        read_snapshot(file)


def test_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InvalidInput, match="cannot be read"):
            read_snapshot(path)

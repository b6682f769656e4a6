"""The command as a whole."""

import gc
import sys

import pytest

from ullage.cli.main import main


def test_garbage_is_not_looked_for_when_the_process_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only of the process's own command: who calls ``main`` goes on."""
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    assert main(["--version"]) == 0
    assert frozen == []
    monkeypatch.setattr(sys, "argv", ["ullage", "--version"])
    assert main() == 0
    assert frozen == [True]
    assert capsys.readouterr().out.count("ullage") == 2

"""The examples in the documents are run, so that a reader who copies one gets what it says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import ullage

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
JOB_FILES = sorted([*(ROOT / "examples").glob("*.yaml"), *(ROOT / "benchmarks").glob("*.yaml")])
ANSWERED = (0, 1, 3)  # fits, oom, tight


def blocks(language: str) -> list:
    """Each fenced block of ``language`` in the documents, as a parameter named after its place."""
    return [
        pytest.param(match[1], id=f"{document.name}-{number}")
        for document in DOCUMENTS
        for number, match in enumerate(re.finditer(rf"^```{language}\n(.*?)^```", document.read_text(), re.M | re.S))
    ]


def commands() -> list:
    """Each ``ullage ...`` line of a shell block, without its comment."""
    return [
        pytest.param(shlex.split(line, comments=True), id=line.partition("#")[0].strip())
        for block in blocks("sh")
        for line in block.values[0].splitlines()
        if line.startswith("ullage ")
    ]


@pytest.mark.parametrize("code", blocks("python"))
def test_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", commands())
def test_command(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert done.returncode in ANSWERED, done.stderr
    assert done.stdout, done.stderr  # a traceback's status is 1 too


@pytest.mark.parametrize("text", [block for block in blocks("yaml") if "schema: 1" in block.values[0]])
def test_job_in_a_document(text: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert ullage.read_job(path).layout.world > 0


@pytest.mark.parametrize("path", JOB_FILES, ids=lambda path: path.name)
def test_job_file(path: Path) -> None:
    assert ullage.estimate(ullage.read_job(path)).peak.allocated_bytes > 0

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
JOB_FILES = [
    path
    for folder in ("examples", "benchmarks")
    for path in sorted((ROOT / folder).glob("*.yaml"))
    if "\nmodel:" in path.read_text()  # the others go with a traced module
]
ANSWERED = (0, 1, 3)  # fits, oom, tight


def blocks(language: str) -> list:
    """Each fenced block of ``language`` in the documents, as a parameter named after its place."""
    return [
        pytest.param(match[1], id=f"{document.name}-{number}")
        for document in DOCUMENTS
        for number, match in enumerate(re.finditer(rf"^```{language}\n(.*?)^```", document.read_text(), re.M | re.S))
    ]


def commands(block: str) -> list[list[str]]:
    """Each ``ullage ...`` line of a shell block, without its comment."""
    return [shlex.split(line, comments=True) for line in block.splitlines() if line.startswith("ullage ")]


@pytest.mark.parametrize("code", blocks("python"))
def test_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", [block for block in blocks("sh") if commands(block.values[0])])
def test_commands(block: str, tmp_path: Path) -> None:
    """In order and in one folder: a later command reads what an earlier one wrote."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command in commands(block):
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
        assert done.returncode in ANSWERED, (command, done.stderr)
        assert done.stdout, (command, done.stderr)  # a traceback's status is 1 too


@pytest.mark.parametrize("text", [block for block in blocks("yaml") if "schema: 1" in block.values[0]])
def test_job_in_a_document(text: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert ullage.read_job(path).layout.world > 0


@pytest.mark.parametrize("path", JOB_FILES, ids=lambda path: path.name)
def test_job_file(path: Path) -> None:
    assert ullage.estimate(ullage.read_job(path)).peak.allocated_bytes > 0

"""What holds for the tree as a whole. The layers themselves are import-linter's contracts, in pyproject.toml."""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import ullage
from ullage import errors

ROOT = Path(__file__).parents[2]
JOB_FILE = ROOT / "examples" / "llama-3.1-8b-fsdp2.yaml"

# What `from ullage import ...` offers. A name added or taken away is a decision: make it here too.
PUBLIC_NAMES = {
    "Check",
    "Conversion",
    "Contradiction",
    "Estimate",
    "Infeasible",
    "InvalidInput",
    "Job",
    "Measured",
    "ModelFacts",
    "OutOfMemory",
    "Planned",
    "Proof",
    "Settings",
    "Shown",
    "Step",
    "Trained",
    "Training",
    "UllageError",
    "UnknownKey",
    "UnknownName",
    "Unsupported",
    "Validation",
    "Why",
    "as_dict",
    "bench",
    "check",
    "convert",
    "devices",
    "estimate",
    "measure",
    "models",
    "plan",
    "prove",
    "read_job",
    "show",
    "validate",
    "watch",
    "why",
}

# The terminal library is the command's, not the API's; numpy would cost more than an estimate.
MAY_BE_LOADED = {"ullage", "yaml", "_yaml"}

LIST_WHAT_AN_ESTIMATE_LOADS = """
import json, sys
before = set(sys.modules)
import ullage.api
ullage.api.estimate(ullage.api.read_job(sys.argv[1]))
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps(sorted(loaded - set(sys.stdlib_module_names))))
"""


def test_an_estimate_loads_the_standard_library_and_a_yaml_reader() -> None:
    command = [sys.executable, "-c", LIST_WHAT_AN_ESTIMATE_LOADS, str(JOB_FILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    assert "ullage" in loaded
    assert {name for name in loaded if "cython" not in name} <= MAY_BE_LOADED  # the YAML reader's own runtime


def test_public_names() -> None:
    assert len(ullage.__all__) == len(set(ullage.__all__))
    assert set(ullage.__all__) == PUBLIC_NAMES
    for name in ullage.__all__:
        assert getattr(ullage, name) is not None


def test_every_error_is_public() -> None:
    ours = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert ours <= set(ullage.__all__)


def test_every_public_name_says_what_it_is() -> None:
    for name in ullage.__all__:
        value = getattr(ullage, name)
        if not (isinstance(value, type) and issubclass(value, Exception)):  # errors.py draws them as a tree
            assert value.__doc__, f"{name} has no docstring"


def test_the_command_and_the_package_have_one_version() -> None:
    assert ullage.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_importing_ullage_loads_nothing_of_it() -> None:
    code = "import sys, ullage; print(sorted(name for name in sys.modules if name.startswith('ullage')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['ullage']"


def test_json_is_answered_without_the_terminal_library() -> None:
    code = (
        "import sys; from ullage.cli.main import main; main(['estimate', sys.argv[1], '--json']); "
        "sys.exit('rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(JOB_FILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_units_are_converted_in_one_place() -> None:
    """1024 and 10^9 stand in units.py alone: GB that means GiB is this field's oldest mistake."""
    powers = {1024, 1024**2, 1024**3, 10**9}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        if path.name != "units.py"
        for node in ast.walk(_without_cache_sizes(ast.parse(path.read_text())))
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value in powers
    ]
    assert not found, "use ullage.units"


def _without_cache_sizes(tree: ast.AST) -> ast.AST:
    """``lru_cache(maxsize=1024)`` is a number of entries."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "maxsize"]
    return tree


def test_the_core_depends_on_a_yaml_reader_and_a_terminal_library() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [requirement.partition(">")[0] for requirement in project["dependencies"]] == ["pyyaml", "rich"]

"""The closed form of a block is the trace of it, to the byte. Red: a release changed what a block keeps, and the message says where."""

import pytest

from ullage.trace.compare import Case, main, rows, unlike

CASES = [
    Case("llama", "bf16", "sdpa", "none"),
    Case("llama", "autocast", "eager", "full"),
    Case("qwen2", "fp32", "sdpa", "none"),
    Case("qwen3", "bf16", "eager", "none"),
    Case("mistral", "autocast", "sdpa", "none"),
    Case("gpt2", "bf16", "sdpa", "full"),
    Case("gpt_neox", "fp32", "eager", "none"),
    Case("phi3", "bf16", "sdpa", "none"),
    Case("gemma2", "bf16", "eager", "none"),
    Case("mixtral", "bf16", "sdpa", "none"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_closed_form_is_the_trace(case: Case) -> None:
    found = rows(case)
    assert found
    if not all(row.equal for row in found):
        gaps = [f"{row.block}: {row.closed} against {row.traced} {row.why}" for row in found if not row.equal]
        pytest.fail("\n".join([*gaps, *unlike(case)]))


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--family", "none"]) == 0
    assert capsys.readouterr().out.startswith("| family |")

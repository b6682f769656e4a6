"""What a compiled chunk of head and cross entropy takes: its 16-bit logits once, forward and backward."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

TOKENS, HIDDEN, VOCAB = 512, 256, 32000


def _loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, weight).float(), labels)


def _chunk(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    grad, loss = torch.func.grad_and_value(_loss)(hidden, weight, labels)
    into[:] = grad
    return loss


def _peak(run: object, *tensors: torch.Tensor) -> float:
    """In tensors of 16-bit logits."""
    assert callable(run)
    run(*tensors)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run(*tensors)
    live = highest = 0
    for event in found.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            highest = max(highest, live)
    return highest / (2 * TOKENS * VOCAB)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of inductor's own imports
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_the_gradient_of_the_logits_is_written_over_them() -> None:
    """Seven such tensors eager (three of them in fp32), one compiled."""
    hidden, into = (torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16)
    labels = torch.randint(0, VOCAB, (TOKENS,))
    assert _peak(_chunk, hidden, weight, labels, into) == pytest.approx(7, abs=0.1)
    compiled = torch.compile(_chunk, dynamic=True, fullgraph=True)
    assert _peak(compiled, hidden, weight, labels, into) == pytest.approx(1, abs=0.1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_the_backward_of_a_compiled_loss_makes_the_gradient_and_nothing_else() -> None:
    """Its scatter into zeros is no tensor (_inductor/fx_passes: scatter_upon_const_tensor)."""
    compiled = torch.compile(
        lambda logits, labels: torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
    )
    logits = torch.randn(TOKENS, VOCAB, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, VOCAB, (TOKENS,))

    def forward_and_backward() -> None:
        logits.grad = None
        compiled(logits, labels).backward()

    assert _peak(forward_and_backward) == pytest.approx(1, abs=0.1)

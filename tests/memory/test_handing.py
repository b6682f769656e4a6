"""What crosses blocks beside the stream goes with the last block that needs it, and is freed once."""

import itertools
from dataclasses import replace

import pytest

from ullage.kernels.step import Buffer, Crossing, Segment, Step
from ullage.memory.block import BlockProgram, BlockSteps, GradRule, boundary, carried, carried_grad
from ullage.memory.block_replay import BlockReplay
from ullage.memory.handing import Crossings, handed
from ullage.memory.program import net

K = 1024
LENT, BORROWED = Crossing("to 0", 0, 4 * K), Crossing("from 0", 0, 4 * K)
SENT, RECEIVED = Crossing("back to 0", 0, 4 * K), Crossing("back from 0", 0, 4 * K)

MAKER = Step(
    name="make", reads=("x",), writes=(Buffer("to 0", 4 * K), Buffer("y", K)), lends=(LENT,), receives=(RECEIVED,)
)
SAVER = Step(
    name="use", reads=("x", "from 0"), no_grad=("from 0",), saves=("from 0",), writes=(Buffer("y", K),), borrows=(BORROWED,), sends=(SENT,)
)  # fmt: skip
ADDER = Step(name="add", reads=("x", "from 0"), no_grad=("from 0",), writes=(Buffer("y", K),), borrows=(BORROWED,))


def crossings(step: Step) -> Crossings:
    return Crossings(
        borrows=step.borrows,
        lends=step.lends,
        sends=step.sends,
        receives=step.receives,
        read=frozenset(step.reads),
        saved=frozenset(step.saves),
    )


def owners(*steps: tuple[Step, bool]) -> list[frozenset[str]]:
    return handed([(crossings(step), recomputes) for step, recomputes in steps])


def test_the_first_block_whose_backward_needs_it_frees_it() -> None:
    assert "from 0" in owners((MAKER, False), (ADDER, False), (SAVER, False), (SAVER, False))[2]


def test_a_checkpoint_needs_all_that_it_reads() -> None:
    worker = replace(ADDER, saves=("x",))
    assert "from 0" in owners((MAKER, True), (worker, True), (SAVER, True))[1]


def test_a_checkpoint_that_saves_nothing_is_not_run_again() -> None:
    assert "from 0" in owners((MAKER, True), (ADDER, True), (SAVER, True))[2]
    assert not net(replay(ADDER, True, frozenset()).forward)  # its output came, its input went
    assert net(replay(replace(ADDER, saves=("x",)), True, frozenset()).forward) == {boundary(K): 1}


def test_what_no_backward_needs_goes_with_its_last_reader() -> None:
    assert owners((MAKER, False), (ADDER, False), (ADDER, False)) == [{"to 0"}, set(), {"from 0"}]


def test_what_another_chunk_makes_is_not_freed_here() -> None:
    assert owners((SAVER, False), (ADDER, True)) == [set(), set()]


def replay(step: Step, recomputes: bool, names: frozenset[str]) -> BlockProgram:
    segments = (Segment(start=0, stop=1, early_stop=True),) if recomputes else ()
    block = BlockSteps(steps=(step,), input="x", input_bytes=K, output="y", segments=segments, handed=names)
    return BlockReplay(block, grad_rule=GradRule()).run()


@pytest.mark.parametrize("recomputes", list(itertools.product((False, True), repeat=3)))
def test_it_is_made_once_and_freed_once(recomputes: tuple[bool, bool, bool]) -> None:
    steps = [*zip((MAKER, ADDER, SAVER), recomputes, strict=True)]
    programs = [replay(*one, names) for one, names in zip(steps, owners(*steps), strict=True)]
    tensor, gradient = carried(4 * K, 0, "tensor that skips blocks"), carried_grad(4 * K, 0)
    live = 0
    for program in programs:
        live += net(program.forward).get(tensor, 0)
        assert live == 1
    assert [net(program.backward).get(gradient, 0) for program in programs] == [-1, 0, 1]
    assert sum(net(program.backward).get(tensor, 0) for program in programs) == -1

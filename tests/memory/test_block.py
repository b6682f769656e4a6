"""The replay of a block: autograd's rules, one at a time, and together under every way of recomputing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.kernels.step import Buffer, Fit, Segment, Step, WeightGrad
from ullage.memory.block import BlockProgram, BlockSteps, GradRule, boundary, boundary_grad
from ullage.memory.block_replay import BlockReplay
from ullage.memory.program import Sequence, alloc, events, free, net

K = 1024


def made(name: str, size_kib: int = 4) -> Buffer:
    return Buffer(name, size_kib * K)


MLP = (
    Step(name="norm", reads=("x",), writes=(made("h"),), saves=("x",)),
    Step(name="fc1", reads=("h",), writes=(made("u", 16),), saves=("h",), weights=(WeightGrad("w1", 512, "bf16"),)),
    Step(name="act", reads=("u",), writes=(made("a", 16),), saves=("u",)),
    Step(name="fc2", reads=("a",), writes=(made("o"),), saves=("a",), weights=(WeightGrad("w2", 512, "bf16"),)),
    Step(name="add", reads=("x", "o"), writes=(made("y"),), passes=("x", "o")),
)


def replay(steps: tuple[Step, ...] = MLP, rule: GradRule = GradRule(mode="fused"), **how: object) -> BlockProgram:
    block = BlockSteps(steps=steps, input="x", input_bytes=4 * K, output="y", **how)  # type: ignore[arg-type]
    return BlockReplay(block, grad_rule=rule).run()


def saved_kib(program: BlockProgram) -> float:
    """What a forward leaves, beside the stream that it hands on."""
    return program.forward.delta_bytes / K


def test_a_block_saves_what_its_backward_needs() -> None:
    assert saved_kib(replay()) == 4 + 4 + 16 + 16  # x, h, u, a; o and the residual sum are not kept


def test_a_checkpointed_block_saves_its_input_alone() -> None:
    assert saved_kib(replay(segments=(Segment(start=0, stop=5),))) == 4


def test_a_module_segment_keeps_its_input() -> None:
    assert saved_kib(replay(segments=(Segment(start=1, stop=4),))) == 4 + 4  # x for the norm, h for the segment


def test_a_segment_that_discards_its_output_saves_it_nowhere() -> None:
    kept = replay(segments=(Segment(start=2, stop=3),))
    discarded = replay(segments=(Segment(start=2, stop=3, discards_output=True),))
    assert saved_kib(kept) - saved_kib(discarded) == 16  # a, which fc2 would have saved


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_discarded_output_that_another_segment_reads_is_made_again_before_it(reentrant: bool) -> None:
    """The norm's output serves the checkpoint after it, and neither keeps it (Megatron-Core transformer_layer.py, random.py)."""
    norm = Segment(start=0, stop=1, discards_output=True)
    program = replay(segments=(norm, Segment(start=1, stop=4, reentrant=reentrant)))
    assert saved_kib(program) == 4  # x
    assert net(Sequence([alloc(boundary(4 * K)), program.forward])) == {boundary(4 * K): 2}
    assert program.forward.delta_bytes + program.backward.delta_bytes == 0


def test_a_policy_keeps_what_it_names() -> None:
    assert saved_kib(replay(segments=(Segment(start=0, stop=5, keep=frozenset({"u"})),))) == 4 + 16


def test_early_stop_leaves_out_what_nothing_saves() -> None:
    whole = replay(segments=(Segment(start=0, stop=5),))
    early = replay(segments=(Segment(start=0, stop=5, early_stop=True),))
    assert early.backward.peak_bytes <= whole.backward.peak_bytes
    assert early.forward.delta_bytes == whole.forward.delta_bytes


def test_gradients_stay_under_keep_and_go_under_add() -> None:
    kept, added = replay(rule=GradRule(mode="keep")), replay(rule=GradRule(mode="add"))
    assert {name for name, _ in kept.grads} == {"w1", "w2"}
    assert kept.backward.delta_bytes - added.backward.delta_bytes == 2 * 1024  # two of 512 bf16 elements


def test_a_gradient_cast_to_another_type_is_there_twice_for_a_moment() -> None:
    cast = replay(rule=GradRule(mode="keep", dtype="fp32"))
    assert all(item.bytes == 2048 for _, item in cast.grads)


def test_a_residual_passes_its_gradient_on_without_a_copy() -> None:
    only_add = (Step(name="add", reads=("x", "x"), writes=(made("y"),), passes=("x",)),)
    assert replay(only_add).backward.peak_bytes == 0


def test_a_gradient_written_over_what_was_saved_takes_no_room() -> None:
    steps = (
        Step(name="fc", reads=("x",), writes=(made("logits", 64),), saves=("x",)),
        Step(name="loss", reads=("logits",), writes=(made("y"),), saves=("logits",), reuses=("logits",)),
    )
    copying = (steps[0], replace(steps[1], reuses=()))
    assert replay(copying).backward.peak_bytes == 64 * K  # a second tensor of logits, before the first is let go
    assert replay(steps).backward.peak_bytes == 0  # the input's gradient replaces the loss' own


BROADCAST = (
    Step(name="up", reads=("x",), writes=(made("u", 16),)),
    Step(name="gate", reads=("x",), writes=(made("g", 1),)),
    Step(
        name="mul",
        reads=("u", "g"),
        writes=(made("p", 16),),
        saves=("u", "g"),
        fits=(Fit("g", made("whole", 16)),),
    ),
    Step(name="sum", reads=("p",), writes=(made("y"),)),
)


def test_a_broadcast_gradient_is_made_whole_and_summed_beside_what_was_saved() -> None:
    of_p, of_u, whole, of_y, of_g = 16, 16, 16, 4, 1
    assert replay(BROADCAST).backward.peak_bytes == (of_p - of_y + of_u + whole + of_g) * K


def test_a_checkpoint_lets_go_of_what_it_unpacked_before_that_sum() -> None:
    """u and g, recomputed, are gone when the gradient of g is summed; reentrant, they are saved as in any other run."""
    of_p, of_u, whole, of_y, of_g, recomputed = 16, 16, 16, 4, 1, 16 + 1
    before_the_sum = of_p - of_y + of_u + whole + recomputed
    segment = Segment(start=0, stop=4, early_stop=True)
    assert replay(BROADCAST, segments=(segment,)).backward.peak_bytes == before_the_sum * K
    reentrant = replace(segment, early_stop=False, reentrant=True)
    assert replay(BROADCAST, segments=(reentrant,)).backward.peak_bytes > (before_the_sum + of_g) * K


def test_gradients_of_wrapped_tensors_are_never_added_in_place() -> None:
    """Three readers: of a plain tensor the second and third gradient are added to the first, of a DTensor each sum is a new one."""
    readers = tuple(Step(name=f"fc{at}", reads=("x",), writes=(made(f"h{at}", 1),)) for at in range(3))
    joined = Step(name="sum", reads=tuple(f"h{at}" for at in range(3)), writes=(made("y", 1),))
    wrapped = tuple(replace(step, wrapped=("x",)) for step in readers)
    plain, apart = replay((*readers, joined)), replay((*wrapped, joined))
    of_y, of_h = 1, 1
    assert plain.backward.peak_bytes == (2 * 4 + 2 * of_h - of_y) * K  # the second gradient beside the first
    assert apart.backward.peak_bytes == (3 * 4 + of_h - of_y) * K  # and their sum, once its reader's own is gone


def test_two_steps_may_not_make_one_name() -> None:
    with pytest.raises(AssertionError, match="h"):
        replay((MLP[0], MLP[0], *MLP[1:]))


segments = st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True).map(sorted)


@given(segments, st.booleans(), st.booleans(), st.sampled_from(["keep", "add", "fused"]), st.integers(1, 3))
def test_forward_and_backward_leave_nothing_but_gradients(
    cut: list[int], discards: bool, early: bool, mode: str, layers: int
) -> None:
    segment = Segment(start=cut[0], stop=cut[1], discards_output=discards, early_stop=early)
    program = replay(rule=GradRule(mode=mode), segments=(segment,))
    stream, gradient = boundary(4 * K), boundary_grad(4 * K)
    forwards, backwards = [program.forward] * layers, [program.backward] * layers
    step = Sequence([alloc(stream), *forwards, free(stream), alloc(gradient), *backwards, free(gradient)])
    expected = {item: layers for _, item in program.grads}
    assert net(step) == expected
    live = peak = 0
    for event in events(step):
        live += event.item.bytes if event.alive else -event.item.bytes
        assert live >= 0
        peak = max(peak, live)
    assert peak == step.peak_bytes

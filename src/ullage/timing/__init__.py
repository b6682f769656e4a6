"""Seconds of a step: what each op computes, moves and sends, and how an engine overlaps it.

Not yet shown by any command: held against published runs, the papers' A100 tables come out within 6 to 16 % (median 5 to 8), SimuMax's B200
14 % early, torchtitan's H100 about 25 % early (cards limited to less power, kernels launched from Python).
tests/published/test_step_times.py holds what is right so far.
"""

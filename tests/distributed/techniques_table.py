"""``python -m tests.distributed.techniques_table``: technique by technique, the ranks' loss against one device's, and what each rank held
at its highest in a steady step against the estimate. Run for real, on CPU processes.
"""

from __future__ import annotations

import sys

from tests.distributed.test_measured import CASES, FOUR
from tests.distributed.training import all_measured, all_proved
from tests.distributed.world import run

from ullage.train.answers import Measured, Proof
from ullage.train.settings import Settings

STEPS = 20
TIMEOUT_S = 1200.0
HEAD = """\
| technique | ranks | loss | norm | weights | predicted bytes | measured bytes by rank | difference |
|---|---|---|---|---|---|---|---|
"""


def line(name: str, ranks: int, proof: Proof, measured: Measured) -> str:
    """One of Markdown's. loss, norm, weights: the largest relative differences, as docs/train.md says."""
    held = ", ".join(f"{one.allocated_bytes:,}" for one in measured.ranks)
    errors = f"{proof.loss_error:.1e} | {proof.norm_error:.1e} | {proof.weight_error:.1e}"
    return f"| {name} | {ranks} | {errors} | {measured.predicted_bytes:,} | {held} | {measured.error:+.2%} |\n"


def main() -> int:
    failed = 0
    sys.stdout.write(HEAD)
    for ranks, jobs in ((2, CASES), (4, FOUR)):
        settings = Settings(steps=STEPS, lr=1e-3)
        proofs = run(all_proved, (jobs, settings), ranks=ranks, timeout_s=TIMEOUT_S)[0]
        measures = run(all_measured, (jobs, Settings(steps=1)), ranks=ranks, timeout_s=TIMEOUT_S)[0]
        for name in jobs:
            proof, measured = proofs[name], measures[name]
            if isinstance(proof, Proof) and isinstance(measured, Measured):
                sys.stdout.write(line(name, ranks, proof, measured))
            else:
                failed += 1
                sys.stderr.write(f"{name}: {proof if isinstance(proof, str) else measured}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

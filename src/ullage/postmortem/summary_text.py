"""The table that ``torch.cuda.memory_summary()`` prints, read back."""

from __future__ import annotations

import re

from ullage.postmortem.evidence import Event, Evidence
from ullage.postmortem.messages import Numbers, printed

HEAD = re.compile(r"(?:PyTorch )?(?:CUDA|HIP|XPU) memory summary, device ID (\d{1,4})")
_OOMS = re.compile(r"(?:CUDA|HIP) OOMs: (\d{1,12})")
_ROW = re.compile(r"\|\s*([A-Za-z][A-Za-z -]{2,40}?)\s*\|((?:\s*\d{1,18} ?(?:[KMGTP]i?B|B)?\s*\|){2,4})")
_CELL = re.compile(r"(\d{1,18}) ?([KMGTP]i?B|B)")


def read_summary(text: str, source: str) -> Evidence | None:
    """The evidence of a summary's text; None: there is none in it. Peaks where an OOM was counted, else what is held now."""
    head = HEAD.search(text)
    if head is None:
        return None
    rows: dict[str, list[int]] = {}
    for match in _ROW.finditer(text, head.end()):
        cells = [one.bytes for cell in _CELL.finditer(match[2]) if (one := printed(cell[1], cell[2])) is not None]
        if len(cells) >= 2:
            rows.setdefault(match[1].lower(), cells)
    ooms = _OOMS.search(text)
    ran_out = ooms is not None and int(ooms[1]) > 0
    column = 1 if ran_out else 0
    held = {name: cells[column] for name, cells in rows.items()}
    numbers = Numbers(
        allocated_bytes=held.get("allocated memory"),
        reserved_bytes=held.get("gpu reserved memory"),
        device=int(head[1]),
    )
    event = Event(
        recognised="cuda-oom" if ran_out else "unknown",
        weight=1,
        what=f"a memory summary with {ooms[1] if ooms else 'no count of'} OOMs",
        line=text.count("\n", 0, head.start()) + 1,
        text=head[0],
        numbers=numbers,
    )
    current = rows.get("non-releasable memory")
    return Evidence(source=source, event=event, split_bytes=current[0] if current else None)

"""An error that a training loop met, explained as ``ullage why`` explains a log: by its message, its traceback and the job."""

from __future__ import annotations

import io
import traceback

from ullage.job.job import Job
from ullage.postmortem.log import read_log
from ullage.postmortem.why import Why, advised, why


def explained(error: BaseException, job: Job | None = None) -> Why | None:
    """What ran out of memory, why, and what helps; None where the error tells of no failure of memory.

    report/why.py makes text of it, report/why_json.py an object.
    """
    text = "".join(traceback.format_exception(error))
    evidence = read_log(io.BytesIO(text.encode("utf-8", "replace")), f"{type(error).__name__}, as it was raised")
    return advised(why(evidence, job)) if evidence.ran_out else None

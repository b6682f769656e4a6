"""A callback for the Hugging Face Trainer."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ullage.job.job import Job
from ullage.report.watched import watched_text
from ullage.train.watched import Watched
from ullage.watching.watch import Say, Watch, to_stderr

FOLLOWED_STEPS = 2
"""On the CPU: the second is the steady one, and to follow more takes time."""


class UllageCallback(TrainerCallback):
    """Says at the end what the training held beside what its job's account says. One that ends the program for want of memory says why.

    A Trainer tells its callbacks of no exception: what is caught on the way, as by auto_find_batch_size, is not seen here. To have it
    explained where you catch it, put ``with ullage.watch(job):`` around ``trainer.train()``.
    """

    def __init__(self, job: Job | str | Path | Mapping[str, object], *, say: Say | None = None) -> None:
        self.job = job
        self.watched: Watched | None = None
        self._say = say or to_stderr
        self._watch: Watch | None = None
        self._before = sys.excepthook

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **found: Any
    ) -> None:
        self._leave()  # a training that was given up after an exception
        self.watched = None
        self._watch = Watch(self.job, found.get("model"), found.get("optimizer"), say=self._say)
        self._before, sys.excepthook = sys.excepthook, self._uncaught
        self._watch.__enter__()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **found: Any) -> None:
        if self._watch is not None and self.watched is None and self._watch.followed_steps >= FOLLOWED_STEPS:
            self.watched = self._watch.stop()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **found: Any) -> None:
        watched = self._leave()
        if watched is not None:
            self._say(watched_text(watched))

    def _leave(self) -> Watched | None:
        """Nothing is watched any more."""
        watch, self._watch = self._watch, None
        if watch is None:
            return None
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._before
        if self.watched is None:
            self.watched = watch.stop()
        return self.watched

    def _uncaught(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        watch, before = self._watch, self._before
        self._leave()
        if watch is not None:
            watch.explain(error)
        before(kind, error, traceback)

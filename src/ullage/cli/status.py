"""Exit statuses. 0 to 3 are docs/job.md's; the others are no answer at all, and none of them can be taken for one."""

OF_VERDICT = {"fits": 0, "oom": 1, "tight": 3}
WRONG_INPUT = 2
RAN_OUT = 4  # of a training that had started
BUG = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130  # 128 + SIGINT, as shells count
BROKEN_PIPE = 141  # 128 + SIGPIPE

MEANING = "0 fits, 1 out of memory, 2 the input is wrong, 3 tight"

"""torch in, a Trace or a Graph out: any module's step on fake tensors, every storage's birth and death recorded.

``events`` is plain Python; the other modules import torch and are imported only where a trace is asked for (extra ``ullage[torch]``).
"""

"""Where in a model something happens: the module whose forward runs, or the one whose backward does.

A forward is followed by the stack of module calls. A backward is followed by autograd's own numbering: each node carries the
number that the thread's counter had when it was made (``_sequence_nr``), so the calls of the forward, noted with the counter's value
at their beginning and end, cut the numbers into spans that belong to modules.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
from torch import nn

next_number: Any = torch._C._autograd._get_sequence_nr
_current_node: Any = torch._C._current_autograd_node


class Places:
    """names: id of a module -> qualified name; filled by ``learn``."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.classes: dict[str, str] = {}
        self.params: dict[int, str] = {}
        self.stack: list[str] = []
        self.base = 0  # height of the stack where the backward that runs was begun
        self._starts: list[int] = [0]
        self._paths: list[str] = [""]

    def learn(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            self.names[id(module)] = name
            self.classes[name] = type(module).__name__
        for name, param in model.named_parameters():
            self.params[id(param)] = name

    def enter(self, module: nn.Module) -> None:
        name = self.names.get(id(module))
        if name is None:
            name = (
                f"{self.stack[-1]}.{type(module).__name__}" if self.stack and self.stack[-1] else type(module).__name__
            )
            self.classes.setdefault(name, type(module).__name__)
        self.stack.append(name)
        self._note()

    def leave(self) -> None:
        self.stack.pop()
        self._note()

    def _note(self) -> None:
        path = self.stack[-1] if self.stack else ""
        number = next_number()
        if self._starts[-1] == number:
            self._paths[-1] = path
        elif self._starts[-1] < number:  # numbers of another thread's counter say nothing here
            self._starts.append(number)
            self._paths.append(path)

    def of_number(self, number: int) -> str:
        """The module in whose call the autograd node with this number was made."""
        return self._paths[bisect_right(self._starts, number) - 1]

    def of_node(self, node: Any) -> str:
        variable = getattr(node, "variable", None)  # AccumulateGrad
        if variable is not None:
            return self.params.get(id(variable), "").rpartition(".")[0]
        return self.of_number(node._sequence_nr())

    def number(self) -> int:
        """Of the autograd node whose backward runs; -1 between two nodes and where a gradient is accumulated."""
        node = _current_node()
        return -1 if node is None or hasattr(node, "variable") else int(node._sequence_nr())

    @property
    def recomputing(self) -> bool:
        """A module's forward runs inside of a backward."""
        return len(self.stack) > self.base

    @property
    def calling(self) -> bool:
        return bool(self.stack)

    def current(self) -> str:
        if len(self.stack) > self.base:
            return self.stack[-1]
        node = _current_node()
        if node is not None:
            return self.of_node(node)
        return self.stack[-1] if self.stack else ""

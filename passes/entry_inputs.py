"""The inputs of an entry over a step's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from accel.ir.program import Editor, Program


@dataclass
class EntryInputs:
    """The placeholders of an entry over a step's state while it is built, such as `compress`."""

    program: Program
    graph: fx.Graph
    placeholders: dict[str, fx.Node] = field(default_factory=dict)

    @cached_property
    def source(self) -> Editor:
        """Of the step."""
        return Editor(self.program, self.program.step.graph)

    @property
    def batch(self) -> Any:
        """B."""
        return self.program.step.input("tokens").meta["val"].shape[0]

    def placeholder(self, name: str, value: Tensor) -> fx.Node:
        """An input of the entry, one for all layers that ask for the name."""
        if name not in self.placeholders:
            *_, at = (self.graph._root, *self.graph.find_nodes(op="placeholder"))
            with self.graph.inserting_after(at):
                self.placeholders[name] = self.graph.placeholder(name)
            self.placeholders[name].meta["val"] = value
        return self.placeholders[name]

    def new(self, name: str, *shape: Any, dtype: torch.dtype = torch.int64) -> fx.Node:
        """An input of these sizes."""
        return self.placeholder(name, self.blank(shape, dtype))

    def shared(self, name: str) -> fx.Node:
        """An input that the step has, too."""
        return self.placeholder(name, self.program.step.input(name).meta["val"])

    def param(self, name: str, tensor: Tensor | None = None) -> fx.Node:
        """A parameter of the program; `tensor` is its value where it is new."""
        return Editor(self.program, self.graph).param(name, tensor)

    def blank(self, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """A value of this shape, whose sizes may be symbols."""
        with self.source.fake:
            return torch.empty(tuple(shape), dtype=dtype)

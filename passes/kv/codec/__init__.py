"""kv.codec: in what form keys and values are stored. A method is a few pure functions of tensors, and this
pass puts them between attention and the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, fx

from accel.ir.errors import PassError
from accel.ir.ops.kv import kv_append
from accel.ir.program import DTYPES, Editor, Program, State
from accel.ir.trace import trace
from accel.passes import Pass, Report
from accel.passes.state.cache import Cache

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Base(Pass, ABC):
    """`kv.<layer>.k/v [B,G,C,D]` -> the parts that a codec makes of them, for each slot by itself.

    A call's own keys and values are read back as they are stored too, so that a call of T tokens gives
    what T calls of one do, and a slot that is written again leaves no trace. `role` is "k" or "v".
    """

    after = (Cache,)
    flat = True
    grade = "approximate"

    @abstractmethod
    def parts(self, role: str, width: int) -> dict[str, tuple[str, Sizes]]:
        """What is kept of D = `width` numbers: name -> (dtype, sizes after [B,G,C]). The first is named ""."""

    @abstractmethod
    def encode(self, role: str, x: Tensor) -> dict[str, Tensor]:
        """x [B,G,T,D] -> its parts [B,G,T,…]. A row (one slot of one head) must not depend on others."""

    @abstractmethod
    def decode(self, role: str, parts: dict[str, Tensor]) -> Tensor:
        """Parts [B,G,C,…] -> [B,G,C,D] float32."""

    @abstractmethod
    def bits(self, role: str, width: int) -> float:
        """Bits that a number takes, all told, where D = `width`."""

    def run(self, program: Program) -> Report:
        step = program.step
        editor = Editor(program, step.graph)
        report, kept = Report(), []
        outputs = step.output_nodes()
        for state in program.state:
            if state.role in ("k", "v"):
                kept += self._store(editor, state, outputs)
                report.changed += 1
                continue
            kept.append(state)
            if state.role in ("cross.k", "cross.v"):
                report.refused.append(f"{state.name}: the encode entry writes it, once, as it is")
        if not report.changed:
            raise PassError(
                f"{type(self).__name__}: {program.facts.name} has no cache of keys and values to store "
                "otherwise; leave the kv.codec recipe out"
            )
        program.state[:] = kept
        step.set_outputs(outputs)
        return report

    def _store(self, editor: Editor, state: State, outputs: dict[str, fx.Node]) -> list[State]:
        """One buffer's parts in its place: appended encoded, and decoded for whoever reads them."""
        stored = outputs.pop(f"{state.name}.next")
        holder, new, slots = stored.args
        assert isinstance(holder, fx.Node) and isinstance(new, fx.Node)
        lead = holder.meta["val"].shape[:3]  # [B,G,C]
        states, held = [], {}
        with editor.graph.inserting_before(stored):
            coded = trace(editor, state.name, partial(self.encode, state.role), new, like=stored)
        for part, (dtype, sizes) in self.parts(state.role, int(state.shape[3])).items():
            name, role = (f"{n}.{part}" if part else n for n in (state.name, state.role))
            states.append(
                replace(state, name=name, role=role, dtype=dtype, shape=(*state.shape[:3], *sizes))
            )
            buffer = editor.placeholder(name, (*lead, *sizes), DTYPES[dtype])
            with editor.graph.inserting_before(stored):
                held[part] = editor.call(kv_append.default, buffer, coded[part], slots, like=stored)
            outputs[f"{name}.next"] = held[part]
        with editor.graph.inserting_before(stored):
            decoded = trace(
                editor, state.name, self._decoder(state.role, held), *held.values(), like=stored
            )
        stored.replace_all_uses_with(decoded)
        editor.graph.erase_node(stored)
        editor.graph.erase_node(holder)
        return states

    def _decoder(self, role: str, names: Iterable[str]) -> Callable[..., Tensor]:
        """`decode` over operands one after another."""
        return lambda *parts: self.decode(role, dict(zip(names, parts, strict=True)))

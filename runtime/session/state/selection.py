"""What a session may rely on where a call of several tokens reads otherwise than calls of one."""

from __future__ import annotations

from accel.ir.selection import Selection
from accel.runtime.session.observers.observer import (
    Capabilities,
    ModelParts,
    ObserverFactory,
    SessionObserver,
)


class Selected(SessionObserver):
    """Says the width of calls up to which tokens select alone."""

    def __init__(self, selection: Selection):
        self.selection = selection

    @classmethod
    def for_model(cls, model: ModelParts) -> ObserverFactory | None:
        """Where the recipe says a width."""
        found = model.facts.selection
        return None if found is None else ObserverFactory(lambda n: cls(found))

    @property
    def capabilities(self) -> Capabilities:
        """See SessionObserver."""
        return Capabilities(width=self.selection.width, trees=False, chunks=False)

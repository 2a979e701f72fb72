"""Which methods of a recipe go together, by what they declare (`ir/invariants.py`): nothing is captured for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from accel.ir.axis import find_axes
from accel.ir.invariants import PROVIDED, Invariant, Method

__all__ = ["TARGET_METHODS", "Conflict", "conflict_text", "conflicts", "providers", "table"]


@dataclass(frozen=True)
class _Target(Method):
    breaks: frozenset[Invariant] = frozenset()


TARGET_METHODS: Mapping[str, Method] = {  # what no artifact of them keeps; the others break nothing
    "triton": _Target(frozenset({Invariant.BATCH_INVARIANCE, Invariant.HOST_MEMORY})),
}


@dataclass(frozen=True)
class Conflict:
    """The method of the axis `relying` relies on what the one of `other` breaks, or does not provide; `other` is empty
    where the recipe has no method that could.
    """

    relying: str
    invariant: Invariant
    other: str


def conflicts(methods: Mapping[str, Method]) -> list[Conflict]:
    """Every reason why methods, by axis, do not go together; none: they do."""
    found = []
    breaks = {axis: method.breaks for axis, method in methods.items()}
    provided = frozenset[Invariant]().union(*(method.provides for method in methods.values()))
    for axis, method in methods.items():
        relies = method.relies
        for invariant in (one for one in Invariant if one in relies):
            if invariant not in PROVIDED:
                others = (
                    other for other in methods if other != axis and invariant in breaks[other]
                )
                found += [Conflict(axis, invariant, other) for other in others]
            elif invariant not in provided:
                could = (other for other in methods if other in providers(invariant))
                found.append(Conflict(axis, invariant, next(could, "")))
    return found


@cache
def providers(invariant: Invariant) -> Mapping[str, list[str]]:
    """Axis -> its methods that provide an invariant, with their default options."""
    found = {
        name: [use for use in axis.names() if invariant in axis.build(use).provides]
        for name, axis in find_axes().items()
    }
    return {name: uses for name, uses in found.items() if uses}


def conflict_text(conflict: Conflict, uses: Mapping[str, str]) -> str:
    """Both sides and the invariant, in words. `uses`: axis -> the name of its method."""
    one, what = f"{conflict.relying} = {uses[conflict.relying]}", conflict.invariant
    if not conflict.other:
        return f"{one} relies on {what.name}, which no method of the recipe provides: {what.value}"
    verb = "does not provide" if what in PROVIDED else "breaks"
    return (
        f"{one} cannot be combined with {conflict.other} = {uses[conflict.other]}: the first relies on {what.name}, "
        f"which the second {verb}: {what.value}"
    )


def table() -> str:
    """A Markdown table of the invariants: who relies on each, and who breaks or provides it, with default options."""
    rows = ["| invariant | holds when | relied on by | broken by |", "|---|---|---|---|"]
    for what in Invariant:
        if what in PROVIDED:
            other = f"holds only with {_who('provides', what)}"
        else:
            targets = [
                f"target `{name}`" for name in TARGET_METHODS if what in TARGET_METHODS[name].breaks
            ]
            other = ", ".join(filter(None, (_who("breaks", what), *targets)))
        rows.append(f"| `{what.name}` | {what.value} | {_who('relies', what)} | {other} |")
    return "\n".join(rows)


def _who(declares: str, what: Invariant) -> str:
    """The methods that declare an invariant; their axis, where all of several do."""
    found = []
    for name, axis in sorted(find_axes().items()):
        names = axis.names()
        uses = [use for use in names if what in getattr(axis.build(use), declares)]
        whole = len(uses) == len(names) > 1
        found += [f"all of {name}"] if whole else [f"`{use}`" for use in uses]
    return ", ".join(found)

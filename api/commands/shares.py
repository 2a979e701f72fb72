"""How near to the machine's limit an artifact ran: the time that what it must read or multiply takes at least, as a
share of the time that it took.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accel.commands.console import pairs, size, table

if TYPE_CHECKING:
    from accel.runtime.backends.onnx.peaks import Peaks
    from accel.runtime.backends.onnx.work import Work


def decode_share(work: Work, peaks: Peaks, depth: float, seconds: float) -> float | None:
    """Of a step after `depth` tokens: the share of its time that memory needs for what it reads."""
    if work.unread or not peaks.read:
        return None
    return work.read(depth) / peaks.read / seconds


def prefill_share(work: Work, peaks: Peaks, tokens: int, seconds: float) -> float | None:
    """Of a prompt: the share of its time that its products need at the peak of the types that they are of."""
    rates: Mapping[str, float] = {"int8": peaks.int8, "float32": peaks.float32}
    products = work.multiplied(tokens)
    if work.unread or not products or not all(rates[kind] for kind in products):
        return None
    return sum(count / rates[kind] for kind, count in products.items()) / seconds


def slope(work: Work, peaks: Peaks, steps: Mapping[float, float]) -> dict[str, Any] | None:
    """What each further token of context costs, from the least to the greatest depth; None of one depth. `steps`:
    seconds by depth. share: of that time, what memory needs for the state that they add; None where it is not known.
    """
    least, most = min(steps), max(steps)
    if least == most:
        return None
    each = (steps[most] - steps[least]) / (most - least)
    added = (work.state(most) - work.state(least)) / (most - least)
    known = not work.unread and peaks.read and each > 0
    return {
        "from": least,
        "to": most,
        "us_per_1000_tokens": 1e9 * each,
        "bytes_per_token": None if work.unread else added,
        "share": added / peaks.read / each if known else None,
    }


def percent(share: float | None) -> str:
    """A dash where it is not known."""
    return "-" if share is None else f"{share:.0%}"


def spread(values: Sequence[float], digits: int) -> str:
    """From the least to the most."""
    return f"{min(values):.{digits}f}..{max(values):.{digits}f}"


def show_shares(result: Mapping[str, Any]) -> None:
    """What `bench` found, for people, from the least to the most of the runs; and what the limit is."""
    columns = [
        ">context", ">prefill tokens/s", ">of peak", ">decode tokens/s", ">a step reads",
        ">of bandwidth",
    ]  # fmt: skip
    rows = [
        [
            r["context"], spread(r["prefill_of_runs"], 0), percent(r["prefill_share"]),
            spread(r["decode_of_runs"], 1), "-" if r["read_bytes"] is None else size(r["read_bytes"]),
            percent(r["decode_share"]),
        ]
        for r in result["rows"]
    ]  # fmt: skip
    table(columns, rows)
    if (found := result["slope"]) is not None:
        more = (
            f"{found['us_per_1000_tokens']:.0f} us a step, {percent(found['share'])} of bandwidth"
        )
        pairs([("1,000 tokens more", more)])
    for peak in result["peaks"]:
        name = f"{peak['threads']} thread{'s' * (peak['threads'] > 1)}"
        pairs([(f"limit, {name}", limit_text(peak))])
    pairs([("shares not known", result["not_known"])])


def limit_text(peak: Mapping[str, Any]) -> str:
    """What so many threads do at most, and how it was found."""
    products = ", ".join(f"{peak[kind] / 1e9:.0f} in {kind}" for kind in ("int8", "float32"))
    return f"{peak['read'] / 1e9:.1f} GB/s read, GMAC/s {products} ({peak['how']})"

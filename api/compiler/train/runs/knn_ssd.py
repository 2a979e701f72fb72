"""Anchors and plans of `knn-ssd` (arXiv:2505.16162): of each kind of text a plan, searched as that of `draft-verify`,
and the directions that the means of its texts' last hidden states lie in, found by k-means.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accel.compiler.measure import watched
from accel.compiler.part_text import text_ids, text_rows
from accel.compiler.train.host import HELD, HostKind, save_part
from accel.compiler.train.kind import Made
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs.draft_verify import AT_ONCE, Search, passed
from accel.compiler.train.source import Source
from accel.compiler.train.whole import Whole
from accel.ir.errors import InputError
from accel.ir.program import Program
from accel.ir.taps import FINAL
from accel.passes.calibrate import feeds
from accel.passes.kv.select._units import k_means
from accel.passes.state.taps import Taps
from accel.runtime.decode.trained_part import sample
from accel.runtime.draft._plans import Plan
from accel.runtime.draft.knn_ssd import KnnSsd

ANCHORS = 10  # of a kind
ROUNDS = 50  # of k-means
SEARCHED = 8  # texts of a kind that its plan is searched on


class Anchored(HostKind):
    """Each kind's texts are read once for its anchors, and some of them once for each plan that is tried."""

    of = KnnSsd

    @classmethod
    def lacks(cls, options: TrainOptions) -> str | None:
        """See Kind."""
        if options.text is None or not options.text.is_dir():
            return "give a folder with a file of text for each kind of text, text=…"
        return None

    @classmethod
    def make(cls, method: Any, source: Source, options: TrainOptions) -> Made:
        """See Kind."""
        one, read = watched(method)
        options = replace(options, length=min(options.length, source.program.facts.max_context))
        kinds = kinds_of(source, options)
        plain, tapped = passed(source), passed(source, Taps((one,)))
        found, means, told = list[dict[str, Any]](), list[Tensor](), dict[str, float]()
        with torch.no_grad(), plain.params.read_once():
            for number, (name, (texts, held)) in enumerate(kinds.items()):
                source.progress(f"kind {name}", number / len(kinds))
                search = Search(plain, texts[:SEARCHED])
                best = search.run(search.proposals, source.progress, source.say)
                plan = Plan.without(best.left_out, len(search.calls))
                means.append(means_of(tapped, held))
                anchors = anchors_of(means_of(tapped, texts))
                least = near(means[-1], anchors).amax(1).min()
                found.append({"plan": plan, "cost": best.cost, "anchors": anchors, "least": least})
                told |= {f"speed of {name}": best.speed, f"likeliest of {name}": best.share}
        part = {
            "anchors": torch.cat([each["anchors"] for each in found]),
            "kind": torch.cat(
                [torch.full((len(each["anchors"]),), float(n)) for n, each in enumerate(found)]
            ),
            "attn": torch.stack([torch.from_numpy(each["plan"].attn).float() for each in found]),
            "mlp": torch.stack([torch.from_numpy(each["plan"].mlp).float() for each in found]),
            "cost": torch.tensor([each["cost"] for each in found]),
            "least": torch.stack([each["least"] for each in found]),
        }
        told["found again"] = found_again(means, part)
        samples = {"model": sample(lambda: Whole(source.program))}
        return save_part(one, read, part, samples, told, options)


def kinds_of(source: Source, options: TrainOptions) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each file of the folder, by its name, as many texts [n,T] as the options say, behind what prompts begin with.
    An eighth of them, those from its last eighth, are apart. Raises InputError.
    """
    assert options.text is not None
    files = sorted(one for one in options.text.iterdir() if one.is_file())
    if not files:
        raise InputError(
            f"{options.text} is empty; give a folder with a file of text for each kind"
        )
    if source.tokenizer is None:
        raise InputError(f"{source.path} has no tokenizer for a text; give tokenizer=…")
    if (count := options.samples * options.rows) < HELD:
        raise InputError(
            f"{count} texts of a kind tell too little; give samples={-(-HELD // options.rows)} or more"
        )
    first, found = torch.tensor(source.tokenizer.encode(""), dtype=torch.int64), {}

    def texts(ids: Tensor, count: int) -> Tensor:
        some = next(text_rows(ids, options.length, count, options.seed))[0][:, :-1]
        return torch.cat([first.expand(count, -1), some], 1)

    for file in files:
        ids = text_ids(source.tokenizer, file, HELD * (options.length + 2))
        last = len(ids) * (HELD - 1) // HELD
        found[file.stem] = (
            texts(ids[:last], count - count // HELD),
            texts(ids[last:], count // HELD),
        )
    return found


def means_of(program: Program, texts: Tensor) -> Tensor:
    """The means [n,E] of the last hidden states of texts [n,T], by a program whose step gives these."""
    parts = texts.split(max(1, AT_ONCE // texts.shape[1]))
    found = [program.run("step", feeds(program, "step", part))[FINAL] for part in parts]
    return torch.cat([one.float().mean(1) for one in found])


def anchors_of(means: Tensor) -> Tensor:
    """Directions [A,E] that means [n,E] lie in."""
    count = min(ANCHORS, len(means))
    real = torch.ones(1, len(means), dtype=torch.bool)
    units = torch.ones(1, count, dtype=torch.bool)
    labels, found = k_means(means[None, None], real, units, ROUNDS)
    directions: Tensor = found[0, 0][labels.unique()]
    return directions


def near(means: Tensor, anchors: Tensor) -> Tensor:
    """Cosines [n,A] of means [n,E] with anchors [A,E]."""
    one, other = (x / x.norm(dim=1, keepdim=True).clamp(min=1e-12) for x in (means, anchors))
    found: Tensor = one @ other.T
    return found


def found_again(means: list[Tensor], part: dict[str, Tensor]) -> float:
    """Of texts that anchors were not made of, means [n,E] of each kind, the share whose nearest anchor is of theirs."""
    kinds = [part["kind"][near(one, part["anchors"]).argmax(1)] for one in means]
    right = torch.cat([kind == number for number, kind in enumerate(kinds)])
    return float(right.float().mean())

"""Measure which nodes of a draft tree stand, for `tree = stand`.

    python tools/tree_template.py [MODEL] --out FILE [--prompts 5] [--tokens 48] [--temperature 0.8] [--nodes 80]

MODEL: a model's folder (default: the bundled one). It drafts by `stand` a tree of 256 nodes in each call (the paper: of
625), for four samples of so many prompts of each of the six kinds (`accel.reference.kinds`), 30 prompts in all as in
the paper, and counts the nodes of accepted paths. FILE gets those that stood most often, each after its parent and its
earlier siblings, and how often each did.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass, field
from heapq import heappop, heappush
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

import accel
from accel.reference.kinds import KINDS, prompts
from accel.runtime.decode.context import DecodeContext
from accel.runtime.decode.row import Row
from accel.runtime.draft.stand import Stand
from accel.runtime.length.fixed import Fixed
from accel.runtime.loop.speculative import Speculative
from accel.runtime.sample.standard import Standard
from accel.runtime.tree import ROOT, Base, Shape, Tree
from accel.runtime.tree._shaped import Formed, likely
from accel.runtime.verify.rrs_wor import RrsWor

# Of a rank, only to say which nodes are tried: any of the ten that a memory keeps, and deep where ranks are low.
TRIED, NODES, DEPTH = (0.8, 0.3, 0.2, 0.15, 0.12, 0.1, 0.08, 0.07, 0.06, 0.05), 256, 10
SAMPLES = 4  # of a prompt, which share the memory, as in the paper
Ranks = tuple[int, ...]


@dataclass
class Counted(Base, Shape):
    """Grows a form, and counts which of its nodes stand."""

    form: Any = None
    stood: Counter[Ranks] = field(default_factory=Counter)
    rounds: int = 0

    def grow(self, limit: int, draw: Any = None) -> Any:
        return self.form.grow(limit, draw)

    def observe(self, tree: Tree, path: Any) -> None:
        self.rounds += 1
        ranks, parent = (), ROOT
        for node in path:
            ranks = (*ranks, list(tree.children(parent)).index(node))
            self.stood[ranks] += 1
            parent = node

    def begin(self, cost: Any = None, level: float = 0.0) -> Shape:
        return self


def best(stood: Counter[Ranks], count: int) -> list[Ranks]:
    """So many nodes that stood, the most often first, each after its parent and its earlier siblings."""
    found: list[Ranks] = []
    heap = [(-stood[0,], 1, (0,))]
    while heap and len(found) < count:
        value, _, path = heappop(heap)
        if not value:
            break
        found.append(path)
        for new in ((*path, 0), (*path[:-1], path[-1] + 1)):
            heappush(heap, (-stood[new], len(new), new))
    return found


def measured(model: Path, each: int, tokens: int, temperature: float) -> Counted:
    """What stood of the trees of several samples of each prompt. No guard limits a draft."""
    counted, draft = Counted(Formed(tuple(likely(TRIED, NODES, DEPTH)))), Stand(shared=True)
    methods = {"draft": draft, "tree": counted, "verify": RrsWor(), "length": Fixed(NODES)}
    with accel.optimize(model, {"draft": {"use": "stand"}}, verify=False) as compiled:
        store = draft.store(compiled.facts, compiled.tokenizer)
        context = DecodeContext(methods, None, compiled, store)
        for kind in KINDS:
            for prompt in prompts(kind, each, seed=7):  # figures are of others
                ids = np.array(compiled.tokenizer.encode(prompt), np.int64)
                for seed in range(SAMPLES):
                    row = Row(
                        ids, Standard(temperature=temperature), np.random.default_rng(seed), limit=tokens,
                        max_context=compiled.facts.max_context,
                    )  # fmt: skip
                    with compiled.session() as session:
                        for _ in Speculative().tokens(session, [row], context):
                            pass
            stood = sum(counted.stood.values())
            print(f"{kind}: {counted.rounds} rounds, {stood} tokens stood", flush=True)
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=Path(str(files("accel.reference"))))
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--prompts", type=int, default=5, help="of each kind")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of each")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--nodes", type=int, default=80, help="of the template, at most")
    options = parser.parse_args()
    found = measured(options.model, options.prompts, options.tokens, options.temperature)
    paths = best(found.stood, options.nodes)
    stand = [round(found.stood[path] / found.rounds, 4) for path in paths]
    text = json.dumps({"paths": paths, "stand": stand, "rounds": found.rounds})
    options.out.write_text(text + "\n", encoding="utf-8")
    print(f"{len(paths)} nodes, {1 + sum(stand):.2f} tokens a round")


if __name__ == "__main__":
    main()

"""Random requests, and a model whose logits are a function of exactly the tokens that it sees: whatever a session holds
wrongly, or a loop takes elsewhere, gives other tokens or log-probabilities.
"""

import math
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import torch

from accel.ir.facts import Facts, LayerFacts
from accel.ir.state import Part, StateValue
from accel.runtime.backends.eager import EagerBackend
from accel.runtime.decode.costs import Costs
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.decode.structured_outputs import StructuredOutputsParams
from accel.runtime.model.compiled import CompiledModel

STATE = [
    StateValue(Part.POSITIONS, None, "int64", ("B", "C"), -1),
    StateValue(Part.KEYS, 0, "float32", ("B", 1, "C", 1)),
    StateValue(Part.VALUES, 0, "float32", ("B", 1, "C", 1)),
]
WORDS = ["<eos>", *'abc1x"{}', "Ġ", "Ċ", "Ã"]  # the last is a part of a character
TOKENS = (1, 2, 4, 8, 16, 32)


@dataclass
class Says:
    """A program over state whose keys are the tokens themselves. `active`: those that come; `noise`: how much logits go
    by tokens before the last two; `wrong`: whether it says no numbers at times.
    """

    size: int
    active: np.ndarray
    seed: int
    noise: float = 0.3
    wrong: bool = False
    state = STATE
    entries = ("step", "commit")
    _known: dict = field(default_factory=dict)

    def logits(self, seen):
        """Logits [V] after tokens."""
        if seen not in self._known:
            key = blake2b(np.array(seen, np.int64).tobytes(), digest_size=6).digest()
            near = np.random.default_rng([self.seed, *(t + 1 for t in seen[-2:])])
            far = np.random.default_rng([self.seed, int.from_bytes(key, "big")])
            out = np.full(self.size, -9, np.float32) + far.random(self.size, np.float32)
            out[self.active] = 2.5 * near.standard_normal(len(self.active))
            out[self.active] += self.noise * far.standard_normal(len(self.active))
            if self.wrong and far.random() < 0.2:
                out[:] = np.nan
            self._known[seen] = out
        return self._known[seen]

    def run(self, entry, inputs):
        pos, keys, values = (inputs[one.name].clone().numpy() for one in STATE)
        slots, positions = inputs["slots"].numpy(), inputs["positions"].numpy()
        width, out = positions.shape[1], {}
        for row, first in enumerate(slots.tolist()):
            there = slice(first, first + width)
            pos[row, there] = positions[row]
            if entry == "commit":
                keys[row, 0, there] = keys[row, 0, first + inputs["path"].numpy()[row]]
            else:
                keys[row, 0, there, 0] = inputs["tokens"].numpy()[row]
        if entry == "step":
            out["logits"] = torch.from_numpy(self._said(inputs, pos, keys[:, 0, :, 0]))
        state = zip(STATE, (pos, keys, values), strict=True)
        return out | {f"{one.name}.next": torch.from_numpy(array) for one, array in state}

    def _said(self, inputs, pos, keys):
        slots, positions, rows = (inputs[n].numpy() for n in ("slots", "positions", "rows"))
        found = np.zeros((*rows.shape, self.size), np.float32)
        for row, columns in enumerate(rows):
            for n, column in enumerate(columns):
                seen = (pos[row] >= 0) & (pos[row] <= positions[row, column])
                if "tree" in inputs:
                    tree = inputs["tree"].numpy()[row, column]
                    seen[slots[row] : slots[row] + tree.size] &= tree
                at = np.flatnonzero(seen)
                at = at[np.argsort(pos[row, at], kind="stable")]
                if at.size and positions[row, column] >= 0:
                    assert pos[row, at].tolist() == list(range(at.size)), "a place that is empty"
                    found[row, n] = self.logits(tuple(keys[row, at].astype(int).tolist()))
        return found


def model_of(program, tokenizer, tables, context, draft=None, eos=(0,)):
    """A compiled model over it, to which drafts are nearly free."""
    layers = [LayerFacts("causal", 0, 1, 1, 1)]
    facts = Facts("Says", program.size, context, 4, eos=eos, layers=layers)
    made = CompiledModel(
        EagerBackend(program), facts, tokenizer=tokenizer, recipe={"tables": tables}, draft_model=draft
    )  # fmt: skip
    made._costs = Costs(TOKENS, tuple(1 + 0.001 * t for t in TOKENS), 3)
    return made


def fails(ids, logits):
    return logits if ids[-1] % 9 or ids.size < 7 else 1 / 0


def leads_nowhere(ids, logits):
    return logits if ids[-1] % 7 or ids.size < 7 else np.full_like(logits, -np.inf)


def bans_the_last(ids, logits):
    logits[int(ids[-1])] = -np.inf
    return logits


def request(rng, active, context, grammar=True, sampled=True, failing=True):
    """(prompt, params) of a request that may be."""

    def some(share):
        return rng.random() < share

    def one_of(values):
        return values[int(rng.integers(len(values)))]

    asked = {"max_tokens": one_of([1, 2, 5, 12, 40]), "ignore_eos": some(0.25)}
    if sampled and some(0.4):
        asked |= {"temperature": one_of([0.5, 1.0, 1.7]), "seed": int(rng.integers(99))}
        asked |= {"top_k": one_of([None, 2, 8]), "top_p": one_of([None, 0.8])}
    if some(0.3):
        asked["logprobs"] = one_of([0, 3])
    if some(0.3):
        asked["stop"] = one_of([["ab"], ["1", "b"], ["�"], ["abab", "ba"], ["a", "abc"]])
    if some(0.2):
        asked["stop_token_ids"] = rng.choice(active, 2).tolist()
    if some(0.2):
        asked["logit_bias"] = {t: one_of([-math.inf, 3.0]) for t in rng.choice(active, 3).tolist()}
    if some(0.3):
        own = [bans_the_last, *([fails, leads_nowhere] if failing else [])]
        asked["logits_processors"] = [one_of(own)]
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        if some(0.1):
            asked[name] = 1.3
    if grammar and some(0.3):
        forms = [{"regex": "[abc1 ]{3,}x"}, {"regex": "(ab|a|b)+x?"}, {"choice": ["ab", "abab"]}]
        forms.append({"json": {"type": "array", "items": {"enum": [1, 11]}}})
        asked["structured_outputs"] = StructuredOutputsParams(**one_of(forms))
    few = rng.choice(active[1:], one_of([1, 3, 5]))
    size = int(rng.integers(1, context // 2))
    return np.resize(few, size), SamplingParams(**asked)

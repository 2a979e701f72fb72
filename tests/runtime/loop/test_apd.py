"""apd: its published rule, its ends, noise that both draws share, and the causal model that it needs."""

from dataclasses import dataclass

import numpy as np
import pytest
import tokenizers
import torch

import accel
from accel.runtime.canvas import Base
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop.apd import Apd

from ...diffusion_case import (
    BLOCK,
    LONGEST,
    MASK,
    NEW,
    VOCABULARY,
    Case,
    Filler,
    causal,
    decoded,
    eager,
    official,
    prompts,
    with_loop,
)


def lines(text, drafts):
    """What the causal model says of each drafted token from those before it, [n,V], plainly: one whole call."""
    with torch.no_grad():
        said = causal()[0](torch.tensor([[*text, *drafts]]))[0].numpy()
    return said[len(text) - 1 : -1]


def product(mixture, logits, said):
    """The log of the product of experts, normalised [n,V]; never the mask."""
    own, other = (torch.tensor(one, dtype=torch.float64).log_softmax(-1) for one in (logits, said))
    return torch.where(own.isneginf(), own, mixture * own + (1 - mixture) * other).log_softmax(-1)


def together(mixture, first=1):
    """Drafted tokens up to the first that the product's best one is not; `first` stay in any case."""

    def stays(seen):
        count = int(np.cumprod(seen.free).sum())
        drafts = seen.logits[:count].argmax(1)
        said = lines(seen.text, drafts)
        same = product(mixture, seen.logits[:count], said).argmax(-1).numpy() == drafts
        same[:first] = True
        return np.arange(int(np.cumprod(same).sum()))

    return stays


CASES = [
    Case({"mixture": 0.7}, together(0.7), slides=True),
    Case({"mixture": 0.0}, together(0.0), slides=True),
    Case({"mixture": 0.9, "block": 3}, together(0.9), slides=True),
]
GIVEN = prompts(3, (5, 11, 2))


def test_the_weight_of_the_causal_model_decides_how_many_stay():
    """All of a call, with none of it; fewer with more of it."""
    found = {}
    for mixture in (1.0, 0.9, 0.0):
        tokens, found[mixture], again = decoded(
            eager(True)[1], "apd", GIVEN, block=BLOCK, mixture=mixture
        )
        assert tokens == again
    assert found[1.0] == [-(-NEW // BLOCK)] * 3
    sums = [sum(calls) for calls in found.values()]
    assert sums == sorted(sums) and sums[0] < sums[1] < sums[-1]


@pytest.mark.parametrize("shift", [False, True], ids=["llada", "dream"])
def test_a_block_of_one_is_a_token_of_the_masked_model_per_call(shift):
    """Each is the likeliest of the one mask behind the text."""
    module, compiled = eager(shift)
    tokens, calls, _ = decoded(compiled, "apd", GIVEN, block=1, mixture=0.0)
    for prompt, got, count in zip(GIVEN, tokens, calls, strict=True):
        text = list(prompt)
        for _ in range(NEW):
            with torch.no_grad():
                said = module(torch.tensor([[*text, MASK]]))[0, -1 - module.shift]
            said[MASK] = -torch.inf
            text.append(int(said.argmax()))
        assert got == text[len(prompt) :] and count == NEW


def test_the_first_token_would_not_always_be_the_causal_models():
    """The control of what always stays: without that rule, a row would not move, or end elsewhere."""
    module, _ = eager(False)
    refused = 0

    def stays(seen):
        nonlocal refused
        refused += not together(0.0, first=0)(seen).size
        return together(0.0)(seen)

    official(module, GIVEN[0], NEW, BLOCK, stays, slides=True)
    assert refused


# With a temperature

WARM = {"temperature": 0.7, "top_p": 0.9}


def sampled(given, seed=3, **options):
    with with_loop(eager(True)[1], "apd", block=BLOCK, **options) as made:
        out = made.generate(given, NEW, eos=[], seed=seed, **WARM)
        return out.tokens, out.stats["speculation"]


def test_sampled_tokens_come_again_and_alone_as_in_a_batch():
    tokens, figures = sampled(GIVEN)
    assert tokens == sampled(GIVEN)[0] == [sampled([one])[0][0] for one in GIVEN]
    assert tokens != sampled(GIVEN, seed=4)[0]
    assert MASK not in sum(tokens, []) and min(figures["seconds"].values()) > 0


def test_both_draws_share_their_noise(monkeypatch):
    """Of one distribution twice the same token, so that with all of the weight everything stays; with noise of their
    own, it does not, and of near distributions fewer tokens do.
    """
    mixtures, seeds = (1 - 1e-9, 0.9), (3, 4, 5)
    figures = {m: [sampled(GIVEN, seed=s, mixture=m)[1] for s in seeds] for m in mixtures}
    assert all(one["accepted"] == one["drafted"] for one in figures[mixtures[0]])
    monkeypatch.setattr("accel.runtime.loop.apd._Memory.drawn", fresh)
    for mixture, shared in figures.items():
        apart = [sampled(GIVEN, seed=s, mixture=mixture)[1] for s in seeds]
        assert sum(one["rounds"] for one in apart) > sum(one["rounds"] for one in shared)


def fresh(self, place, logits):
    """The control: new noise for each draw."""
    law = self._row.sampler.distribution(logits, self._seen)
    return law.draw(self._row.rng)


def test_a_slot_is_drawn_from_the_samplers_law():
    """One slot, one call: its token has the masked model's own distribution."""
    module, compiled = eager(False)
    with torch.no_grad():
        scores = module(torch.tensor([[*GIVEN[0], MASK]]))[0, -1]
    scores[MASK] = -torch.inf
    wanted = (scores / 1.5).softmax(-1).numpy()
    with with_loop(compiled, "apd") as made:
        found = np.bincount(
            [
                made.generate(GIVEN[0], 1, temperature=1.5, seed=s, eos=[]).tokens[0][0]
                for s in range(120)
            ],
            minlength=VOCABULARY,
        )
    likely = wanted > 0.02
    off = (found[likely] - 120 * wanted[likely]) / np.sqrt(
        120 * wanted[likely] * (1 - wanted[likely])
    )
    assert np.abs(off).max() < 4 and found[MASK] == 0


# The causal model


def shorter(tokens=VOCABULARY, context=LONGEST):
    """The causal model with the first tokens alone, or less room."""
    module = Filler(False, seed=5, causal=True).eval()
    with torch.no_grad():
        head = torch.nn.Linear(module.head.in_features, tokens)
        head.weight.copy_(module.head.weight[:tokens]), head.bias.copy_(module.head.bias[:tokens])
    module.head = head
    return module, accel.optimize(module, target="eager", max_context=context, max_batch=3)


def test_tokens_that_the_causal_model_lacks_never_come():
    """Of the others, those of the rule."""
    module, second = shorter(30)
    masked, compiled = eager(False)

    def stays(seen):
        seen.logits[:, 30:] = -np.inf
        drafts = seen.logits.argmax(1)
        with torch.no_grad():
            said = module(torch.tensor([[*seen.text, *drafts]]))[0, len(seen.text) - 1 : -1].numpy()
        said = np.pad(said, ((0, 0), (0, VOCABULARY - 30)), constant_values=-1e9)
        same = product(0.8, seen.logits, said).argmax(-1).numpy() == drafts
        same[0] = True
        return np.arange(int(np.cumprod(same).sum()))

    with with_loop(compiled, "apd", block=BLOCK, mixture=0.8) as made, second:
        made.draft_model = second
        out = made.generate(GIVEN[0], NEW, eos=[])
    with pytest.raises(AssertionError):  # the control: others come with the whole vocabulary
        assert max(official(masked, GIVEN[0], NEW, BLOCK, together(0.8), slides=True)[0]) < 30
    clipped = Filler(False).eval()
    with torch.no_grad():
        clipped.head.bias[30:] = -1e9
    want, calls = official(clipped, GIVEN[0], NEW, BLOCK, stays, slides=True)
    assert (out.tokens[0], out.stats["calls"]) == (want, calls) and max(want) < 30


def words(letter):
    vocabulary = {f"{letter}{i}": i for i in range(VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=f"{letter}0"))
    return Tokenizer(made.to_str().encode())


def test_what_the_causal_model_must_be():
    _, compiled = eager(False)
    tables = {"loop": {"use": "apd"}}
    with pytest.raises(accel.RecipeError, match=r"loop = apd needs \[draft\]"):
        accel.optimize(compiled.program, tables, target="eager")
    tables["draft"] = {"use": "model"}
    with pytest.raises(
        accel.RecipeError, match="and the model 41, .* set `path` to a model of the same"
    ):
        accel.optimize(Filler(False).eval(), tables, target="eager", max_context=LONGEST)
    with with_loop(compiled, "apd") as made:
        second, made.draft_model = made.draft_model, None
        with pytest.raises(
            accel.InputError, match="loop.apd: this model was built without its draft"
        ):
            made.generate(GIVEN[0], 3)
        made.draft_model = second
        made.tokenizer, second.tokenizer = words("a"), words("b")
        with pytest.raises(
            accel.InputError, match="loop.apd: the draft model has another tokenizer"
        ):
            made.generate(GIVEN[0], 3, eos=[])
        made.tokenizer = None
        _, made.draft_model = shorter(context=12)
        with pytest.raises(
            accel.InputError, match=r"loop.apd: .* 13 tokens.* reads 12; give fewer"
        ):
            made.generate(GIVEN[1], 2, eos=[])
        assert len(made.generate(GIVEN[1], 1, eos=[]).tokens[0]) == 1


@dataclass(frozen=True)
class Late(Base):
    """Computes the last mask alone, once it is there."""

    def feeds(self, sheet):
        late = np.zeros(sheet.open.size, np.bool_)
        late[-1] = True
        return late


def test_a_canvas_that_leaves_out_the_first_mask_is_named():
    with with_loop(eager(False)[1], "apd", block=4) as made:
        made._methods["canvas"] = Late()
        with pytest.raises(accel.AccelError, match="does not compute the first mask of row 0"):
            made.generate(GIVEN[0], NEW, eos=[])


@pytest.mark.parametrize("name, value", [("mixture", 1.1), ("mixture", -0.1), ("block", 0)])
def test_options_out_of_range_are_refused(name, value):
    with pytest.raises(accel.RecipeError, match=f"loop.apd: {name} is {value}"):
        Apd(**{name: value})

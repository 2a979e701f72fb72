"""draft = mctp: what modules say is what the authors' formulas say, whatever stood before, and a schedule says how much
of a text they write.
"""

import json

import numpy as np
import pytest
import torch

import accel
from accel.compiler.load.heads._folder import head_at
from accel.compiler.with_draft import with_draft
from accel.ir.errors import AccelError, RecipeError
from accel.runtime.length.interleave import Interleave
from accel.runtime.speculation.round_cost import unmeasured_cost
from accel.runtime.tree.chain import Chain

from ...draft_case import rows_of
from ...heads_case import (
    PROMPTS,
    Mctp,
    as_plain,
    asked,
    drafts,
    llama_in,
    mctp_folder,
    mctp_tensors,
    opened,
    texts_of,
)

COUNT = 4
PATTERN = [1, 2, 2, 4]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A target, its folder, the tensors of its modules and their folder."""
    module, folder = llama_in(tmp_path_factory.mktemp("target"), 2)
    tensors = mctp_tensors(module, COUNT)
    return module, folder, tensors, mctp_folder(folder / "modules", module, tensors)


def build(source, path, target="eager", pattern=None, **more):
    recipe = {
        "draft": {"use": "mctp", "path": str(path), "weights": ""},
        "verify": {"use": "sample-match" if pattern is None else "unverified"},
        "length": {"use": "fixed"}
        if pattern is None
        else {"use": "interleave", "pattern": pattern},
    }
    return accel.optimize(source, recipe, target=target, max_context=64, max_batch=2, **more)


@pytest.fixture(scope="module")
def built(home):
    """It verifies nothing, by a pattern."""
    with build(home[1], home[3], pattern=PATTERN) as model:
        yield model


@torch.no_grad()
def features_of(module, tokens, normed=True):
    """What the output head reads of tokens; not normed: before the last norm."""
    found = []
    hook = module.model.norm.register_forward_hook(
        lambda _, x, y: found.append(y if normed else x[0])
    )
    logits = module(torch.tensor([tokens])).logits[0]
    hook.remove()
    return found[0][0], logits


def decoded(home, prompt, pattern, count, shift=0):
    """A text by the formulas: tokens of the model and of its modules in turns, by the pattern. shift: of the states
    that the first module reads.
    """
    module, _, tensors, _ = home
    head, tokens, pair = Mctp(tensors, module), list(prompt), 0
    pairs = list(zip(pattern[::2], pattern[1::2], strict=True))
    while (left := count - (len(tokens) - len(prompt))) > 0:
        steps, drafted = pairs[min(pair, len(pairs) - 1)]
        for _ in range(min(steps, left)):
            tokens.append(int(features_of(module, tokens)[1][-1].argmax()))
        pair += 1
        if (n := min(drafted, COUNT, count - (len(tokens) - len(prompt)) - 1)) > 0:
            states = features_of(module, tokens)[0][:-1].roll(shift, 0)
            tokens += head.chain(states, tokens, n)[0]
    return tokens[len(prompt) :]


@pytest.mark.few(1)
def test_a_draft_is_that_of_the_formulas(home, built):
    """Behind a prompt, and behind tokens that came after other drafts. The controls: the stream before the last norm,
    and the states of the token before.
    """
    module, _, tensors, _ = home
    head, texts, rounds = Mctp(tensors, module), texts_of(20), (8, 9, 14)

    def wanted(shift=0, **other):
        return [
            [
                head.chain(
                    features_of(module, t[: n - 1], **other)[0].roll(shift, 0), t[:n], COUNT
                )[0]
                for t in texts
            ]
            for n in rounds
        ]

    assert built.draft_model.facts.draft_head.cascade == COUNT
    found = drafts(built, texts, COUNT, rounds)
    assert found == wanted()
    assert found != wanted(normed=False) and found != wanted(shift=1), "the controls"


def test_logits_and_slots(home, built):
    """Of each module, behind a prompt, behind a draft that stood and one that fell, and where a module had no turn
    before. Slots: as many as the target has, of each module that had its turn.
    """
    module, _, tensors, _ = home
    head, (text, _) = Mctp(tensors, module), texts_of(20)
    rows = rows_of([text[:6]])
    with built.session(1) as session:
        drafters = opened(built, session, rows)
        follower = drafters._follower
        for size, turns in ((7, 2), (9, 1), (10, COUNT), (15, COUNT)):
            session.run(np.array([text[session.lengths[0] : size - 1]]))
            features = features_of(module, text[: size - 1])[0]
            tokens, wanted = head.chain(features, text[:size], turns)
            said = [follower.begin({0: np.array(text[:size])})[0, 0]]
            said += [follower.said({0: token})[0, 0] for token in tokens[:-1]]
            error = (torch.tensor(np.array(said)) - wanted).abs().max()
            assert error < 1e-5 * wanted.abs().max(), (size, error)
            shifted = head.chain(features.roll(1, 0), text[:size], 1)[1]
            assert (torch.tensor(said[0]) - shifted[0]).abs().max() > 1e-2, "the control"
            assert follower.slots(0)[:turns] == [size - 1] * turns
            assert max(follower.slots(0)[turns:], default=0) < size - 1
        drafters.close()


def test_a_text_is_that_of_the_schedule(home, built):
    """Tokens of the model and of its modules in turns, in rows of two lengths. The control: states off by one."""
    out = built.generate(PROMPTS, max_new_tokens=16)
    wanted = [decoded(home, prompt, PATTERN, 16) for prompt in PROMPTS]
    assert [list(tokens) for tokens in out.tokens] == wanted
    assert wanted != [decoded(home, prompt, PATTERN, 16, shift=1) for prompt in PROMPTS]
    assert wanted != [decoded(home, prompt, [1, 0], 16) for prompt in PROMPTS]
    figures = out.stats["speculation"]
    assert figures["accepted"] == figures["drafted"] > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("pattern", [[1, 0], PATTERN], ids=str)
def test_a_schedule_without_drafts_is_plain_decoding(home, tmp_path, pattern):
    """Bit for bit. The control: one with drafts. And the artifact writes what this process does."""
    _, folder, _, path = home
    with accel.optimize(folder, target="onnx", out=tmp_path / "plain", max_context=64) as plain:
        wanted = plain.generate(PROMPTS[0], max_new_tokens=16, logprobs=3)
    with build(folder, path, "onnx", pattern, out=tmp_path / "out") as model:
        found = model.generate(PROMPTS[0], max_new_tokens=16, logprobs=3)
    same = (found.tokens, found.logprobs) == (wanted.tokens, wanted.logprobs)
    assert same == (pattern == [1, 0])
    if not same:
        assert list(found.tokens[0]) == decoded(home, PROMPTS[0], pattern, 16)


@pytest.mark.few(1)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_verified_tokens_are_those_of_plain_decoding(home, temperature):
    with build(home[1], home[3]) as model:
        assert as_plain(model, Chain(), temperature, limit=COUNT)


def test_rows_take_turns_as_their_lengths_say(home, built):
    """A row that waits goes on with its own next module."""
    texts = [text[:8] for text in texts_of(20)]
    rows = rows_of(texts)
    with built.session(2) as session:
        drafters = opened(built, session, rows)
        session.prompt(np.array([text[:7] for text in texts]))
        both = asked(drafters, rows, 0, 1, limit=COUNT)
        alone = [*asked(drafters, rows, 1, limit=2), *asked(drafters, rows, 0, limit=COUNT)]
        drafters.close()
    assert [tree.tokens.tolist() for tree in both[::-1]] == [
        alone[0].tokens.tolist() + both[1].tokens.tolist()[2:],
        alone[1].tokens.tolist(),
    ]


def test_the_format_is_told_by_its_class(home, tmp_path):
    module, folder, tensors, path = home
    assert with_draft("base", path).tables["draft"]["use"] == "mctp"
    assert head_at(folder) is None
    assert (
        head_at(mctp_folder(tmp_path, module, tensors, architectures=["Qwen2ForCausalLM"])) is None
    )


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, c: t.pop("model.mtp_projs.1.weight"), r"lacks projs.1.weight"),
        (lambda t, c: t.pop("model.layers.3.mlp.up_proj.weight"), r"lacks layers.1.mlp.up_proj"),
        (lambda t, c: t["model.norm.weight"].fill_(torch.nan), "norm.weight holds numbers that a"),
        (lambda t, c: c.update(num_nextn_predict_layers=9), "_predict_layers = 9 and num_hidden_l"),
        (lambda t, c: c.update(vocab_size=90), "has 90 tokens and the model 101"),
        (lambda t, c: c.update(hidden_size=40), "reads states of 40 numbers, .* of 48"),
    ],
)
def test_wrong_modules_are_refused(home, tmp_path, change, words):
    module, folder, *_ = home
    tensors = mctp_tensors(module, 2)
    path = mctp_folder(tmp_path / "head", module, tensors)
    config = json.loads((path / "config.json").read_text())
    change(tensors, config)
    mctp_folder(path, module, tensors)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(AccelError, match=words):
        build(folder, path).close()


def test_a_pattern_is_pairs():
    pace = Interleave([1, 3, 2, 4]).begin(unmeasured_cost)
    assert [pace.limit() for _ in range(6)] == [3, 0, 4, 0, 4, 0]
    assert [Interleave().begin(unmeasured_cost).limit() for _ in range(2)] == [10, 10]
    for wrong in ([], [1], [0, 3], [1, 2, 3], "12", [1, 2.5], [True, 2], 4, [1, -1], [1, 999]):
        with pytest.raises(
            RecipeError, match="length.interleave: pattern is .*(give pairs|draft 0)"
        ):
            Interleave(wrong)

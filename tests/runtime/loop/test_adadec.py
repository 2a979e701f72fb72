"""adadec: the tokens of a version that reads every text anew, and its ends."""

import models
import numpy as np
import pytest
import torch

import accel
from accel.compiler.train.runs.adadec import pauses_at
from accel.compiler.train.train import train
from accel.ir import trained as ir_trained
from accel.ir.parts import bundled
from accel.runtime.loop import adadec

from ...part_case import written

PROMPTS = [[3, 5, 7, 11], [2, 40, 9], [17, 18, 19, 20, 21, 22]]
NEW = 12


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    made = models.make("llama", 2).eval()
    with torch.no_grad():
        made.lm_head.weight.mul_(3)  # else no token is likelier than others
    return made


def build(module, **options):
    recipe = {"loop": {"use": "adadec", **options}}
    return accel.optimize(module, recipe, target="eager", max_context=64, max_batch=4)


def published(module, prompt, new, threshold, tries, ahead, eos=()):
    """Every text from its first token on; (tokens, pauses)."""

    @torch.no_grad()
    def logs(ids):
        return module(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)

    ids, pauses = list(prompt), 0
    while len(ids) < len(prompt) + new and not (len(ids) > len(prompt) and ids[-1] in eos):
        now = logs(ids)
        token = int(now.argmax())
        if float(-(now.exp() * now).sum()) >= threshold:
            pauses, scores = pauses + 1, []
            for first in now.topk(tries).indices.tolist():
                text, total = [*ids, first], [float(now[first])]
                room = len(prompt) + new - len(text)
                for _ in range(min(ahead, room)):
                    if text[-1] in eos:
                        break
                    then = logs(text)
                    text.append(int(then.argmax()))
                    total.append(float(then.max()))
                scores.append((np.mean(total), first))
            token = max(scores, key=lambda one: one[0])[1]
        ids.append(token)
    return ids[len(prompt) :], pauses


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [(2.0, 3, 4), (0.0, 2, 1), (1.5, 4, 7)], ids=str)
def test_tokens_are_those_of_texts_read_anew(module, options):
    names = dict(zip(("threshold", "tries", "ahead"), options, strict=True))
    with build(module, **names) as made:
        found = [made.generate(prompt, NEW, eos=[]).tokens[0] for prompt in PROMPTS]
        together = made.generate(PROMPTS, NEW, eos=[]).tokens
    wanted = [published(module, prompt, NEW, *options) for prompt in PROMPTS]
    assert found == together == [tokens for tokens, _ in wanted]
    assert sum(pauses for _, pauses in wanted) > 1


def test_other_tokens_than_greedy_ones_are_taken(module):
    with build(module, threshold=0.0) as made, build(module, threshold=1e9) as greedy:
        assert (
            made.generate(PROMPTS, NEW, eos=[]).tokens
            != greedy.generate(PROMPTS, NEW, eos=[]).tokens
        )


@pytest.mark.parametrize("ends", [{"threshold": 1e9}, {"tries": 1}, {"ahead": 0}], ids=str)
def test_its_ends_are_greedy_decoding(module, ends):
    with (
        build(module, **{"threshold": 0.0, **ends}) as made,
        accel.optimize(module, "base", target="eager", max_context=64, max_batch=4) as plain,
    ):
        assert (
            made.generate(PROMPTS, NEW, eos=[]).tokens
            == plain.generate(PROMPTS, NEW, eos=[]).tokens
        )


@pytest.mark.long
def test_an_answer_ends_at_eos_also_within_a_try(module):
    plain, _ = published(module, PROMPTS[0], NEW, 0.0, 3, 4)
    for eos in sorted(set(plain[2:]))[:4]:
        want, _ = published(module, PROMPTS[0], NEW, 0.0, 3, 4, {eos})
        with build(module, threshold=0.0, tries=3, ahead=4) as made:
            assert made.generate(PROMPTS[0], NEW, eos=[eos]).tokens[0] == want


def test_a_wrong_mean_is_caught(module, monkeypatch):
    """The control: the least log-probability in place of their mean picks other tokens somewhere."""
    monkeypatch.setattr(adadec._Try, "worth", property(lambda one: min(one.sums)))
    with build(module, threshold=0.0, tries=4, ahead=7) as made:
        found = [made.generate(prompt, NEW, eos=[]).tokens[0] for prompt in PROMPTS]
    assert found != [published(module, prompt, NEW, 0.0, 4, 7)[0] for prompt in PROMPTS]


def test_requests_that_sample_are_refused(module):
    with build(module) as made, pytest.raises(accel.InputError, match="leave temperature at 0"):
        made.generate(PROMPTS[0], 4, temperature=0.7)


@pytest.mark.parametrize(
    "wrong", [{"tries": 0}, {"ahead": -1}, {"threshold": float("nan")}], ids=str
)
def test_options_without_sense_are_refused(module, wrong):
    with pytest.raises(accel.RecipeError, match=next(iter(wrong))):
        build(module, **wrong)


# The threshold that is learnt


def plainly(entropy, right):
    """The published threshold: Newton's steps for a logistic regression of two classes that weigh alike, and every
    cut tried. No torch.
    """
    x = np.stack([entropy, np.ones_like(entropy)], 1)
    balance = np.where(right, 0.5 / right.mean(), 0.5 / (1 - right.mean()))
    line = np.zeros(2)
    for _ in range(50):
        p = 1 / (1 + np.exp(-x @ line))
        slope = x.T @ (balance * (p - right))
        line -= np.linalg.solve((x.T * (balance * p * (1 - p))) @ x, slope)
    p = 1 / (1 + np.exp(-x @ line))
    best = max(np.arange(1, 100) / 100, key=lambda cut: ((p >= cut) == right).mean())
    return (np.log(best / (1 - best)) - line[1]) / line[0]


def some(seed, count=3000):
    """Entropies of a model that is the likelier wrong the larger they are, and whether it is right."""
    rng = np.random.default_rng(seed)
    entropy = rng.gamma(1.5, 1.2, count)
    return entropy, rng.random(count) < 1 / (1 + np.exp(1.7 * entropy - 3))


def test_the_threshold_is_that_of_the_published_regression():
    entropy, right = some(0)
    want = plainly(entropy, right)
    found = pauses_at(torch.tensor(entropy), torch.tensor(right), 0.05)
    told = [((entropy < cut) == right).mean() for cut in (found, want, 0.3, 5.0)]
    assert abs(found - want) < 0.1 and told[0] > told[1] - 0.003
    assert max(told[2:]) < told[0] - 0.05, "a control: other thresholds tell less"


@pytest.mark.parametrize(
    "right, words", [(1, "always"), (0, "never"), (None, "not surer of tokens that it has right")]
)
def test_a_text_that_tells_no_threshold_is_refused(right, words):
    entropy, known = some(1, 200)
    known = ~known if right is None else np.full(200, bool(right))
    with pytest.raises(accel.InputError, match=f"adadec: .*{words}.*another|longer text"):
        pauses_at(torch.tensor(entropy), torch.tensor(known), 0.05)


def test_a_part_is_made_and_found_by_builds(tmp_path, monkeypatch):
    """By the command: of a file of text, for a model of a folder; kept where builds of that model find it."""
    monkeypatch.setattr(ir_trained, "_FOLDER", f"parts-{tmp_path.name}")
    folder = models.write(tmp_path / "tiny")
    text = tmp_path / "text"
    text.write_text("def f(x):\n    return x + 1\n" * 40)
    monkeypatch.setattr(
        "accel.compiler.train.runs.adadec.pauses_at", lambda *_: 0.25
    )  # it has learnt nothing to be sure of
    made = train("adadec", folder, {"text": text, "length": 24, "samples": 2, "rate": 0.05})
    assert made.file.is_file() and "threshold 0.25" in made.message
    options = {"target": "eager", "max_context": 64}
    with accel.optimize(folder, "adadec", **options) as model:
        assert model._loop.pauses_at == 0.25 and model._loop.trained == str(made.file)


@pytest.mark.long
def test_the_learnt_threshold_is_taken_unless_one_is_given(module, tmp_path):
    with build(module) as plain:
        assert plain._loop.pauses_at == adadec.UNLEARNT, "the bundled part is another model's"
        file = written(plain, "adadec", {"threshold": [0.0]}, tmp_path / "part")
        default = plain.generate(PROMPTS, NEW, eos=[]).tokens
    with build(module, trained=file) as learnt, build(module, threshold=0.0) as given:
        assert learnt._loop.pauses_at == 0
        tokens = learnt.generate(PROMPTS, NEW, eos=[]).tokens
        assert tokens == given.generate(PROMPTS, NEW, eos=[]).tokens != default
    with build(module, trained=file, threshold=1.0) as over:
        assert over.generate(PROMPTS, NEW, eos=[]).tokens == default


def test_an_artifact_takes_its_part_along(module, tmp_path):
    with build(module) as plain:
        file = written(plain, "adadec", {"threshold": [0.25]}, tmp_path / "part")
    recipe = {"loop": {"use": "adadec", "trained": file}}
    made = accel.optimize(module, recipe, out=tmp_path / "out", max_context=64, verify=False)
    made.close()
    (tmp_path / "part").unlink()
    with accel.load(tmp_path / "out") as model:
        assert model._loop.pauses_at == 0.25
        model.generate(PROMPTS[0], 2, eos=[])


def test_parts_that_are_not_this_models_are_refused(module, tmp_path):
    with build(module) as plain:
        right = written(plain, "adadec", {"threshold": [0.25]}, tmp_path / "right")
        nan = written(plain, "adadec", {"threshold": [np.nan]}, tmp_path / "nan")
        none = written(plain, "adadec", {"cut": [0.25]}, tmp_path / "none")
    (tmp_path / "half").write_bytes((tmp_path / "right").read_bytes()[:100])
    act = "train it: accel-compile train adadec"
    for file, words in [
        (bundled("adadec"), "was trained for another model"),
        (tmp_path / "half", "not a complete safetensors file"),
        (nan, "numbers in threshold that are not finite"),
        (none, r"threshold of size \[0\], but \[1\] is needed"),
        (bundled("disco"), "holds 'disco'"),
    ]:
        with (
            build(module, trained=str(file)) as model,
            pytest.raises(accel.InputError, match=f"adadec: .*{words}.*{act}"),
        ):
            model.generate(PROMPTS[0], 2)
    with build(module, trained=right) as model:
        model.generate(PROMPTS[0], 2)
    with pytest.raises(accel.RecipeError, match="does not exist, or was moved"):
        build(module, trained=str(tmp_path / "gone"))

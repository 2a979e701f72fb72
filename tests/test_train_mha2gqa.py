"""A model with fewer KV heads, made of its weights: what is exact, what loses least, what is written and refused."""

import copy
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

import models
import pytest
import torch
from torch import nn

from accel.compiler.train.runs import mha2gqa
from accel.compiler.train.runs.mha2gqa import complex_of, directions, factors, real_of
from accel.compiler.train.source import Source
from accel.compiler.train.train import train
from accel.ir.errors import InputError, RecipeError
from accel.ir.ops.rope import rope

from .tuned_case import LENGTH, plain, rows

TEXT = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0))


def source(folder):
    return Source(folder, None, None, lambda *_: None, lambda _: None, rows)


def saved(folder, kind="llama", unlike=0.0):
    """A small model with two KV heads: the second one's are the first one's by maps that one head holds, and so much of
    its own.
    """
    model, generator = models.make(kind, 2), torch.Generator().manual_seed(1)
    for layer in model.model.layers:
        part = layer.self_attn
        width = part.head_dim
        size, angle = torch.rand(2, width // 2, generator=generator)
        turn = torch.polar(size + 0.5, angle * 6)
        mixed = torch.randn(width, width, generator=generator) / width**0.5
        with torch.no_grad():
            for name in ("weight", "bias"):
                k, v = (getattr(getattr(part, f"{n}_proj"), name) for n in "kv")
                if k is not None:
                    one = real_of(complex_of(k[:width].t(), False) * turn, False).t()
                    k[width:] = one + unlike * k[width:]
                    v[width:] = mixed @ v[:width] + unlike * v[width:]
    model.save_pretrained(folder)
    return folder


def converted(folder, out, **options):
    given = {"out": out, "samples": 4, "length": LENGTH, "rows": 4, **options}
    return train("mha2gqa", folder, given, rows=rows)


def said(model):
    with torch.no_grad():
        return model(TEXT).logits


@dataclass
class Read:
    """A model, and what a text told of it."""

    model: nn.Module
    layers: Mapping[int, mha2gqa.Weights]
    moments: Mapping[int, mha2gqa.Moments]

    def fewer(self, by=mha2gqa.fewer):
        """As transformers runs it with one KV head."""
        weights = dict(self.model.state_dict())
        for layer, names in self.layers.items():
            weights |= by(names, weights, self.moments[layer], 2)
        config = copy.deepcopy(self.model.config)
        config.num_key_value_heads = 1
        made = type(self.model)(config).eval()
        made.load_state_dict(weights)
        return made


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Of a model whose heads are alike, or nearly so."""
    made = {}
    for unlike in (0.0, 0.3):
        folder = saved(tmp_path_factory.mktemp("heads") / "model", unlike=unlike)
        program = source(folder).program
        text = itertools.islice(rows(LENGTH, 4, 0), 4)
        moments = mha2gqa.measured(program, text, 2)
        made[unlike] = Read(plain(folder), mha2gqa.layers_of(program, 2, folder), moments)
    return made


def law_exact(one):
    torch.testing.assert_close(said(one.fewer()), said(one.model), rtol=1e-3, atol=2e-3)


def test_heads_that_one_head_holds_are_one_without_loss(read):
    law_exact(read[0.0])


@pytest.mark.parametrize("broken", ["factors", "directions"])
def test_queries_and_outputs_that_are_left_alone_are_caught(broken, read, monkeypatch):
    whole = getattr(mha2gqa, broken)

    def only_into(*given):
        into, back = whole(*given)
        same = torch.ones_like(back)
        return into, same if broken == "factors" else torch.eye(back.shape[-1]).to(back) * same

    monkeypatch.setattr(mha2gqa, broken, only_into)
    with pytest.raises(AssertionError):
        law_exact(read[0.0])


def test_it_loses_less_than_the_mean_of_heads(read):
    """Which is what GQA begins with."""

    def mean(names, weights, moments, heads):
        width = moments["v"].shape[1] // heads
        one = {n: weights[n].unflatten(0, (-1, heads, width)) for n in (names.k, names.v)}
        return {n: x.mean(1).flatten(0, 1) for n, x in one.items()}

    one = read[0.3]
    models_ = (one.model, one.fewer(), one.fewer(mean))
    want, found, other = (said(model).log_softmax(-1) for model in models_)
    near, far = ((want.exp() * (want - x)).sum(-1).mean() for x in (found, other))
    assert near < 0.5 * far


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen2", marks=pytest.mark.long)])
def test_a_folder_that_transformers_and_accel_read(kind, tmp_path):
    """With biases, too; and what it says of the loss. Files and tensors that are not of attention stay."""
    folder, out = saved(tmp_path / "model", kind), tmp_path / "out"
    made = converted(folder, out)
    before, after = plain(folder), plain(out)
    torch.testing.assert_close(said(after), said(before), rtol=1e-3, atol=2e-3)
    assert made.file == out and "KV heads: 1 in place of 2" in made.message
    told = [float(x) for x in re.findall(r"(\d+\.\d+) (?:nats|after)", made.message)]
    assert told[1] == pytest.approx(told[0], abs=2e-3)
    width = before.model.layers[0].self_attn.head_dim
    assert after.model.layers[0].self_attn.k_proj.weight.shape[0] == width
    a, b = (one.state_dict() for one in (before, after))
    other = {n for n in a if a[n].shape != b[n].shape or not torch.equal(a[n], b[n])}
    assert other and all("self_attn" in n for n in other)
    a, b = (json.loads((one / "config.json").read_text()) for one in (folder, out))
    assert {n for n in a if a[n] != b[n]} == {"num_key_value_heads"}


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_factor_of_a_pair_commutes_with_rope(interleaved):
    """The control: pairs of the other kind."""
    generator = torch.Generator().manual_seed(0)
    x, angle = (
        torch.randn(1, 1, 6, 8, generator=generator),
        torch.rand(6, 4, generator=generator) * 6,
    )
    factor = torch.complex(*torch.randn(2, 4, generator=generator))
    places = torch.arange(6)[None]

    def turned(y):
        return rope(y, places, angle.cos(), angle.sin(), interleaved)

    def multiplied(y, kind):
        return real_of(complex_of(y, kind) * factor, kind)

    assert torch.equal(real_of(complex_of(x, interleaved), interleaved), x)
    torch.testing.assert_close(
        turned(multiplied(x, interleaved)), multiplied(turned(x), interleaved)
    )
    assert (
        turned(multiplied(x, not interleaved)) - multiplied(turned(x), not interleaved)
    ).abs().max() > 0.1


def test_no_other_map_of_the_text_loses_less():
    """Of what queries ask, and of what output projections read; beside means of the heads, and maps by chance."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    keys = torch.complex(draw(1, 3, 4, 200), draw(1, 3, 4, 200))  # [G/t,t,D/2,N]
    keys[:, 1] = keys[:, 0] * 0.7j + 0.3 * keys[:, 1]
    asked = draw(1, 4, 3).square() * 9
    moment = torch.einsum("gidn,gjdn->gdij", keys, keys.conj())

    def lost(into, back):
        one = (keys * into[..., None]).sum(1, keepdim=True) * back[..., None]
        return float(((one - keys).abs().square() * asked.transpose(1, 2)[..., None]).sum())

    best = factors(moment, asked)
    third = torch.full((1, 3, 4), 1 / 3, dtype=torch.complex128)
    assert lost(*best) < 0.9 * lost(third, torch.ones_like(third))
    other = torch.complex(draw(1, 3, 4), draw(1, 3, 4)) * 0.2
    assert lost(*best) < lost(best[0] + other, best[1])
    assert lost(*best) < 0.999 * lost(*factors(moment, torch.ones_like(asked)))

    values, output = (
        draw(1, 2, 300, 4) @ draw(1, 2, 4, 4),
        draw(1, 2, 9, 4) * torch.tensor([9, 3, 1, 0.1]),
    )
    joined = values.transpose(1, 2).flatten(2)
    told = joined.mT @ joined

    def behind(into, back):
        one = torch.einsum("gifd,gind->gnf", into, values)
        back_again = torch.einsum("gidf,gnf->gind", back, one)
        return float(torch.einsum("gind,gied->gine", back_again - values, output).square().sum())

    weight = torch.einsum("gied,gief->gidf", output, output)
    best = behind(*directions(told, weight))
    half = torch.eye(4).double().expand(1, 2, 4, 4)
    assert best < 0.9 * behind(half / 2, half)
    assert best < 0.999 * behind(*directions(told, half))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"out": None}, "a model with fewer KV heads is a folder of its own; give out=DIR"),
        ({"heads": 3}, "has 2 KV heads, and 3 do not divide them; give heads=2$"),
        ({"heads": 1}, "heads is 1; give 2 to 64"),
        ({"block": 4}, "mha2gqa has no option block"),
    ],
    ids=str,
)
def test_options_that_do_not_do_are_refused(settings, why, tmp_path):
    folder = saved(tmp_path / "model")
    given = {"out": tmp_path / "out", "length": LENGTH, **settings}
    given = {name: value for name, value in given.items() if value is not None}
    with pytest.raises((InputError, RecipeError), match=why):
        train("mha2gqa", folder, given, rows=rows)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("qwen3", "layer 0: something stands between a product and RoPE or the cache"),
        ("gpt_neox", "names no num_key_value_heads|RoPE turns some of"),
    ],
)
def test_models_that_it_is_not_for_are_refused(kind, why, tmp_path):
    models.make(kind, 2).save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match=why) as error:
        converted(tmp_path / "model", tmp_path / "out")
    assert "mha2gqa-svd" in str(error.value) and not (tmp_path / "out").exists()

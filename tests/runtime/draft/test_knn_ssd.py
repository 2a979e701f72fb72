"""draft = knn-ssd: which kind of text a prompt is of, by transformers' hidden states; the plans that drafts then run;
and the file of anchors and plans, from texts of each kind.
"""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from accel.compiler.over_state import over_state
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.runs import knn_ssd as runs
from accel.compiler.train.source import Source
from accel.ir.capture.capture import capture
from accel.ir.errors import InputError
from accel.runtime.decode.context import DecodeContext
from accel.runtime.draft.draft_verify import DraftVerify
from accel.runtime.draft.knn_ssd import KnnSsd
from accel.runtime.length.fixed import Fixed
from accel.runtime.sample.standard import Standard
from accel.runtime.session import core

from ...depth_case import LAYERS, module_of
from ...draft_case import plain, rows_of, speculated
from ...part_case import written
from ...prefill_case import TOKENS, built

TABLES = {"draft": {"use": "knn-ssd"}, "depth": {"use": "by-branch"}}
PROMPTS = [TOKENS[0, :9], TOKENS[1, :9]]
FIRST, SECOND = [1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0]  # plans of two kinds


@pytest.fixture(scope="module")
def model():
    return built(f"llama:{LAYERS}", tables=TABLES)


@torch.no_grad()
def mean_of(tokens):
    out = module_of(LAYERS)(torch.from_numpy(np.array([tokens])), output_hidden_states=True)
    return out.hidden_states[-1][0].mean(0).numpy()


def part_of(model, file, least=0.99, **more):
    """Anchors that are the means of `PROMPTS`, each of a kind of its own."""
    tensors = {
        "anchors": np.stack([mean_of(p) for p in PROMPTS]),
        "kind": [0, 1],
        "attn": [FIRST, SECOND],
        "mlp": [FIRST, SECOND],
        "cost": [0.5, 0.5],
        "least": np.broadcast_to(least, 2),
    }
    return KnnSsd(written(model, "knn-ssd", tensors | more, file))


def generated(model, method, prompts=PROMPTS, temperature=0.0):
    rows = rows_of(prompts, Standard(temperature=temperature))
    for i, row in enumerate(rows):
        row.rng = np.random.default_rng(i)
    if method is None:
        return plain(model.session(len(rows)), rows), rows
    with model.session(len(rows)) as session:
        list(speculated(session, rows, method, "sample-match", length=Fixed(5), model=model))
    return [row.tokens for row in rows], rows


def routed(model, method, prompts, lengths=None):
    """The kinds of prompts [B,T], of which the first `lengths` tokens count, and what their drafts say."""
    with model.session(len(prompts)) as session:
        rows = rows_of([p[:n] for p, n in zip(prompts, lengths or [99] * 9, strict=False)])
        drafters = method.open(session, rows, model._context())
        session.prompt(prompts, lengths)
        for row in rows:
            row.accept(5, None)
        limits = dict.fromkeys(range(len(rows)), 2)
        asked, run = [], session.run
        session.run = lambda *a, **k: asked.append(k["run_attn"].tolist()) or run(*a, **k)
        drafters.draft(limits, Fixed(5).open(rows, lambda n: 1.0))
        means = [drafters._means.of(i) for i in limits]
        drafters.close()
        return drafters.kinds, asked, means


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.few(1)
def test_tokens_are_those_of_plain_decoding(model, tmp_path, temperature):
    method = part_of(model, tmp_path / "a")
    got, rows = generated(model, method, temperature=temperature)
    assert got == generated(model, None, temperature=temperature)[0]
    assert all(row.drafting["drafted"] > 0 for row in rows)


def test_each_row_drafts_by_the_plan_of_its_kind(model, tmp_path):
    method = part_of(model, tmp_path / "a")
    kinds, asked, _ = routed(model, method, PROMPTS)
    assert kinds == [0, 1] and asked == [FIRST, SECOND] * 2
    kinds, asked, _ = routed(model, method, PROMPTS[::-1])
    assert kinds == [1, 0] and asked == [SECOND, FIRST] * 2
    one = part_of(model, tmp_path / "b", kind=[1, 1])
    assert routed(model, one, PROMPTS)[:2] == ([1, 1], [SECOND] * 2), (
        "rows of one plan run together"
    )


def test_what_is_near_to_no_kind_leaves_out_every_second_layer(model, tmp_path):
    other = [TOKENS[2, :9]] * 2
    kinds, asked, _ = routed(model, part_of(model, tmp_path / "a"), other)
    assert kinds == [-1, -1] and asked == [[True, False, True, True]] * 2
    assert routed(model, KnnSsd(), PROMPTS)[:2] == ([-1, -1], asked), "as without a part"
    kinds, *_ = routed(model, part_of(model, tmp_path / "b", least=-1.0), other)
    assert set(kinds) <= {0, 1}, "the control: any cosine is enough"


def test_a_mean_is_over_a_prompts_tokens_whatever_its_calls(model, tmp_path, monkeypatch):
    """As transformers' last hidden states have it; not moved by padding, nor by where a long prompt is cut."""
    method = part_of(model, tmp_path / "a")
    padded = np.zeros((2, 14), np.int64)
    padded[0, :9], padded[1, :14] = PROMPTS[0], TOKENS[2, :14]
    want = [mean_of(PROMPTS[0]), mean_of(TOKENS[2, :14])]
    for chunk in (512, 4):
        monkeypatch.setattr(core, "CHUNK", chunk)
        kinds, _, means = routed(model, method, padded, [9, 14])
        np.testing.assert_allclose(means, want, atol=1e-5)
        assert kinds[0] == 0
    assert np.abs(mean_of(padded[0]) - want[0]).max() > 1e-2, "the control: with the padding"


@pytest.mark.long
def test_of_one_kind_it_is_draft_verify(model, tmp_path):
    method = part_of(model, tmp_path / "a", least=-1.0, kind=[0, 0])
    whole = {"attn": FIRST, "mlp": FIRST, "cost": [0.5]}
    other = DraftVerify(written(model, "draft-verify", whole, tmp_path / "b"))
    mine, its = (generated(model, m) for m in (method, other))
    assert mine[0] == its[0]
    assert [row.drafting for row in mine[1]] == [row.drafting for row in its[1]]


def test_what_does_not_fit_is_refused(model, tmp_path):
    method = part_of(model, tmp_path / "a")
    with pytest.raises(InputError, match="trained for another model; .* train knn-ssd"):
        generated(built("llama", tables=TABLES), method)
    for n, wrong in enumerate(
        ({"attn": [FIRST[:3]] * 2, "mlp": [FIRST[:3]] * 2}, {"kind": [0, 2]})
    ):
        wrong = part_of(model, tmp_path / f"wrong {n}", **wrong)
        with pytest.raises(InputError, match="has 2 plans of . layers .* model has 4 layers"):
            wrong.plans(DecodeContext(model=model))
    narrow = part_of(model, tmp_path / "narrow", anchors=np.ones((2, 5)))
    with pytest.raises(InputError, match="anchors of 5 numbers, but .* hidden states have 48"):
        generated(model, narrow)
    bare = built(f"llama:{LAYERS}", tables={"depth": {"use": "by-branch"}})
    with bare.session() as session, pytest.raises(InputError, match="build with draft = knn-ssd"):
        KnnSsd().open(session, rows_of(PROMPTS[:1]), bare._context())
    whole = built(f"llama:{LAYERS}", tables={"depth": {"use": "by-call"}})
    with whole.session() as session, pytest.raises(InputError, match="depth = by-branch"):
        KnnSsd().open(session, rows_of(PROMPTS[:1]), whole._context())


# The file


class Numbers:
    """A tokenizer of texts that are numbers, behind a 2."""

    def encode(self, text, special=True):
        return [2] * special + [int(one) for one in text.split()]


@cache
def program():
    return over_state(capture(module_of(LAYERS), max_context=64))


class Loaded(Source):
    program = property(lambda _: program())


def texts(folder, **ranges):
    """A file of numbers for each kind."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, (first, last) in ranges.items():
        numbers = rng.integers(first, last, 200)
        (folder / f"{name}.txt").write_text(" ".join(map(str, numbers)))
    return folder


def source_of():
    return Loaded(Path("x"), Numbers(), None, lambda *_: None, lambda _: None)


def options_of(folder, **more):
    return TrainOptions(text=folder, **{"samples": 16, "length": 12, **more})


def made(folder, out, **more):
    options = options_of(folder, out=out, **more)
    assert runs.Anchored.lacks(options) is None
    return runs.Anchored.make(KnnSsd(), source_of(), options)


def test_a_part_is_made_of_a_folder_of_texts_and_finds_their_kinds(model, tmp_path, monkeypatch):
    tried = []
    search = runs.Search.run
    monkeypatch.setattr(runs.Search, "run", lambda *a: tried.append(search(*a)) or tried[-1])
    folder = texts(tmp_path / "texts", high=(60, 66), low=(3, 9))
    found = made(folder, tmp_path / "part.safetensors")
    method = KnnSsd(str(found.file))
    method.fit(model)
    part = method.part
    assert 2 < len(part["anchors"]) <= 2 * runs.ANCHORS and set(part["kind"]) == {0, 1}
    assert "found again 1" in found.message and "speed of high" in found.message
    plans, costs = method.plans(DecodeContext(model=model))
    assert len(plans) == 3 and costs[:2] == pytest.approx([one.cost for one in tried])
    for plan, one in zip(plans, tried, strict=False):
        off = {("run_attn", i) for i in np.flatnonzero(~plan.attn)}
        assert off | {("run_mlp", i) for i in np.flatnonzero(~plan.mlp)} == one.left_out
    read = [one[:3].numpy() for one, _ in runs.kinds_of(source_of(), options_of(folder)).values()]
    for number, prompts in enumerate(read):
        near = [np.corrcoef(mean_of(p), part["anchors"])[0, 1:] for p in prompts]
        assert {part["kind"][one.argmax()] for one in near} == {number}
        kinds, *_ = routed(model, method, prompts)
        assert kinds == [number] * 3, "a text that anchors were made of"
    swapped = part_of(model, tmp_path / "swapped", **{**part, "kind": 1 - part["kind"]})
    assert routed(model, swapped, read[0])[0] != [0] * 3, "the control"


def test_anchors_are_the_means_of_the_directions_nearest_to_them():
    rng = torch.Generator().manual_seed(0)
    means = torch.randn(40, 6, generator=rng)
    anchors = runs.anchors_of(means)
    assert len(anchors) <= runs.ANCHORS
    labels = torch.nn.functional.cosine_similarity(means[:, None], anchors[None], dim=2).argmax(1)
    for n in labels.unique():
        torch.testing.assert_close(anchors[n], means[labels == n].mean(0))
    assert len(runs.anchors_of(means[:3])) == 3
    assert len(runs.anchors_of(means[:1].expand(12, -1))) == 1, "what is alike is one"


def test_texts_that_are_not_learnt_from_are_of_the_end_of_a_file(tmp_path):
    numbers = list(range(3, 83)) * 3
    (tmp_path / "all.txt").write_text(" ".join(map(str, numbers)))
    ((texts, held),) = runs.kinds_of(source_of(), options_of(tmp_path, samples=40)).values()
    assert texts.shape == (35, 13) and held.shape == (5, 13)
    assert set(texts[:, 0].tolist()) == set(held[:, 0].tolist()) == {2}, "as prompts begin"
    texts, held = texts[:, 1:], held[:, 1:]
    last = numbers[len(numbers) * 7 // 8 :]
    for row in held.tolist():
        assert row == last[last.index(row[0]) :][:12]
    assert max(row[0] for row in texts.tolist()) > min(last), "of another time round"
    with pytest.raises(InputError, match="has 240 tokens; give text=… of more than"):
        runs.kinds_of(source_of(), options_of(tmp_path, length=30))


def test_texts_that_will_not_do_are_refused(tmp_path):
    for text in (None, tmp_path / "nowhere", Path(__file__)):
        assert "a folder with a file of text" in runs.Anchored.lacks(TrainOptions(text=text))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="is empty; give a folder with a file of text"):
        made(tmp_path / "empty", tmp_path / "a")
    folder = texts(tmp_path / "texts", low=(3, 30))
    with pytest.raises(InputError, match="7 texts of a kind tell too little; give samples=8"):
        made(folder, tmp_path / "a", samples=7)
    (folder / "short.txt").write_text("3 4 5")
    with pytest.raises(InputError, match="short.txt has 3 tokens"):
        made(folder, tmp_path / "a")

"""φ-Decoding: the tokens of a version that reads every text anew, its clusters, ends and options."""

import math
import re
from collections import Counter

import numpy as np
import pytest

from accel.ir.errors import InputError, RecipeError
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.loop import _clusters, phi_decoding
from accel.runtime.loop.phi_decoding import PhiDecoding
from accel.runtime.sample.standard import Standard
from accel.runtime.session.session import Session

from ...draft_case import plain, rows_of
from ...search_case import PROMPTS, WARM, Text, searched

NEW, EOS = 18, [12, 34, 70, 101]
HOT = Standard(temperature=1.6)
LOOP = dict(beams=2, tries=3, depth=5, step_tokens=3, foresight=6)


def vectors(texts):
    """TF-IDF, word by word."""
    words = [re.findall(r"\w\w+", text.lower()) for text in texts]
    found = []
    for mine in words:
        line = {
            w: n * (math.log((1 + len(texts)) / (1 + sum(w in o for o in words))) + 1)
            for w, n in Counter(mine).items()
        }
        norm = math.sqrt(sum(x * x for x in line.values()))
        found.append({w: x / norm for w, x in line.items()})
    return found


def distance(a, b):
    return sum((a.get(w, 0) - b.get(w, 0)) ** 2 for w in {*a, *b})


def grouped(texts, k):
    """k-means, point by point."""
    points = vectors(texts)
    if len(texts) < k or not any(points):
        return None
    centres = [points[0]]
    while len(centres) < k:
        far = [round(min(distance(p, c) for c in centres), 12) for p in points]
        centres.append(points[far.index(max(far))])
    labels = None
    while True:
        near = [[round(distance(p, c), 12) for c in centres] for p in points]
        new = [line.index(min(line)) for line in near]
        if new == labels:
            return labels
        labels = new
        for j in set(labels):
            mine = [p for p, label in zip(points, labels, strict=True) if label == j]
            centres[j] = {w: sum(p.get(w, 0) for p in mine) / len(mine) for w in set().union(*mine)}


def soft(values):
    e = [math.exp(v - max(values)) for v in values]
    return np.maximum(np.array(e) / sum(e), 1e-12)


def published(toy, prompt, seed, beams, tries, depth, step_tokens, foresight, told):
    decode = Tokenizer(toy.path / "tokenizer.json").decode
    root = Text(toy, prompt, np.random.default_rng(seed), NEW, EOS, HOT)
    (draws,) = root.rng.spawn(1)

    def choose(places, count, weights):
        return sorted(draws.choice(places, count, replace=False, p=weights / weights.sum()).tolist())  # fmt: skip

    def picked(nodes, count, k):
        valid = [i for i, n in enumerate(nodes) if n["text"] and n["F"] > n["parent"]]
        labels = grouped([nodes[i]["text"] for i in valid], k)
        of = dict(zip(valid, labels, strict=True)) if labels is not None else {}
        share = max(Counter(of.values()).values(), default=0) / max(1, len(of))
        told.update(clustered=bool(of), agreed=share > 0.7)
        if len(nodes) <= count:
            return nodes, share
        places = valid if of and len(valid) >= count else range(len(nodes))
        weights = soft([(nodes[i]["F"] - nodes[i]["parent"]) / 0.1 for i in places])
        if places is valid:
            sizes = [sum(of[j] == of[i] for j in valid) / len(valid) for i in places]
            weights = (weights + soft(sizes)) / 2
        places = list(places)
        return [nodes[i] for i in choose(places, count, weights)], share

    live = [{"way": one, "logp": 0.0, "F": 0.0} for one in root.copies(beams)]
    for turn in range(depth):
        nodes = []
        for node in live:
            for way in [node["way"]] if node["way"].ended else node["way"].copies(tries):
                start = len(way.tokens)
                way.write(step_tokens, "\n", decode)
                logp = float(np.mean(way.logs[start:])) if len(way.logs) > start else node["logp"]
                nodes.append({"way": way, "logp": logp, "parent": node["F"], "F": 0.0, "text": ""})
        logps = np.array([n["logp"] for n in nodes])
        keep = [i for i in range(len(nodes)) if logps[i] > logps.mean() - logps.std()]
        if len(keep) < min(beams, len(nodes)):
            rest = [i for i in range(len(nodes)) if i not in keep]
            keep += choose(rest, min(beams, len(nodes)) - len(keep), soft(logps[rest] / 0.1))
        told.update(pruned=len(keep) < len(nodes))
        nodes = [nodes[i] for i in sorted(keep)]
        for n in nodes if len(nodes) > 1 else ():
            if n["way"].ended:
                n["F"] = n["logp"]
            else:
                ahead = n["way"].copy(n["way"].rng.spawn(1)[0])
                start = len(ahead.tokens)
                ahead.write(foresight)
                n["F"], n["text"] = float(np.mean(ahead.logs[start:])), decode(ahead.tokens[start:])
        live, share = picked(nodes, beams, 3)
        same = len({n["text"] for n in nodes}) == 1
        if all(n["way"].ended for n in live) or (turn >= 3 and (share > 0.7 or same)):
            break
    for n in live:
        start = len(n["way"].tokens)
        n["way"].write()
        n["parent"], before = n["F"], n["logp"]
        n["F"] = float(np.mean(n["way"].logs[start:])) if len(n["way"].logs) > start else before
        n["text"] = n["way"].decoded(decode)
    (best,), _ = picked(live, 1, 2)
    return best["way"].tokens


def agree(toy, seeds, **options):
    options = LOOP | options
    told = Counter()
    for seed in seeds:
        wanted = [published(toy, p, seed, **options, told=told) for p in PROMPTS]
        loop = PhiDecoding(**options)
        rows, _ = searched(toy, loop, PROMPTS, sampler=HOT, seed=seed, limit=NEW, eos=EOS)
        if [row.tokens for row in rows] != wanted:
            return None
    return told


def test_tokens_are_those_of_texts_read_anew(toy):
    told = agree(toy, range(4))
    assert told is not None, "other tokens"
    assert all(told[name] for name in ("clustered", "pruned")), told


@pytest.mark.parametrize("options", [{"beams": 3, "tries": 1}, {"beams": 1}, {"depth": 1}], ids=str)
def test_and_with_other_options(toy, options):
    assert agree(toy, range(2), **options) is not None


@pytest.mark.parametrize("broken", ["clusters", "SHARP", "GROUPS"])
def test_other_rules_are_caught(toy, monkeypatch, broken):
    """The controls: no clusters, another temperature, and another number of clusters."""
    value = {"clusters": lambda *_: None, "SHARP": 1.0, "GROUPS": 2}[broken]
    monkeypatch.setattr(phi_decoding, broken, value)
    assert agree(toy, range(6)) is None


def test_one_beam_with_one_try_and_greedy_requests_are_plain_decoding(toy):
    for loop, sampler in (
        (PhiDecoding(beams=1, tries=1, step_tokens=3), WARM),
        (PhiDecoding(step_tokens=3), Standard()),
    ):
        want = plain(toy.session(batch=3), rows_of(PROMPTS, sampler, 4, limit=NEW, eos=EOS))
        rows, _ = searched(toy, loop, PROMPTS, sampler=sampler, seed=4, limit=NEW, eos=EOS)
        assert [row.tokens for row in rows] == want


def test_clusters_are_of_texts_with_the_same_words():
    texts = ["the cat sat", "numbers add up", "the cat sat down", "a wide blue sea", "numbers add"]
    assert _clusters.clusters(texts, 3).tolist() == [0, 1, 0, 2, 1]
    assert _clusters.clusters(texts, 3).tolist() == [0, 1, 0, 2, 1] == grouped(texts, 3)
    for line, want in zip(_clusters.tf_idf(texts), vectors(texts), strict=True):
        np.testing.assert_allclose(sorted(x for x in line if x), sorted(want.values()))
    assert (
        _clusters.clusters(texts[:2], 3) is None and _clusters.clusters(["", "?", "a"], 2) is None
    )


def test_options_and_models_that_do_not_fit_are_refused():
    for name in LOOP:
        with pytest.raises(RecipeError, match=name):
            PhiDecoding(**{name: 0})
    with pytest.raises(InputError, match="has no tokenizer; build with tokenizer="):
        PhiDecoding().check(None)


def test_a_way_that_waits_keeps_what_it_ran(toy, monkeypatch):
    """Nothing goes back before a continuation is thrown away: an evicting cache could not."""
    sizes, own = [], Session.rewind

    def spied(session, lengths):
        sizes.append(int((session.lengths - np.asarray(lengths)).max()))
        own(session, lengths)

    monkeypatch.setattr(Session, "rewind", spied)
    searched(toy, PhiDecoding(**{**LOOP, "depth": 1}), PROMPTS, None, limit=NEW, eos=EOS)
    assert sizes and 1 not in sizes

"""da-transformer: the graph of one call, and the paths through it, against plain ones and all paths of small graphs."""

from itertools import combinations

import numpy as np
import pytest
import torch

import accel
from accel.ir.axis import Axis
from accel.ir.capture.arch.da_transformer import DaTransformerConfig
from accel.ir.errors import CaptureError, InputError, RecipeError
from accel.ir.paths import Paths, paths_of
from accel.runtime.loop import _graph
from accel.runtime.loop.da_transformer import GREEDY, JOINT, LOOKAHEAD, VITERBI

from ...both_ways_case import CONFIG, SOURCES, built, graphs

AXIS = Axis("loop", "accel.runtime.loop")
WAYS = (GREEDY, LOOKAHEAD, VITERBI, JOINT)


@torch.no_grad()
def graph(source):
    """Log-probabilities [P,V] of tokens and [P,P] of transitions, as the paper writes them down."""
    count = round(len(source) * CONFIG.upsample_scale)
    ids = torch.tensor([[0] + [3] * (count - 2) + [2]])
    x = torch.tensor([source])
    out = graphs()(x, torch.ones_like(x), ids)[0].double()
    logits, rest = out.split([CONFIG.vocab_size, out.shape[1] - CONFIG.vocab_size], 1)
    q, k, gates = rest.split([16, 16, 2], 1)
    q, k = (part.view(count, 2, 8) for part in (q, k))
    found = torch.full((count, count), -torch.inf, dtype=torch.double)
    for i in range(count - 1):
        heads = []
        for h in range(2):
            scores = torch.stack([q[i, h] @ k[j, h] for j in range(i + 1, count)]) / 8**0.5
            heads.append(scores.log_softmax(0) + gates[i].log_softmax(0)[h])
        found[i, i + 1 :] = torch.stack(heads).logsumexp(0)
    return logits.log_softmax(1).numpy(), found.numpy()


def plain_path(way, tokens, links, beta=1.0, penalty=1.0, longest=None):
    """The path of each way, vertex by vertex, or by trying all."""
    sure, end = tokens.max(1), len(links) - 1
    if way in (GREEDY, LOOKAHEAD):
        path = [0]
        while path[-1] != end:
            i, scores = path[-1], {}
            for j in range(i + 1, end + 1):
                scores[j] = links[i, j] + (beta * sure[j] if way == LOOKAHEAD else 0)
            path.append(max(scores, key=scores.get))
        return path
    best = (-np.inf, None)
    for count in range(1, min(longest or end, end - 1) + 1):
        for inner in combinations(range(1, end), count):
            path = [0, *inner, end]
            score = sum(links[i, j] for i, j in zip(path, path[1:], strict=False))
            if way == JOINT:
                score += sum(sure[i] for i in path[:-1])
            best = max(best, (score / count**penalty, path))
    return best[1]


def plain_text(path, tokens):
    found, before = [], None
    for vertex in path:
        token = int(tokens[vertex].argmax())
        if vertex and token not in (before, CONFIG.pad_token_id):
            found.append(token)
        before = token
    return found


def drawn(seed, count):
    """A random graph of so many vertices."""
    rng = np.random.default_rng(seed)
    logits, links = rng.normal(size=(count, 7)) * 2, rng.normal(size=(count, count)) * 2
    links[np.tri(count, dtype=bool)] = -np.inf
    return _graph.log_softmax(logits), _graph.log_softmax(links)


def law_path(way, penalty, walk=None):
    for seed in range(30):
        tokens, links = drawn(seed, 2 + seed % 7)
        loop = AXIS.build("da-transformer", path=way, length_penalty=penalty, beta=0.7)
        got = (walk or loop.walk)(links, tokens.max(1), 1.0)
        if len(links) == 2:
            assert got == [0, 1]
        else:
            assert got == plain_path(way, tokens, links, 0.7, penalty)
        assert got[0] == 0 and got[-1] == len(links) - 1 and (np.diff(got) > 0).all()


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("way", WAYS)
def test_a_path_is_the_best_of_all(way, penalty):
    law_path(way, penalty)


@pytest.mark.parametrize("way", (VITERBI, JOINT))
def test_another_path_is_seen(way):
    """The control: a path that takes the best of each step."""
    with pytest.raises(AssertionError):
        law_path(way, 0.0, lambda links, sure, scale: _graph.walked(links))


def test_limits_of_the_ways():
    for seed in range(20):
        tokens, links = drawn(seed, 9)
        sure = tokens.max(1)
        by = {w: AXIS.build("da-transformer", path=w, beta=0.0) for w in WAYS}
        assert by[LOOKAHEAD].walk(links, sure, 1.0) == by[GREEDY].walk(links, sure, 1.0)
        short = by[JOINT].walk(links, sure, 9.0)  # 2 P / scale: two inner vertices
        assert len(short) <= 4 and short == plain_path(JOINT, tokens, links, longest=2)


@pytest.mark.parametrize("target", ["eager", "onnx"])
def test_texts_are_those_of_the_papers_graph(target):
    """Rows of three lengths in one call, and each alone."""
    texts = set()
    for way in WAYS if target == "eager" else (JOINT,):
        model = built("da-transformer", target, path=way)
        out = model.generate(encoder_input=SOURCES, eos=[])
        assert out.stats["calls"] == 2 and out.finish_reason == ["stop"] * 3
        for source, got in zip(SOURCES, out.tokens, strict=True):
            tokens, links = graph(source)
            longest = int(2 * len(links) / CONFIG.upsample_scale)
            assert got == plain_text(plain_path(way, tokens, links, longest=longest), tokens)
            assert model.generate(encoder_input=[source], eos=[]).tokens == [got]
        texts.add(str(out.tokens))
    assert len(texts) == (4 if target == "eager" else 1)


def test_a_row_ends_at_its_limit_and_at_eos():
    model = built("da-transformer")
    (whole,) = model.generate(encoder_input=SOURCES[:1], eos=[]).tokens
    cut = model.generate(encoder_input=SOURCES[:1], eos=[], max_new_tokens=2)
    assert cut.tokens == [whole[:2]] and cut.finish_reason == ["length"]
    ended = model.generate(encoder_input=SOURCES[:1], eos=[whole[1]])
    assert ended.tokens == [whole[:2]] and ended.stats["finish"] == ["eos"]
    run = model.retranslate([SOURCES[0][:2], SOURCES[0][2:]], eos=[])
    assert [one.tokens for one in run][-1] == whole and run.stats["calls"] == 4


def test_a_source_of_one_token_and_one_that_the_context_bounds():
    model = built("da-transformer")
    out = model.generate(encoder_input=[[5], [5] * 30], eos=[])  # 3 vertices, and 40 in place of 90
    assert out.finish_reason == ["stop", "stop"] and len(out.tokens[1]) < 40


def test_what_is_refused():
    model = built("da-transformer")
    for options, words in (
        ({"temperature": 1.0}, "loop.da-transformer does not sample"),
        ({"repetition_penalty": 2.0}, "unset|leave penalties"),
        ({"logprobs": 1}, "logprobs"),
    ):
        with pytest.raises(InputError, match=words):
            model.generate(encoder_input=SOURCES[:1], **options)
    with pytest.raises(InputError, match="a prompt of 2 tokens cannot come before"):
        model.generate([[0, 5]], encoder_input=SOURCES[:1])
    with pytest.raises(InputError, match="at least one"):
        model.generate(encoder_input=[[]])
    for use in ("base", "dllm-lowconf", "ut5"):
        recipe = use if use == "base" else {"loop": {"use": use}}
        with pytest.raises(RecipeError, match="da-transformer"):
            accel.optimize(graphs(), recipe, target="eager", max_context=40)


@pytest.mark.parametrize("name", ["transition_size", "upsample_scale", "eos_token_id"])
def test_a_configuration_without_what_transitions_need(name):
    wrong = DaTransformerConfig(23, 16, 32, 1, 1, 2, 48, 2, 8)
    object.__setattr__(wrong, name, None)
    with pytest.raises(CaptureError, match=f"set config.{name}"):
        paths_of(wrong)
    assert paths_of(CONFIG) == Paths(2, 8, 3.0, 2, 1) and paths_of(object()) is None

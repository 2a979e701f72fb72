"""draft = dflash: a block is that of the published formulas, whatever stood before; tokens are plain decoding's."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import accel
from accel.compiler.draft_build import _check_head
from accel.compiler.load.heads._folder import head_at
from accel.compiler.with_draft import with_draft
from accel.ir.errors import CaptureError, RecipeError
from accel.runtime.decode.context import DecodeContext
from accel.runtime.tree.chain import Chain

from ...dflash_case import LAYERS, block, config_for, tensors_for, written
from ...draft_case import rows_of
from ...heads_case import as_plain, drafts, llama_in, target_of, texts_of


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A model, its directory, and a head's tensors for it."""
    module, folder = llama_in(tmp_path_factory.mktemp("target"), LAYERS)
    return module, folder, tensors_for(module.config.hidden_size)


def build(folder, path, target="eager", **more):
    recipe = {
        "draft": {"use": "dflash", "path": str(path), "weights": ""},
        "verify": {"use": "sample-match"},
        "length": {"use": "fixed"},
    }
    return accel.optimize(folder, recipe, target=target, max_context=64, max_batch=2, **more)


def test_a_block_is_that_of_the_formulas(tmp_path, target):
    """Behind a prompt, and behind tokens that came after other blocks; a shorter draft is of a whole block, too,
    but where the context ends.
    """
    module, folder, tensors = target
    path = written(tmp_path / "head", config_for(module), tensors)
    texts, rounds = texts_of(20), (8, 9, 14)

    def wanted(count, **other):
        return [[block(module, tensors, t[:n], count, **other) for t in texts] for n in rounds]

    with build(folder, path) as model:
        assert drafts(model, texts, 3, rounds) == wanted(3)
        found = drafts(model, texts, 9, rounds)
        ends = [(text * 4)[:62] for text in texts]  # of 64 tokens
        last = drafts(model, ends, 9, (62,))
    assert found == wanted(9)
    assert last == [[block(module, tensors, text, 9, size=3) for text in ends]]
    for control in ({"off": 1}, {"off": -1}, {"first": 1}, {"causal": (0, 1)}):
        assert found != wanted(9, **control), control


@pytest.mark.long
def test_rows_join_and_leave(tmp_path, target):
    """A row that came with another session drafts as by itself, and a row that takes another's place, too."""
    module, folder, tensors = target
    path, texts = written(tmp_path / "head", config_for(module), tensors), texts_of(20)

    def asked(drafters, *rows):
        trees = drafters.draft(dict.fromkeys(rows, 4), None)
        return [trees[i].tokens.tolist() for i in rows]

    def grown(session, rows, text, size):
        session.run(np.array([text[size - 2 : size - 1]]))
        rows[0].accept(text[size - 1], None)

    with build(folder, path) as model:
        method, opened = model.decoding()[1].methods["draft"], []
        for text, size in zip(texts, (8, 11), strict=True):
            rows, session = rows_of([text[:size]]), model.session(1)
            drafters = method.open(session, rows, DecodeContext({}, None, model))
            session.prompt(np.array([text[: size - 1]]))
            assert asked(drafters, 0) == [block(module, tensors, text[:size], 4)]
            opened.append((session, rows, drafters))
        (session, rows, drafters), (other, more, theirs) = opened
        session.join(other)
        rows += more
        drafters.join(theirs)
        assert drafters.joins
        want = [block(module, tensors, t[:n], 4) for t, n in zip(texts, (8, 11), strict=True)]
        assert asked(drafters, 0, 1) == want
        order = session.leave(0)
        drafters.leave(order)
        rows[:] = [rows[i] for i in order]
        grown(session, rows, texts[1], 12)
        assert asked(drafters, 0) == [block(module, tensors, texts[1][:12], 4)]
        drafters.close()
        session.close()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("target_name", "temperature"), [("onnx", 0.0), ("onnx", 0.9), ("eager", 0.0)]
)
def test_tokens_are_those_of_plain_decoding(tmp_path, target, target_name, temperature):
    module, folder, tensors = target
    path = written(tmp_path / "head", config_for(module), tensors)
    out = {"out": tmp_path / "out"} if target_name == "onnx" else {}
    with build(folder, path, target_name, **out) as model:
        assert as_plain(model, Chain(), temperature, limit=4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, c: t.pop("fc.weight"), "lacks fc.weight .1 of 25 tensors"),
        (lambda t, c: t.update(extra=torch.zeros(2)), "has extra .1 tensors more"),
        (lambda t, c: t["norm.weight"].fill_(torch.nan), "norm.weight holds numbers"),
        (lambda t, c: c.update(hidden_size="a"), "hidden_size = 'a'; a head needs a whole number"),
        (
            lambda t, c: c.update(dflash_config={}),
            r"comes out of layers \[\], and its target has 4",
        ),
        (lambda t, c: c.update(target_layer_ids=[4]), r"comes out of layers \[4\], and its target"),
        (lambda t, c: c.update(block_size=1), "block_size = 1; a head needs a whole number of 2"),
        (lambda t, c: c["dflash_config"].update(mask_token_id=101), "mask_token_id is 101, of 101"),
        (lambda t, c: c.update(conv_kernel_size=2), "a later form .conv_kernel_size = 2"),
        (lambda t, c: c.update(markov_rank=8), "later form .markov_rank = 8., and"),
        (lambda t, c: c.update(num_target_layers=5), "num_target_layers = 5, and the model has 4"),
        (lambda t, c: c.update(model_type="llama"), "layers are of model_type 'llama'"),
        (
            lambda t, c: c.update(layer_types=["full_attention", "sliding_attention"]),
            "sliding_window = None, use_sliding_window = None",
        ),
        (
            lambda t, c: c.update(layer_types=["full_attention", "chunked_attention"]),
            "have chunked_attention, and accel reads heads of full or sliding",
        ),
        (
            lambda t, c: c.update(output_multiplier="2"),
            "says output_multiplier = '2'; a head needs",
        ),
        (
            lambda t, c: c.update(vocab_size=110),
            r"the model's output head has size \[101, 48\], and \[110",
        ),
    ],
)
def test_wrong_heads_are_refused(tmp_path, target, change, words):
    module, folder, tensors = target
    config, tensors = config_for(module), {n: t.clone() for n, t in tensors.items()}
    change(tensors, config)
    path = written(tmp_path / "head", config, tensors)
    with pytest.raises(CaptureError, match=words):
        head_at(path, target=target_of(module.lm_head.weight, LAYERS)).load()


def test_what_is_no_head(tmp_path, target):
    module, folder, tensors = target
    path = written(tmp_path / "head", config_for(module), tensors)
    assert with_draft("base", path).tables["draft"]["use"] == "dflash"
    with pytest.raises(RecipeError, match="holds a model, not a head"):
        build(folder, folder)
    gemma = SimpleNamespace(config={"model_type": "gemma3_text", "hidden_size": 48})
    with pytest.raises(RecipeError, match="the embedding of a gemma3_text without its scale"):
        _check_head(head_at(path), gemma)

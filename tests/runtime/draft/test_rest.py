"""REST: the datastore against comparing texts, its files, and the tree of the heaviest continuations."""

import json
from pathlib import Path
from types import SimpleNamespace

import datastore as tool
import numpy as np
import pytest

import accel
from accel.compiler.assemble import assemble
from accel.ir.errors import RecipeError
from accel.ir.recipe import Recipe
from accel.reference import kinds
from accel.runtime.draft.rest import Rest, heaviest
from accel.runtime.inputs.text import Tokenizer
from accel.runtime.speculation.data_folder import TOLD
from accel.runtime.speculation.datastore import Datastore, suffix_order
from accel.runtime.speculation.texts import GAP

REFERENCE = Path(kinds.__file__).parent
FACTS = SimpleNamespace(vocab_size=4096, max_context=64)


def texts(seed=0, count=12, letters=3):
    rng = np.random.default_rng(seed)
    parts = [[GAP, *rng.integers(0, letters, rng.integers(1, 30))] for _ in range(count)]
    return np.concatenate(parts).astype(np.int32)


def test_suffixes_are_in_order():
    for line in (texts(), np.tile([1, 2], 50), np.zeros(30, int), np.array([5]), np.zeros(0, int)):
        line, order = np.asarray(line, np.int32), suffix_order(np.asarray(line, np.int32))
        assert sorted(order.tolist()) == list(range(line.size))
        found = [line[place : place + 64].tolist() for place in order]
        assert found == sorted(found)


def law(find, shards=(10, 50, 10**6)):
    """The longest end of a tail of 2 or more tokens, and all places behind it, whatever the shards."""
    line, rng, deep = texts(), np.random.default_rng(1), 0
    for shard in shards:
        store = Datastore.of(line, shard)
        assert (len(store.starts) > 1) == (shard < line.size)
        for _ in range(60):
            tail = rng.integers(0, 4, 8)
            size, places = find(store, tail)
            for want in range(8, 0, -1):
                hits = [
                    end
                    for end in range(want, line.size + 1)
                    if line[end - want : end].tolist() == tail[-want:].tolist()
                ]
                if hits:
                    break
            assert (size, sorted(places.tolist())) == ((want, hits) if hits else (0, []))
            deep += size > 3
    assert deep


def test_the_longest_match_is_found_in_every_shard():
    law(lambda store, tail: store.find(tail, 5000))


def test_the_first_shard_alone_is_caught():
    with pytest.raises(AssertionError):
        law(
            lambda store, tail: Datastore(
                store.tokens, store.order[: [*store.starts, store.order.size][1]], (0,)
            ).find(tail, 5000)
        )


def test_the_tree_is_the_heaviest_prefixes():
    """By counting every prefix in a dict; parents stay, and shards do not matter."""
    line = texts(3)
    for nodes in (1, 3, 8, 99):
        seen = np.random.default_rng(nodes).integers(0, 3, 12)
        trees = [
            Rest(nodes=nodes, ahead=4).begin(seen, Datastore.of(line, shard)).draft(seen, 50)
            for shard in (10, 10**6)
        ]
        assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
        _, places = Datastore.of(line).find(seen, 5000)
        weights = {}
        for place in places:
            path = []
            for token in line[place : place + 4].tolist():
                if token == GAP:
                    break
                path.append(token)
                weights[tuple(path)] = weights.get(tuple(path), 0) + 1
        order = sorted(weights, key=lambda path: (-weights[path], len(path), path))
        tree = trees[0]
        paths = [tuple(tree.tokens[list(tree.path(n))].tolist()) for n in range(len(tree))]
        assert [weights[path] for path in paths] == [
            weights[path] for path in order[: min(nodes, 50)]
        ]
        assert set(paths) == set(order[: min(nodes, 50)])


def test_a_short_match_drafts_nothing_and_no_datastore_is_the_request():
    prompt, seen = np.array([1, 2, 3, 4]), np.array([1, 2, 3, 4, 1, 2])
    assert Rest().begin(prompt).draft(seen, 9).tokens.tolist() == [3, 4, 1, 2]
    for size in range(4, 40):
        line = np.random.default_rng(size).integers(0, 3, size)
        text, want = line.tolist(), []
        for deep in range(16, 1, -1):
            ends = [e for e in range(deep, size) if text[e - deep : e] == text[-deep:]]
            if ends:
                after = [text[e] for e in ends]
                want = [min(set(after), key=lambda t: (-after.count(t), t))]
                break
        assert Rest().begin(line).draft(line, 9).tokens.tolist()[:1] == want
    assert not len(Rest(least=3).begin(prompt).draft(seen, 9))
    assert not len(Rest().begin(prompt).draft(np.append(seen, 9), 9))
    places = np.array([0, 0])
    assert len(heaviest(np.zeros(0, np.int32), places, 4, 4)) == 0


@pytest.fixture
def made(tmp_path, capsys):
    """A datastore of two texts for the bundled tokenizer, by the command."""
    for n, kind in enumerate(("code", "recall")):
        (tmp_path / f"{n}.txt").write_text(" ".join(kinds.prompts(kind, 2)), encoding="utf-8")
    out = tmp_path / "store"
    files = [str(tmp_path / f"{n}.txt") for n in range(2)]
    tool.main([str(REFERENCE), "--text", *files, "--out", str(out), "--shard", "300"])
    assert "bytes" in capsys.readouterr().out
    return out


def test_the_command_makes_what_the_drafter_maps(made):
    tokenizer = Tokenizer(REFERENCE / "tokenizer.json")
    store = Rest(str(made)).store(FACTS, tokenizer)
    assert isinstance(store.tokens, np.memmap) and isinstance(store.order, np.memmap)
    text = kinds.prompts("code", 1)[0]
    ids = np.array(tokenizer.encode(text, special=False))
    tree = Rest().begin(ids, store).draft(ids[:20], 30)
    assert ids[20] in tree.tokens[[c for c in tree.children(-1)]]


def test_the_command_says_what_is_wrong(made, tmp_path):
    for given, words in [
        (["--text", str(tmp_path / "0.txt"), "--out", str(made)], "exists; give another folder"),
        (
            ["--text", str(tmp_path / "no.txt"), "--out", str(tmp_path / "a")],
            "cannot be read as text",
        ),
    ]:
        with pytest.raises(SystemExit, match=words):
            tool.main([str(REFERENCE), *given])


def damage(folder, how):
    if how == "moved":
        (folder / TOLD).unlink()
    elif how == "short":
        (folder / "tokens.npy").write_bytes((folder / "tokens.npy").read_bytes()[:-8])
    elif how == "torn":
        (folder / "order.npy").write_bytes(b"no numbers")
    elif how == "lies":
        np.save(folder / "order.npy", np.load(folder / "order.npy") + 10**6)
    elif how == "text":
        (folder / TOLD).write_text("{", encoding="utf-8")
    elif how in ("wide", "words"):
        found = np.load(folder / "tokens.npy")
        changed = found[:, None] if how == "wide" else found.astype(str)
        np.save(folder / "tokens.npy", changed)
        sizes = json.loads((folder / TOLD).read_text(encoding="utf-8"))["sizes"]
        damage(
            folder, {"sizes": {**sizes, "tokens": [str(changed.dtype), *map(int, changed.shape)]}}
        )
    else:
        told = json.loads((folder / TOLD).read_text(encoding="utf-8"))
        (folder / TOLD).write_text(json.dumps({**told, **how}), encoding="utf-8")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("moved", "holds no datastore, or was moved"),
        ("short", "is damaged"),
        ("torn", "is damaged"),
        ("lies", "is damaged"),
        ("text", "is damaged"),
        ({"format": 9}, "is damaged, or no datastore .it holds datastore of format 9"),
        ("wide", "is damaged"),
        ("words", "is damaged"),
        ({"starts": [5]}, "is damaged"),
        ({"starts": []}, "is damaged"),
        ({"starts": [0, "a"]}, "is damaged"),
        ({"vocab_size": 5000}, "of another vocabulary, of 5000 tokens .the model has 4096"),
        ({"vocabulary": "ab"}, "of another vocabulary"),
    ],
)
def test_a_datastore_that_does_not_fit(made, how, words):
    damage(made, how)
    with pytest.raises(RecipeError, match=f"draft.rest: .*{words}.*tools/datastore.py"):
        Rest(str(made)).store(FACTS, Tokenizer(REFERENCE / "tokenizer.json"))


def test_a_build_refuses_one_that_is_not_there():
    tables = {"draft": {"use": "rest", "datastore": "/no/where"}}
    for draft in (tables["draft"], {"use": "stack", "members": ["sam", tables["draft"]]}):
        with pytest.raises(
            RecipeError, match="draft.*rest: datastore = '/no/where' does not exist"
        ):
            accel.optimize("nothing", {"draft": draft})


def test_bad_options():
    for options, words in [
        ({"nodes": 0}, "nodes is 0; give 1 to 512"),
        ({"span": 1}, "span is 1 and least 2; give span >= least"),
    ]:
        with pytest.raises(RecipeError, match=f"draft.rest: {words}"):
            Rest(**options)
    plan = assemble(Recipe(tables={"draft": {"use": "rest"}}))
    assert plan.recipe.tables["verify"]["use"] == "rrs-wor", "a rule that takes trees"


@pytest.mark.long
def test_it_ships(made, tmp_path):
    """An artifact drafts by its own copy, wherever it is moved, and a damaged copy is refused."""
    recipe = {"draft": {"use": "rest", "datastore": str(made)}, "verify": {"use": "sample-match"}}
    sizes = {"max_context": 512, "verify": False}
    accel.optimize(REFERENCE, recipe, out=tmp_path / "built", **sizes).close()
    for file in made.iterdir():
        file.unlink()
    (tmp_path / "built").rename(tmp_path / "moved")
    prompt = kinds.prompts("code", 1)[0]
    with accel.load(tmp_path / "moved") as model:
        assert model.recipe["tables"]["draft"]["datastore"] == "data/draft.datastore"
        got = model.generate(prompt, max_new_tokens=32)
        assert got.stats["speculation"]["drafted"]
        model.save(tmp_path / "saved")
    with accel.load(tmp_path / "saved") as model:
        assert model.generate(prompt, max_new_tokens=32).tokens == got.tokens
    file = tmp_path / "saved" / "data" / "draft.datastore" / "tokens.npy"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        accel.AccelError, match="data/draft.datastore/tokens.npy.*changed or damaged"
    ):
        accel.load(tmp_path / "saved")

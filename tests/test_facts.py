"""Facts: what a manifest keeps of them is read again as it was."""

import json
from dataclasses import replace

import pytest

from accel.ir.adapters import AdapterFacts
from accel.ir.depth import NESTED, Depth
from accel.ir.diffusion import Blocks, Diffusion
from accel.ir.draft_head import DraftHead
from accel.ir.embedding import Embedding
from accel.ir.encoder import EncoderFacts, SpeechTokens
from accel.ir.errors import ArtifactError
from accel.ir.extra_ids import ExtraIds
from accel.ir.facts import FEATURES, Facts, LayerFacts
from accel.ir.fields import Fields
from accel.ir.kv import KvFacts
from accel.ir.low_rank import LowRank
from accel.ir.paths import Paths
from accel.ir.picks import Picks
from accel.ir.prefill import Fill, Pick, Prefill, Ranks, Segments
from accel.ir.selection import Selection
from accel.ir.suppressed import Suppressed
from accel.ir.units import Units
from accel.ir.window import Window

LAYERS = [
    LayerFacts("causal", 0, 4, 2, 16, nodes=40),
    LayerFacts("recurrent", 0, 0, 0, 0, state_bytes=512),
    LayerFacts("window", 8, 4, 2, 16, shares=0),
]
SPEECH = SpeechTokens(1, {"en": 40}, {"translate": 41}, "en", None, (2,), True, 42)
FULL = {
    "encoder": EncoderFacts(0, 30, (80, 60), (1, 2), SPEECH),
    "kv": KvFacts(observe=4, tables=({"share": (0.5, 1.5)}, {"share": (1.0, 1.0)})),
    "depth": Depth((True, False, True), NESTED, 0.5),
    "prefill": Prefill(
        Pick(8, 1, 2), (Pick(4, 0, 1),), Segments(16, 32), Ranks((0, 1, 0)), Fill(3)
    ),
    "diffusion": Diffusion(7, shift=True),
    "blocks": Blocks(7, 4),
    "paths": Paths(2, 8, 4.0, 3, 1),
    "draft_head": DraftHead("eagle3", ("stream.1", "final"), 8, 32, 16),
    "embedding": Embedding("last", False, 384, True),
    "adapters": AdapterFacts({"a.q": (8, 6)}, {"poet": 3}, {"poet": 168}),
    "units": Units(80, 320, 16),
    "selection": Selection(1, history=True),
    "window": Window(512, 64),
    "low_rank": LowRank((0, 2), (2, 2), (16, 16), (8, 32)),
    "suppressed": Suppressed((3, 9), (4,)),
    "picks": Picks(1),
    "extra_ids": ExtraIds(2),
}


def made(**features):
    return Facts(
        "Toy",
        50,
        128,
        max_batch=2,
        eos=(3, 4),
        bos=1,
        parameters=9,
        layers=list(LAYERS),
        **features,
    )


def again(raw):
    return Facts.from_json(Fields(json.loads(json.dumps(raw)), "model"))


@pytest.mark.parametrize("names", [(), *((n,) for n in FEATURES), FEATURES])
def test_what_is_kept_is_read_again(names):
    facts = made(**{n: FULL[n] for n in names})
    assert set(facts.to_json()) & set(FEATURES) == set(names)
    assert again(facts.to_json()) == facts
    assert again(replace(facts, bos=2).to_json()) != facts  # the comparison tells them apart


def test_layers_of_older_artifacts():
    raw = made().to_json()
    for layer in raw["layers"]:
        for name in ("state_bytes", "shares", "nodes"):
            del layer[name]
    assert again(raw).layers == [replace(x, state_bytes=0, shares=None, nodes=0) for x in LAYERS]


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        (
            "num_layers",
            2,
            "model.num_layers is 2 .int., not 3, the number of layers; .*build it again",
        ),
        ("bos", -1, "model.bos is -1"),
        ("eos", [3, 50], r"model.eos\[1\] is 50 .int., not a token id, 0..49"),
        ("layers", [{"attention": ""}], r"model.layers\[0\].attention is ''"),
        ("depth", {"plan": [True], "cache": NESTED}, "model.depth.plan is .*not 3 bools"),
        (
            "diffusion",
            {"mask": 50, "shift": False},
            "model.diffusion.mask is 50 .*not a token id, 0..49",
        ),
        ("blocks", {"mask": 50, "size": 4}, "model.blocks.mask is 50 .*not a token id, 0..49"),
        (
            "paths",
            {"heads": 2, "size": 8, "scale": 4.0, "last": 50, "padding": 1},
            "model.paths.last is 50 .*token id",
        ),
        (
            "adapters",
            {"modules": {"q": [8]}, "ranks": {}, "bytes": {}},
            r"model.adapters.modules.q is \[8\] .*2 of them",
        ),
        (
            "adapters",
            {"modules": {}, "ranks": {"../x": 1}, "bytes": {}},
            r"model.adapters.ranks.../x is '../x' .*the name of an adapter",
        ),
        (
            "prefill",
            {"stages": [{"tokens": -1, "share": 0.5}]},
            r"model.prefill.stages\[0\].tokens is -1",
        ),
        (
            "prefill",
            {"stages": [], "ranks": {"forms": [0, 2]}},
            r"model.prefill.ranks.forms\[1\] is 2 .*0..1",
        ),
    ],
)
def test_what_is_wrong_is_named(where, value, words):
    with pytest.raises(ArtifactError, match=words):
        again({**made().to_json(), where: value})


def test_tokens_beyond_the_vocabulary_are_dropped():
    speech = replace(SPEECH, languages={}, tasks={}, last=None)
    facts = made(encoder=EncoderFacts(50, 30, start=(1, 4), speech=speech))
    facts.set_vocabulary(5)
    assert (facts.eos, facts.bos, facts.encoder.start) == ((3, 4), 1, (1, 4))
    facts.set_vocabulary(4)
    assert (facts.eos, facts.bos, facts.encoder.start) == ((3,), 1, ())
    assert facts.encoder.speech == speech
    facts.set_vocabulary(2)
    assert facts.encoder.speech is None
    facts.set_vocabulary(1)
    assert (facts.eos, facts.bos) == ((), None)


def test_a_model_that_rewrites_has_no_mask():
    facts = made(diffusion=Diffusion())
    assert facts.diffusion.mask is None and again(facts.to_json()) == facts

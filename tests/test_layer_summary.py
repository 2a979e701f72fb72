"""The layers of a model: what each carries, runs and patterns, the picture, and why there are none."""

import json
from xml.etree import ElementTree

import models
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import accel
from accel import cli
from accel.compiler.layer_summary import LayerSummary, groups, picture, summaries, why_not

CAUSAL, WINDOW = (
    LayerSummary("causal", 0, 8, 4, 64, 2048),
    LayerSummary("window", 512, 8, 4, 64, 2048),
)
MAMBA = LayerSummary("recurrent", fixed=65_536)
SVG = "{http://www.w3.org/2000/svg}"


def shape(layers):
    """Each group as (layers, times, counts)."""
    return [(g.which, g.times, [n for _, n in g.runs]) for g in groups(layers)]


@pytest.mark.parametrize(
    ("layers", "want"),
    [
        ([], []),
        ([CAUSAL], [("0", 1, [1])]),
        ([CAUSAL] * 32, [("0-31", 1, [32])]),
        ([WINDOW, CAUSAL] * 21, [("0-41", 21, [1, 1])]),
        (([WINDOW] * 5 + [CAUSAL]) * 4 + [WINDOW] * 2, [("0-23", 4, [5, 1]), ("24-25", 1, [2])]),
        ([CAUSAL, WINDOW, MAMBA], [("0", 1, [1]), ("1", 1, [1]), ("2", 1, [1])]),
        ([CAUSAL] + [MAMBA] * 3, [("0", 1, [1]), ("1-3", 1, [3])]),
        (([MAMBA] * 4 + [CAUSAL] + [MAMBA] * 3) * 4, [("0-31", 4, [4, 1, 3])]),
    ],
)
def test_runs_and_patterns(layers, want):
    assert shape(layers) == want
    again = [
        layer
        for g in groups(layers)
        for _ in range(g.times)
        for layer, n in g.runs
        for _ in range(n)
    ]
    assert again == layers, "nothing is lost and the order stays"


def facts(layer):
    heads = {"num_heads": layer.heads, "num_kv_heads": layer.kv_heads, "head_dim": layer.head_dim}
    return {"attention": layer.attention, "window": layer.window, **heads}


def value(layer, role, *dims, dtype="float32"):
    return {
        "name": f"{role}.{layer}",
        "layer": layer,
        "role": role,
        "dtype": dtype,
        "shape": ["B", *dims],
    }


LAYERS = [facts(CAUSAL), facts(MAMBA), facts(WINDOW)]
STATE = [
    value(None, "pos", "C", dtype="int64"),
    value(0, "k", 4, "C", 64), value(0, "v", 4, "C", 64, dtype="float16"),
    value(0, "cross.k", 8, "X", 32), value(0, "cross.v", 8, 1500, 32),
    value(1, "recurrent", 16, 64, 16),
]  # fmt: skip


def test_what_each_layer_carries():
    """Bytes per token, fixed bytes, bytes per token of an encoder; what layers share is none's."""
    found = summaries(LAYERS, STATE)
    assert [(f.per_token, f.fixed, f.cross) for f in found] == [
        (1536, 0, 2048), (0, 65_536, 0), (0, 0, 0),
    ]  # fmt: skip
    assert found[0].state() == "1.54 kB/token + 2.05 kB/input token"
    assert found[1].state() == "65.5 kB fixed" and found[2].state() == "no state"
    assert found[2].name == "window 512" and found[1].name == "recurrent"


def words(svg):
    """Every text; what a tooltip (<title>) says is left out."""
    found = ElementTree.fromstring(svg).iter(f"{SVG}text")
    return [(t.text or "") + "".join(child.tail or "" for child in t) for t in found]


def test_the_picture_says_it_all():
    found = words(picture(LAYERS, STATE))
    for word in (
        "tokens",
        "logits",
        "layer 0",
        "8 heads over 4 × 64",
        "no attention",
        "window 512",
    ):
        assert word in found, word


def boxes(svg):
    """(x, y, width, height) of every rectangle."""
    rects = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    return [tuple(int(r.get(n)) for n in ("x", "y", "width", "height")) for r in rects]


@pytest.mark.parametrize(
    "layers",
    [
        [LayerSummary("causal", head_dim=i % 7, heads=1) for i in range(40)],
        [LayerSummary("causal", head_dim=i % 7, heads=1) for i in range(14)],
        ([WINDOW] * 5 + [CAUSAL]) * 4 + [WINDOW] * 2,
        ([MAMBA] * 4 + [CAUSAL] + [MAMBA] * 3) * 4 + [CAUSAL, WINDOW] * 3,
    ],
)
def test_nothing_leaves_the_picture_or_overlaps(layers):
    drawn = picture([facts(layer) for layer in layers], [])
    width, height = map(int, ElementTree.fromstring(drawn).get("viewBox").split()[2:])
    found = [b for b in boxes(drawn) if b[2] < 160]  # frames hold others
    assert all(
        0 <= x and x + w <= width and 0 <= y and y + h <= height for x, y, w, h in boxes(drawn)
    )
    for i, (x, y, w, h) in enumerate(found):
        for u, v, p, q in found[:i]:
            assert x >= u + p or u >= x + w or y >= v + q or v >= y + h, "two boxes overlap"


def test_a_reason_is_shown_and_escaped_and_boxes_are_dashed():
    drawn = picture(LAYERS, STATE, "mul_3: <nothing> & more")
    assert "not split into layers: mul_3: <nothing> & more" in words(drawn)
    assert drawn.count("stroke-dasharray") == 3 and "stroke-dasharray" not in picture(LAYERS, STATE)
    evil = picture([{**facts(CAUSAL), "attention": '<script>"'}], [])
    assert "<script" not in evil and '<script>"' in words(evil)
    assert (
        words(picture([], [], "no layer boundary found"))[-1]
        == "not split into layers: no layer boundary found"
    )


class Twin(nn.Module):
    """Two attentions side by side on one stream: nothing lies between them to cut at."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(37, 12), nn.Embedding(64, 12)
        self.left, self.right = models.SdpaBlock(12, 2), models.SdpaBlock(12, 2)
        self.head = nn.Linear(12, 37)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.left(x) * torch.sigmoid(self.right(x)))


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """An artifact whose layers were not found."""
    folder = tmp_path_factory.mktemp("twin") / "artifact"
    model = models.randomise(Twin(), "twin")
    accel.optimize(model, out=folder, max_context=32, verify=False).close()
    return folder


def test_a_model_without_layers_says_why(twin, tmp_path):
    report = accel.load(twin).report
    assert "are in one layer" in why_not(report)
    file = tmp_path / "chain.svg"
    result = CliRunner().invoke(cli.app, ["inspect", str(twin), "--picture", str(file)])
    assert result.exit_code == 0, result.output
    assert "not split into layers  " in result.stdout and "are in one layer" in result.stdout
    drawn = words(file.read_text(encoding="utf-8"))
    assert "2 × causal" in drawn and any("are in one layer" in word for word in drawn)
    page = (twin / "report.html").read_text(encoding="utf-8")
    assert "not split into layers" in page and "stroke-dasharray" in page
    told = CliRunner().invoke(cli.app, ["inspect", str(twin), "--json"])
    assert "are in one layer" in json.loads(told.stdout)["layers_refused"]


def test_a_model_with_layers_gives_no_reason():
    report = {"steps": [{"name": "Layers", "changed": 2, "refused": []}]}
    assert why_not(report) == "" and why_not({}) == ""
    assert (
        why_not({"steps": [{"name": "Layers", "changed": 0, "refused": []}]})
        == "no layer boundary found"
    )


def test_a_picture_that_cannot_be_written(twin, tmp_path):
    file = tmp_path / "none" / "chain.svg"
    result = CliRunner().invoke(cli.app, ["inspect", str(twin), "--picture", str(file)])
    assert result.exit_code == 1
    assert "chain.svg: No such file or directory; give another path" in result.stderr

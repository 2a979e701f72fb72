"""The build report as a page: everything on it, everything escaped, nothing fetched, in no time."""

import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from accel.commands.show import show_steps
from accel.compiler.report import kinds, state_bytes, write_html

pytestmark = pytest.mark.usefixtures("figures")

LAYER = {"attention": "causal", "window": 0, "num_heads": 8, "num_kv_heads": 2, "head_dim": 16}
EVIL = "<script>alert('$1$ & \"x\"')</script>"


def report(layers=4, **changes):
    """A report as `optimize` makes it."""
    return {
        "model": {
            "name": "Model", "vocab_size": 4096, "num_layers": layers, "max_context": 2048,
            "parameters": 1234567,
            "layers": [
                {**LAYER, "nodes": 45, **({"attention": "sliding", "window": 64} if i % 2 else {})}
                for i in range(layers)
            ],
        },
        "recipe": {"name": "base", "about": "as it is", "papers": [], "tables": {"loop": {"use": "x"}}},
        "target": "onnx",
        "grade": "lossless",
        "steps": [
            {"name": "Clean", "changed": 9, "refused": [], "seconds": 0.1, "error": 0.0},
            {"name": "Rope", "changed": 0, "refused": ["no cos"], "seconds": 0.2, "error": None},
            {"name": "Cache", "changed": 4, "refused": [], "seconds": 0.3, "error": 2.5e-7},
        ],
        "seconds": {"load": 1.5, "passes": 0.6, "total": 2.1},
        "errors": {"passes": 2.5e-7, "onnx": 3.5e-7},
        "bytes": {"step.onnx": 4000, "weights.bin": 4_938_268, "total": 4_942_268},
        "kv_bytes_per_token": 1032,
        "notes": ["a note"],
        "versions": {"accel": "0.1.0"},
        **changes,
    }  # fmt: skip


def page(tmp_path, value):
    write_html(tmp_path / "report.html", value)
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def pictures(text):
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.S)]


class Tags(HTMLParser):
    """Names of all tags, all attributes, and whether each tag is closed where it must be."""

    VOID = {"meta", "br", "link", "img", "use", "path"}

    def __init__(self):
        super().__init__()
        self.names, self.links, self.ids, self.open = set(), [], [], []

    def handle_starttag(self, tag, attributes):
        self.names.add(tag)
        self.open += [tag] if tag not in self.VOID else []
        self.links += [v for k, v in attributes if k in ("src", "href", "xlink:href")]
        self.ids += [v for k, v in attributes if k == "id"]

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_it_tells_what_was_built(tmp_path):
    text = page(tmp_path, report())
    for word in (
        "Model", "1,234,567", "4.94 MB", "0, 2", "1, 3", "sliding", "64", "256 B", "no cos",
        "2.5e-07", "3.5e-07", "a note", "as it is", "0.30", "lossless", "use = x",
    ):  # fmt: skip
        assert word in text, word
    words = [
        [t.text for t in svg.iter("{http://www.w3.org/2000/svg}text")] for svg in pictures(text)
    ]
    assert len(words) == 4
    chain, errors, seconds, sizes = words
    assert {"tokens", "causal", "sliding 64", "2 times, layers 0-3", "logits"} <= set(chain)
    assert {"Clean", "Cache", "exact", "2.5e-07"} <= set(errors) and "Rope" not in errors
    assert {"load", "1.50 s", "passes"} <= set(seconds) and "total" not in seconds
    assert {"weights.bin", "4.94 MB"} <= set(sizes)


def test_it_is_whole_and_fetches_nothing(tmp_path):
    text = page(tmp_path, report())
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert not tags.names & {"script", "link", "img", "iframe", "object"}
    assert all(link.startswith("#") for link in tags.links)
    assert {link[1:] for link in tags.links} <= set(tags.ids), "what a picture uses is in it"
    assert len(tags.ids) == len(set(tags.ids)), "pictures do not clash"
    assert "url(http" not in text and "@import" not in text


def test_everything_is_escaped(tmp_path):
    value = report(notes=[EVIL], grade=EVIL, target=EVIL, versions={EVIL: EVIL})
    value["model"]["name"] = EVIL
    value["model"]["layers"][0]["attention"] = EVIL
    value["recipe"] = {
        "name": EVIL,
        "about": EVIL,
        "papers": [EVIL],
        "tables": {EVIL: {EVIL: EVIL}},
    }
    value["steps"][1] = {**value["steps"][2], "name": EVIL, "refused": [EVIL]}
    value["bytes"][EVIL] = value["seconds"][EVIL] = 3
    text = page(tmp_path, value)
    assert "<script" not in text
    assert text.count("&lt;script&gt;") > 10


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": [], "notes": [], "bytes": {}, "seconds": {}, "errors": {}},
        {"bytes": {"a": 0, "total": 0}, "seconds": {"a": 0.0, "total": 0.0}},
        {"steps": [{"name": "A", "changed": 1, "refused": [], "seconds": 0.0, "error": 3e3}]},
    ],
)
def test_reports_with_little_in_them(tmp_path, changes):
    assert "Model" in page(tmp_path, report(layers=0, **changes))
    assert "No layers were found" in page(tmp_path, report(layers=0))
    assert page(tmp_path, {"model": {"name": "X"}})


def test_state_by_layer():
    state = [
        {"name": "kv.pos", "layer": None, "dtype": "int64", "shape": ["B", "C"]},
        {"name": "kv.0.k", "layer": 0, "dtype": "float32", "shape": ["B", 2, "C", 16]},
        {"name": "kv.0.v", "layer": 0, "dtype": "int8", "shape": ["B", 2, "C", 16]},
        {"name": "kv.1.sum", "layer": 1, "dtype": "float32", "shape": ["B", 2]},
    ]
    found = state_bytes(state)
    assert found == {None: 8, 0: 160}
    layers = [{**LAYER, "nodes": 1}] * 2
    assert [(k["which"], k["state"]) for k in kinds(layers, found)] == [("0", 160), ("1", 0)]
    assert [(k["which"], k["state"]) for k in kinds(layers)] == [("0-1", 256)]


def test_layers_that_repeat_are_told_once(tmp_path):
    layers = [{**LAYER, "window": 64 if i % 3 else 0} for i in range(9)]
    assert [k["which"] for k in kinds(layers)] == ["0, 3, 6", "1-2, 4-5, 7-8"]
    text = page(tmp_path, report(layers=80))
    assert "40 times, layers 0-79" in text


def test_it_is_quick_and_the_same_each_time(tmp_path):
    first = page(tmp_path, report())
    start = time.process_time()
    assert page(tmp_path, report()) == first
    assert time.process_time() - start < 1.5, "measured: 0.35 s, imports apart"


def test_loading_an_artifact_draws_nothing():
    code = (
        "import sys, accel.runtime.model.load\n"
        "assert not {'matplotlib', 'jinja2', 'accel.compiler.report'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_passes_left_is_a_note_for_each_reason(capsys):
    why = "it belongs to a mixture of experts"
    left = [f"linear_{i}: {why}" for i in (3, 7, 9)]
    show_steps(
        [{"name": "Pack", "changed": 4, "refused": left, "seconds": 0.1, "error": None},
         {"name": "Concat", "changed": 0, "refused": ["no cache"], "seconds": 0.1, "error": None}]
    )  # fmt: skip
    out = capsys.readouterr().out
    assert f"note  Pack left linear_3 and 2 more as it is: {why}\n" in out
    assert "note  Concat left the model as it is: no cache\n" in out
    assert "refused" not in out and "left as is" in out

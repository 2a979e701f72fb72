"""What the README and the docs tell works: their Python runs, their recipes assemble, their commands have these
options, their links and paths lead somewhere.
"""

import importlib
import re
import shlex
import shutil
import sys
import tomllib
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import models
import pytest
from typer.main import get_command

import accel
from accel import cli
from accel.commands import demo
from accel.compiler import optimize as building
from accel.compiler.assemble import assemble
from accel.ir.axis import find_axes
from accel.ir.capture.capture import capture_inspected
from accel.ir.recipe import Recipe, bundled

from . import adapter_case, traces

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GENERATED = DOCS / "recipes"
WRITTEN_BY_TOOLS = {"leaderboard.md", "speculation.md", "composition.md", "coverage.md"}
PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    *(p for p in sorted(DOCS.rglob("*.md")) if GENERATED not in p.parents),
]
NAMES = [str(p.relative_to(ROOT)) for p in PAGES]
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
LONG = (
    "docs/guides/shrink-a-long-context.md",  # with each method: its code takes as long as ten others
    "docs/guides/many-machines.md",  # starts a Ray three times
)
METHOD = re.compile(
    r"# ((?:passes|runtime)/[\w/]+)/(\w+)\.py\n"
)  # the first line of a method's file


def text(page):
    return page.read_text(encoding="utf-8")


def blocks(page, language):
    """The fenced blocks of a language, with their line numbers."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text(page), re.M | re.S)
    return [(text(page)[: m.start()].count("\n") + 2, m.group(1)) for m in found]


def prose(page):
    """The text without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text(page), flags=re.M | re.S)


def commands(page):
    """Every line of a shell block that calls accel-compile, as words, without its comment."""
    for line, block in blocks(page, "sh"):
        for number, command in enumerate(block.splitlines()):
            words = shlex.split(command.rstrip("\\"), comments=True)
            while "|" in words:
                words = words[words.index("|") + 1 :]
            if words and words[0] == "accel-compile":
                yield f"{page.name}:{line + number}", words[1:]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with `my-model` in it, two layers of random weights with the bundled tokenizer, its copy where the name
    of a repository leads, its artifact, and two adapters.
    """
    folder = tmp_path_factory.mktemp("docs")
    model = models.wordy("readme")
    model.save_pretrained(folder / "my-model")
    for seed, name in enumerate(("poet", "coder")):
        adapter_case.write(folder / name, model, ["q_proj", "up_proj"], seed=seed)
    tokenizer = (demo.reference() / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "my-model" / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (folder / "my-model" / "chat_template.jinja").write_text(template, encoding="utf-8")
    shutil.copytree(folder / "my-model", folder / HUB)  # a path goes before the Hub
    accel.optimize(folder / "my-model", out=folder / "artifact", max_batch=4, verify=False).close()
    return folder


@pytest.fixture(scope="module")
def captures():
    """Model class -> its captured program."""
    return {}


@pytest.fixture
def workplace(built, captures, tmp_path, monkeypatch):
    """A copy of that folder as the current one. A model is captured once for all pages, and builds are checked where a
    block says so only.
    """

    def once(model, traits, stored=None):
        name = type(model).__name__
        if name not in captures:
            captures[name] = capture_inspected(model, traits, stored)
        return traces.shared(captures[name].copy())

    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(accel, "optimize", partial(accel.optimize, verify=False))
    before, building.capture_inspected = building.capture_inspected, once
    yield tmp_path  # not by monkeypatch, for builds share traces while nothing is replaced by it
    building.capture_inspected = before


@pytest.fixture
def shown(workplace):
    """shown(code): makes a block that is a method's file a method of its axis, until the test ends."""
    with ExitStack() as undo:

        def install(code):
            folder, stem = METHOD.match(code).groups()
            package = importlib.import_module("accel." + folder.replace("/", "."))
            path = workplace / folder / f"{stem}.py"
            path.parent.mkdir(parents=True)
            path.write_text(code, encoding="utf-8")
            before = package.__path__
            package.__path__ = [*before, str(path.parent)]
            undo.callback(setattr, package, "__path__", before)
            undo.callback(sys.modules.pop, f"{package.__name__}.{stem}", None)

        yield install


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.long if n in LONG else ())
        for n, p in zip(NAMES, PAGES, strict=True)
        if blocks(p, "python")
    ],
)
def test_python_blocks_run_in_order(name, shown, workplace, capsys):
    page = ROOT / name
    for line, code in blocks(page, "python"):
        if METHOD.match(code):
            shown(code)
            continue
        space = {"__name__": f"page_{line}"}
        exec(compile("\n" * (line - 1) + code, name, "exec"), space)
        for test in [v for k, v in space.items() if k.startswith("test_")]:
            test()
    for _, block in blocks(page, "toml"):  # of methods that the page shows, too
        assert assemble(accel.Recipe.load(tomllib.loads(block))).methods


def test_a_method_shown_is_one_of_its_axis(shown, workplace):
    code = "# passes/kv/score/none.py\nfrom accel.passes.kv.score import Base\nclass Nothing(Base):\n    pass\n"
    shown(code)
    assert find_axes()["kv.score"].method("none").__name__ == "Nothing"
    with pytest.raises(accel.RecipeError, match="did you mean"):
        accel.optimize("my-model", {"kv.score": {"use": "nono"}})


@pytest.mark.parametrize(
    "name", [n for n, p in zip(NAMES, PAGES, strict=True) if blocks(p, "toml")]
)
def test_recipes_shown_are_recipes(name):
    for _, block in blocks(ROOT / name, "toml"):
        assert accel.Recipe.load(tomllib.loads(block)).tables


def test_commands_have_the_options_shown():
    known = get_command(cli.app).commands
    told = [one for page in PAGES for one in commands(page)]
    assert {words[0] for _, words in told} == set(known), "each command is shown"
    for where, words in told:
        options = {o for p in known[words[0]].params for o in p.opts}
        for word in words[1:]:
            assert not word.startswith("-") or word in options, f"{where}: {word}"
        names = [b for a, b in zip(words, words[1:], strict=False) if a == "--recipe"]
        for recipe in names + (words[1:] if words[0] == "recipes" else []):
            assert Recipe.load(recipe).tables, where


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not path and anchor.startswith("recipe-"):
            assert anchor.removeprefix("recipe-") in bundled(), link
        elif target.parent != GENERATED:
            assert target.is_file(), link
            heads = re.findall(r"^#+ (.*)$", prose(target), re.M) if target.suffix == ".md" else []
            assert not anchor or anchor in map(slug, heads), link


def slug(heading):
    """The anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def goes_with(recipe, other):
    """Whether the two make one recipe."""
    try:
        assemble(Recipe.load([recipe, other]))
    except accel.RecipeError:
        return False
    return True


def test_guides_say_what_goes_together():
    draft, shrink = (
        text(DOCS / "guides" / f"{n}.md") for n in ("draft-tokens", "shrink-a-long-context")
    )
    good, bad = re.search(r"^Compatible: (.*?)^Not compatible: (.*?)$", draft, re.M | re.S).groups()
    for told, expected in ((good, True), (bad, False)):
        names = [name for name in re.findall(r"`([\w-]+)`", told) if name in bundled()]
        assert len(names) > 3
        assert {n: goes_with("prompt-lookup", n) for n in names} == dict.fromkeys(names, expected)
    told = re.search(r"combines with all but (.*?\))\.", shrink, re.S).group(1)
    refused = set(re.findall(r"`([\w-]+)`", told))
    others = [n for n in bundled() if not {"kv.codec", "draft"} & set(Recipe.load(n).tables)]
    assert {n for n in others if not goes_with("kv-int8", n)} == refused


def test_pages_can_be_read_at_once():
    for page in PAGES:
        most = 150 if page.name == "README.md" else 250
        assert page.name in WRITTEN_BY_TOOLS or len(text(page).splitlines()) <= most, page


def test_pictures_are_shown_and_small():
    everything = "".join(map(text, PAGES))
    for picture in (DOCS / "pictures").iterdir():
        assert picture.name in everything and picture.stat().st_size < 200_000


def test_the_picture_of_the_folders_has_all():
    import structure

    drawn = Counter(re.findall(r"<!-- (.*) -->", text(DOCS / "pictures" / "structure.svg")))
    folders = [name.partition("/")[2] or name for name in structure.graph()]
    assert drawn == Counter([*folders, *structure.LAYERS]), "python tools/pages/structure.py"


def test_every_public_name_has_a_reference():
    told = "".join(map(text, (DOCS / "api").iterdir()))
    for name in set(accel.__all__) - {"__version__"}:
        assert re.search(rf":: accel\.{name}$", told, re.M), name


def test_make_has_the_commands():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    told = [
        t
        for page in PAGES
        for _, block in blocks(page, "sh")
        for t in re.findall(r"^make (\w+)", block, re.M)
    ]
    assert {"demo", "test", "docs"} <= set(told) <= set(targets)

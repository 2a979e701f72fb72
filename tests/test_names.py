"""Names in backticks, in the docs and in docstrings, are of what is there: files, modules, members of classes."""

import importlib
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("ir", "passes", "lowering", "runtime", "api")
CODE = (*LAYERS, "tools", "tests")
TOPS = (*CODE, "docs", "recipes")
GENERATED = ROOT / "docs" / "recipes"
MADE = ("artifact/", "build/", "org/")  # what examples call what a run writes, and repositories
TICKED = re.compile(r"`([^`\n]+)`")
FILE = re.compile(rf"[\w./-]+\.py|(?:{'|'.join(TOPS)})/[\w./-]*\.\w+")
FOLDER = re.compile(r"([a-z_0-9-]+(?:/[a-z_0-9-]+)+)(\.\w+)?/?")  # or a module, or what it has
MODULE = re.compile(rf"((?:accel\.)?(?:{'|'.join(LAYERS)})(?:\.\w+)+)")
MEMBER = re.compile(r"([A-Z]\w+)\.(\w+)")
OF_FILE = re.compile(r"`(\w+)` (?:of|in) `([\w/]+\.py)`")
DOCSTRING = re.compile(r'""".*?"""', re.S)
CLASS = re.compile(r"^class (\w+)(?:\[[^\]]*\])?(?:\(([^)]*)\))?:\n((?:[ \t#].*\n|\n)*)", re.M)
HAS = re.compile(r"\bdef (\w+)|^ +(\w+)(?::| =)|\bself\.(\w+)|^ +class (\w+)", re.M)


@cache
def paths() -> frozenset[str]:
    """Every file and folder, by as much of its path as tells it: a docstring says `session/core.py`."""
    tops = [*(ROOT / top for top in TOPS), *ROOT.glob("*.*")]
    found = set()
    for file in [p for top in tops for p in (top, *top.rglob("*"))]:
        parts = file.relative_to(ROOT).parts
        if "__pycache__" not in parts:
            found |= {"/".join(parts[i:]) for i in range(len(parts))}
    return frozenset(found)


@cache
def members() -> dict[str, list[tuple[frozenset[str], tuple[str, ...]]]]:
    """Class -> of each of that name what it has itself, and its bases."""
    found = defaultdict(list)
    for layer in LAYERS:
        for file in (ROOT / layer).rglob("*.py"):
            for name, bases, body in CLASS.findall(file.read_text(encoding="utf-8")):
                its = frozenset(one for hit in HAS.findall(body) for one in hit if one)
                found[name].append((its, tuple(re.findall(r"\w+", bases))))
    return found


def has(name: str, member: str, seen: frozenset[str] = frozenset()) -> bool:
    """Whether a class of this name has it, or one of those that it is made of."""
    return any(
        member in its or any(has(b, member, seen | {name}) for b in bases if b not in seen | {name})
        for its, bases in members().get(name, ())
    )


def is_module(name: str) -> bool:
    """Whether a dotted name is a module, or what one has."""
    parts = name.removeprefix("accel.").removeprefix("api.").split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(["accel", *parts[:end]]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@cache
def called(file: str) -> list[Path]:
    """The files of code that the end of a path may be of."""
    found = [path for top in CODE for path in (ROOT / top).rglob(Path(file).name)]
    return [path for path in found if path.as_posix().endswith(f"/{file}")]


def lost(text: str) -> list[str]:
    """The names in backticks that lead nowhere. A word in capitals, and what holds <, * or {, stands for a name."""
    found = [
        f"{name} of {file}"
        for name, file in OF_FILE.findall(text)
        if not any(name in read(path) for path in called(file))
    ]
    for word in map(str.strip, TICKED.findall(text)):
        if re.search(r"[<*{]|[A-Z]{4,}", word.partition("(")[0]) or word.startswith(MADE):
            continue
        if FILE.fullmatch(word):
            good = word in paths() or is_module(word.replace("/", "."))
        elif one := FOLDER.fullmatch(word):
            good = word.rstrip("/") in paths() or f"{one[1]}.py" in paths()
        elif one := MODULE.match(word):
            good = is_module(one[1])
        elif (one := MEMBER.match(word)) and one[1] in members():
            good = has(one[1], one[2])
        else:
            continue
        if not good:
            found.append(word)
    return found


@cache
def read(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def texts(top: str) -> dict[str, str]:
    """Page -> its text without code, or file -> its docstrings."""
    if top == "docs":
        pages = [
            *ROOT.glob("*.md"),
            *(p for p in (ROOT / top).rglob("*.md") if GENERATED not in p.parents),
        ]
        return {
            str(p.relative_to(ROOT)): re.sub(r"^```.*?^```$", "", read(p), flags=re.M | re.S)
            for p in pages
        }
    files = [p for p in (ROOT / top).rglob("*.py") if "__pycache__" not in p.parts]
    return {str(p.relative_to(ROOT)): "\n".join(DOCSTRING.findall(read(p))) for p in files}


@pytest.mark.parametrize("top", ["docs", *CODE])
def test_names_lead_somewhere(top):
    found = texts(top)
    wrong = {name: names for name, text in found.items() if (names := lost(text))}
    assert len(found) > 5 and not wrong, wrong


def test_a_name_that_leads_nowhere_is_seen():
    """The control."""
    gone = [
        "runtime/session/heart.py", "session/heart.py", "recipes/basic/bass.toml",
        "session/heart", "runtime.depth", "accel.runtime.depths.Base",
        "accel.ir.axis.find_axis", "Session.rewound", "Recipe.tablets()",
    ]  # fmt: skip
    there = [
        "runtime/session/core.py", "session/core.py", "core.py", "docs/conf.py", "recipes/basic/base.toml",
        "runtime/session", "speculation/guard", "ir.axis",
        "accel.ir.axis.find_axes", "Session.rewind", "Recipe.tables", "CompiledModel.generate(prompts)",
        "tests/laws/test_<axis>.py", "test_NAME.py", "runtime/*/Base.py",
    ]  # fmt: skip
    assert lost(" ".join(f"`{one}`" for one in gone)) == gone
    assert lost(" ".join(f"`{one}`" for one in there)) == []
    assert lost("`MISSING` of `tools/new.py` and `find_axes` in `ir/axis.py`") == [
        "MISSING of tools/new.py"
    ]

"""The package: every folder is named, every data file goes along, nothing knows this machine."""

import ast
import fnmatch
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TABLE = PROJECT["tool"]["setuptools"]
EXTRAS = PROJECT["project"]["optional-dependencies"]
TOOLS = ("dev", "docs", "eval", "genai", "parity")  # extras that the package itself does not import
WANTED = [
    *PROJECT["project"]["dependencies"],
    *(
        each
        for name, extra in EXTRAS.items()
        if name not in TOOLS
        for each in extra
        if not each.startswith(PROJECT["project"]["name"])  # its own extras
    ),
]


def folder_of(package: str) -> Path:
    """Where a package lies, by [tool.setuptools.package-dir]."""
    for name, folder in sorted(TABLE["package-dir"].items(), key=lambda item: -len(item[0])):
        if package == name or package.startswith(name + "."):
            return ROOT / folder / package[len(name) + 1 :].replace(".", "/")
    raise AssertionError(f"{package} is mapped nowhere")


def test_every_package_is_named():
    """A package that is left out works from a checkout and is missing from the wheel."""
    found = set()
    for name, folder in TABLE["package-dir"].items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join([name, *inner]))
    named = set(TABLE["packages"])
    assert found - named == set(), "add the missing packages to [tool.setuptools] packages"
    assert named - found == set(), "these packages do not exist"


def test_every_folder_of_code_is_a_package():
    for name, folder in TABLE["package-dir"].items():
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), (
                f"{path.parent} needs an __init__.py ({name})"
            )


def test_every_data_file_goes_along():
    """Each tracked file of a package is code, or matches the package's package-data."""
    missing = []
    for package in TABLE["packages"]:
        patterns = TABLE["package-data"].get(package, [])
        inner = {folder_of(p) for p in TABLE["packages"]}
        for path in tracked(folder_of(package)):
            owner = next(p for p in path.parents if p in inner)
            if owner != folder_of(package) or path.suffix == ".py":
                continue
            if path.name == "_template.toml":  # of a checkout's tools
                continue
            relative = path.relative_to(owner).as_posix()
            if not any(
                fnmatch.fnmatch(relative, p) or fnmatch.fnmatch("/" + relative, p) for p in patterns
            ):
                missing.append(f"{package}: {relative}")
    assert missing == [], "add them to [tool.setuptools.package-data]"


def tracked(folder: Path = ROOT) -> list[Path]:
    """Files that git holds or would hold; all files where there is no git."""
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z", str(folder)]
    try:
        out = subprocess.run(command, capture_output=True, check=True).stdout.decode()
        files = [ROOT / name for name in out.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        files = [p for p in folder.rglob("*") if "__pycache__" not in p.parts]
    return [p for p in files if p.is_file()]


def test_dependencies_that_are_imported_are_named():
    names = {re.match(r"[\w-]+", d)[0].lower() for d in WANTED}
    brought_by = {"onnxruntime": "onnxruntime-gpu", "markupsafe": "jinja2", "h11": "uvicorn"}
    brought_by |= {"starlette": "fastapi", "pydantic": "fastapi", "pyarrow": "ray"}
    used = set()
    for package in TABLE["packages"]:
        for path in folder_of(package).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    used |= {a.name.split(".")[0] for a in node.names}
                elif isinstance(node, ast.ImportFrom):
                    used.add(str(node.module).split(".")[0])
    third = used - set(sys.stdlib_module_names) - {"accel", "__future__"}
    assert {u for u in third if brought_by.get(u, u) not in names} == set()
    assert names - {brought_by.get(u, u) for u in used} <= {"onnxruntime"}, "nothing imports these"


def test_what_is_pinned_satisfies_what_is_asked_for():
    pinned = dict(
        re.findall(r"^([\w-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    for wanted in WANTED:
        name, least = re.match(r"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+)", wanted).groups()
        if name in pinned:
            have = [int(n) for n in pinned[name].split(".")]
            assert have >= [int(n) for n in least.split(".")], f"{name} {pinned[name]} < {least}"


@pytest.mark.parametrize(
    "name", ["accel", "accel.ir.program", "accel.runtime.session.session", "accel.recipes"]
)
def test_the_installed_package_is_this_checkout(name):
    module = __import__(name, fromlist=["_"])
    assert Path(module.__file__).resolve().is_relative_to(ROOT)


def test_importing_the_front_door_is_quick():
    """`import accel` and `accel.load` bring in neither torch nor transformers."""
    code = (
        "import sys, accel; accel.load; accel.Session; accel.Recipe; accel.InputError\n"
        "print([m for m in ('torch', 'transformers', 'onnx', 'networkx', 'matplotlib') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_nothing_committed_names_this_machine():
    """Paths of whoever built it, user names in home folders, addresses of local networks."""
    home = r"/(?:home|Users)/(?!user\b|you\b|me\b)[a-z][\w.-]*/|/root/"
    here = re.escape(str(ROOT.parent)) + r"/" if len(ROOT.parts) > 2 else r"(?!)"
    pattern = re.compile(
        rf"{home}|{here}|\b(?:10|192\.168|172\.(?:1[6-9]|2\d|3[01]))(?:\.\d+){{2,3}}\b"
    )
    found = []
    for path in tracked():
        if path == Path(__file__) or path.suffix in (".safetensors", ".png"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {m.group(0)}" for m in pattern.finditer(text)][:3]
    assert found == []

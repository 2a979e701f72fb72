"""accel on Ray: each row and each client gets what `generate` gives, whatever the blocks, actors and replicas; what
fails is told where it failed. Tests that start a Ray are long.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import httpx
import openai
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

import accel
import accel.ray
from accel import cli
from accel.serve.server import bound

from . import serve_case

PROMPT = "import os\nimport sys\n\ndef main("
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
SAMPLED = accel.SamplingParams(max_tokens=6, temperature=0.9, seed=7)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return serve_case.build(tmp_path_factory.mktemp("ray"), max_context=128, max_batch=3)


@pytest.fixture(scope="module")
def model(artifact):
    with accel.load(artifact, threads=1) as found:
        yield found


def rows(n):
    """Rows of which each has an id and a prompt of its own."""
    return [{"id": f"r{i}", "prompt": f"def f{i}(x, y):\n    return"} for i in range(n)]


def alone(model, row):
    """What a row is to get, with the options SAMPLED."""
    seed = accel.ray.row_seed(7, row["id"])
    return model.generate(row["prompt"], 6, temperature=0.9, seed=seed).text[0]


def test_a_row_gets_what_it_gets_alone(artifact, model, monkeypatch):
    """Whatever rows are beside it and fail, in blocks of any size, through a queue that is full."""
    from accel.ray import batches

    monkeypatch.setattr(batches, "WAITING", 1)
    given = [*rows(9), {"id": "long", "prompt": "x = 1\n" * 200}, {"id": "none", "prompt": None}]
    given += [{"id": None, "prompt": "x"}, {"id": "empty", "prompt": ""}]
    table = pa.Table.from_pylist(given)
    worker = batches.Generate(artifact, params=SAMPLED, row="id", threads=1)
    made = [
        [row for at in range(0, len(given), size) for row in worker(table[at : at + size]).to_pylist()]
        for size in (len(given), 2)
    ]  # fmt: skip
    assert made[0] == made[1]
    assert [{"id": row["id"], "prompt": row["prompt"]} for row in made[0]] == given
    for row in made[0][:9]:
        assert row["generated_text"] == alone(model, row) and row["error"] is None
        assert row["finish_reason"] == "length" and row["completion_tokens"] == 6
        assert row["prompt_tokens"] == len(model.tokenizer.encode(row["prompt"]))
    assert any(alone(model, {**row, "id": "other"}) != alone(model, row) for row in given[:9])
    for row, word in zip(made[0][9:], ("max_context", "no prompt", "no id", "empty"), strict=True):
        assert word in row["error"] and row["generated_text"] is row["finish_reason"] is None
    with pytest.raises(accel.InputError, match="generated_text already"):
        worker(worker(table[:1]))
    with pytest.raises(accel.InputError, match='batch_format="pyarrow"'):
        worker({"prompt": ["x"]})


def test_prompts_of_each_kind(artifact, model):
    """Token ids and messages, whose fields Arrow fills with null."""
    worker = accel.ray.Generate(
        artifact, params=accel.SamplingParams(max_tokens=5), prompt="p", threads=1
    )
    messages = [TALK, [{**TALK[1], "name": "me"}]]
    ids = [[5, 6, 7], [9]]
    for given in (messages, ids):
        made = worker(pa.table({"p": given})).column("generated_text").to_pylist()
        assert made == model.generate(given, 5).text
    (error,) = worker(pa.table({"p": [1.5]})).column("error").to_pylist()
    assert "no text, no token ids and no messages" in error


def test_a_ray_with_too_few_cpus_is_refused():
    from accel.ray.room import check_room, share

    check_room([2, 2], 3, 1, "actors", spare=1)
    check_room([2], 2, 0.5, "actors", spare=1)
    check_room([2, 2], 2, 1.5, "actors", spare=1)
    check_room([4], 2, 2, "replicas")
    for machines, workers, cpus in (([2], 2, 1), ([2, 2], 2, 1.6), ([2, 2, 2], 1, 3), ([], 1, 1)):
        with pytest.raises(accel.InputError, match="do not fit into this Ray"):
            check_room(machines, workers, cpus, "actors", spare=1)
    assert [share(cpus) for cpus in (0.5, 1, 3.7)] == [1, 1, 3]
    for cpus in (0, -1, float("nan"), True, "2"):
        with pytest.raises(accel.InputError, match="cpus"):
            share(cpus)


def said(*arguments):
    """The one line of a command that fails before it starts a Ray."""
    result = CliRunner().invoke(cli.app, ["map", *map(str, arguments)])
    lines = result.stderr.splitlines()
    assert result.exit_code == 1 and len(lines) == 1, result.output
    return lines[0]


def test_what_cannot_be_mapped_is_one_line(artifact, tmp_path, monkeypatch):
    given, mixed, out = tmp_path / "in.jsonl", tmp_path / "mixed", tmp_path / "out"
    given.write_text('{"prompt": "x"}\n')
    mixed.mkdir()
    for name in ("a.csv", "b.jsonl"):
        (mixed / name).write_text("")
    assert "nothing" in said(tmp_path / "nothing", given, out)
    assert "no such file" in said(artifact, tmp_path / "no.csv", out)
    assert "end in .parquet, .jsonl, .csv" in said(artifact, artifact / "accel.json", out)
    assert "files of no one kind" in said(artifact, mixed, out)
    assert "a seed needs ids" in said(artifact, given, out, "--seed", 1, "--temperature", 1)
    assert "cpus = 0.0: give a number above 0" in said(artifact, given, out, "--cpus", 0)
    assert "stop = ['']: give a non-empty" in said(artifact, given, out, "--stop", "")
    assert f"{mixed} exists" in said(artifact, given, mixed)
    assert f"{given} exists" in said(artifact, given, given)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "mixed"]
    from accel.ray import files, job

    torn = tmp_path / "torn.parquet"
    torn.write_text("PAR")
    with monkeypatch.context() as patch:
        patch.setattr(job, "_ray", nullcontext)
        patch.setitem(files._READ, ".parquet", lambda names: pyarrow.parquet.read_table(names[0]))
        assert f"{torn} cannot be read as .parquet: ArrowInvalid: " in said(artifact, torn, out)
    assert not out.exists()
    for module in [name for name in sys.modules if name.startswith("accel.ray.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "package ray, which is not installed" in said(artifact, given, out)
    with pytest.raises(accel.ExtraError, match="extra 'ray'"):
        _ = accel.ray.app
    with pytest.raises(AttributeError, match="did you mean 'app'"):
        _ = accel.ray.apps


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """JSON lines as they come back, when nothing is made of them."""
    from accel.ray import files

    monkeypatch.setattr(files, "ROWS", 2)
    monkeypatch.setattr(files.ray, "put", lambda table: table)
    monkeypatch.setattr(files.ray.data, "from_arrow_refs", pa.concat_tables)

    def come_back(*texts):
        paths = [tmp_path / f"{i}.jsonl" for i in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text)
        assert list(files.write(iter([files.read(paths, ".jsonl")]), tmp_path, ".jsonl"))
        made = (tmp_path / "part-00000.jsonl").read_text()
        return [json.loads(line) for line in made.splitlines()]

    return come_back


def test_json_lines_stay_as_they_are(lines):
    """What a row lacks is null; no text becomes a number or a date, no number a date."""
    texts = ({"role": "user", "content": "x"}, {"role": "user", "content": "x", "name": "y"})
    given = [
        {"id": "007", "prompt": "2024-01-01", "created_at": 1700000000},
        {"id": "8", "prompt": "1", "score": 2**53 + 1},
        {"id": "9", "talk": [texts[0]]},
        {"id": "10", "talk": [texts[1]], "score": None, "new": 0.5},
    ]
    first, *more = [json.dumps(row) for row in given]
    names = dict.fromkeys(name for row in given for name in row)
    found = lines(first + "\n\n", "\n".join(more))
    assert list(found[0]) == list(names)
    assert found[2].pop("talk") == [{**texts[0], "name": None}]
    del given[2]["talk"]
    for row, want in zip(found, given, strict=True):
        assert {k: v for k, v in row.items() if v is not None} == {
            k: v for k, v in want.items() if v is not None
        }
    assert lines("") == []


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"prompt": "x"}\n{"prompt": ', "line 2: not JSON"),
        ('{"prompt": "x", "score": NaN}', "line 1: not JSON: NaN is no number"),
        ('["x"]', "line 1: give an object"),
        ('{"prompt": "x"}\n{"prompt": 3}', "column 'prompt' is not of one type: Exp"),
        (
            '{"prompt": "x"}\n\n{"prompt": "x"}\n{"prompt": 3}',
            "column 'prompt' is not of one type: Unable",
        ),
        (
            '{"prompt": 1}\n{"prompt": 99999999999999999999}',
            "column 'prompt' is not of one type: P",
        ),
    ],
)
def test_lines_that_are_no_rows_are_named(lines, text, word):
    with pytest.raises(accel.InputError, match=word):
        lines(text)


def test_importing_it_brings_no_ray_and_no_statistics():
    code = "import sys, os, accel.ray; print('ray' in sys.modules, os.environ['RAY_USAGE_STATS_ENABLED'])"
    env = {k: v for k, v in os.environ.items() if k != "RAY_USAGE_STATS_ENABLED"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert run.stdout.split() == ["False", "0"], run.stderr


@pytest.fixture(scope="module")
def cluster():
    """A Ray of four CPUs, whatever the machine has; at the priority of the tests."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("RAY_worker_register_timeout_seconds", "600")
        patch.setenv("RAY_SERVE_LOG_TO_STDERR", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        found = ray.init(
            "local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
        )
        ray.data.DataContext.get_current().enable_progress_bars = False
        try:
            yield found.address_info["address"]
        finally:
            ray.shutdown()


@pytest.mark.long
def test_rows_come_back_whatever_the_blocks_and_deaths(
    artifact, model, cluster, tmp_path, monkeypatch
):
    """Two actors of which one is killed in its first call: all rows are there, each with what it gets alone; and the
    artifact was loaded once by each actor, never by the driver.
    """
    import ray

    from accel.ray import batches
    from accel.ray.job import in_a_line

    class Watched(batches.Generate):
        folder, kills = tmp_path, False

        def __init__(self, *args, **options):
            (self.folder / f"{os.getpid()}").touch()
            super().__init__(*args, **options)

        def __call__(self, table):
            if self.kills and not (self.folder / "killed").exists():
                (self.folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(table)

    class Broken(batches.Generate):
        def __call__(self, table):
            raise OSError("a broken disk")

    monkeypatch.setattr(batches, "Generate", Watched)
    given = rows(24)
    want = [alone(model, row) for row in given]
    for blocks, batch, kills in ((1, 5, False), (6, 8, True)):
        Watched.folder, Watched.kills = tmp_path / f"{blocks}", kills
        Watched.folder.mkdir()
        data = ray.data.from_items(given, override_num_blocks=blocks)
        made = batches.generate(data, artifact, actors=2, params=SAMPLED, row="id", batch=batch)
        found = sorted(made.take_all(), key=lambda row: int(row["id"][1:]))
        assert [row["id"] for row in found] == [row["id"] for row in given]
        assert [row["generated_text"] for row in found] == want
        loads = {int(one.name) for one in Watched.folder.iterdir() if one.name != "killed"}
        assert len(loads) == 2 + kills and os.getpid() not in loads
    monkeypatch.setattr(batches, "Generate", Broken)
    with (
        pytest.raises(accel.AccelError, match="^Ray could not do it: OSError: a broken disk$"),
        in_a_line(),
    ):
        batches.generate(data, artifact).take_all()
    with pytest.raises(accel.InputError, match="4 actors of 1 CPUs do not fit"):
        batches.generate(data, artifact, actors=4)
    with pytest.raises(
        accel.InputError, match="column 'promt' does not exist; did you mean 'prompt'"
    ):
        batches.generate(data, artifact, prompt="promt")


@pytest.mark.long
def test_map_makes_a_folder(artifact, model, cluster, tmp_path):
    """On the Ray at RAY_ADDRESS, from each kind of file; nothing is left of a job that fails."""

    def command(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "accel.cli", "map", *map(str, arguments)],
            env={**os.environ, "RAY_ADDRESS": cluster}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    given = [*rows(5), {"id": "long", "prompt": "x = 1\n" * 200}]
    with (tmp_path / "in.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in given)
    table = pa.Table.from_pylist(given)
    pyarrow.csv.write_csv(table, tmp_path / "in.csv")
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    options = (
        "--max-tokens",
        6,
        "--temperature",
        0.9,
        "--seed",
        7,
        "--id-column",
        "id",
        "--cpus",
        1,
    )
    made = {}
    for kind in ("jsonl", "csv", "parquet"):
        run = command(artifact, tmp_path / f"in.{kind}", tmp_path / kind, *options)
        assert run.returncode == 0, run.stderr
        assert run.stdout == f"{tmp_path / kind}: 6 rows, 1 of them with an error\n"
        assert "map: 100% 6 of 6 rows" in run.stderr
        (part,) = (tmp_path / kind).iterdir()
        assert part.name == f"part-00000.{kind}"
        if kind == "jsonl":
            made[kind] = [json.loads(line) for line in part.read_text().splitlines()]
        elif kind == "parquet":
            made[kind] = pyarrow.parquet.read_table(part).to_pylist()
        else:
            made[kind] = pyarrow.csv.read_csv(
                part, convert_options=pyarrow.csv.ConvertOptions(strings_can_be_null=True)
            ).to_pylist()
    texts = [alone(model, row) for row in given[:5]]
    for kind, found in made.items():
        assert [row["id"] for row in found] == [row["id"] for row in given], kind
        assert [row["generated_text"] for row in found[:5]] == texts, kind
        assert "max_context" in found[5]["error"] and not found[5]["generated_text"], kind
    for more, word in (
        (("--prompt-column", "promt"), "did you mean 'prompt'"),
        (("--actors", 4, "--cpus", 1), "do not fit into this Ray"),
    ):
        run = command(artifact, tmp_path / "in.csv", tmp_path / "out" / "deep", *more)
        lines = [line for line in run.stderr.splitlines() if not line.startswith("map: ")]
        assert run.returncode == 1 and len(lines) == 1 and word in lines[0], run.stderr
    assert not (tmp_path / "out").exists()


def mapped(pid, name):
    """Bytes of a file that a process has in memory: all, and its share of those that others have too (Pss)."""
    found, here = {"Rss": 0, "Pss": 0}, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in found:
            found[key] += 1024 * int(value.split()[0]) if here else 0
        elif "-" in key.split()[0]:
            here = line.endswith(name)
    return found["Rss"], found["Pss"]


@pytest.mark.long
def test_replicas_serve_and_a_killed_one_fails_only_its_own(
    artifact, model, cluster, tmp_path, monkeypatch
):
    from ray import serve

    from accel.ray import replica

    class Watched(replica.Replica):
        folder = tmp_path

        async def __init__(self, *args):
            (self.folder / f"made-{os.getpid()}").touch()
            await super().__init__(*args)

        async def __call__(self, scope, receive, send):
            (self.folder / f"asked-{os.getpid()}").touch()
            await super().__call__(scope, receive, send)

    def those(kind):
        return {
            int(p.name.partition("-")[2]) for p in tmp_path.iterdir() if p.name.startswith(kind)
        }

    monkeypatch.setattr(replica, "Replica", Watched)
    with bound("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(replica.app(artifact, replicas=2, cpus=1, max_waiting=16, mapped=True))
        url = f"http://127.0.0.1:{port}"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            _serves(client, url, model, those)
            pids = those("made")
            if sys.platform == "linux":
                sizes = [mapped(pid, "/weights.bin") for pid in pids]
                whole = (artifact / "weights.bin").stat().st_size
                assert all(rss > 0.7 * whole and pss < 0.7 * rss for rss, pss in sizes), sizes
            _survives(client, those)
    finally:
        serve.shutdown()


def _serves(client, url, model, those):
    """Both replicas answer, with what `generate` gives, whole and in a stream; errors are OpenAI's."""
    asked = {"model": "artifact", "temperature": 0, "max_tokens": 12, "prompt": PROMPT}
    want = model.generate(PROMPT, 12).text[0]
    while True:  # Ray chooses at random
        with ThreadPoolExecutor(8) as pool:
            made = pool.map(lambda _: client.completions.create(**asked).choices[0].text, range(8))
            assert set(made) == {want}
        if len(those("asked")) == 2:
            break
    assert len(those("made")) == 2 and os.getpid() not in those("made")
    pieces = [c.choices[0].text for c in client.completions.create(**asked, stream=True)]
    assert "".join(pieces) == want and len(pieces) > 5
    chat = client.chat.completions.create(
        model="artifact", temperature=0, max_tokens=6, messages=TALK
    )
    assert chat.choices[0].message.content == model.generate(TALK, 6).text[0]
    with pytest.raises(openai.NotFoundError, match="did you mean"):
        client.completions.create(model="artefact", prompt="x")
    with pytest.raises(openai.BadRequestError, match="max_context"):
        client.completions.create(model="artifact", prompt="x = 1\n" * 200)
    assert "accel_requests_total" in httpx.get(f"{url}/metrics").text


def _survives(client, those):
    """Streams in both replicas; one is killed: some fail and their readers see it, the others end, and the next
    request is answered.
    """
    asked = {"model": "artifact", "max_tokens": 100, "prompt": "x", "temperature": 1.5, "seed": 3}
    asked["extra_body"] = {"ignore_eos": True}
    ends, begun = [], threading.Semaphore(0)

    def read(_):
        finish = None
        try:
            for piece in client.completions.create(**asked, stream=True):
                begun.release()
                finish = piece.choices[0].finish_reason
        except (openai.APIError, httpx.HTTPError) as error:
            finish = error
        ends.append(finish)

    victim, before = min(those("made")), those("made")
    with ThreadPoolExecutor(12) as pool:
        reading = [pool.submit(read, i) for i in range(12)]
        begun.acquire()
        os.kill(victim, signal.SIGKILL)
        for one in reading:
            one.result()
    assert len(ends) == 12 and ends.count("length") > 0, ends
    failed = [end for end in ends if end != "length"]
    assert failed and all(isinstance(end, Exception) or end is None for end in failed), ends
    answer = client.completions.create(model="artifact", temperature=0, max_tokens=3, prompt="x")
    assert answer.usage.completion_tokens == 3
    end = time.monotonic() + 300
    while those("made") == before and time.monotonic() < end:
        time.sleep(0.5)
    assert len(those("made")) == 3, "Ray starts another one in its place"

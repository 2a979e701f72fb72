"""tools/bench/bench_serve.py and its page: figures of streams, ratios of rounds, what is told of missing servers."""

import copy
import json
from collections import deque

import bench_engine
import bench_serve
import bench_serve_page
import pytest

from ..prefill_case import built

pytest.importorskip("psutil")


def stream(start, gaps, tokens=None, text="t1"):
    texts = [start + 0.5]
    for gap in gaps:
        texts.append(texts[-1] + gap)
    return {
        "start": start, "texts": texts, "tokens": tokens or len(texts), "text": text * len(texts)
    }  # fmt: skip


def test_streams_give_throughput_first_texts_and_gaps():
    told = [stream(1.0, [0.1] * 99), stream(2.0, [0.1] * 98 + [1.0]), {"error": "no", "texts": []}]
    found = bench_serve.measured(told)
    assert found["tokens"] == 200 and found["errors"] == ["no"] and found["first"] == 0.5
    assert found["seconds"] == pytest.approx(2.5 + 98 * 0.1 + 1.0 - 1.0)
    assert found["gaps"][50] == pytest.approx(0.1) and found["gaps"][100] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="no request was answered: .'no'"):
        bench_serve.measured(told[2:])


def test_prompts_are_of_the_load_and_new_in_each_round():
    mixed = bench_serve.LOADS[1]
    one, other = mixed.requests(4096, 0), mixed.requests(4096, 1)
    assert one == mixed.requests(4096, 0)
    assert [len(r["prompt"]) for r in one[:4]] == list(mixed.prompts)
    begins = {tuple(r["prompt"][:8]) for r in one + other}
    assert len(begins) == 2 * mixed.count


def run(server, turn, tokens, seconds):
    return {
        "server": server, "precision": "int4", "load": "even", "round": turn, "tokens": tokens, "seconds": seconds,
        "first": 0.5, "gaps": [0.01 * (1 + p // 99) for p in range(101)], "memory": 10**9, "errors": [],
        "begins": ["t1"],
    }  # fmt: skip


def found(folder=None):
    runs = [run("accel", t, 100, 1.0 + t) for t in (1, 2, 3)]
    runs += [run("other", t, 50, 1.0 + t) for t in (1, 2, 3)]
    loads = [{"name": "even", "prompts": [64], "new": [64], "count": 2}]
    return {
        "runs": runs, "loads": loads, "machine": "m", "date": "d", "threads": 2, "rows": 16, "command": "c",
        "model": "l", "versions": ["v"],
        "engine": {
            "iterations": {"count": 9, "seconds": 0.05, "plan": 0.001, "calls": 0.9},
            "joins": [{"rows": 1, "seconds": 0.001, "bytes": 2e6}],
        },
    }  # fmt: skip


def test_page_holds_ratios_of_rounds(tmp_path):
    bench_serve_page.write(tmp_path, found())
    text = (tmp_path / "serving.md").read_text()
    assert "| `other` | 17 | 2.00 (2.00..2.00) |" in text and "| `accel` | 33 |  |" in text
    assert "| 2.0 | 1000 | 3/3 |" in text and "0.10% of it" in text
    assert (tmp_path / "serving" / "servers.png").stat().st_size > 1000
    slow = copy.deepcopy(found())
    slow["runs"][0]["seconds"] = 4.0  # one bad round of ours moves the spread, not the median
    bench_serve_page.write(tmp_path, slow)
    assert "2.00 (1.00..2.00)" in (tmp_path / "serving.md").read_text()
    with pytest.raises(ValueError, match="there is no run"):
        bench_serve_page.write(tmp_path, {"runs": []})


def test_a_server_that_is_missing_is_told(tmp_path):
    where = bench_serve.Where("no-python", (), tmp_path, "no-python", 1, 2, 64)
    told = bench_serve.versions(["llama_server", "genai"], where)
    assert all(one.startswith("not there: ") for one in told) and "llama-quantize" in told[0]
    code = bench_serve.subprocess.Popen(["false"])
    with pytest.raises(RuntimeError, match="log says why"):
        bench_serve.wait("http://127.0.0.1:9", code, tmp_path / "log")
    code.wait()


def test_batches_are_of_one_length():
    from load.genai_http import Asked, taken

    waiting = deque(Asked([1] * n, 4, print) for n in (3, 5, 3, 3, 5))
    assert [len(one.prompt) for one in taken(waiting, 2)] == [3, 3]
    assert [len(one.prompt) for one in taken(waiting, 2)] == [5, 5]
    assert [len(one.prompt) for one in waiting] == [3]


def test_engine_is_timed_where_all_rows_decode():
    model = built("llama", tables={})
    told = bench_engine.iterations(model, 2, 8, 6)
    assert told["count"] >= 4 and 0 < told["plan"] < 1 and 0 < told["calls"] < 1
    assert told["plan"] + told["calls"] < 1
    sizes = {one["bytes"] for one in bench_engine.joins(model, 8)}
    assert len(sizes) == 1 and sizes.pop() > 0
    assert json.dumps(told)

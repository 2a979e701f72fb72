"""Memory stays flat over many loads and many requests: what is freed is given back."""

import gc
import inspect
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

import accel
from accel.ir.scratch import trim

from .conftest import PROMPT

MANY = [pytest.param(50, 500), pytest.param(1000, 10_000, marks=pytest.mark.long)]


def resident():
    """Bytes of this process in memory, without freed ones that its allocator keeps."""
    gc.collect()
    trim()
    return psutil.Process().memory_info().rss


def growth(act, count):
    """Bytes that the process grew by over the second half of so many calls: the first fills caches and pools."""
    for _ in range(count // 2):
        act()
    before = resident()
    for _ in range(count - count // 2):
        act()
    return resident() - before


@pytest.mark.long
@pytest.mark.parametrize("loads, _", MANY)
def test_loads(artifact, loads, _):
    path = artifact("draft")

    def cycle():
        with accel.load(path, threads=1) as model:
            model.generate(PROMPT, 4)

    assert growth(cycle, loads) < 8 << 20


def test_loads_control(artifact):
    """Models that nobody lets go of are seen, in a process of its own: here, they fit into what other tests freed."""
    program = f"""
import gc, sys
import accel, psutil
from accel.ir.scratch import trim
{inspect.getsource(resident)}
{inspect.getsource(growth)}
kept = []
def cycle():
    kept.append(accel.load(sys.argv[1], threads=1))
    kept[-1].generate({PROMPT!r}, 4)
print(growth(cycle, 40))
"""
    command = [sys.executable, "-c", program, str(artifact("base"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 8 << 20


@pytest.mark.parametrize("_, requests", MANY)
def test_requests(artifact, _, requests):
    """Plain, streamed and left half-way, sampled, refused, and of several threads at once."""
    with accel.load(artifact("evicts"), threads=1) as model:
        turn, lock = iter(range(1 << 30)), threading.Lock()

        def request():
            with lock:
                number = next(turn)
            kind = number % 4
            if kind == 0:
                model.generate(PROMPT[: 1 + number % len(PROMPT)], 4)
            elif kind == 1:
                with model.stream(PROMPT, 8) as stream:
                    next(iter(stream))
            elif kind == 2:
                model.generate(PROMPT, 4, temperature=0.8, seed=number)
            else:
                with pytest.raises(accel.InputError):
                    model.generate([10**6], 4)

        def some():
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda _: request(), range(10)))

        assert growth(some, requests // 10) < 8 << 20

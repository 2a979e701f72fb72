"""A server in a thread, over the bundled model with a chat template of its own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accel
from accel.commands.demo import reference
from accel.runtime.serve.engine import Engine
from accel.serve.app import application
from accel.serve.loading import Models
from accel.serve.models import Served
from accel.serve.server import bound, server

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ opening or 'assistant:' }}{% endif %}"
)


def build(
    folder: Path,
    recipe: Any = "base",
    template: str = TEMPLATE,
    marks: Sequence[str] = (),
    **options: Any,
) -> Path:
    """The bundled model's artifact, with a chat template; `marks`: texts that are tokens in place of its last ones."""
    model = folder / "model"
    if not model.exists():
        model.mkdir(parents=True)
        for file in reference().iterdir():
            if file.suffix in (".json", ".safetensors"):
                (model / file.name).symlink_to(file)
        (model / "chat_template.jinja").write_text(template, encoding="utf-8")
    if marks:
        data = json.loads((reference() / "tokenizer.json").read_text(encoding="utf-8"))
        (model / "tokenizer.json").unlink()
        (model / "tokenizer.json").write_text(json.dumps(marked(data, marks)), encoding="utf-8")
    accel.optimize(model, recipe, out=folder / "artifact", verify=False, **options).close()
    return folder / "artifact"


def marked(data: dict[str, Any], marks: Sequence[str]) -> dict[str, Any]:
    """A tokenizer.json whose last merges give way to added tokens, of which those in brackets are special."""
    vocabulary, merges = data["model"]["vocab"], data["model"]["merges"]
    names = sorted(vocabulary, key=vocabulary.get)[-len(marks) :]
    assert {"".join(one) for one in merges[-len(marks) :]} == {*names}
    del merges[-len(marks) :]
    for name, mark in zip(names, marks, strict=True):
        number = vocabulary[mark] = vocabulary.pop(name)
        told = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        data["added_tokens"].append(
            {"id": number, "content": mark, **told, "special": mark.startswith("[")}
        )
    return data


@dataclass
class Running:
    """A server that runs. `tell()` ends it as SIGTERM does."""

    url: str
    models: Sequence[accel.CompiledModel]
    engines: Sequence[Engine]
    _server: Any
    thread: threading.Thread

    def tell(self) -> None:
        self._server.should_exit = True

    def idle(self, seconds: float = 10.0) -> bool:
        """Whether all requests end within so many seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not any(e.stats["running"] + e.stats["waiting"] for e in self.engines):
                return True
            time.sleep(0.01)
        return False


@contextmanager
def running(
    paths: Sequence[Path], *, waiting: int = 8, drain: float = 20.0, **options: Any
) -> Iterator[Running]:
    """A server of artifacts; `options` of `application`."""
    with ExitStack() as stack:
        found = []
        for path in paths:
            model = stack.enter_context(accel.load(path, threads=1))
            engine = Engine(model, max_waiting=waiting)
            stack.callback(engine.close, drain=False)
            found.append(Served(path.name, model, engine))
        yield stack.enter_context(listening(found, drain=drain, **options))


@contextmanager
def listening(found: Sequence[Served], *, drain: float = 20.0, **options: Any) -> Iterator[Running]:
    """A server of what is open; `options` of `application`."""
    with over(Models(found), drain=drain, **options) as here:
        here.models = [one.model for one in found]
        here.engines = [one.engine for one in found]
        yield here


@contextmanager
def over(models: Models, *, drain: float = 20.0, **options: Any) -> Iterator[Running]:
    """A server of models that may be loaded; `options` of `application`."""
    with ExitStack() as stack:
        listener = stack.enter_context(bound("127.0.0.1", 0))
        made = server(application(models, **options), drain)
        thread = threading.Thread(target=made.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not made.started:
            assert thread.is_alive()
            time.sleep(0.005)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        here = Running(url, [], [], made, thread)
        try:
            yield here
        finally:
            here.tell()
            thread.join(30)

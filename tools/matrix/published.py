"""Published configurations, shrunk by smoke: `python tools/matrix/published.py FILE… --source WHERE [--write]`.

FILE is a config.json, or a copy of one that is called OWNER--NAME_config.json; a model type of transformers stands for
the defaults of its configuration class, which are those of the checkpoint that its docstring names. Each is one run of
`accel-compile smoke FILE --recipe base`. Results are kept in
build/published.json; `--write` puts them into docs/figures/details/published.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import accel
from accel.ir.errors import AccelError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build/published.json"
TABLE = ROOT / "docs/figures/details/published.md"
TARGETS = ("onnx", "eager")
CHECKPOINT = re.compile(
    r"\[?([\w.-]+/[\w.-]+)\]\(https?://[^)]*\)|checkpoint=\"([\w.-]+/[\w.-]+)\""
)


def name_of(file: Path) -> str:
    """The model whose configuration a file is: OWNER/NAME."""
    stem = file.parent.name if file.stem == "config" else file.stem.removesuffix("_config")
    return stem.replace("--", "/")


def defaults(model_type: str) -> tuple[str, Any]:
    """The checkpoint that a configuration class names, and its defaults. Raises ValueError: it names none."""
    import inspect

    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    found = CHECKPOINT.search(inspect.getsource(kind))
    if found is None:
        raise ValueError(f"{kind.__name__} names no checkpoint; give a published config.json")
    return found[1] or found[2], kind()


def measure(given: Any) -> dict[str, Any]:
    """What smoke finds of a configuration, or why it takes none."""
    row: dict[str, Any] = {"layers": "", "results": {}, "error": None, "why": ""}
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(given, Path):  # smoke's reasons name the path that it was given
            told = json.loads(given.read_text(encoding="utf-8"))
            (file := Path(folder) / "config.json").write_text(json.dumps(told), encoding="utf-8")
            row["type"], given = told.get("model_type", ""), file
        else:
            row["type"] = given.model_type
        try:
            found = accel.smoke(given, ["base"], TARGETS)
        except AccelError as error:
            row["results"] = dict.fromkeys(TARGETS, "refused")
            row["why"] = (
                " ".join(str(error).split()).replace(f"{given}: ", "").replace(str(given), "it")
            )
            return row
    row["layers"], row["notes"] = found.layers, found.notes
    row["results"] = {cell.target: cell.status for cell in found.cells}
    row["error"] = max((c.error for c in found.cells if c.error is not None), default=None)
    row["why"] = "; ".join(dict.fromkeys(c.reason for c in found.cells if c.reason))
    return row


def page(rows: dict[str, Any]) -> str:
    """docs/figures/details/published.md."""
    import transformers

    def good(row: dict[str, Any]) -> str:
        return next((s for s in row["results"].values() if s != "right"), "right")

    states = [good(row) for row in rows.values()]
    count = ", ".join(
        f"{states.count(s)} {s}" for s in dict.fromkeys(["right", "refused", *states])
    )
    lines = [
        "# Published configurations",
        "",
        f"{len(rows)} published models: **{count}**. `accel-compile smoke` shrinks a configuration and keeps its layer "
        "pattern, its rotation and its kinds of attention; the weights are random. Each was built with `base` for ONNX "
        "and eager, and compared with the module's own forward: prefill, single steps, a rewind, a ragged batch. The "
        "error is the largest of a logit, relative to the largest logit (at least 1); right is at most 1e-04. Where "
        "rounding alone takes a token of the module beyond that, its error is divided by as much "
        "(`ir/capture/rounding.py`). "
        "Made by `python tools/matrix/published.py FILE… --source WHERE --write` with transformers "
        f"{transformers.__version__}.",
        "",
        "| model | type | result | layers | error | values from | reason |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in sorted(rows.items(), key=lambda item: item[0].lower()):
        error = "" if row["error"] is None else f"{row['error']:.1e}"
        why = row["why"].replace("|", "\\|")
        cells = (name, row["type"], good(row), row["layers"], error, row["source"], why)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("models", nargs="*", help="config.json files, or model types")
    parser.add_argument("--source", default="", help="where the files come from")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.relative_to(ROOT)}")
    args = parser.parse_args()
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for model in args.models:
        if model.endswith(".json"):
            if not args.source:
                parser.error(f"say with --source where {model} comes from")
            name, given, source = name_of(Path(model)), Path(model), args.source
        else:
            name, given = defaults(model)
            source = f"transformers: defaults of {type(given).__name__}"
        rows[name] = {**measure(given), "source": source}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        print(
            f"{name}: {rows[name]['results']} {rows[name]['error']} {rows[name]['why']}", flush=True
        )
    if args.write:
        TABLE.write_text(page(rows), encoding="utf-8")
    return int(any(s in ("wrong", "crashed") for r in rows.values() for s in r["results"].values()))


if __name__ == "__main__":
    sys.exit(main())

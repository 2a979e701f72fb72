"""train(method, model): make the part of a method that must be trained or measured, beside a model that stays as it is.

What is trained for the graph makes the model, run softly as the method will run it, give what the model alone gives
(KL), predict its text, and stay within a budget; what has an aim of its own (`threshold-evict`) comes near to it; what
leaves out layers or branches (`mod`) learns to predict the text by less; what absorbs evicted tokens, as `less`, makes
up for them in each layer; what foretells attention (`tokenbutler`) learns from what the model reads of the text, and
what changes it (`leank`) in the model; the coprocessor of `cache-augment` predicts the text behind random places of it,
and the embedding of `pause` that behind pauses; masks that draft (`s3d`) say the tokens that come; a length's head
(`specdec-pp`) tells what of a draft stands; heads that draft (`eagle3`, `longspec`, `medusa`) learn what the model
says; what a loop reads learns from a text (`adadec`), is searched on one (`draft-verify`) or several (`knn-ssd`), or
learns from what the model answers (`learn2pd`, `adaptive-bok`, `atts`); a model that fills masks is tuned to be certain
of its own answers (`dparallel`). Tunings are of no method: of a draft model to its target (`distillspec`, `adaspec`),
and of a model to what a loop asks of it (`cllm`, `set-block`, `lud`). A table is measured instead, and so is a model
with fewer KV heads (`mha2gqa`). Each kind is a file in `runs/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from accel.compiler.load.hub import model_folder
from accel.compiler.load.source import open_source, tokenizer_of
from accel.compiler.measure import Progress
from accel.compiler.train.device import CPU
from accel.compiler.train.kind import Made, kind_of, trained_methods, tunings
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.source import RowsOf, Source
from accel.ir.axis import check_options, find_axes, ranges
from accel.ir.errors import InputError, RecipeError, unknown
from accel.ir.recipe import Recipe
from accel.lowering.onnx.threads import default_threads


def train(
    method: str,
    model: str | Path,
    settings: Mapping[str, Any],
    *,
    tokenizer: Any = None,
    download: bool = False,
    trust_remote_code: bool = False,
    rows: RowsOf | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> Made:
    """The part of a method, or of the one that a recipe file names with its options, for a model: in `settings["out"]`,
    or in the user's cache, where builds find it. method: or a tuning. settings: fields of `TrainOptions`, and options
    of a tuning. model, tokenizer, download, trust_remote_code: as `optimize` takes them. rows: of another kind than
    those of a text. progress, say: as `Source`.

    Raises:
        AccelError: with the place, the reason and the next step.
    """
    one = method_of(method, settings)
    kind = kind_of(type(one))
    if kind is None:
        raise InputError(f"{one.key} has nothing to train")
    rest = {name: value for name, value in settings.items() if name not in _of_tunings()}
    options = TrainOptions.of(one.key, {**kind.usual, **rest})
    if options.device != CPU and not kind.on_devices:
        raise InputError(f"{one.key} learns on the processor alone; leave device=… out")
    if lacking := kind.lacks(options):
        raise InputError(lacking)
    path = model_folder(model, download)
    quiet = progress or (lambda *_: None)
    reader = tokenizer_of(tokenizer, open_source(path))
    line = say or (lambda _: None)
    source = Source(path, reader, options.text, quiet, line, rows, trust_remote_code)
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads or default_threads())
    try:
        return kind.make(one, source, options)
    finally:
        torch.set_num_threads(before)


def method_of(name: str, settings: Mapping[str, Any]) -> Any:
    """The method or the tuning of that name, or the method with a part of a recipe file. Raises AccelError."""
    tuning = tunings().get(name)
    given = {n: value for n, value in settings.items() if n in _of_tunings()}
    if foreign := sorted(given.keys() - (ranges(tuning).keys() if tuning else ())):
        raise InputError(f"{name} has no option {foreign[0]}; leave {foreign[0]}=… out")
    if tuning is not None:
        one: Any = tuning(**given)
        check_options(one, name)
        return one
    known = trained_methods()
    beside = {"aux": str(settings["aux"])} if settings.get("aux") is not None else {}
    if name.endswith(".toml"):
        tables = Recipe.load(name).tables
        mine = {axis: t for axis, t in tables.items() if known.get(t["use"], ("",))[0] == axis}
        if len(mine) != 1:
            uses = ", ".join(t["use"] for t in mine.values()) or "none"
            raise RecipeError(
                f"{name} names {len(mine)} methods with a part ({uses}); give a recipe with one of them"
            )
        ((axis, table),) = mine.items()
        name, options = table["use"], {n: v for n, v in table.items() if n != "use"}
    elif name in known:
        axis, options = known[name][0], {}
    else:
        every = [*known, *tunings()]
        raise InputError(unknown("method with a trained part or a table", name, every))
    if beside and not hasattr(known[name][1], "aux"):
        raise InputError(f"{name} goes by no smaller model; leave aux=… out")
    return find_axes()[axis].build(name, **options, **beside)


def _of_tunings() -> set[str]:
    """The options of all tunings."""
    return {name for one in tunings().values() for name in ranges(one)}

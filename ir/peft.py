"""LoRA adapters as the `peft` library saves them: adapter_config.json beside adapter_model.safetensors. No torch.

LoRA (Hu et al., arXiv 2106.09685): W + s B A, with A [r,K], B [N,r] and s = alpha / r, or alpha / √r (rsLoRA,
arXiv 2312.03732). DoRA (Liu et al., arXiv 2402.09353) also sets the norm of each row of the sum.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from accel.ir.errors import InputError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Array = npt.NDArray[np.float32]

_PREFIX = "base_model.model."
_PARTS = {  # how the tensors of one update end -> its field
    ".lora_A.weight": "a", ".lora_embedding_A": "a", ".lora_B.weight": "b", ".lora_embedding_B": "b",
    ".lora_magnitude_vector": "magnitude", ".lora_magnitude_vector.weight": "magnitude",
}  # fmt: skip
_WIDE = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# fields of the configuration by which an adapter computes something else than W + s B A
_OTHER = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "lora_bias", "megatron_config",
    "monteclora_config", "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config",
)  # fmt: skip
_FORMS = (  # fields of the configuration, and what they hold where they are set
    ("alpha_pattern", dict, "an object"), ("rank_pattern", dict, "an object"),
    ("target_parameters", list, "a list of names"), ("modules_to_save", list, "a list of names"),
)  # fmt: skip
# ways to start training that change the base weights, which the adapter then goes with
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")


@dataclass(frozen=True)
class Update:
    """One low-rank update: a [r,K], b [N,r] float32. `nested`: how many updates of the same module wrap this one (peft
    nests those of several bare parameters). magnitude [N]: DoRA's norms. `tensor`: a name in the file, for errors.
    """

    module: str
    tensor: str
    a: Array
    b: Array
    magnitude: Array | None = None
    embedding: bool = False
    nested: int = 0


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter folder that was read. `replaced`: the tensors that take the place of parameters, by the names of these
    (modules_to_save, bias).
    """

    path: Path
    config: Mapping[str, Any]
    updates: tuple[Update, ...]
    replaced: Mapping[str, Array] = field(default_factory=dict)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The ends of names of parameters that are adapted without a module of their own (experts)."""
        return tuple(self.config.get("target_parameters") or ())

    def own_copy(self, name: str) -> bool:
        """Whether peft gives the module of this parameter a copy of its own, which is tied to nothing."""
        module = name.rpartition(".")[0]
        given = self.config.get("modules_to_save") or ()
        return any(module == own or module.endswith(f".{own}") for own in given)

    @property
    def another(self) -> str:
        """What to say where the adapter does not fit a model."""
        base = self.config.get("base_model_name_or_path")
        made = f" ({base})" if base else ""
        return f"the adapter was trained for another base model{made}: give it with that model"

    def scale(self, name: str, rank: int) -> float:
        """The factor s of the update of this module, or parameter."""
        alpha = self._of("alpha_pattern", name, "lora_alpha")
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def rank(self, name: str) -> int:
        """The rank that the configuration says for a parameter (a module's lies in its tensors)."""
        return max(1, int(self._of("rank_pattern", name, "r")))

    def _of(self, patterns: str, name: str, default: str) -> float:
        """The number of the first pattern that is the end of a name, or else that of the field `default`."""
        for pattern, value in (self.config.get(patterns) or {}).items():
            try:
                fits = re.match(rf"(.*\.)?({pattern})$", name)
            except re.error as error:
                raise InputError(
                    f"{self.path / CONFIG}: {patterns} has {pattern!r}, which is no regular expression ({error}); save "
                    "the adapter again"
                ) from None
            if fits:
                return self._number(patterns, value)
        return self._number(default, self.config.get(default, 8))

    def _number(self, field: str, value: Any) -> float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not abs(value) <= np.finfo(np.float32).max:
            raise InputError(
                f"{self.path / CONFIG}: {field} is {value!r}, not a number; save the adapter again"
            )
        return float(value)


def read_adapter(path: str | Path) -> PeftAdapter:
    """Read an adapter folder.

    Raises:
        InputError: it is none, is damaged, or is not LoRA of a kind that accel computes.
    """
    folder = Path(path)
    config = _config(folder)
    file = folder / WEIGHTS
    if not file.is_file():
        pickled = next(iter(sorted(folder.glob("adapter_model.bin"))), None)
        why = (
            f"{pickled.name} there is a pickle, which may run code; save it as safetensors: "
            "PeftModel.from_pretrained(base, DIR).save_pretrained(NEW)"
            if pickled
            else "save the adapter with save_pretrained(DIR), which writes it"
        )
        raise InputError(f"adapter {folder}: it holds no {WEIGHTS}; {why}")
    found: dict[str, dict[str, Any]] = {}
    replaced: dict[str, Array] = {}
    for tensor, array in _tensors(file).items():
        name = tensor.removeprefix(_PREFIX)
        end = next((e for e in _PARTS if name.endswith(e)), None)
        if end is not None:
            parts = found.setdefault(name.removesuffix(end), {})
            parts[_PARTS[end]] = array
            if _PARTS[end] == "a":
                parts |= {"tensor": tensor, "embedding": "embedding" in end}
        elif "lora_" not in name and name.endswith((".weight", ".bias")):
            replaced[name.replace(".base_layer.", ".")] = array
        else:
            raise InputError(
                f"adapter {folder}: accel does not know what {tensor} is for; it reads LoRA and DoRA "
                "weights as peft saves them: merge it with peft (merge_and_unload), and compile that"
            )
    updates = tuple(_update(folder, name, parts) for name, parts in found.items())
    if not updates and not replaced:
        raise InputError(
            f"adapter {folder}: {WEIGHTS} is empty; train the adapter, and save it again"
        )
    return PeftAdapter(folder, config, updates, replaced)


def _config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    if not file.is_file():
        there = "does not exist" if not folder.exists() else f"holds no {CONFIG}"
        raise InputError(
            f"adapter {folder} {there}; give a folder that peft wrote (save_pretrained)"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind = str(config.get("peft_type"))
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{file} is not a configuration ({error}); save the adapter again"
        ) from error
    if kind != "LORA":
        raise InputError(
            f"{file}: peft_type is {kind}, and accel reads LORA; merge it with peft "
            "(merge_and_unload), and compile that"
        )
    if other := [name for name in _OTHER if config.get(name)]:
        raise InputError(
            f"{file}: {other[0]} is set, by which the adapter computes more than W + s B A; merge it with peft "
            "(merge_and_unload), and compile that"
        )
    for name, form, words in _FORMS:
        if config.get(name) and not isinstance(config[name], form):
            raise InputError(
                f"{file}: {name} is {config[name]!r}, not {words}; save the adapter again"
            )
    for key in ("target_parameters", "modules_to_save"):
        if not all(isinstance(name, str) for name in config.get(key) or ()):
            raise InputError(
                f"{file}: {key} is {config[key]!r}, not a list of names; save the adapter again"
            )
    start = str(config.get("init_lora_weights", "")).lower()
    if start.startswith(_CHANGED_BASE):
        raise InputError(
            f"{file}: init_lora_weights is {start}, which changed the base weights before training; save it as plain "
            "LoRA (save_pretrained(..., path_initial_model_for_weight_conversion=...)), and give that"
        )
    return dict(config)


def _tensors(file: Path) -> dict[str, Array]:
    """Every tensor of a safetensors file, widened to float32."""
    try:
        found: dict[str, Any] = dict(deserialize(file.read_bytes()))  # type: ignore[no-untyped-call]
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file} is cut or damaged ({error}): fetch it again") from error
    arrays = {}
    for name, entry in found.items():
        kind = _WIDE.get(entry["dtype"])
        if kind is None:
            raise InputError(
                f"{file}: {name} is {entry['dtype']}, and an adapter's weights must be one of {', '.join(_WIDE)}; "
                "save it in float32"
            )
        array = np.frombuffer(entry["data"], kind).reshape(entry["shape"])
        if entry["dtype"] == "BF16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        arrays[name] = array.astype(np.float32)
    return arrays


def _update(folder: Path, name: str, parts: dict[str, Any]) -> Update:
    a, b = parts.get("a"), parts.get("b")
    if a is None or b is None:
        lacks = "lora_A" if a is None else "lora_B"
        raise InputError(
            f"adapter {folder}: {name} has no {lacks}; {WEIGHTS} is cut: fetch it again"
        )
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or not len(a):
        raise InputError(
            f"adapter {folder}: {parts['tensor']} belongs to A {list(a.shape)} and B {list(b.shape)}, and accel reads "
            "A [r,K] with B [N,r]; merge it with peft (merge_and_unload), and compile that"
        )
    magnitude = parts.get("magnitude")
    return Update(
        name.replace(".base_layer", ""), parts["tensor"], a, b,
        None if magnitude is None else magnitude.reshape(-1), parts["embedding"], name.count(".base_layer"),
    )  # fmt: skip

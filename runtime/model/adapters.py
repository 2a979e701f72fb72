"""The adapters of a model: read from its artifact when first used, and laid side by side for the rows of a session."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from accel.ir.adapters import NAME, AdapterFacts, a_of, b_of, file_of
from accel.ir.errors import ArtifactError, InputError, unknown
from accel.ir.peft import PeftAdapter, Update

Arrays = Mapping[str, npt.NDArray[Any]]
_MERGE = "merge it when the model is built (merge_adapter=DIR)"


@dataclass(frozen=True)
class Adapter:
    """One adapter: the inputs a [K,r] and b [r,N] of the modules that it adapts, by name. `number`: no other of the
    model ever has the same, also of the same name; 0 is none at all.
    """

    name: str
    number: int
    rank: int
    arrays: Arrays

    @property
    def bytes(self) -> int:
        """Of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @cached_property
    def digest(self) -> str:
        """sha256 of its arrays."""
        found = hashlib.sha256()
        for key, array in sorted(self.arrays.items()):
            found.update(f"{key} {array.shape} ".encode())
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()


@dataclass(frozen=True)
class Chosen:
    """The adapters that rows use, in the order in which they lie side by side: their numbers by row, the inputs a and b
    (none where no row uses any), and which row [B,1,R] uses which.
    """

    laid: tuple[Adapter, ...]
    numbers: tuple[int, ...]
    arrays: Arrays
    rows: npt.NDArray[np.float32]


class Adapters:
    """The adapters that sessions of a model choose by name. Safe to share between threads."""

    def __init__(self, facts: AdapterFacts, folder: Path | None = None):
        """`folder`: of the artifact with the adapters that `facts` names; None: `add` brings them."""
        self._facts, self._folder = facts, folder
        self._known: dict[str, Adapter | None] = dict.fromkeys(facts.ranks)
        self._numbers = 0
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        """Those that a session may choose."""
        return sorted(self._known)

    def add(self, name: str, adapter: PeftAdapter) -> Adapter:
        """Let sessions that open from now on choose an adapter by this name. Raises InputError."""
        check_name(name)
        rank, arrays = low_rank(adapter, self._facts.modules)
        with self._lock:
            return self._keep(name, rank, arrays)

    def remove(self, name: str) -> None:
        """Let no session that opens from now on choose one that was added; those that use it keep it. Raises
        InputError.
        """
        with self._lock:
            if name in self._facts.ranks:
                raise InputError(
                    f"adapter {name!r} is the artifact's own, which stays; build one without it"
                )
            if name not in self._known:
                added = self._known.keys() - self._facts.ranks.keys()
                raise InputError(unknown("adapter", str(name), sorted(added)))
            del self._known[name]

    def chosen(self, names: Sequence[str | None]) -> Chosen:
        """What rows that use these adapters are given. Raises InputError for a name that does not exist."""
        found_of = {name: self._get(name) for name in names if name is not None}
        used, start = list(found_of.values()), 0
        rows = np.zeros((len(names), 1, sum(one.rank for one in used)), np.float32)
        for name, one in found_of.items():
            rows[[other == name for other in names], :, start : start + one.rank] = 1
            start += one.rank
        found: dict[str, npt.NDArray[Any]] = {}
        for module, sizes in self._facts.modules.items() if used else ():
            for axis, key in ((1, a_of(module)), (0, b_of(module))):
                parts = [one.arrays.get(key, _zeros(sizes, axis, one.rank)) for one in used]
                found[key] = parts[0] if len(parts) == 1 else np.concatenate(parts, axis)
        numbers = tuple(0 if name is None else found_of[name].number for name in names)
        return Chosen(tuple(used), numbers, found, rows)

    def digest(self, name: str) -> str:
        """sha256 of an adapter's arrays. Raises InputError for a name that does not exist."""
        return self._get(name).digest

    def save(self, folder: Path) -> None:
        """Write each that was added into an artifact's folder."""
        for name, adapter in self._known.items():
            if adapter is not None:
                file = folder / file_of(name)
                file.parent.mkdir(exist_ok=True)
                save_file(dict(adapter.arrays), file)

    def _get(self, name: str) -> Adapter:
        with self._lock:
            if name not in self._known:
                raise InputError(
                    f"{unknown('adapter', str(name), self._known)}; without adapter=NAME the base model "
                    "runs; build with more by adapters={name: DIR}"
                )
            return self._known[name] or self._keep(name, self._facts.ranks[name], self._read(name))

    def _keep(self, name: str, rank: int, arrays: Arrays) -> Adapter:
        self._numbers += 1
        kept = self._known[name] = Adapter(name, self._numbers, rank, arrays)
        return kept

    def _read(self, name: str) -> Arrays:
        """The arrays of an artifact's adapter, whose file was checked when the artifact was opened."""
        assert self._folder is not None
        file, wanted = self._folder / file_of(name), self._facts.shapes()
        try:
            found: Arrays = load_file(file)
        except (OSError, SafetensorError) as error:
            raise ArtifactError(
                f"{file} cannot be read ({error}); build the artifact again"
            ) from error
        rank = self._facts.ranks[name]
        for key, array in found.items():
            shape = [rank if size == "R" else size for size in wanted.get(key, [])]
            if list(array.shape) != shape or array.dtype != np.float32:
                raise ArtifactError(
                    f"{file}: {key} is {array.dtype} {list(array.shape)}, not float32 {shape}; build the artifact again"
                )
        return found


def _zeros(sizes: tuple[int, int], axis: int, rank: int) -> npt.NDArray[np.float32]:
    return np.zeros((sizes[0], rank) if axis else (rank, sizes[1]), np.float32)


def check_name(name: Any) -> str:
    """The name of an adapter. Raises InputError."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InputError(
            f"adapter name {name!r}: give letters, digits, '.', '_' or '-', the first no '.' or '-'"
        )
    return name


def names_of(adapter: Any, batch: int) -> list[str | None]:
    """The name of each row's adapter: one for all, or one each. Raises InputError."""
    if adapter is None or isinstance(adapter, str):
        return [adapter] * batch
    names = list(adapter) if isinstance(adapter, (list, tuple)) else [adapter]
    for name in names:
        if name is not None and not isinstance(name, str):
            raise InputError(
                f"adapter is {adapter!r}; give the name of one, None, or a list of those with one for each row"
            )
    if len(names) != batch:
        raise InputError(
            f"there are {len(names)} adapters for {batch} rows; give one name, or one for each row"
        )
    return names


def adapted(adapter: PeftAdapter) -> list[str]:
    """The modules that an adapter adapts. Raises InputError where a session cannot choose it."""
    first = next(iter(adapter.replaced), None)
    if first is not None:
        raise InputError(
            f"adapter {adapter.path} replaces {first} (modules_to_save, bias or an embedding), which a session cannot "
            f"choose; {_MERGE}"
        )
    for update in adapter.updates:
        if reason := _merged_only(adapter, update):
            raise InputError(f"adapter {adapter.path}: {update.tensor} {reason}; {_MERGE}")
    return [update.module for update in adapter.updates]


def _merged_only(adapter: PeftAdapter, update: Update) -> str:
    """Why a session cannot choose an update; empty where it can."""
    if update.magnitude is not None:
        return "is of DoRA, which scales the base weight and so is no addition to its output"
    if update.embedding:
        return "is of an embedding, which has no input to multiply"
    if update.nested or any(
        t.rpartition(".")[0] and update.module.endswith(t.rpartition(".")[0])
        for t in adapter.parameters
    ):
        return "is of a parameter without a module of its own (target_parameters)"
    return ""


def low_rank(
    adapter: PeftAdapter, modules: Mapping[str, tuple[int, int]]
) -> tuple[int, dict[str, npt.NDArray[np.float32]]]:
    """The largest rank r of an adapter, and its a [K,r] and scaled b [r,N], which zeros fill up. Raises InputError."""
    for name in adapted(adapter):
        if name not in modules:
            raise InputError(
                f"adapter {adapter.path} adapts {name}, and this artifact takes adapters of {len(modules)} modules, "
                "those that the adapters it was built with adapt; build it with this one too "
                "(adapters={name: DIR})"
            )
    rank = max(len(update.a) for update in adapter.updates)
    arrays: dict[str, npt.NDArray[np.float32]] = {}
    for update in adapter.updates:
        into, out = modules[update.module]
        own = len(update.a)
        if (update.a.shape[1], update.b.shape[0]) != (into, out):
            raise InputError(
                f"adapter {adapter.path}: {update.tensor} is for a weight {[update.b.shape[0], update.a.shape[1]]}, "
                f"and {update.module} of the model has {[out, into]}; {adapter.another}"
            )
        a, b = np.zeros((into, rank), np.float32), np.zeros((rank, out), np.float32)
        a[:, :own], b[:own] = update.a.T, update.b.T * np.float32(adapter.scale(update.module, own))
        arrays |= {a_of(update.module): a, b_of(update.module): b}
    return rank, arrays

"""What the metadata of a GGUF file says of its model, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from torch import Tensor

from accel.compiler.load.gguf._blocks import stored
from accel.compiler.load.gguf._file import GgufFile, GgufTensor, plain
from accel.ir.errors import CaptureError, shown

# tokens that end an answer, which llama.cpp knows by their text
_ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>",
    "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
}  # fmt: skip
# tokens by which a message, and not the answer, ends with "<|end|>"
_MESSAGES = ({"<|return|>", "<|call|>"}, {"<|return|>", "<|calls|>"}, {"<|calls|>", "<|flush|>"})
_BY_LAYER = {"attention.head_count", "attention.head_count_kv", "feed_forward_length"}
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,8})\.(.+)")  # the name of a tensor of a layer


@dataclass(frozen=True)
class Metadata:
    """Keys are those of the architecture, without its name. What is wrong raises CaptureError."""

    file: GgufFile

    def decoder(
        self,
        model_type: str,
        rope: Mapping[str, Any] | None = None,
        partial: bool = False,
        groups: int | None = None,
        middle: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """The configuration of a decoder like Llama. rope: its `rope_parameters`; None: those of the metadata.
        partial: a part of a head's columns may be rotated. groups: heads of keys, where they are a list. middle:
        columns within the MLP of each layer, where they are one.
        """
        heads, width = self.count("attention.head_count"), self.width()
        groups = self.heads()[1] if groups is None else groups
        if self.count("attention.value_length", width) != width:
            raise self.wrong(
                f"attention.value_length is {self.count('attention.value_length')} for heads of {width}"
            )
        rotated = self.rotated(partial)
        rope = dict(self.rope() if rope is None else rope)
        part = {"partial_rotary_factor": rotated / width} if rotated != width else {}
        hidden = self.count("embedding_length")
        return {
            "model_type": model_type,
            "vocab_size": self.vocabulary(),
            "hidden_size": hidden,
            "intermediate_size": list(middle)
            if middle is not None
            else self.count("feed_forward_length", hidden),
            "num_hidden_layers": self.depth(),
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": width,
            "max_position_embeddings": self.count("context_length"),
            "rope_parameters": {**rope, **part},
            **part,
            **self.epsilon(),
            **self.shared(),
        }

    def epsilon(self) -> dict[str, float]:
        """What is added to a variance, under the name of the kind of norm."""
        if self.has("attention.layer_norm_epsilon"):
            return {"layer_norm_eps": self.positive("attention.layer_norm_epsilon")}
        return {"rms_norm_eps": self.positive("attention.layer_norm_rms_epsilon")}

    def rotated(self, partial: bool = False) -> int:
        """Columns of a head that are rotated; all of them unless `partial`."""
        width = self.width()
        count = self.count("rope.dimension_count", width)
        if count % 2 or count > width or count != width and not partial:
            raise self.wrong(f"rope.dimension_count is {count} for heads of {width}")
        return count

    def shared(self) -> dict[str, Any]:
        """The part of a configuration that all models have: what ends a text, and whether the head is the embedding."""
        tokens = self._tokens()
        ends = [self._special(name) for name in ("eos", "eot", "eom")]
        known = _ENDS.intersection(token for token in tokens if isinstance(token, str))
        if any(some <= known for some in _MESSAGES):
            known.discard("<|end|>")
        ends += [i for i, token in enumerate(tokens) if token in known]
        found = list(dict.fromkeys(i for i in ends if i is not None))
        return {
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "bos_token_id": self._special("bos"),
            "eos_token_id": found or None,
            "pad_token_id": None,
        }

    def vocabulary(self) -> int:
        """Rows of the embedding, which are as many as the file has tokens."""
        hidden, embedding = self.count("embedding_length"), self._embedding()
        if embedding.shape[1:] != (hidden,):
            raise self.wrong(
                f"token_embd.weight is {list(embedding.shape)} and embedding_length {hidden}"
            )
        rows, tokens = embedding.shape[0], self._tokens()
        if tokens and len(tokens) != rows:
            raise self.wrong(
                f"tokenizer.ggml.tokens has {len(tokens)} tokens, and token_embd.weight {rows} rows"
            )
        if self.count("vocab_size", rows) != rows:
            raise self.wrong(
                f"vocab_size is {self.count('vocab_size')}, and token_embd.weight has {rows} rows"
            )
        return rows

    def heads(self) -> tuple[int, int]:
        """Heads of queries, and of keys and values, which divide them."""
        heads = self.count("attention.head_count")
        groups = self.count("attention.head_count_kv", heads)
        if heads % groups:
            raise self.wrong(f"attention.head_count_kv is {groups} for {heads} heads")
        return heads, groups

    def width(self) -> int:
        """Columns of a head."""
        heads, hidden = self.count("attention.head_count"), self.count("embedding_length")
        if not self.has("attention.key_length") and hidden % heads:
            raise self.wrong(
                f"attention.head_count is {heads}, which embedding_length {hidden} is no multiple of"
            )
        width = self.count("attention.key_length", hidden // heads)
        if width % 2:
            raise self.wrong(f"heads have {width} columns, and rotation takes pairs")
        return width

    def experts_used(self) -> tuple[int, int]:
        """Experts of a layer, and how many of them a token goes to."""
        count, used = self.count("expert_count"), self.count("expert_used_count")
        if used > count:
            raise self.wrong(f"expert_used_count is {used} of {count} experts")
        return count, used

    def depth(self) -> int:
        """Layers of the model, which must all be in the file. Layers that only draft come behind them."""
        count, drafts = self.count("block_count"), self.number("nextn_predict_layers", 0)
        if not 0 <= drafts < count:
            raise self.wrong(f"nextn_predict_layers is {drafts:g} of {count} layers")
        names = [name for name in self.file.tensors if name.startswith("blk.")]
        if short := next((name for name in names if not _LAYER.fullmatch(name)), None):
            raise self.wrong(f"{plain(short)} names no part of a layer")
        depth, found = count - int(drafts), {int(name.split(".")[1]) for name in names}
        if depth > len(found) or max(found) >= count:
            raise self.wrong(f"block_count is {count}, and it holds {len(found)} layers")
        if (lacks := next((i for i in range(depth) if i not in found), None)) is not None:
            raise self.wrong(f"block_count is {count}, and it lacks layer {lacks}")
        return depth

    def layered(self, key: str) -> list[int]:
        """A whole number of each layer, 0 among them; where the file has one for all, that."""
        value = self._value(key, (int, list))
        values = value if isinstance(value, list) else [value] * self.depth()
        if len(values) < self.depth() or any(type(v) is not int or v < 0 for v in values):
            raise self.wrong(f"{key} is {shown(value)}, not a number for each layer")
        return values[: self.depth()]

    def sections(self, key: str) -> list[int]:
        """A list of whole numbers, without the zeros at its end."""
        value = self._value(key, list)
        if not value or any(type(v) is not int or v < 0 for v in value):
            raise self.wrong(f"{key} is {shown(value)}, not a list of numbers")
        while value and value[-1] == 0:
            value = value[:-1]
        return list(value)

    def numbers(self, key: str) -> list[float]:
        """A number of each layer."""
        value = self._value(key, list)
        if len(value) < self.depth() or any(type(v) not in (int, float) for v in value):
            raise self.wrong(f"{key} is {shown(value)}, not a number for each layer")
        return [float(v) for v in value[: self.depth()]]

    def sole_count(self, key: str) -> int:
        """The number that is above 0 in `layered`, the same in all layers that have one."""
        found = sorted(set(self.layered(key)) - {0})
        if len(found) != 1:
            raise self.wrong(f"{key} is {found}, and accel reads models with one such number")
        return found[0]

    def holds(self, tensor: str) -> bool:
        """Whether some layer has a tensor of this name."""
        return any(
            name.startswith("blk.") and name.split(".", 2)[2] == tensor
            for name in self.file.tensors
        )

    def rope(self) -> dict[str, Any]:
        """`rope_parameters`."""
        base = self.positive("rope.freq_base", 10000.0)
        if base <= 1:
            raise self.wrong(f"rope.freq_base is {base:g}, and it must be above one")
        theta = {"rope_theta": base}
        kind = self._value("rope.scaling.type", str, "linear")
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 1.0))
        if kind == "none" or kind == "linear" and factor in (0.0, 1.0):
            return {"rope_type": "default", **theta}
        if factor <= 0:
            raise self.wrong(f"rope.scaling.factor is {factor:g}")
        if kind == "linear":
            return {"rope_type": kind, "factor": factor, **theta}
        if kind == "longrope" and (found := self.longrope()):
            return found
        own = [
            key for key in ("yarn_attn_factor", "attn_factor") if self.has(f"rope.scaling.{key}")
        ]
        if kind != "yarn" or own:
            raise self.wrong(
                f"rope.scaling.{own[0] if own else 'type'} is "
                f"{self._value(f'rope.scaling.{own[0]}', float) if own else kind}, and accel reads linear and yarn "
                "with their usual attention factor"
            )
        context = self.count("rope.scaling.original_context_length")
        usual = {"beta_fast": 32.0, "beta_slow": 1.0}
        betas = {k: self.positive(f"rope.scaling.yarn_{k}", v) for k, v in usual.items()}
        return {
            "rope_type": kind, "factor": factor, "original_max_position_embeddings": context, **betas, **theta,
        }  # fmt: skip

    def longrope(self) -> dict[str, Any] | None:
        """`rope_parameters` with the factors of the file's tensors; None where it lacks them."""
        if not {LONG, SHORT} <= self.file.tensors.keys():
            return None
        factors = {
            f"{kind}_factor": self.factors(name).tolist()
            for kind, name in (("long", LONG), ("short", SHORT))
        }
        return {
            "rope_type": "longrope",
            "rope_theta": self.positive("rope.freq_base", 10000.0),
            "attention_factor": self.positive("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": self.original_context(),
            **factors,
        }

    def original_context(self) -> int:
        """Tokens from which on the long factors of `longrope` hold."""
        whole = self.count("context_length")
        return self.count("rope.scaling.original_context_length", whole)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above zero of the metadata. Of what llama.cpp takes by layer too: a list of one number."""
        held = self.file.fields.get(f"{self._name}.{key}")
        if key in _BY_LAYER and isinstance(held, list):
            if 0 in self.layered(key):
                raise self.wrong(f"{key} is {shown(held)}, and accel reads models with one number")
            return self.sole_count(key)
        value: int = self._value(key, int, default)
        if not 0 < value < 2**31:
            raise self.wrong(f"{key} is {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number of the metadata."""
        value = float(self._value(key, (int, float), default))
        if not isfinite(value):
            raise self.wrong(f"{key} is {value}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above zero of the metadata."""
        value = self.number(key, default)
        if value <= 0:
            raise self.wrong(f"{key} is {value:g}, and it must be above zero")
        return value

    def flag(self, key: str, default: bool = True) -> bool:
        """A yes or no of the metadata."""
        value = self.file.fields.get(f"{self._name}.{key}", default)
        if not isinstance(value, bool):
            raise self.wrong(f"{key} is {shown(value)}, not yes or no")
        return value

    def flags(self, key: str, pattern: int) -> list[bool]:
        """For each layer; `pattern`: where the file does not say, all but each so many-th."""
        value = self._value(key, (int, list), pattern)
        if isinstance(value, list):
            if len(value) < self.depth() or any(flag not in (0, 1) for flag in value):
                raise self.wrong(f"{key} is {shown(value)}, not a yes or no for each layer")
            return [bool(v) for v in value[: self.depth()]]
        if value < 0:
            raise self.wrong(f"{key} is {value}")
        return [bool(value == 0 or i % value < value - 1) for i in range(self.depth())]

    def wrong(self, what: str) -> CaptureError:
        """The error for a file that does not fit together, or that accel does not read."""
        return CaptureError(
            f"{self.file.path} ({self._name}): {what}; convert the model again with a present llama.cpp, or give the "
            "Hugging Face checkpoint that it was made from"
        )

    @property
    def _name(self) -> str:
        return str(self.file.fields["general.architecture"])

    def has(self, key: str) -> bool:
        return f"{self._name}.{key}" in self.file.fields

    def suppressed(self) -> list[int]:
        """Tokens that never follow."""
        key, rows = "tokenizer.ggml.suppress_tokens", self._embedding().shape[0]
        found = self.file.fields.get(key, [])
        if not isinstance(found, list) or any(
            type(i) is not int or not 0 <= i < rows for i in found
        ):
            raise self.wrong(f"{key} is {shown(found)}, not a list of token ids, 0..{rows - 1}")
        return found

    def _value(self, key: str, kind: Any, default: Any = None) -> Any:
        value = self.file.fields.get(f"{self._name}.{key}", default)
        if value is None:
            raise self.wrong(f"its metadata lacks {self._name}.{key}")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.wrong(f"{key} is {shown(value)}, of another kind than accel reads")
        return value

    def factors(self, name: str) -> Tensor:
        """What a tensor says that the frequencies of a head's pairs are divided by, float32 [pairs]."""
        tensor, pairs = self.file.tensors[name], self.rotated(partial=True) // 2
        if tensor.shape != (pairs,) or tensor.kind != "F32":
            raise self.wrong(
                f"{name} is {tensor.kind} {list(tensor.shape)}, and it should be F32 [{pairs}]"
            )
        found = stored(name, tensor, self.file.pages).read()
        if not bool((found.isfinite() & (found > 0)).all()):
            raise self.wrong(f"{name} has factors that are not above zero")
        return found

    def _tokens(self) -> list[Any]:
        tokens = self.file.fields.get("tokenizer.ggml.tokens", [])
        if not isinstance(tokens, list):
            raise self.wrong(f"tokenizer.ggml.tokens is {shown(tokens)}, not a list")
        return tokens

    def _special(self, name: str) -> int | None:
        """The token of a name; None where the file names none."""
        key, rows = f"tokenizer.ggml.{name}_token_id", self._embedding().shape[0]
        index = self.file.fields.get(key)
        if index is not None and (type(index) is not int or not 0 <= index < rows):
            raise self.wrong(f"{key} is {shown(index)}, and there are {rows} tokens")
        return index

    def _embedding(self) -> GgufTensor:
        if "token_embd.weight" not in self.file.tensors:
            raise self.wrong("it lacks token_embd.weight")
        return self.file.tensors["token_embd.weight"]

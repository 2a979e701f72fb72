"""Any model behind one signature: forward(tokens [B,T], positions [B,T], …) -> logits [B,T,V]."""

from __future__ import annotations

import contextlib
from inspect import signature
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.export import ExportedProgram

from accel.ir.capture.logits import logits_of, vectors_of
from accel.ir.capture.traits import Interface, ModelTraits


class Passing:
    """In place of a transformers cache: gives back the keys and values that it is given. Layers that read
    those of a layer before (Gemma-3n) look for them in a cache, and make their own where there is none.
    """

    def __init__(self) -> None:
        self.shared_layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def get_query_offset(self, *_: Any) -> int:  # asked by later versions
        return 0

    def get_mask_sizes(self, queries: Tensor | int, *_: Any) -> tuple[int, int]:
        """`queries`: their positions in earlier versions of transformers, how many they are in later ones."""
        return queries.shape[0] if isinstance(queries, Tensor) else queries, 0


class Adapter(nn.Module):
    """`forward(tokens, positions) -> logits` around any decoder, or the last vectors of a model that embeds; names of
    parameters stay the user's.
    """

    def __init__(self, model: nn.Module, traits: ModelTraits):
        super().__init__()
        self.model = model
        self.hugging_face = traits.hugging_face
        self.position_name = traits.position_name
        self.paddings = traits.paddings
        self.shares = traits.shares_kv
        self.cache_name = (
            "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
        )
        self.read = logits_of if traits.embedding is None else vectors_of
        self.offset = 0
        self.writes = False  # whether the module writes into the positions that it is given

    def settle(self, tokens: Tensor, positions: Tensor, *encoder: Tensor) -> Tensor:
        """Logits of the example, and from now on pass positions as the module itself counts them: some start at
        padding_idx + 1, and some mean another thing by the argument. A module that cannot do without keeps them.
        """
        logits: Tensor
        if self.position_name is None or not self.hugging_face:
            logits = self(tokens, positions, *encoder)
            return logits
        name, self.position_name = self.position_name, None
        counted = tokens
        plain = min(set(range(len(self.paddings) + 1)) - self.paddings)
        for padding in self.paddings:  # which some do not count
            counted = counted.masked_fill(counted == padding, plain)
        own = self(counted, positions)
        for offset in (0, *(p + 1 for p in self.paddings if p >= 0)):
            self.position_name, self.offset = name, offset
            with contextlib.suppress(IndexError):
                given = positions.clone()
                logits = self(counted, given)
                if torch.allclose(logits, own, rtol=1e-4, atol=1e-5):
                    self.writes = not torch.equal(given, positions)
                    break
        else:
            self.position_name, self.offset, logits = None, 0, own
        return logits if torch.equal(counted, tokens) else self(tokens, positions)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        extra: dict[str, Any] = {}
        if self.position_name and self.writes:
            positions = positions.clone()
        if self.position_name:
            extra[self.position_name] = positions + self.offset if self.offset else positions
        if self.hugging_face:
            extra["use_cache"] = False
            if self.shares:
                extra[self.cache_name] = Passing()
            return self.read(self.model(input_ids=tokens, **extra))
        return self.read(self.model(tokens, **extra))


class CrossEncoder(Adapter):
    """`forward(tokens, positions)` -> a number for each token [B,T,1]: what the head gives where this one is first. Ids
    from the size of the vocabulary on are those of a pair's second text.
    """

    def __init__(self, model: nn.Module, traits: ModelTraits):
        super().__init__(model, traits)
        assert traits.embedding is not None and traits.embedding.pairs is not None
        self.size = traits.embedding.pairs.offset

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        extra: dict[str, Any] = {}
        if self.position_name:
            extra[self.position_name] = positions + self.offset if self.offset else positions
        model: Any = self.model
        base = model.base_model
        second = (tokens >= self.size).long()
        given = {"input_ids": tokens - self.size * second, "token_type_ids": second}
        vectors = vectors_of(base(**given, **extra))
        pooler = base.pooler  # over the first token, in transformers
        scores: Tensor = model.classifier(pooler.activation(pooler.dense(vectors)))
        return scores


class EncoderDecoder(Adapter):
    """`forward(tokens, positions, inputs, inputs.pos)` or `forward(tokens, positions, features)`.

    Position -1 marks padding of the encoder's input [B,X].
    """

    def __init__(self, model: nn.Module, traits: ModelTraits):
        super().__init__(model, traits)
        self.position_name = None  # the decoder counts its own
        self.input_name = traits.input_name

    def forward(self, tokens: Tensor, positions: Tensor, *encoder: Tensor) -> Tensor:
        given: dict[str, Any] = {self.input_name: encoder[0], "decoder_input_ids": tokens}
        if len(encoder) > 1:
            given["attention_mask"] = (encoder[1] >= 0).long()
        return logits_of(self.model(**given, use_cache=False))


class UsersProgram(nn.Module):
    """A program that the user exported, whatever its inputs are called and its outputs are packed in."""

    def __init__(self, program: ExportedProgram, interface: Interface):
        super().__init__()
        self.program, self.interface = program, interface
        self.model = program.module()

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        given = {"tokens": tokens, "positions": positions}
        flat = [given[n] for n in self.interface.inputs]
        args, kwargs = pytree.tree_unflatten(flat, self.interface.in_spec)
        return logits_of(self.model(*args, **kwargs))

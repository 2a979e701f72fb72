"""A language model of transformers that has no output head of its own, as it lies within a model that also reads
images or sounds, and a head.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn


@cache
def text_with_head(kind: str) -> Any:
    """The class for a model type, which makes one of a configuration as transformers' automatic classes do."""
    import transformers
    from transformers import AutoModel, GenerationMixin, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    named = str(MODEL_MAPPING_NAMES[kind])
    within: Any = getattr(transformers, named)

    class TextWithHead(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
        config_class = within.config_class
        _supports_sdpa = within._supports_sdpa
        _no_split_modules = within._no_split_modules
        _can_compile_fullgraph = True

        def __init__(self, config: Any):
            super().__init__(config)
            self.model = AutoModel.from_config(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        @classmethod
        def from_config(cls, config: Any) -> Any:
            return cls(config)

        def get_input_embeddings(self) -> Any:
            return self.model.get_input_embeddings()

        def get_output_embeddings(self) -> Any:
            return self.lm_head

        def forward(
            self,
            input_ids: Any = None,
            attention_mask: Any = None,
            position_ids: Any = None,
            past_key_values: Any = None,
            use_cache: Any = None,
            **others: Any,
        ) -> Any:
            out = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **others,
            )
            logits = self.lm_head(out.last_hidden_state)
            return CausalLMOutputWithPast(logits=logits, past_key_values=out.past_key_values)

    TextWithHead.__module__ = within.__module__  # whose code says what may be set
    TextWithHead.__name__ = TextWithHead.__qualname__ = f"{named.removesuffix('Model')}ForCausalLM"
    return TextWithHead

"""Mistral, from version 11 of its tokenizer (Mistral Small 3.2, Devstral, Magistral)."""

from accel.runtime.serve.reply.family import Family
from accel.runtime.serve.reply.forms.named_json import NamedJson

FAMILY = Family(
    signs=("[TOOL_CALLS]", "[ARGS]"),
    form=NamedJson("[ARGS]"),
    open="[TOOL_CALLS]",
    id_size=9,
)

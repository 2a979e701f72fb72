"""What a client says a text must be, in the words of OpenAI, vLLM and llama.cpp -> one constraint."""

from __future__ import annotations

from accel.ir.errors import shown
from accel.runtime.decode.structured_outputs import StructuredOutputsParams
from accel.serve.errors import ApiError
from accel.serve.schemas import Generation, ResponseFormat, StructuredOutputs

_KINDS = {  # fields of a request that hold one constraint -> its kind
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}
FIELDS = ("response_format", "structured_outputs", *_KINDS)


def constraint(asked: Generation) -> StructuredOutputsParams | None:
    """What the text must be; None: any text. JSON of a schema is compact, as OpenAI's: small models would write nothing
    but whitespace. Raises ApiError, InputError.
    """
    given = [name for name in FIELDS if getattr(asked, name) not in (None, "")]
    if asked.response_format is not None and asked.response_format.type == "text":
        given.remove("response_format")
    if len(given) > 1:
        told = f"{' and '.join(given)} say what the text must be; give one"
        raise ApiError(400, told, param=given[1])
    if not given:
        return None
    if asked.structured_outputs is not None:
        return _of_vllm(asked.structured_outputs)
    if given == ["response_format"]:
        assert asked.response_format is not None
        return _of_openai(asked.response_format)
    kind = _KINDS[given[0]]
    return StructuredOutputsParams(
        **{kind: getattr(asked, given[0])}, disable_any_whitespace=kind == "json"
    )


def _of_openai(form: ResponseFormat) -> StructuredOutputsParams:
    if form.type == "json_object" and form.object_schema is None:
        return StructuredOutputsParams(json={"type": "object"})
    if form.type == "json_object":  # llama.cpp's
        return StructuredOutputsParams(json=form.object_schema, disable_any_whitespace=True)
    if form.json_schema is None:
        raise ApiError(
            400,
            'response_format: "json_schema" is missing; give {"name": …, "schema": …}',
            param="response_format",
        )
    schema = form.json_schema.json_schema
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True)


def _of_vllm(form: StructuredOutputs) -> StructuredOutputsParams:
    for name in form.model_extra or ():
        told = f"structured_outputs: {shown(name)} is not supported; leave it out"
        raise ApiError(400, told, param="structured_outputs", code="unsupported_parameter")
    schema = form.json_value
    if form.json_object:
        if schema is not None:
            told = "structured_outputs: json and json_object are given; give one"
            raise ApiError(400, told, param="structured_outputs")
        schema = {"type": "object"}
    compact = schema is not None and form.disable_any_whitespace is not False
    return StructuredOutputsParams(
        schema, form.regex, form.choice, form.grammar, disable_any_whitespace=compact
    )

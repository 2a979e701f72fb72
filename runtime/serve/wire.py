"""What processes of one engine send each other: JSON and bytes in frames. Nothing in it is code."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import IO, Any

import numpy as np

from accel.ir.errors import AccelError, InputError
from accel.runtime.decode.logprobs import Logprob
from accel.runtime.decode.sampling_params import SamplingParams
from accel.runtime.decode.structured_outputs import StructuredOutputsParams
from accel.runtime.inputs.ints import Ints
from accel.runtime.serve.request import Event, Request, Ticket

_SIZES = struct.Struct("<QQ")  # of the JSON, and of the bytes behind it


class Wire:
    """Frames over two pipes. `send` may be called by any thread, `receive` by one."""

    def __init__(self, reads: IO[bytes], writes: IO[bytes]):
        self._reads, self._writes = reads, writes
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any], data: bytes = b"") -> None:
        """Raises OSError, ValueError where the other side is gone."""
        text = json.dumps(message, default=_plain).encode()
        with self._lock:
            self._writes.write(_SIZES.pack(len(text), len(data)))
            self._writes.write(text)
            self._writes.write(data)
            self._writes.flush()

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """The next frame. Raises EOFError where the other side is gone."""
        text, data = _SIZES.unpack(self._exactly(_SIZES.size))
        message: dict[str, Any] = json.loads(self._exactly(text))
        return message, self._exactly(data)

    def close(self) -> None:
        """Tell the other side that no more comes."""
        try:
            self._writes.close()
        except OSError:  # it is gone already
            pass

    def _exactly(self, size: int) -> bytes:
        found = self._reads.read(size)
        if len(found) < size:
            raise EOFError("the other process is gone")
        return found


def request_to_json(request: Request, prompt: Ints) -> dict[str, Any]:
    """A request whose prompt is token ids [n]. Raises InputError where it holds what cannot be sent."""
    if request.params.logits_processors:
        raise InputError(
            "logits_processors are functions, which cannot go to another process; leave them out, or serve with the "
            "schedule continuous-batching"
        )
    if request.encoder_input is not None:
        raise InputError(
            "encoder_input cannot go to another process; serve with the schedule continuous-batching"
        )
    params = {f.name: getattr(request.params, f.name) for f in fields(request.params)}
    del params["logits_processors"]
    if (bias := params["logit_bias"]) is not None:
        params["logit_bias"] = [[int(token), float(value)] for token, value in bias.items()]
    if (sampler := params["sampler"]) is not None:
        params["sampler"] = dict(sampler)
    if (guide := params["structured_outputs"]) is not None:
        params["structured_outputs"] = {f.name: getattr(guide, f.name) for f in fields(guide)}
        if hasattr(guide.json, "model_json_schema"):
            params["structured_outputs"]["json"] = guide.json.model_json_schema()
    found = {
        "prompt": prompt.tolist(),
        "params": params,
        "adapter": request.adapter,
        "sample": request.sample,
        "marks": sorted(request.marks),
        "prompt_logprobs": request.prompt_logprobs,
        "only_prompt": request.only_prompt,
    }
    plain: dict[str, Any] = json.loads(json.dumps(found, default=_plain))
    return plain


def request_from_json(data: Mapping[str, Any]) -> Request:
    """What `request_to_json` gave."""
    params = dict(data["params"])
    if params["logit_bias"] is not None:
        params["logit_bias"] = dict(params["logit_bias"])
    if params["structured_outputs"] is not None:
        params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
    prompt = np.array(data["prompt"], np.int64)
    return Request(
        prompt,
        SamplingParams(**params),
        adapter=data["adapter"],
        sample=data["sample"],
        marks=frozenset(data["marks"]),
        prompt_logprobs=data["prompt_logprobs"],
        only_prompt=data["only_prompt"],
    )


def event_to_json(event: Event, ticket: Ticket) -> dict[str, Any]:
    """An event, with what its ticket knows; the first one also with what is known of the prompt."""
    found = {"token": event.token, "text": event.text, "finish": event.finish}
    found |= {"mark": event.mark}
    found |= {"stop": ticket.stop_reason, "drafts": [ticket.usage.drafted, ticket.usage.accepted]}
    found["reused"] = ticket.usage.reused
    if event.logprobs is not None:
        found["logprobs"] = _scores_to_json(event.logprobs)
    if ticket.prompt_logprobs is not None and ticket.usage.completion_tokens <= 1:
        told = ticket.prompt_logprobs
        found["prompt_logprobs"] = [None if one is None else _scores_to_json(one) for one in told]
    return found


def event_from_json(data: Mapping[str, Any]) -> Event:
    """What `event_to_json` gave."""
    logprobs = _scores_from_json(data.get("logprobs"))
    return Event(data["token"], data["text"], logprobs, data["finish"], data["mark"])


def prompt_logprobs_from_json(data: Sequence[Any]) -> list[dict[int, Logprob] | None]:
    """Those of a ticket."""
    return [_scores_from_json(one) for one in data]


def _scores_to_json(scores: Mapping[int, Logprob]) -> list[Any]:
    return [[token, asdict(one)] for token, one in scores.items()]


def _scores_from_json(data: Any) -> dict[int, Logprob] | None:
    return None if data is None else {token: Logprob(**one) for token, one in data}


def error_to_json(error: BaseException) -> dict[str, Any]:
    """An error; of its class only whether the request was wrong."""
    return {"error": str(error) or type(error).__name__, "input": isinstance(error, InputError)}


def error_from_json(data: Mapping[str, Any]) -> AccelError:
    """What `error_to_json` gave."""
    return InputError(data["error"]) if data["input"] else AccelError(data["error"])


def _plain(value: Any) -> Any:
    """A number, an array or a set, as JSON has it."""
    if isinstance(value, (set, frozenset)):
        return list(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise InputError(f"{type(value).__name__} in a request cannot go to another process")

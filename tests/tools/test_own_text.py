"""Text that a chat model writes itself."""

import own_text

from accel.reference.tasks import __file__ as reference
from accel.runtime.inputs.text import Tokenizer


def test_an_answer_is_written_with_the_token_that_ended_it():
    tokenizer = Tokenizer(own_text.Path(reference).parent / "tokenizer.json")
    end = min(tokenizer.special)
    ids = tokenizer.encode("the answer", special=False)
    told = own_text.written("a question\n", "the answer", [*ids, end], tokenizer)
    read = tokenizer.encode(told, special=False)
    assert read.count(end) == 1 and tokenizer.decode(read[: read.index(end)]).endswith("answer")
    cut = own_text.written("a question\n", "the answer", ids, tokenizer)
    assert cut == "a question\nthe answer\n", "one that its length ended has none"

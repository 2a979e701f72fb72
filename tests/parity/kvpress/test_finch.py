"""`finch` against FinchPress, whose window is the question."""

from accel.passes.kv.score.finch import Finch

from ..presses import agree, kvpress

WINDOW = 6


class OneFewer(Finch):
    """The press counts one key fewer than a query sees."""

    def normalizer(self, keys):
        return keys - 1


def press(ratio):
    found = kvpress.FinchPress(ratio, rerotate_keys=False)
    found.window_size = WINDOW
    return found


def test_the_same_tokens_stay():
    agree(OneFewer(window=WINDOW), press, attentions=False, operands=unmarked)


def test_a_question_is_marked():
    """Of more queries than are its."""

    def marked(prompt):
        return {"question": prompt.slots(Finch())["seen"] - WINDOW}

    agree(OneFewer(window=3 * WINDOW), press, operands=marked)


def test_of_each_chunk_the_same_share_stays():
    def chunked(ratio):
        found = press(ratio)
        found.chunk_length = 20
        return found

    agree(
        OneFewer(window=WINDOW, chunk=20), chunked, attentions=False, operands=unmarked,
        lengths=(40, 80), ratios=(0.25, 0.5),
    )  # fmt: skip


def unmarked(prompt):
    return {"question": prompt.slots(Finch())["seen"] * 0 - 1}

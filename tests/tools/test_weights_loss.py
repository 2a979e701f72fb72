"""tools/bench/weights_loss.py: a line of its table."""

import models
import pytest
from weights_loss import WHOLE, row


@pytest.mark.long
def test_a_line_tells_bits_and_what_they_lose(tmp_path):
    model = models.write(tmp_path / "model")
    cells, whole = row(model, {"weights": {"use": "int4", "smallest": 256, "block": 16}}, 0)
    bits, kl, perplexity = map(float, cells)
    assert bits < 32 and kl > 0 and perplexity > 1 and whole is not None and whole > 1
    assert row(model, "base", 0) == (["32.00", "0", WHOLE], None)

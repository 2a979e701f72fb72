"""tools/bench/beyond.py: what it asks, and the model with more positions."""

import json

import beyond


def test_the_key_stands_in_the_prompt():
    prompts = [beyond.asked(300, i) for i in range(3)]
    assert len({answer for _, answer in prompts}) == 3
    for prompt, answer in prompts:
        assert f"the pass key is{answer}\n" in prompt and prompt.endswith("the pass key is")


def test_only_the_positions_of_the_model_change(tmp_path):
    made = beyond.longer(9000, tmp_path / "model")
    assert sorted(p.name for p in made.iterdir()) == sorted(beyond.FILES)
    one, other = (
        json.loads((f / "config.json").read_text(encoding="utf-8")) for f in (beyond.MODEL, made)
    )
    assert other == {**one, "max_position_embeddings": 9000}

"""Prompts that hide what they ask for, and how many a model answers."""

from __future__ import annotations

import random

from accel.reference.examples import NOTES
from accel.runtime.model.compiled import CompiledModel

SENTENCES = 100  # of a prompt: some 930 tokens
PEOPLE = ("Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Henry", "Irene", "Jonas")


def key_prompts(count: int, sentences: int = SENTENCES) -> list[tuple[str, str]]:
    """Questions about a pass key that so many sentences hide (some 930 tokens), and the key."""
    found = []
    for i in range(count):
        rng = random.Random(f"key {i}")
        notes = [rng.choice(NOTES) for _ in range(sentences)]
        key = str(rng.randrange(1000, 9999))
        place = rng.randrange(sentences // 5, sentences - sentences // 5)
        notes.insert(place, f"The pass key is {key}. Remember it. {key} is the pass key.")
        told = "There is a pass key hidden in this text. Find it and remember it."
        found.append((f"{told}\n\n{' '.join(notes)}\n\nWhat is the pass key?", key))
    return found


def number_prompts(count: int) -> list[tuple[str, str]]:
    """Questions about one of five people's numbers, which are strewn over some 930 tokens, and the number."""
    found = []
    for i in range(count):
        rng = random.Random(f"number {i}")
        notes = [rng.choice(NOTES) for _ in range(SENTENCES)]
        people = {name: str(rng.randrange(1000, 9999)) for name in rng.sample(PEOPLE, 5)}
        for name, number in people.items():
            notes.insert(rng.randrange(len(notes)), f"The phone number of {name} is {number}.")
        asked = rng.choice(list(people))
        question = f"What is the phone number of {asked}?"
        found.append((f"Read this text.\n\n{' '.join(notes)}\n\n{question}", people[asked]))
    return found


def right(model: CompiledModel, prompts: list[tuple[str, str]]) -> int:
    """How many answers hold what was asked for."""
    count = 0
    for prompt, wanted in prompts:
        out = model.generate([[{"role": "user", "content": prompt}]], 16)
        count += wanted in (out.text or [""])[0]
    return count

"""Models that are tuned from windows: runs beside tiny ones, and what transformers says of the same."""

import models
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from accel.compiler.train.options import TrainOptions
from accel.compiler.train.source import Source

LENGTH = 24


def rows(length, count, seed):
    """Rows in which one of three phrases follows another."""
    generator = torch.Generator().manual_seed(seed)
    phrases = torch.tensor([[5, 9, 30, 41, 8], [12, 33, 5, 60, 7], [77, 20, 21, 22, 90]])
    while True:
        order = torch.randint(3, (count, length // 5 + 2), generator=generator)
        ids = phrases[order].flatten(1)[:, : length + 1]
        known = torch.ones(count, length)
        known[:, :3] = 0
        yield ids, known


def write(folder, **config):
    """The folder of a Llama of two layers."""
    models.write(folder)
    model = models.make("llama", 2)
    model.config.update(config)
    model.save_pretrained(folder)
    return folder


def opened(folder):
    quiet = (lambda *_: None,) * 2
    return Source(folder, None, None, *quiet, rows)


def run_of(kind, method, source, file, **options):
    """A run that has learnt nothing."""
    given = TrainOptions(**{"length": LENGTH, "rows": 2, "rate": 1e-3, **options})
    soft, given = kind.opened(method, source, given)
    return kind(soft, soft.start(0, 0), given, file)


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def behind(model, text, window, first, sees):
    """The logits [K,V] of a window at place `first` behind the text before it, whose tokens see it as `sees` says."""
    ids = torch.cat([text[:first], window])
    size = len(ids)
    seen = torch.ones(size, size).tril().bool()
    seen[first:, first:] = torch.as_tensor(np.array(sees)).bool()
    mask = torch.zeros(1, 1, size, size).masked_fill(~seen, -1e30)
    return model(ids[None], attention_mask=mask, position_ids=torch.arange(size)[None]).logits[
        0, first:
    ]


def step_of(run, batch, name):
    """The losses of one step, and the gradient of a weight; nothing is learnt."""
    found = []
    run.descend = lambda loss: found.append(
        (loss, torch.autograd.grad(loss, run.parts[0][name])[0])
    )
    told = run.learn(*batch)
    del run.descend
    return told, *found[0]

"""Training of heads on another device than the processor."""

import pytest
import torch

from accel.compiler.train.device import made_on
from accel.compiler.train.options import TrainOptions
from accel.compiler.train.train import train
from accel.ir.errors import InputError

from .second_device import NAME, SecondDevice
from .test_train_heads import METHODS, OPTIONS, opened, run_of  # noqa: F401 (a fixture)


def learnt(source, name, device, tmp_path, monkeypatch):
    """A run, and the losses of two steps."""
    monkeypatch.setitem(OPTIONS, "device", device)
    run, rows = run_of(source, name, tmp_path)
    assert {one.device.type for one in run.tensors} == {device}
    found = []
    for _ in range(2):
        batch = [one.to(device) for one in next(rows)]
        with made_on(device):
            found.append(run.learn(*batch)["loss"])
    return run, found


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.long
def test_a_head_learns_the_same_on_each_device(opened, tmp_path, monkeypatch, name):  # noqa: F811
    here, losses = learnt(opened, name, "cpu", tmp_path, monkeypatch)
    with SecondDevice():
        there, others = learnt(opened, name, NAME, tmp_path, monkeypatch)
        assert others == pytest.approx(losses, rel=1e-5)
        there.write(tmp_path / "head", {}, {})
    here.write(tmp_path / "same", {}, {})
    for file in (tmp_path / "same").iterdir():
        other = tmp_path / "head" / file.name
        assert file.stat().st_size == other.stat().st_size


def test_no_operator_takes_tensors_of_both_devices():
    """The control of the test above."""
    with SecondDevice(), pytest.raises(RuntimeError, match="tensors of lazy and of cpu"):
        torch.ones(3, device=NAME) + torch.ones(3)


def test_a_seed_gives_the_same_numbers_on_each_device():
    with SecondDevice(), made_on(NAME):
        there = torch.rand(4, generator=torch.Generator("cpu").manual_seed(3))
        assert there.device.type == NAME == torch.arange(2).device.type
        there = there.cpu()
    assert torch.equal(there, torch.rand(4, generator=torch.Generator().manual_seed(3)))


def test_a_device_that_is_not_there_is_named(opened, tmp_path):  # noqa: F811
    with pytest.raises(InputError, match="device is 'xpu', and PyTorch finds none such here"):
        TrainOptions(device="xpu")
    with pytest.raises(InputError, match="device is 'gpu'"):
        TrainOptions(device="gpu")
    with SecondDevice(), pytest.raises(InputError, match="trim-kv learns on the processor alone"):
        train("trim-kv", opened.path, {"device": NAME})

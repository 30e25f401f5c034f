import pytest
import torch
from torch import nn

import halve
from halve.errors import FileError
from halve.learn.moving import MovingStatistics
from halve.learn.run_state import FORMAT
from halve.masks import storage
from tests.tiny import convnet, images, interrupting, labels, learn
from tests.untouched import same_bits, untouched


def test_statistics_move_beside_those_of_the_model_and_are_restored_on_request():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)).eval()
    found = MovingStatistics(model, {}, moving=True)
    assert list(found.tensors) == ["0.running_mean", "0.running_var"]
    with found.restored():
        found.tensors["0.running_mean"] += 1
    assert same_bits(found.tensors["0.running_mean"], model[0].running_mean)
    with found.moving():
        assert model[0].training
    assert not model[0].training
    assert not MovingStatistics(model, {}, moving=False).tensors


@pytest.mark.parametrize("options", [{"preset": "paper-tuned"}, {"norms": "track"}], ids=["task", "distill"])
def test_tracked_statistics_are_stored_and_the_model_stays_as_it_is(options):
    model = convnet()
    with untouched(model):
        masks = learn(model, [(images(), labels())], steps=30, **options)
    assert list(masks.statistics) == [f"{norm}.running_{key}" for norm in (1, 4) for key in ("mean", "var")]
    assert not any(torch.equal(value, model.state_dict()[name]) for name, value in masks.statistics.items())
    sparse = halve.apply(model, masks, permute=False)
    assert halve.verify(sparse, masks).ok
    outputs = {}
    hook = sparse[0].register_forward_hook(lambda module, args, output: outputs.update(first=output))
    sparse(images())
    hook.remove()
    mean = outputs["first"].mean((0, 2, 3))
    assert torch.allclose(masks.statistics["1.running_mean"], mean, atol=0.05)


def test_what_is_judged_has_its_statistics():
    model, x = convnet(), images(256)
    masks = halve.learn(model, x, steps=30, norms="track", permute=False, fallback=False)
    held_back = halve.evaluate(model, masks, x[-masks.recipe["quality"]["images"] :])
    assert held_back.kl == pytest.approx(masks.recipe["quality"]["kl"], rel=1e-3)


@pytest.mark.filterwarnings("ignore:interrupted")
def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    model, path, options = convnet(), tmp_path / "run", {"steps": 8, "norms": "track"}
    whole = learn(model, [images(6)], **options)
    learn(model, [images(6)], run_state=path, report=interrupting(3), **options)
    assert learn(model, [images(6)], run_state=path, resume=True, **options) == whole


@pytest.mark.filterwarnings("ignore:interrupted")
def test_a_state_without_its_statistics_is_refused(tmp_path):
    model, path, options = convnet(), tmp_path / "run", {"steps": 8, "norms": "track"}
    learn(model, [images(6)], run_state=path, report=interrupting(3), **options)
    _, header, tensors = storage.read(path, [FORMAT])
    tensors.pop("statistics:1.running_mean")
    storage.write(path, FORMAT, header, tensors)
    with pytest.raises(FileError, match="statistics of 4"):
        learn(model, [images(6)], run_state=path, resume=True, **options)

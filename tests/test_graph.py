import warnings

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import init

from halve.errors import ModelError
from halve.graph import capture
from tests.untouched import untouched

CLASSIFIERS = torchvision.models.list_models(torchvision.models)


@pytest.fixture
def no_init(monkeypatch):
    """Large models are built in no time when nobody fills in their weights."""
    for name in dir(init):
        if name.endswith("_") and not name.startswith("_"):
            monkeypatch.setattr(init, name, lambda tensor, *args, **kwargs: tensor)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_every_classifier_of_torchvision_is_captured_whole_with_a_free_batch(name, no_init):
    extra = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = torchvision.models.get_model(name, weights=None, **extra).to("meta")
    size = 299 if name == "inception_v3" else 224
    captured = capture(model, torch.zeros(1, 3, size, size, device="meta"))
    assert captured.whole
    assert captured.parts[0].free_batch
    assert captured.left == {}
    state = model.state_dict(keep_vars=True)
    assert set(captured.parts[0].tensors.values()) <= state.keys() | dict(model.named_buffers()).keys()


def test_weights_and_operations_are_named_as_in_the_model():
    model = torchvision.models.resnet18()
    part = capture(model, torch.zeros(2, 3, 64, 64)).parts[0]
    convolutions = [node for node in part.graph.nodes if "conv2d" in str(node.target)]
    assert len(convolutions) == 20
    for node in convolutions:
        assert part.tensors[node.args[1].name] == f"{part.module_of(node)}.weight"


def test_the_graph_computes_what_the_model_does_at_other_batch_sizes():
    model = torchvision.models.resnet18(num_classes=5).eval()
    part = capture(model, torch.randn(1, 3, 32, 32)).parts[0]
    images = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(part.program.module()(images), model(images))


def test_the_model_stays_as_it_is_in_training_mode_too():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout()).train()
    with untouched(model):
        part = capture(model, torch.randn(4, 3, 8, 8)).parts[0]
    norm = next(node for node in part.graph.nodes if "batch_norm" in str(node.target))
    assert norm.args[5] is False  # as in eval mode


def test_tied_weights_have_one_name():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    part = capture(nn.Sequential(first, second), torch.zeros(2, 4)).parts[0]
    assert set(part.tensors.values()) == {"0.bias", "0.weight", "1.bias"}


def test_a_forward_of_the_users_own_keeps_the_models_names():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    part = capture(model, {"image": torch.zeros(1, 3, 4, 4)}, lambda net, batch: net(batch["image"])).parts[0]
    assert sorted(part.tensors.values()) == ["0.bias", "0.weight"]
    assert part.free_batch
    assert part.module_of(next(node for node in part.graph.nodes if "conv2d" in str(node.target))) == "0"


class Stubborn(nn.Module):
    """Decides by its data, which no exporter can follow; its children can be exported."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.unused = nn.Linear(8, 8)

    def forward(self, x):
        x = self.stem(x).mean((2, 3))
        if float(x.sum()) > 1e9:
            return x
        return self.blocks[1](self.blocks[0](x))


def test_what_cannot_be_exported_whole_is_captured_in_its_largest_parts():
    captured = capture(Stubborn(), torch.randn(1, 3, 9, 9))
    assert not captured.whole
    assert [part.name for part in captured.parts] == ["stem", "blocks.0", "blocks.1"]
    assert sorted(captured.parts[0].tensors.values()) == [
        "stem.0.bias",
        "stem.0.weight",
        "stem.2.bias",
        "stem.2.weight",
    ]
    assert captured.left == {"unused": "it did not run on the example"}


def test_signatures_of_any_kind_are_captured_whole():
    class Stars(nn.Linear):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Stars(4, 4)

        def forward(self, x, *, scale=1.0):
            return self.inner(input=x) * scale

    for model in (Stars(4, 4), Named()):
        captured = capture(model, torch.randn(1, 4))
        assert captured.whole, captured.reason
        assert captured.parts[0].free_batch


def test_a_scripted_part_does_not_get_in_the_way():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4))

        def forward(self, x):
            x = self.b(self.a(x))
            return x if float(x.sum()) < 1e9 else -x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        captured = capture(Mixed(), torch.randn(1, 4))
    assert "a" in {part.name for part in captured.parts}
    assert captured.reason


def test_what_the_exporter_has_to_say_of_failures_is_not_printed(capfd):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            x = self.inner(x)
            return x if len(torch.nonzero(x > 0)) > 3 else x + 1

    assert not capture(Counting(), torch.randn(2, 4)).whole
    assert capfd.readouterr() == ("", "")


def test_a_detector_is_captured_in_parts_that_hold_its_backbone():
    model = torchvision.models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None).eval()
    captured = capture(model, [torch.rand(3, 64, 64), torch.rand(3, 80, 64)])
    names = {name for part in captured.parts for name in part.tensors.values()}
    weights = {name for name, _ in model.named_parameters()}
    assert not captured.whole
    assert len(names & weights) / len(weights) > 0.9
    assert all(why for why in captured.left.values())


def test_a_segmentation_model_is_captured_whole():
    model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None)
    captured = capture(model, torch.zeros(1, 3, 64, 64))
    assert captured.whole
    assert captured.parts[0].free_batch


class Hopeless(nn.Linear):
    def forward(self, x):
        return super().forward(x) if float(x.sum()) > -1e9 else x


def test_a_model_of_which_nothing_can_be_captured_is_refused_with_the_reason():
    with pytest.raises(ModelError, match="can capture no part of Sequential: 0: "):
        capture(nn.Sequential(Hopeless(4, 4)), torch.zeros(1, 4))


def test_an_example_that_does_not_fit_is_refused():
    with pytest.raises(ModelError, match="cannot run on the example"):
        capture(nn.Sequential(nn.Linear(4, 4)), torch.zeros(1, 5))

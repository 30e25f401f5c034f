import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torchvision.models.detection import ssd, ssdlite

from halve.errors import ModelError
from halve.graph import capture
from tests.families import family
from tests.untouched import untouched


def has_free_batch(part):
    return all(limits[0][1] is None for limits in part.sizes())


def test_weights_and_operations_are_named_as_in_the_model():
    model = family("resnet_basic")
    part = capture(model, torch.zeros(2, 3, 64, 64)).parts[0]
    convolutions = [node for node in part.graph.nodes if "conv2d" in str(node.target)]
    assert len(convolutions) == 14
    for node in convolutions:
        assert part.tensors[node.args[1].name] == f"{part.module_of(node)}.weight"


def test_the_graph_computes_what_the_model_does_at_other_batch_sizes():
    model = family("resnet_basic")
    part = capture(model, torch.randn(1, 3, 32, 32)).parts[0]
    images = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(part.program.module()(images), model(images))


def test_the_model_stays_as_it_is_in_training_mode_too():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout()).train()
    example = torch.randn(4, 3, 8, 8)
    with untouched(model):
        part = capture(model, example).parts[0]
    assert "aten._native_batch_norm_legit_no_training.default" in {str(node.target) for node in part.graph.nodes}


def test_tied_weights_have_one_name():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    part = capture(nn.Sequential(first, second), torch.zeros(2, 4)).parts[0]
    assert set(part.tensors.values()) == {"0.bias", "0.weight", "1.bias"}


def test_a_forward_of_the_users_own_keeps_the_models_names():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    part = capture(model, {"image": torch.zeros(1, 3, 4, 4)}, lambda net, batch: net(batch["image"])).parts[0]
    assert sorted(part.tensors.values()) == ["0.bias", "0.weight"]
    assert has_free_batch(part)
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
    assert not captured.complete
    assert [part.name for part in captured.parts] == ["stem", "blocks.0", "blocks.1"]
    assert sorted(captured.parts[0].tensors.values()) == [
        "stem.0.bias",
        "stem.0.weight",
        "stem.2.bias",
        "stem.2.weight",
    ]
    assert captured.uncaptured == {"unused": "it did not run on the example"}


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
        assert captured.complete, captured.reason
        assert has_free_batch(captured.parts[0])


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

    assert not capture(Counting(), torch.randn(2, 4)).complete
    assert capfd.readouterr() == ("", "")


class Features(nn.Module):
    """A backbone that returns two sizes of features."""

    def __init__(self):
        super().__init__()
        self.near = nn.Sequential(nn.Conv2d(3, 16, 3, 4, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.far = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())

    def forward(self, x):
        near = self.near(x)
        return OrderedDict(near=near, far=self.far(near))


def test_a_detector_is_captured_in_parts_that_hold_its_backbone():
    anchors = ssd.DefaultBoxGenerator([[2], [2]], min_ratio=0.2, max_ratio=0.9)
    head = ssdlite.SSDLiteHead([16, 32], anchors.num_anchors_per_location(), 5, nn.BatchNorm2d)
    model = ssd.SSD(Features(), anchors, (64, 64), 5, head=head).eval()
    captured = capture(model, [torch.rand(3, 64, 64), torch.rand(3, 80, 64)])
    names = {name for part in captured.parts for name in part.tensors.values()}
    assert not captured.complete
    assert "backbone" in [part.name for part in captured.parts]
    assert names >= {name for name, _ in model.named_parameters()}
    assert all(why for why in captured.uncaptured.values())


class Hopeless(nn.Linear):
    def forward(self, x):
        return super().forward(x) if float(x.sum()) > -1e9 else x


def test_a_model_of_which_nothing_can_be_captured_is_refused_with_the_reason():
    with pytest.raises(ModelError, match="cannot capture any part of Sequential: 0: "):
        capture(nn.Sequential(Hopeless(4, 4)), torch.zeros(1, 4))


def test_an_example_that_does_not_fit_is_refused():
    with pytest.raises(ModelError, match="does not run on the example"):
        capture(nn.Sequential(nn.Linear(4, 4)), torch.zeros(1, 5))


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, buffers=False):
        if buffers:
            self.calls += 1
        return self.conv(torch.relu_(x)).add_(1).view(len(x), -1)


@pytest.mark.parametrize("buffers", [False, True])
def test_the_graph_writes_nothing_and_says_what_the_module_would_write(buffers):
    model, x = Writing().eval(), torch.randn(2, 3, 4, 4)
    [part] = capture(model, (x, buffers)).parts
    assert not [node for node in part.graph.nodes if str(node.target).split(".")[1:2][-1:] and "_." in str(node.target)]
    assert (part.writes_inputs, part.writes_buffers) == (True, buffers)
    before = x.clone()
    if not buffers:
        expected = model(x.clone())
        torch.testing.assert_close(part.program.module()(x, buffers), expected)
        assert torch.equal(x, before)


def test_image_sizes_are_those_of_the_example_unless_asked_otherwise():
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU()), torch.zeros(2, 3, 16, 16)
    assert capture(model, x).parts[0].sizes() == (((0, None), (3, 3), (16, 16), (16, 16)),)
    assert [limits[1] for limits in capture(model, x, any_size=True).parts[0].sizes()[0]] == [None, 3, None, None]


def test_casts_are_kept_though_they_change_nothing_in_single_precision():
    class Casting(nn.Module):
        def forward(self, x):
            return x.float().softmax(1).type_as(x)

    [part] = capture(Casting(), torch.zeros(2, 3)).parts
    assert sum("_to_copy" in str(node.target) for node in part.graph.nodes) == 2

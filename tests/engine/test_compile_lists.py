"""Networks that take lists of images are compiled in parts."""

import copy
import io

import pytest
import torch
from torch import nn

import halve
from halve.errors import DataError, EngineError, OptionError
from tests.detectors import faster_rcnn, pictures, retinanet, targets
from tests.engine.nets import compiled, sparsely
from tests.untouched import untouched


class Counting(nn.Module):
    """Takes images of any sizes, and returns as many rows as there are bright spots in them."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body = nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
            )
            self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, images):
        assert isinstance(images, list)
        height, width = (max(image.shape[dim] for image in images) for dim in (1, 2))
        stacked = images[0].new_zeros(len(images), 3, height, width)
        for place, image in zip(stacked, images, strict=True):
            place[:, : image.shape[1], : image.shape[2]] = image
        features = self.body(stacked)
        return [self.head(one[:, one.mean(0) > one.mean()].T) for one in features]


def same(fast, sparse, batch):
    with torch.no_grad():
        torch.testing.assert_close(fast(batch), sparse(batch), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def counting():
    """(a model, the same with masks applied, the model compiled with them)"""
    model = Counting().eval()
    masks = halve.prune(model)
    with untouched(model):
        fast = compiled(model, masks, pictures(2))
    return model, halve.apply(model, masks), sparsely(fast)


def test_lists_of_any_length_and_sizes_give_what_the_masked_network_gives(counting):
    _, sparse, fast = counting
    assert fast.plan.uncompiled == {"the network": "compiled in 2 parts: it takes a list of images"}
    assert {layer.name for layer in fast.layers if layer.is_2_4} == {"body.2", "head.0"}
    for count in (1, 2, 5):
        same(fast, sparse, pictures(count, seed=count))
    assert len({len(rows) for rows in fast(pictures(5))}) > 1


def test_the_parts_run_not_the_modules(counting):
    fast = counting[2]
    before = fast.layers[1].tensors()["weight"].clone()
    expected = fast(pictures(2))
    changed = copy.deepcopy(fast)
    for module in changed.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.zeros_(module.weight)
    assert all(torch.equal(one, other) for one, other in zip(changed(pictures(2)), expected, strict=True))
    assert torch.equal(fast.layers[1].tensors()["weight"], before)


@pytest.mark.parametrize(
    "example",
    [
        (pictures(2), targets(2)),
        (tuple(pictures(2)), None),
        {"images": pictures(2), "targets": targets(2)},
        pictures(1),
    ],
    ids=["torchvision", "tuple", "dict", "one image"],
)
def test_batches_of_every_kind_are_examples(counting, example):
    model, sparse, _ = counting
    fast = compiled(model, halve.prune(model), example)
    assert {layer.name for layer in fast.layers if layer.is_2_4} == {"body.2", "head.0"}
    same(fast, sparse, pictures(3, seed=9))


def test_a_tuple_of_images_is_taken_too(counting):
    _, sparse, fast = counting
    with torch.no_grad():
        torch.testing.assert_close(fast(tuple(pictures(2))), sparse(pictures(2)))


def test_inputs_that_are_no_list_of_such_images_are_refused(counting):
    fast, batch = counting[2], pictures(2)
    for bad, why in (
        (torch.zeros(2, 3, 8, 8), "compiled for a list of images, got a Tensor"),
        ([], "compiled for a list of images, got a list"),
        ([batch[0].half()], r"is torch.float16, the network was compiled for torch.float32"),
        ([batch[0], batch[1][None]], r"has shape \(1, 3, 32, 36\)"),
        (["image"], "must be tensors, got a str"),
    ):
        with pytest.raises(EngineError, match=why):
            fast(bad)
    with pytest.raises(EngineError, match=r"for 1 input\(s\), got 2"):
        fast(batch, targets(2))


def test_examples_without_images_are_refused():
    model = Counting().eval()
    for example, error in (([], DataError), ({"boxes": 1}, DataError), ([torch.zeros(3, 4, 4).long()], DataError)):
        with pytest.raises(error):
            compiled(model, example=example)
    with pytest.raises(OptionError, match="example must be a tensor of images, a list of images or"):
        compiled(model, example=3)


def test_batch_sizes_copies_pickles_and_precision(counting, tmp_path):
    model, sparse, fast = counting
    fast.warmup([1, 3])
    same(copy.deepcopy(fast), sparse, pictures(2))
    buffer = io.BytesIO()
    torch.save(fast, buffer)
    buffer.seek(0)
    same(torch.load(buffer, weights_only=False), sparse, pictures(2))
    with pytest.raises(EngineError, match="cannot be saved"):
        fast.save(tmp_path / "net.pt2")
    half = compiled(model, halve.prune(model), pictures(2), dtype=torch.bfloat16)
    assert {row.dtype for row in half(pictures(2))} == {torch.float32}


@pytest.mark.parametrize("make", [faster_rcnn, retinanet])
def test_boxes_are_decoded_and_chosen_in_single_precision(make):
    model, batch = make(), pictures(2)
    masks = halve.prune(model)
    half = compiled(model, masks, batch, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = halve.apply(model, masks)(batch)
    for one, other in zip(half(batch), expected, strict=True):
        assert one["boxes"].dtype == torch.float32
        assert not torch.equal(one["boxes"], one["boxes"].bfloat16().float())
        torch.testing.assert_close(one["scores"][:5], other["scores"][:5], rtol=0, atol=0.02)
        assert not torch.equal(one["scores"][:5], other["scores"][:5])  # layers compute in bfloat16
    assert {layer.dtype for layer in half.layers} == {torch.bfloat16}
    assert half.plan.uncompiled["the network"].endswith("; what is not compiled runs in float32")


def test_the_example_stays_as_it_is():
    class Writing(Counting):
        def forward(self, images):
            for image in images:
                image.zero_()
            return super().forward(images)

    example = pictures(2)
    compiled(Writing().eval(), example=example)(example)
    assert all(torch.equal(one, other) for one, other in zip(example, pictures(2), strict=True))


def test_torchvisions_faster_rcnn_is_compiled_in_four_parts():
    model = faster_rcnn()
    masks = halve.prune(model)
    with torch.no_grad():
        model(pictures(1))
    with untouched(model):
        fast = sparsely(compiled(model, masks, (pictures(2), targets(2))))
    assert {layer.name for layer in fast.layers if layer.is_2_4} == set(masks)
    assert list(fast.plan.uncompiled) == ["the network"]
    sparse = halve.apply(model, masks)
    for count in (1, 2, 3):
        batch = pictures(count, seed=count)
        result = halve.evaluate(fast, None, [batch], dense=sparse)
        assert result.agreement == 1.0
        assert result.dense_boxes > 20 * count
        assert halve.evaluate(fast, None, [batch], dense=model).agreement < 0.9

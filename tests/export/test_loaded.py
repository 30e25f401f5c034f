"""An ONNX file as a module."""

import copy

import onnx
import pytest
import torch
from torch import nn

import halve
from halve.errors import FileError, OptionError
from tests.untouched import untouched


def network():
    torch.manual_seed(0)
    convs = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()
    return nn.Sequential(*convs, nn.Flatten(), nn.Linear(32, 5)).eval()


@pytest.fixture
def images():
    return torch.randn(40, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def test_it_computes_what_the_file_computes_and_can_be_certified(images, tmp_path):
    model = network()
    masks = halve.prune(model, "random", pattern="1:4")
    exported = halve.load_onnx(halve.export(model, masks, images[:2], tmp_path / "net.onnx").path)
    assert torch.allclose(exported(images), halve.apply(model, masks)(images), atol=1e-5)
    with untouched(exported):
        found = halve.certify(exported, None, images, reference=model)
    expected = halve.certify(model, masks, images)
    assert found.result == expected.result
    assert 0 < found.result["same"] < 40  # both outcomes are counted
    assert str(found).startswith("With 99.9 % confidence, exported and reference network predict the same class")
    assert "the exported network was run in onnxruntime on the CPU" in found.assumptions
    assert torch.equal(copy.deepcopy(exported)(images), exported(images))


def test_the_digest_covers_weights_that_are_beside_the_file(images, tmp_path):
    halve.export(network(), None, images[:2], tmp_path / "net.onnx")
    model = onnx.load(tmp_path / "net.onnx")
    onnx.save(model, tmp_path / "big.onnx", save_as_external_data=True, location="big.data", size_threshold=100)
    first = halve.load_onnx(tmp_path / "big.onnx").sha256
    content = bytearray((tmp_path / "big.data").read_bytes())
    content[5] ^= 1
    (tmp_path / "big.data").write_bytes(content)
    assert not torch.equal(halve.load_onnx(tmp_path / "big.onnx").sha256, first)


def test_files_that_take_pixels_need_the_normalisation(images, tmp_path):
    model, preprocess = network(), ((0.5,) * 3, (0.25,) * 3)
    halve.export(model, None, images[:2], tmp_path / "net.onnx", preprocess=preprocess)
    with pytest.raises(OptionError, match=r"takes pixels: pass preprocess="):
        halve.load_onnx(tmp_path / "net.onnx")
    normalised = (torch.randint(0, 256, (4, 3, 6, 6)) / 255 - 0.5) / 0.25
    exported = halve.load_onnx(tmp_path / "net.onnx", preprocess=preprocess)
    assert torch.allclose(exported(normalised), model(normalised), atol=1e-5)


def with_fixed_batch(source, target, size, reduce=False):
    """The file with a fixed batch size; its output may be the mean over the batch."""
    model = onnx.load(source)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = size
    if reduce:
        output = model.graph.output[0]
        axes = onnx.helper.make_tensor("axes", onnx.TensorProto.INT64, [1], [0])
        model.graph.initializer.append(axes)
        model.graph.node.append(onnx.helper.make_node("ReduceMean", [output.name, "axes"], ["mean"], keepdims=1))
        output.name, output.type.tensor_type.shape.dim[0].dim_value = "mean", 1
    onnx.save(model, target)
    return target


@pytest.mark.parametrize("size", [1, 16, 64])
def test_a_file_with_a_fixed_batch_size_takes_any_number_of_images(images, size, tmp_path):
    """Also fewer images than half of a batch: they are repeated more than once."""
    model = network()
    masks = halve.prune(model, "random", pattern="1:4")
    free = halve.export(model, masks, images[:2], tmp_path / "net.onnx").path
    exported = halve.load_onnx(with_fixed_batch(free, tmp_path / "fixed.onnx", size))
    assert torch.allclose(exported(images), halve.load_onnx(free)(images), atol=1e-5)
    batches = images.split(15)  # the last one is partial
    found, expected = halve.certify(exported, None, batches, reference=model), halve.certify(model, masks, batches)
    assert found.result == expected.result
    assert found.result["images"] == 40


def test_a_fixed_batch_size_without_a_result_for_each_image_is_refused(images, tmp_path):
    free = halve.export(network(), None, images[:2], tmp_path / "net.onnx").path
    exported = halve.load_onnx(with_fixed_batch(free, tmp_path / "fixed.onnx", 16, reduce=True))
    assert exported(images[:16]).shape == (1, 5)
    with pytest.raises(FileError, match=r"takes 16 images at a time, and its output 'mean' of shape \(1, 5\)"):
        exported(images)


def test_what_is_no_network_of_images_is_refused(tmp_path):
    (tmp_path / "text.onnx").write_text("hello")
    with pytest.raises(FileError, match="not an ONNX file"):
        halve.load_onnx(tmp_path / "text.onnx")
    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "abc"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Add", ["a", "b"], ["c"])], "add", value[:2], value[2:])
    onnx.save(
        onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)]),
        tmp_path / "two.onnx",
    )
    with pytest.raises(FileError, match="has 2 inputs"):
        halve.load_onnx(tmp_path / "two.onnx")

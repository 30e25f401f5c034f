import json

import onnx
import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer

import halve
from halve.errors import FileError, ModelError, OptionError
from halve.export import file
from halve.export.runtime import Session
from halve.masks.file import checksum
from halve.masks.storage import metadata_of
from tests.export.nets import Residual, images, initializer, residual
from tests.untouched import untouched


def test_the_file_computes_what_apply_returns_for_any_batch(exported):
    model, masks, done = exported
    assert done.difference < 1e-5
    assert done.inputs == {"image": (None, 3, 8, 8)}
    assert done.outputs == ("scores", "features")
    session, sparse = Session(done.path), halve.apply(model, masks)
    for count in (1, 3, 7):
        with torch.no_grad():
            expected = sparse(images(count))
        scores, features = session.run([images(count)])
        torch.testing.assert_close(scores, expected["scores"], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(features, expected["features"], atol=1e-5, rtol=1e-5)


def test_the_file_has_moved_channels_and_no_norm_and_says_what_it_was_made_from(exported, tmp_path):
    _, masks, done = exported
    model = onnx.load(done.path)
    assert masks.moves
    assert {node.op_type for node in model.graph.node} == {"Conv", "Relu", "Add", "ReduceMean", "Gemm"}
    assert [layer.name for layer in done.check.layers] == ["stem", "body", "point", "head"]
    assert [layer.name for layer in done.check.eligible] == ["body", "point"]
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    assert metadata["halve.masks"] == checksum(masks)
    assert metadata["halve.masks"] == metadata_of(masks.save(tmp_path / "net.masks.safetensors"))["sha256"]
    assert json.loads(metadata["halve.layers"]) == ["body", "point"]
    assert str(tmp_path.parent) not in str(model.graph)  # no traces of the user's source code
    assert not any(node.metadata_props for node in model.graph.node)


def test_neither_the_model_nor_the_process_changes(tmp_path):
    model, x = residual(), images()
    masks = halve.prune(model)
    with untouched(model):
        halve.export(model, masks, x, tmp_path / "net.onnx")


def test_float16_is_strongly_typed_and_survives_statistics_that_overflow(tmp_path):
    model = residual()
    model.bn2.running_var.fill_(1e6)  # overflows float16
    model.body.weight.data.mul_(1e3)
    done = halve.export(model, halve.prune(model), images(), tmp_path / "net.onnx", dtype=torch.float16)
    assert done.difference < 5e-3
    types = {tensor.data_type for tensor in onnx.load(done.path).graph.initializer}
    assert types <= {onnx.TensorProto.FLOAT16, onnx.TensorProto.INT64}
    assert {layer.dtype for layer in done.check.layers} == {"float16"}
    assert done.check.notes == ()


class Before(nn.Module):
    """BatchNorm before a convolution cannot be folded into a layer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3)

    def forward(self, x):
        return self.conv(self.norm(x).relu())


def test_a_norm_without_a_layer_before_it_does_not_overflow_either(tmp_path):
    model = Before().eval()
    model.norm.running_var.fill_(1e6)
    x = 1e3 * torch.randn(2, 8, 6, 6)
    done = halve.export(model, halve.prune(model, also="conv"), x, tmp_path / "net.onnx", dtype=torch.float16)
    assert done.difference < 5e-3
    assert "BatchNormalization" in {node.op_type for node in onnx.load(done.path).graph.node}


def test_what_float16_cannot_hold_is_an_error_and_nothing_is_written(tmp_path):
    model = residual()
    path = tmp_path / "net.onnx"
    model.head.weight.data.mul_(1e6)
    with pytest.raises(ModelError, match="overflow; export in float32 or bfloat16"):
        halve.export(model, None, images(), path, dtype=torch.float16)
    model.head.weight.data.clamp_(-6e4, 6e4)
    with pytest.raises(ModelError, match="the network overflows float16 on the example"):
        halve.export(model, None, 100 * images(), path, dtype=torch.float16)
    assert not list(tmp_path.iterdir())


def test_values_that_vanish_in_float16_are_noted(tmp_path):
    model = residual()
    for tensor in (model.head.weight, model.head.bias):
        tensor.data.mul_(1e-8)
    done = halve.export(model, None, images(), tmp_path / "net.onnx", dtype=torch.float16)
    assert done.difference > 0.05
    assert "too small or too large for float16: export in float32 or bfloat16" in done.notes[0]


def test_bfloat16_goes_as_far_as_the_checker(tmp_path):
    done = halve.export(residual(), None, images(), tmp_path / "net.onnx", dtype=torch.bfloat16)
    assert done.difference is None
    assert "onnxruntime does not run bfloat16" in str(done)


def test_without_masks_the_model_is_exported_as_it_is(exported, tmp_path):
    model, masks, _ = exported
    dense = halve.export(model, None, images(), tmp_path / "dense.onnx")
    assert dense.check.status == "none"
    sparse = halve.export(halve.apply(model, masks), None, images(), tmp_path / "sparse.onnx")
    assert [layer.name for layer in sparse.check.eligible] == ["body", "point"]


def test_computed_weights_become_constants(tmp_path):
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3)), nn.ReLU(), nn.Conv2d(8, 4, 1))
    done = halve.export(model, halve.prune(model), torch.randn(2, 8, 8, 8), tmp_path / "net.onnx")
    assert [layer.verdict for layer in done.check.layers] == ["eligible", "no"]


class Attention(nn.Module):
    """Uses the weights of layers that it does not call, as Swin does, on tokens and on rows."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = nn.functional.linear(x, self.qkv.weight, self.qkv.bias).chunk(3, -1)
        x = (q @ k.transpose(-2, -1)).softmax(-1) @ v @ self.proj.weight.T
        return nn.functional.linear(x.mean(1), self.head.weight)


@pytest.mark.parametrize("preprocess", [None, ((0.5,), (0.5,))])
def test_products_have_the_names_of_the_layers_whose_weights_they_read(tmp_path, preprocess):
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(2), nn.Linear(36, 8), Attention()).eval()
    masks = halve.prune(model, also="*")
    path = tmp_path / "net.onnx"
    done = halve.export(model, masks, torch.randn(2, 1, 8, 8), path, preprocess=preprocess)
    names = [layer.name for layer in done.check.layers]
    assert names == ["0", "2", "3.qkv", "3", "3.call2", "3.proj", "3.head"]
    assert {layer.name for layer in done.check.eligible} == set(masks) == {"2", "3.qkv", "3.proj", "3.head"}


class Tied(nn.Module):
    """A layer with two names, of which the second is called, and one with its weight."""

    def __init__(self):
        super().__init__()
        self.first, self.other = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
        self.second, self.other.weight = self.first, self.first.weight

    def forward(self, x):
        return self.other(self.second(x))


def test_an_input_that_is_also_an_output_keeps_its_name(tmp_path):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 1)

        def forward(self, picture):
            return self.conv(picture), picture

    model = Both().eval()
    masks = halve.prune(model, also="conv", progress=False)
    halve.export(model, masks, torch.randn(2, 8, 4, 4), tmp_path / "net.onnx")
    assert [value.name for value in onnx.load(tmp_path / "net.onnx").graph.input] == ["picture"]


def test_a_patch_convolution_and_a_transformer_run_in_float16(tmp_path):
    """onnxruntime 1.31 ends the process on them, unless one of its optimisations is off."""
    torch.manual_seed(0)
    model = VisionTransformer(32, 16, 1, 2, 32, 64, num_classes=5).eval()
    halve.export(
        model, halve.prune(model, progress=False), torch.randn(2, 3, 32, 32), tmp_path / "net.onnx", dtype=torch.float16
    )
    assert (tmp_path / "net.onnx").exists()


def test_a_weight_that_is_read_twice_has_one_name(tmp_path):
    model = Tied().eval()
    masks = halve.prune(model, also="*")
    done = halve.export(model, masks, torch.randn(2, 8, 8, 8), tmp_path / "net.onnx")
    assert list(masks) == ["first"]
    assert [layer.name for layer in done.check.eligible] == ["first", "first.call2"]


class Auxiliary(nn.Module):
    """Has a head that only runs in training, as GoogLeNet and Inception do."""

    def __init__(self):
        super().__init__()
        self.body, self.auxiliary, self.head = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.body(x)
        return (self.head(x), self.auxiliary(x)) if self.training else self.head(x)


def test_masked_layers_that_do_not_run_are_noted(tmp_path):
    model = Auxiliary().eval()
    done = halve.export(model, halve.prune(model, also="*"), torch.randn(2, 4, 6, 6), tmp_path / "net.onnx")
    assert [layer.name for layer in done.check.eligible] == ["body", "head"]
    assert done.check.ok
    assert done.notes == ("1 masked layer(s) did not run on the example and are not in the file: auxiliary",)


class Scattered(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)

    def forward(self, x):
        return self.conv(x) if float(x.sum()) > 0 else self.conv(-x)


def test_a_model_that_is_no_single_graph_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ModelError, match="cannot be exported as one graph"):
        halve.export(Scattered(), None, torch.randn(2, 4, 6, 6), tmp_path / "net.onnx")


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


def test_a_file_that_computes_something_else_is_refused(tmp_path):
    with pytest.raises(ModelError, match="does not compute what the model computes"):
        halve.export(Noisy(), None, torch.randn(2, 4), tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


class OneBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)

    def forward(self, x):
        return self.conv(x.reshape(2, 4, 6, 6))


def test_a_batch_size_that_the_code_fixes_is_noted(tmp_path):
    done = halve.export(OneBatch().eval(), None, torch.randn(2, 4, 6, 6), tmp_path / "net.onnx")
    assert "it does not run on a single image" in done.notes[0]


def test_only_an_older_export_is_replaced_unless_forced(copied):
    model, x = nn.Sequential(nn.Conv2d(4, 4, 1)), torch.randn(2, 4, 6, 6)
    halve.export(model, None, x, copied)  # over an older export
    foreign = onnx.load(copied)
    del foreign.metadata_props[:]
    onnx.save(foreign, copied)
    before = copied.read_bytes()
    with pytest.raises(FileError, match="was not written by halve export"):
        halve.export(model, None, x, copied)
    assert copied.read_bytes() == before
    halve.export(model, None, x, copied, force=True)
    assert file.is_exported(copied)
    copied.chmod(0o444)
    with pytest.raises(FileError, match="write-protected"):
        halve.export(model, None, x, copied)


def test_weights_beyond_the_limit_go_to_a_file_beside_it(exported, tmp_path, monkeypatch):
    model, masks, done = exported
    monkeypatch.setattr(file, "MAX_BYTES", 1000)
    path = tmp_path / "big.onnx"
    big = halve.export(model, masks, images(), path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["big.onnx", "big.onnx.data"]
    assert initializer(onnx.load(path, load_external_data=False), "body.weight").external_data
    assert big.difference < 1e-5
    assert [layer.verdict for layer in big.check.layers] == [layer.verdict for layer in done.check.layers]
    data = path.with_name("big.onnx.data")
    halve.export(model, masks, images(), path)  # over an older export with its data
    other = tmp_path / "other.onnx"
    mine = other.with_name("other.onnx.data")
    mine.write_text("mine")
    with pytest.raises(FileError, match=r"other.onnx.data: the file exists and was not written by halve export"):
        halve.export(model, masks, images(), other)
    assert mine.read_text() == "mine"
    assert not other.exists()
    halve.export(model, masks, images(), other, force=True)
    with pytest.raises(ModelError, match="int8 needs a network of at most"):
        halve.export(model, masks, images(), other, int8=True, calibrate=images(8))
    data.write_bytes(data.read_bytes()[:-1] + b"!")
    with pytest.raises(FileError, match="is not the data that"):
        halve.check_onnx(path)


def test_bad_options_are_errors(tmp_path):
    model = Residual().eval()
    with pytest.raises(OptionError, match=r"dtype must be one of torch.float32"):
        halve.export(model, None, images(), tmp_path / "net.onnx", dtype=torch.int8)
    with pytest.raises(OptionError, match="first dimension must be the batch size"):
        halve.export(model, None, (images(2), images(3)), tmp_path / "net.onnx")
    with pytest.raises(ModelError, match="does not run on the example"):
        halve.export(model, None, torch.randn(2, 5, 8, 8), tmp_path / "net.onnx")


class Mixed(nn.Module):
    """Returns tensors by name, a list of them, and what is no tensor."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)

    def forward(self, x):
        y = self.conv(x).relu()
        parts = {"features": [y, 2 * y], "count": 3, "size": x.shape[0]}
        return {"scores": self.head(y.mean((2, 3))), "parts": parts, "name": "mixed", "nothing": None}


def test_outputs_that_are_no_tensors_are_left_out(tmp_path):
    torch.manual_seed(0)
    done = halve.export(Mixed().eval(), None, images(), tmp_path / "net.onnx", dtype=torch.float16)
    assert done.outputs == ("scores", "parts.features.0", "parts.features.1")
    assert done.difference < 5e-3

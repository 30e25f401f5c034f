import contextlib
import math
import os

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import halve
from halve.errors import FileError, HalveError
from halve.export import file
from tests.export.nets import edited, initializer

EVERY = 97  # bytes between the places where a file is cut off or changed


def refused(path, message):
    with pytest.raises(FileError, match=message) as caught:
        halve.check_onnx(path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_is_cut_off_anywhere_is_refused_or_has_lost_only_metadata(copied):
    content = copied.read_bytes()
    whole = halve.check_onnx(copied).layers
    for size in range(0, len(content), EVERY):
        copied.write_bytes(content[:size])
        with contextlib.suppress(FileError):
            assert halve.check_onnx(copied).layers == whole


def test_changed_bytes_never_raise_anything_else(copied):
    content = copied.read_bytes()
    for place in range(0, len(content), EVERY):
        copied.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        with contextlib.suppress(HalveError):
            str(halve.check_onnx(copied))


@pytest.mark.parametrize("name", [b"body", b"halve.masks", b"image", b"strides"])
def test_names_that_are_no_text_are_refused(copied, name):
    content = copied.read_bytes()
    assert name in content
    copied.write_bytes(content.replace(name, b"\xff" * len(name)))
    refused(copied, "is not valid UTF-8")


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "net.onnx"
    refused(path, "no such file")
    path.write_bytes(b"")
    refused(path, "holds no graph")
    path.write_text("not a model")
    refused(path, "not an ONNX file")
    refused(tmp_path, "not a regular file")


def test_a_cyclic_graph_is_refused(copied):
    def cycle(model):
        body = next(node for node in model.graph.node if node.name == "body")
        body.input[0] = model.graph.node[-1].output[0]

    refused(edited(copied, cycle), "cyclic or not sorted: node 'body' reads")


def test_a_node_that_reads_itself_is_refused(copied):
    def cycle(model):
        model.graph.node[0].input[0] = model.graph.node[0].output[0]

    refused(edited(copied, cycle), "cyclic or not sorted")


def test_a_tensor_that_two_nodes_produce_is_refused(copied):
    def twice(model):
        model.graph.node[1].output[0] = model.graph.node[0].output[0]

    refused(edited(copied, twice), "two tensors with the name")


@pytest.mark.parametrize("dims", [[1 << 20, 1 << 20, 1 << 10, 3], [1 << 62, 1 << 62], [16, 16, 3, 4], [-1, 16, 3, 3]])
def test_declared_sizes_must_be_there(copied, dims):
    def declare(model):
        tensor = initializer(model, "body.weight")
        del tensor.dims[:]
        tensor.dims.extend(dims)

    model = onnx.load(copied)
    declare(model)
    copied.write_bytes(model.SerializeToString())
    refused(copied, "is damaged: tensor 'body.weight'")


@pytest.mark.parametrize("dims", [[0, 1 << 62], [1] * 100])
def test_shapes_that_no_array_has_are_refused(copied, dims):
    model = onnx.load(copied)
    tensor = initializer(model, "body.weight")
    del tensor.dims[:]
    tensor.dims.extend(dims)
    tensor.raw_data = bytes(4 * math.prod(dims))
    copied.write_bytes(model.SerializeToString())
    refused(copied, "tensor 'body.weight' cannot be read")


def test_typed_data_and_unknown_types_are_checked(copied):
    model = onnx.load(copied)
    tensor = initializer(model, "body.weight")
    tensor.ClearField("raw_data")
    tensor.float_data.extend([1.0, 2.0])
    copied.write_bytes(model.SerializeToString())
    refused(copied, "the file has 2 numbers")
    tensor.data_type = 99
    copied.write_bytes(model.SerializeToString())
    refused(copied, "unknown type 99")


def external(model, **entries):
    tensor = initializer(model, "body.weight")
    raw = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    return raw


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/hostname", "folder/../../secret.bin", ""])
def test_external_data_outside_of_the_folder_is_not_read(copied, location):
    model = onnx.load(copied)
    raw = external(model, location=location)
    (copied.parent.parent / "secret.bin").write_bytes(raw)
    copied.write_bytes(model.SerializeToString())
    refused(copied, "outside of the model's folder")


def test_names_of_external_data_cannot_break_the_message(copied):
    model = onnx.load(copied)
    external(model, location="a" * 5000)
    copied.write_bytes(model.SerializeToString())
    refused(copied, "has no file 'aaaa")
    initializer(model, "body.weight").external_data[0].value = "a\n\x1b[2J"
    copied.write_bytes(model.SerializeToString())
    refused(copied, r"has no file 'a\\n\\x1b")


def test_huge_external_data_is_not_read(copied):
    model = onnx.load(copied)
    external(model, location="weights.bin")
    tensor = initializer(model, "body.weight")
    del tensor.dims[:]
    tensor.dims.extend([1 << 20, 1 << 10, 3, 3])
    copied.write_bytes(model.SerializeToString())
    with (copied.parent / "weights.bin").open("wb") as data:
        data.truncate(36 << 30)  # takes no space on the disk
    refused(copied, "at most 8,589,934,592 are read")


def test_a_constant_that_a_node_produces_as_well_is_refused(copied):
    def twice(model):
        model.graph.node[0].output[0] = "body.weight"

    refused(edited(copied, twice), "two tensors with the name 'body.weight'")


def test_a_link_out_of_the_folder_is_not_followed(copied, tmp_path_factory):
    model = onnx.load(copied)
    outside = tmp_path_factory.mktemp("outside") / "secret.bin"
    outside.write_bytes(external(model, location="weights.bin"))
    os.symlink(outside, copied.parent / "weights.bin")
    copied.write_bytes(model.SerializeToString())
    refused(copied, "outside of the model's folder")


def test_external_data_inside_of_the_folder_is_read_within_its_bounds(copied):
    whole = halve.check_onnx(copied).layers
    model = onnx.load(copied)
    raw = external(model, location="weights.bin", offset=5)
    copied.write_bytes(model.SerializeToString())
    refused(copied, "has no file 'weights.bin'")
    data = copied.parent / "weights.bin"
    data.write_bytes(b"12345" + raw)
    assert halve.check_onnx(copied).layers == whole
    data.write_bytes(b"12345" + raw[:-4])
    refused(copied, "declares 9,216 bytes, its external data has 9,212")
    initializer(model, "body.weight").external_data.add(key="length", value="9216")
    copied.write_bytes(model.SerializeToString())
    refused(copied, "is truncated: tensor 'body.weight' is at bytes 5 to 9,221 of 9,217")


def message(field, content):
    """A message inside of another one, as protobuf writes it."""
    size, length = len(content), b""
    while size > 127:
        length, size = length + bytes([size % 128 + 128]), size // 128
    return bytes([field * 8 + 2]) + length + bytes([size]) + content


def test_deeply_nested_graphs_are_refused(tmp_path):
    graph = message(1, message(4, b"Relu"))
    for _ in range(2000):  # a node of the graph has an attribute that is a graph
        graph = message(1, message(5, message(6, graph)))
    path = tmp_path / "net.onnx"
    path.write_bytes(message(7, graph))
    refused(path, "not an ONNX file")


def test_small_types_are_measured_in_bits(tmp_path):
    assert file._bits(TensorProto.INT4) == 4
    assert file._bits(TensorProto.BFLOAT16) == 16
    assert file._bits(TensorProto.STRING) is None
    values = numpy_helper.to_array(file.from_numpy(np.arange(3.0, dtype=np.float32), "a"))
    assert values.tolist() == [0, 1, 2]

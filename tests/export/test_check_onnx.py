import json
import time

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import halve
from halve.errors import FileError
from tests.export.nets import edited, initializer, set_values

PATTERN = np.array([1, 0, 0, 1], dtype=np.float32)


def sparse(shape, axis=1):
    """A weight that is 2:4 along an axis."""
    sizes = [1] * len(shape)
    sizes[axis] = shape[axis]
    pattern = np.resize(PATTERN, shape[axis]).reshape(sizes)
    return (np.random.default_rng(0).uniform(0.5, 1, shape) * pattern).astype(np.float32)


def saved(path, nodes, constants, shape=(1, 8, 8, 8)):
    """A file with these nodes, from x to y, and constants."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)
    return path


def only(path):
    [layer] = halve.check_onnx(path).layers
    return layer


def conv(weight="w", **attributes):
    return helper.make_node("Conv", ["x", weight], ["y"], name="conv", **attributes)


def test_what_export_wrote_is_ok(exported):
    check = halve.check_onnx(exported[2].path)
    assert check.ok
    assert check.masked == ("body", "point")
    assert check.layers == exported[2].check.layers
    assert "ok: 2 of 4 layers eligible for sparse kernels, 0 likely" in str(check)
    assert json.loads(json.dumps(check.as_json()))["layers"][1]["shape"] == [16, 16, 3, 3]


def test_one_filled_zero_is_found_and_located(copied):
    def fill(model):
        weight = numpy_helper.to_array(initializer(model, "body.weight")).copy()
        place = np.argwhere(weight == 0)[-1]
        weight[tuple(place)] = 1e-8
        set_values(model, "body.weight", weight)
        return place

    edited(copied, fill)
    check = halve.check_onnx(copied)
    assert check.status == "failed"
    assert list(check.failures) == ["body"]
    assert (
        "1 of 576 blocks of 4 input channels have more than 2 nonzero weights, the first at output channel 15"
        in (check.failures["body"])
    )


def test_a_swapped_axis_is_found_and_named(copied):
    def swap(model):
        weight = numpy_helper.to_array(initializer(model, "body.weight"))
        set_values(model, "body.weight", np.ascontiguousarray(weight.swapaxes(0, 1)))

    edited(copied, swap)
    assert "2:4 along output channels instead of input channels" in halve.check_onnx(copied).failures["body"]


def test_a_multiplication_between_weight_and_layer_is_found(copied):
    def multiply(model):
        nodes = list(model.graph.node)
        model.graph.initializer.append(numpy_helper.from_array(np.float32(2), "two"))
        node = next(node for node in nodes if node.name == "body")
        scaled = helper.make_node("Mul", ["body.weight", "two"], ["scaled"], name="scale")
        node.input[1] = "scaled"
        del model.graph.node[:]
        model.graph.node.extend([scaled, *nodes])

    edited(copied, multiply)
    reason = halve.check_onnx(copied).failures["body"]
    assert "its weight goes through Mul 'scale', which hides it: fold constants first" in reason


def test_a_masked_layer_that_vanished_is_a_failure(copied):
    def rename(model):
        next(node for node in model.graph.node if node.name == "body").name = "conv_7"

    edited(copied, rename)
    assert halve.check_onnx(copied).failures == {"body": "it is not in the graph"}


@pytest.mark.parametrize(("channels", "outputs", "kernel", "verdict", "reason"), [
    (256, 256, 3, "likely", "large, 3x3"),
    (256, 256, 1, "likely", "large, but 1x1: chosen less often than larger kernels"),
    (256, 64, 3, "eligible", "small: 64 output channels, fewer than 256"),
    (6, 8, 3, "no", "6 input channels, not divisible by 4"),
])  # fmt: skip
def test_size_decides_what_is_likely(tmp_path, channels, outputs, kernel, verdict, reason):
    weight = sparse((outputs, channels, kernel, kernel))
    layer = only(saved(tmp_path / "net.onnx", [conv()], {"w": weight}))
    assert (layer.verdict, layer.reason, layer.shape) == (verdict, reason, weight.shape)


def test_grouped_transposed_and_dense_layers_are_not_eligible(tmp_path):
    path = tmp_path / "net.onnx"
    assert only(saved(path, [conv(group=2)], {"w": sparse((8, 4, 3, 3))})).reason == "grouped convolution (2 groups)"
    transposed = helper.make_node("ConvTranspose", ["x", "w"], ["y"])
    layer = only(saved(path, [transposed], {"w": sparse((8, 4, 3, 3))}))
    assert (layer.name, layer.reason) == ("ConvTranspose[0]", "transposed convolution")
    assert only(saved(path, [conv()], {"w": np.ones((8, 8, 3, 3), np.float32)})).reason == "dense"
    assert halve.check_onnx(path).status == "none"


def test_flat_order_is_named(tmp_path):
    flat = np.random.default_rng(0).permuted(np.resize(PATTERN, (144, 4)), axis=1).reshape(8, 8, 3, 3)
    reason = only(saved(tmp_path / "net.onnx", [conv()], {"w": flat})).reason
    assert reason.startswith("2:4 along the flattened kernel instead of input channels")


@pytest.mark.parametrize(("node", "axis", "eligible"), [
    (helper.make_node("Gemm", ["x", "w"], ["y"], transB=1), 1, True),
    (helper.make_node("Gemm", ["x", "w"], ["y"], transB=1), 0, False),
    (helper.make_node("Gemm", ["x", "w"], ["y"]), 0, True),
    (helper.make_node("Gemm", ["w", "x"], ["y"]), 1, True),
    (helper.make_node("Gemm", ["w", "x"], ["y"], transA=1), 0, True),
    (helper.make_node("MatMul", ["x", "w"], ["y"]), 0, True),
    (helper.make_node("MatMul", ["x", "w"], ["y"]), 1, False),
    (helper.make_node("MatMul", ["w", "x"], ["y"]), 1, True),
])  # fmt: skip
def test_matrix_products_are_judged_along_their_inner_dimension(tmp_path, node, axis, eligible):
    path = saved(tmp_path / "net.onnx", [node], {"w": sparse((16, 16), axis)}, (16, 16))
    assert only(path).is_eligible == eligible


def test_batched_matrix_products_are_judged_too(tmp_path):
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    assert only(saved(tmp_path / "net.onnx", [node], {"w": sparse((2, 16, 8), 1)}, (2, 4, 16))).shape == (16, 16)


def test_products_of_activations_have_no_weight(tmp_path):
    node = helper.make_node("MatMul", ["x", "x"], ["y"], name="attention")
    layer = only(saved(tmp_path / "net.onnx", [node], {}, (8, 8)))
    assert (layer.verdict, layer.weight) == ("no", None)


def quantized(zero_point=0, stored=np.int8):
    scale = np.full(8, 0.1, np.float32)
    point = np.full(8, zero_point, np.int8)
    weight = sparse((8, 8, 3, 3))
    if stored is np.int8:
        weight = np.round(weight / 0.1).astype(np.int8)
        return [helper.make_node("DequantizeLinear", ["w", "s", "z"], ["d"], axis=0), conv("d")], {
            "w": weight, "s": scale, "z": point,
        }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["w", "s", "z"], ["q"], axis=0),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], axis=0),
        conv("d"),
    ]
    return nodes, {"w": weight, "s": scale, "z": point}


def test_quantised_weights_are_followed(tmp_path):
    path = tmp_path / "net.onnx"
    layer = only(saved(path, *quantized()))
    assert (layer.verdict, layer.dtype) == ("eligible", "int8")
    layer = only(saved(path, *quantized(stored=np.float32)))
    assert (layer.verdict, layer.dtype) == ("eligible", "float32 Q/DQ")
    assert "zero point other than 0" in only(saved(path, *quantized(zero_point=3))).reason


@pytest.mark.parametrize(("point", "noted"), [(0, []), (-128, ["QuantizeLinear 'q'"])])
def test_activations_with_a_zero_point_are_noted(tmp_path, point, noted):
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"], name="q"),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["d"], name="dq"),
        helper.make_node("Conv", ["d", "w"], ["y"]),
    ]
    constants = {"s": np.float32(0.1), "z": np.int8(point), "w": sparse((8, 8, 3, 3))}
    notes = halve.check_onnx(saved(tmp_path / "net.onnx", nodes, constants)).notes
    told = "2 Q/DQ nodes have a zero point other than 0, such as {}: TensorRT takes symmetric quantisation only"
    assert [note for note in notes if "zero point" in note] == [told.format(name) for name in noted]


def test_a_dense_layer_with_some_zeros_is_dense(tmp_path):
    weight = np.ones((64, 64, 1, 1), np.float32)
    weight[0, :3] = 0  # as rounding to int8 makes
    assert only(saved(tmp_path / "net.onnx", [conv()], {"w": weight})).reason == "dense"


def test_casts_transpositions_and_constant_nodes_are_followed(tmp_path):
    value = numpy_helper.from_array(sparse((3, 3, 8, 8), 2).astype(np.float16))
    nodes = [
        helper.make_node("Constant", [], ["w"], value=value),
        helper.make_node("Transpose", ["w"], ["t"], perm=[3, 2, 0, 1]),
        helper.make_node("Cast", ["t"], ["c"], to=TensorProto.FLOAT),
        conv("c"),
    ]
    layer = only(saved(tmp_path / "net.onnx", nodes, {}))
    assert (layer.verdict, layer.dtype, layer.shape) == ("eligible", "float16", (8, 8, 3, 3))
    nodes[1] = helper.make_node("Transpose", ["w"], ["t"], perm=[2, 3, 0, 1])
    assert "2:4 along output channels" in only(saved(tmp_path / "net.onnx", nodes, {})).reason


def test_operators_that_tensorrt_does_not_take_say_so(tmp_path):
    node = helper.make_node("ConvInteger", ["x", "w"], ["y"])
    assert "quantise with Q/DQ" in only(saved(tmp_path / "net.onnx", [node], {"w": sparse((8, 8, 3, 3))})).reason


def test_weights_of_other_shapes_and_types_are_not_eligible(tmp_path):
    path = tmp_path / "net.onnx"
    for shape in [(8, 0, 3, 3), (0, 0, 0, 0)]:
        assert only(saved(path, [conv()], {"w": np.zeros(shape, np.float32)})).reason == "its weight is empty"
    for shape in [(), (8,), (8, 8)]:
        for operator in ("Conv", "ConvTranspose"):
            node = helper.make_node(operator, ["x", "w"], ["y"])
            reason = only(saved(path, [node], {"w": np.ones(shape, np.float32)})).reason
            assert reason == f"its weight has {len(shape)} dimensions"
    for dtype in (np.complex64, np.int64, np.float64, bool):
        layer = only(saved(path, [conv()], {"w": sparse((8, 8, 3, 3)).astype(dtype)}))
        assert "its weight is stored as" in layer.reason


def test_a_sparse_initializer_is_named(tmp_path):
    path = saved(tmp_path / "net.onnx", [conv()], {"w": sparse((8, 8, 3, 3))})

    def move(model):
        values = numpy_helper.to_array(model.graph.initializer[0]).reshape(-1)
        places = np.flatnonzero(values)
        stored = model.graph.sparse_initializer.add(dims=[8, 8, 3, 3])
        stored.values.CopyFrom(numpy_helper.from_array(values[places], "w"))
        stored.indices.CopyFrom(numpy_helper.from_array(places, "places"))
        del model.graph.initializer[:]

    assert "stored as a sparse initializer" in only(edited(path, move)).reason


def test_attributes_of_the_wrong_type_are_damage(tmp_path):
    path = tmp_path / "net.onnx"
    for group in ("two", 2.5, [1, 2]):
        with pytest.raises(FileError, match="the attribute group of Conv 'conv' is not an integer"):
            halve.check_onnx(saved(path, [conv(group=group)], {"w": sparse((8, 8, 3, 3))}))
    assert only(saved(path, [conv(group=0)], {"w": sparse((8, 8, 3, 3))})).verdict == "no"
    nodes = [helper.make_node("Transpose", ["w"], ["t"], perm=1.5), conv("t")]
    assert "invalid order" in only(saved(path, nodes, {"w": sparse((8, 8, 3, 3))})).reason
    nodes = [helper.make_node("Constant", [], ["c"], value=3), conv("c")]
    assert only(saved(path, nodes, {})).weight is None


def test_every_node_with_the_name_of_a_masked_layer_must_be_eligible(tmp_path):
    path, constants = tmp_path / "net.onnx", {"w": sparse((8, 8, 3, 3)), "d": np.ones((8, 8, 3, 3), np.float32)}
    dense = helper.make_node("Conv", ["x", "d"], ["z"], name="conv")
    for nodes in ([conv(), dense], [dense, conv()]):
        saved(path, nodes, constants)
        edited(path, lambda model: model.metadata_props.add(key="halve.layers", value='["conv"]'))
        assert halve.check_onnx(path).failures == {"conv": "dense"}


def test_long_chains_of_nodes_take_linear_time(tmp_path):
    count = 3000
    chain = [helper.make_node("Identity", [f"t{i}" if i else "w"], [f"t{i + 1}"]) for i in range(count)]
    layers = [helper.make_node("Conv", ["x", f"t{count}"], [f"y{i}"]) for i in range(count)]
    path = saved(tmp_path / "net.onnx", chain + layers, {"w": sparse((8, 8, 3, 3))})
    started = time.process_time()
    check = halve.check_onnx(path)
    assert time.process_time() - started < 10  # a search from each layer took minutes
    assert {layer.reason.partition(",")[0] for layer in check.layers} == {"its weight goes through Identity"}


LOG = """[11/16/2026-12:00:00] [I] [TRT] Loaded 49 MB
[11/16/2026-12:00:01] [I] [TRT] (Sparsity) Layers eligible for sparse math: body + relu,
 point, elsewhere
[11/16/2026-12:00:01] [I] [TRT] (Sparsity) TRT inference plan picked sparse implementation for layers: body + relu
"""


def test_a_log_of_tensorrt_is_joined(exported, tmp_path):
    log = tmp_path / "trtexec.log"
    log.write_text(LOG)
    check = halve.check_onnx(exported[2].path, trt_log=log)
    assert {layer.name: layer.picked for layer in check.layers} == {
        "stem": False, "body": True, "point": False, "head": False,
    }  # fmt: skip
    assert "TensorRT picked 1" in check.summary
    assert "picked" in str(check).splitlines()[0]
    assert any("1 layer(s) that the file does not have: elsewhere" in note for note in check.notes)


def test_newer_messages_are_read_as_well_and_the_last_one_counts(exported, tmp_path):
    log = tmp_path / "trtexec.log"
    log.write_text(
        "[V] [TRT] (Sparsity) Found 2 layer(s) eligible to use sparse tactics: body, point\n"
        "[V] [TRT] (Sparsity) Chose 2 layer(s) using sparse tactics: body, point\n"
        "[V] [TRT] (Sparsity) Chose 1 layer(s) using sparse tactics: point\n"
    )
    check = halve.check_onnx(exported[2].path, trt_log=log)
    assert [layer.name for layer in check.layers if layer.picked] == ["point"]


def test_counts_without_names_are_only_enough_if_nothing_was_picked(exported, tmp_path):
    log = tmp_path / "trtexec.log"
    found = "(Sparsity) Found 2 layer(s) eligible to use sparse tactics\n"
    log.write_text(f"{found}(Sparsity) Chose 0 layer(s) using sparse tactics\n")
    assert not any(layer.picked for layer in halve.check_onnx(exported[2].path, trt_log=log).layers)
    log.write_text(f"{found}(Sparsity) Chose 2 layer(s) using sparse tactics\n")
    with pytest.raises(FileError, match="says that 2 layers were picked, but not which"):
        halve.check_onnx(exported[2].path, trt_log=log)


def test_a_log_that_ends_early_says_nothing_about_what_was_picked(exported, tmp_path):
    log = tmp_path / "trtexec.log"
    log.write_text("".join(LOG.splitlines(keepends=True)[:-1]))
    check = halve.check_onnx(exported[2].path, trt_log=log)
    assert {layer.picked for layer in check.layers} == {None}
    assert any("does not say which layers TensorRT picked" in note for note in check.notes)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-8-sig"])
def test_logs_with_colours_and_of_other_shells_are_read(exported, tmp_path, encoding):
    log = tmp_path / "trtexec.log"
    text = "".join(f"\x1b[32m{line}\x1b[0m\r\n" for line in LOG.splitlines() if "Sparsity" in line)
    log.write_bytes(text.encode(encoding))
    check = halve.check_onnx(exported[2].path, trt_log=log)
    assert [layer.name for layer in check.layers if layer.picked] == ["body"]
    assert not any("does not have" in note for note in check.notes)


def test_long_logs_take_linear_time(exported, tmp_path):
    log = tmp_path / "trtexec.log"
    log.write_text(LOG + "an output without a time stamp\n" * 200_000)
    started = time.process_time()
    check = halve.check_onnx(exported[2].path, trt_log=log)
    assert time.process_time() - started < 10
    assert "TensorRT picked" in check.summary
    log.write_text("(Sparsity) Chose 1 layer(s) using sparse tactics: body\n" * 100_000)
    assert halve.check_onnx(exported[2].path, trt_log=log).layers[1].picked


def test_a_log_without_sparsity_says_how_to_make_one(exported, tmp_path):
    log = tmp_path / "trtexec.log"
    log.write_text("[I] [TRT] Loaded\n")
    with pytest.raises(FileError, match="build with trtexec --sparsity=enable --verbose"):
        halve.check_onnx(exported[2].path, trt_log=log)


def test_names_cannot_control_the_terminal(tmp_path):
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="a\x1b[2J")
    path = saved(tmp_path / "net.onnx", [node], {"w": sparse((8, 8, 3, 3))})
    assert "\x1b" not in str(halve.check_onnx(path))


def test_the_commands_are_for_strongly_typed_networks(exported):
    commands = exported[2].check.commands
    assert commands["10"] == f"{commands['11']} --stronglyTyped"
    assert "--sparsity=enable" in commands["11"]
    assert "--optShapes=image:8x3x8x8" in commands["11"]
    assert "fp16" not in commands["10"]


def test_sizes_that_the_file_does_not_fix_are_filled_in_and_noted(tmp_path):
    path = saved(tmp_path / "net.onnx", [conv()], {"w": sparse((8, 8, 3, 3))}, ["n", 8, "h", "w"])
    check = halve.check_onnx(path)
    assert "--optShapes=x:8x8x224x224" in check.commands["11"]
    assert any("image sizes are not fixed" in note for note in check.notes)
    assert "--optShapes" not in halve.check_onnx(saved(path, [conv()], {"w": sparse((8, 8, 3, 3))}, [])).commands["11"]


def test_control_flow_and_functions_are_not_guessed_at(tmp_path):
    inner = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["z"], name="inner")],
        "then",
        [],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    path = saved(tmp_path / "net.onnx", [node], {"w": sparse((8, 8, 3, 3)), "c": np.array(True)})
    assert {layer.reason for layer in halve.check_onnx(path).layers} == {"inside of control flow (If, Loop)"}

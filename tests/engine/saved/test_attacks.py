"""Files that were made to run code, to take memory, or to get other content past the checks."""

import io
import json
import os
import re
import zipfile

import pytest
import torch
from torch import nn

import halve
from halve.errors import FileError
from tests.engine.nets import compiled, sparsely
from tests.engine.saved.edited import contents, edited
from tests.masks.damage import flipped
from tests.tiny import convnet, images


class Running:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def pickled(path):
    buffer = io.BytesIO()
    torch.save(Running(path), buffer)
    return buffer.getvalue()


def former_file(path, ending, change):
    """A network in torch.export's format, which halve wrote once, with one member of the archive changed."""
    program = torch.export.export(
        nn.Flatten(),
        (torch.zeros(2, 4, 8, 8),),
        dynamic_shapes=({0: torch.export.Dim("batch", min=2)},),
        strict=False,
    )
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"halve.json": json.dumps({"version": 4})})
    with zipfile.ZipFile(buffer) as archive, zipfile.ZipFile(path, "w") as copy:
        members = {name: archive.read(name) for name in archive.namelist()}
        [name] = [name for name in members if name.endswith(ending)]
        before, members[name] = members[name], change(members[name])
        assert members[name] != before
        for name, content in members.items():
            copy.writestr(name, content)
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["a pickle", "an expression"])
def test_files_of_the_former_format_are_refused_before_they_can_run_code(tmp_path, how):
    ran = tmp_path / "ran"
    code = json.dumps(f"__import__('os').mkdir({str(ran)!r}) or ")[1:-1].encode()
    ending, change = {
        "a pickle": ("sample_inputs/model.pt", lambda content: pickled(ran)),
        "an expression": (
            "models/model.json",
            lambda content: content.replace(b'"expr_str": "', b'"expr_str": "' + code),
        ),
    }[how]
    path = former_file(tmp_path / "net.pt2", ending, change)
    with pytest.raises(FileError, match="compile the model again"):
        halve.load_compiled(path)
    assert not ran.exists()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "net.compiled.safetensors"
    sparsely(compiled(convnet())).save(path)
    return path


def test_any_edit_of_the_bytes_is_refused_or_changes_nothing(saved, tmp_path):
    content, path = saved.read_bytes(), tmp_path / "net"
    header, tensors = contents(saved)
    loaded = 0
    for damaged in flipped(content, 150, first=64):
        path.write_bytes(damaged)
        try:
            halve.load_compiled(path)
        except FileError:
            continue
        found, numbers = contents(path)
        assert found == header
        assert all(torch.equal(numbers[name], tensor) for name, tensor in tensors.items())
        loaded += 1
    assert loaded < 10


def test_other_weights_need_another_checksum(saved, tmp_path):
    content = bytearray(saved.read_bytes())
    values = next(tensor for name, tensor in contents(saved)[1].items() if name.endswith(".values"))
    content[bytes(content).index(values.numpy().tobytes()) + 5] ^= 64
    path = tmp_path / "net"
    path.write_bytes(content)
    with pytest.raises(FileError, match="checksum does not match"):
        halve.load_compiled(path)


def first_layer(header):
    return next(node for node in header["nodes"] if "layer" in node)


CODE = "__import__('os').mkdir('RAN')"
INJECTED = {
    "an operator": lambda h, t: h["nodes"].append({"call": "builtins.eval", "args": [CODE]}),
    "a method": lambda h, t: h["nodes"].append({"call": "torch.ops.aten.add.__class__", "args": []}),
    "a loader": lambda h, t: h["nodes"].append({"call": "torch.load", "args": ["RAN"]}),
    "a file": lambda h, t: h["nodes"].append({"call": "aten.from_file.default", "args": ["RAN", True, 4]}),
    "a writer": lambda h, t: h["nodes"].append({"call": "aten.save.default", "args": [{"value": 0}, "RAN"]}),
    "a setter": lambda h, t: h["nodes"].append({"call": "aten.relu_.default", "args": [{"value": 0}]}),
    "an attribute": lambda h, t: h["nodes"].append({"call": "operator.attrgetter", "args": ["__class__"]}),
    "a name of an argument": lambda h, t: h["nodes"].append(
        {"call": "aten.relu.default", "args": [], "named": {f"self=x0); {CODE} #": {"value": 0}}}
    ),
    "an index": lambda h, t: h["nodes"].append({"call": "operator.getitem", "args": [{"value": 0}, CODE]}),
    "an equation": lambda h, t: h["nodes"].append(
        {"call": "aten.einsum.default", "args": [f"') or {CODE} #", [{"value": 0}]]}
    ),
    "a newline": lambda h, t: h["nodes"].append({"call": "aten.einsum.default", "args": [f"\n{CODE}", [{"value": 0}]]}),
    "a float": lambda h, t: h["nodes"].append({"call": "aten.add.Scalar", "args": [{"value": 0}, {"float": CODE}]}),
    "a dtype": lambda h, t: h["nodes"].append({"call": "aten._to_copy.default", "args": [], "named": {"dtype": CODE}}),
    "a layer": lambda h, t: first_layer(h).update(layer=CODE),
    "a name of a tensor": lambda h, t: t.update({f"0.x; {CODE}": torch.zeros(1)}),
    "an output": lambda h, t: h.update(structure=[CODE, ["*"]]),
    "a class of outputs": lambda h, t: h.update(structure=["Running", ["*"]]),
    "an input": lambda h, t: h["inputs"][0].update(dtype=f"float32; {CODE}"),
    "a guard": lambda h, t: h["guards"].update(conditions=[CODE]),
    "a name of an input": lambda h, t: h["guards"].update(names=[f"x: {CODE}"]),
    "a compiler option": lambda h, t: first_layer(h)["layer"]["operation"].update(kernel=["3 -include /etc/passwd", 3]),
    "an activation": lambda h, t: first_layer(h)["layer"]["operation"].update(activation="relu; exit(1)"),
    "a device": lambda h, t: h.update(device="privateuseone"),
    "a terminal": lambda h, t: h["plan"].update(dense="\x1b]0;title\x07"),
}


@pytest.mark.parametrize("name", INJECTED)
def test_no_text_of_a_file_is_run(saved, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileError, match="damaged"):
        halve.load_compiled(edited(saved, INJECTED[name]))
    assert os.listdir(tmp_path) == []


def test_text_that_a_file_may_hold_stays_text(saved, tmp_path, monkeypatch):
    def edit(header, tensors):
        header["outputs"].append(f"\\'\"); {CODE} #")
        header["structure"] = ["dict", [f"'): {CODE}, ('", 5], ["*", "*"]]
        first_layer(header)["layer"]["name"] = f"'); {CODE} #"

    monkeypatch.chdir(tmp_path)
    fast = halve.load_compiled(edited(saved, edit))
    result = fast(images(2))
    assert list(result) == [f"'): {CODE}, ('", 5]
    assert result[5] == f"\\'\"); {CODE} #"
    assert fast.layers[0].name == f"'); {CODE} #"
    assert re.search(r"def forward\(self, x0\)", fast.body.code)
    assert os.listdir(tmp_path) == []


def node(call, *args, **named):
    return lambda h, t: h["nodes"].append({"call": call, "args": list(args), **({"named": named} if named else {})})


def chain(*nodes):
    def edit(header, tensors):
        header["nodes"] = [{"call": call, "args": args} for call, *args in nodes]
        header["outputs"], header["structure"] = [{"value": len(nodes)}], "*"
        tensors.clear()

    return edit


def recurrent(weights, states, layers=1):
    """An LSTM of one channel with weights and states of these shapes."""
    shapes = [[5, 2, 8], *states, *weights]
    numbers = [{"value": number} for number in range(1, 6)]
    layer = ["aten.lstm.input", numbers[0], numbers[1:3], numbers[3:], False, layers, 0.0, False, False, False]
    return chain(*(("aten.ones.default", shape) for shape in shapes), layer)


def with_residual(header, tensors):
    """The first layer with one number for a residual."""
    place = header["nodes"].index(first_layer(header))
    header["nodes"][place]["args"].append({"value": place})
    header["nodes"][place - 1] = {"call": "aten.ones.default", "args": [[1, 1, 1, 1]]}


HOSTILE = {
    "a reference to itself": (
        lambda h, t: node("aten.relu.default", {"value": 1 + len(h["nodes"])})(h, t),
        "no earlier",
    ),
    "a reference to a later value": (lambda h, t: first_layer(h).update(args=[{"value": 8}]), "no earlier value"),
    "a reference before the first": (node("aten.relu.default", {"value": -1}), "no earlier value"),
    "no reference": (node("aten.relu.default", {"value": True}), "no earlier value"),
    "too many arguments": (node("aten.relu.default", {"value": 0}, 1), "too many arguments"),
    "an argument twice": (node("aten.add.Tensor", {"value": 0}, 1, other=1), "one twice"),
    "no arguments": (node("aten.relu.default"), "missing arguments"),
    "an unknown argument": (node("aten.relu.default", {"value": 0}, strange=1), "unknown arguments"),
    "a text for a tensor": (node("aten.relu.default", "x"), "node"),
    "shapes that do not fit": (node("aten.mm.default", {"value": 0}, {"value": 0}), "2D"),
    "a number for a dtype": (node("aten.softmax.int", {"value": 0}, 1, -1), "dtype must be a ScalarType"),
    "a value for a dtype": (node("aten.softmax.int", {"value": 0}, 1, {"value": 0}), "dtype must be a ScalarType"),
    "a number for a layout": (node("aten.ones.default", [1], layout=99), "layout must be a Layout"),
    "a number for a generator": (node("aten.bernoulli.default", {"value": 0}, generator=1), "must be a Generator"),
    "an unknown node": (lambda h, t: h["nodes"].append({"eval": 1}), "a tensor, a layer or a call"),
    "a node that is none": (lambda h, t: h["nodes"].append(5), "a tensor, a layer or a call"),
    "a number for the nodes": (lambda h, t: h.update(nodes=5), "must be lists"),
    "ten thousand nodes": (lambda h, t: h.update(nodes=h["nodes"][:1] * 10_001), "at most 10,000 nodes"),
    "a huge tensor": (node("aten.full.default", [10**12], 0), "too large"),
    "a huge tensor by its input": (node("aten.new_zeros.default", {"value": 0}, [10**12]), "too large"),
    "a huge tensor by steps": (
        chain(("aten.zeros.default", [2**20]), ("aten.repeat.default", {"value": 1}, [2**20])),
        "too large",
    ),
    "a huge convolution": (
        lambda h, t: first_layer(h)["layer"]["operation"].update(padding=[2**30, 2**30]),
        "too large|overflow",
    ),
    "a huge range": (node("aten.arange.default", 2**50), "too large"),
    "a huge input": (lambda h, t: h["inputs"][0].update(shape=[1, 4, 2**30, 2**30]), "too large"),
    "a huge integer": (node("operator.mul", 2**62, 2**62), "64 bits"),
    "a huge power": (node("operator.pow", 10, 2**62), "exponent"),
    "a huge list": (node("operator.mul", [0], 2**40), "must be numbers"),
    "a huge text": (node("operator.mul", "x", 2**40), "must be numbers"),
    "an item of a number": (node("operator.getitem", {"value": 0}, 0), "list of values"),
    "lists in lists": (node("aten.relu.default", [[[[[[[[[[0]]]]]]]]]]), "node"),
    "a long list": (node("aten.cat.default", [{"value": 0}] * 5000), "not a valid argument"),
    "many pieces": (
        chain(("aten.zeros.default", [2**20]), ("aten.unbind.int", {"value": 1})),
        "more than 10,000 pieces",
    ),
    "many pieces by their number": (
        chain(("aten.zeros.default", [4]), ("aten.tensor_split.sections", {"value": 1}, 2**40)),
        "more than 10,000 pieces",
    ),
    "a norm that would read beyond its weights": (
        chain(
            ("aten.ones.default", [1]),
            (
                "aten._native_batch_norm_legit_no_training.default",
                {"value": 0},
                *[{"value": 1}] * 4,
                0.1,
                1e-5,
            ),
        ),
        "a norm of 4 channels needs as many values",
    ),
    "a weight norm that would, too": (
        chain(("aten.ones.default", [1]), ("aten._weight_norm.default", {"value": 0}, {"value": 1})),
        "g must have one value",
    ),
    "a recurrent layer that would, too": (
        recurrent([[4, 2], [4, 1]], [[1, 1, 1]] * 2),
        "weights of the LSTM",
    ),
    "states of another size": (recurrent([[4, 8], [4, 1]], [[1, 7, 1]] * 2), "states of the LSTM"),
    "a thousand recurrent layers": (recurrent([[4, 8], [4, 1]], [[1, 2, 1]] * 2, 2**40), "LSTM do not fit"),
    "an output that is missing": (lambda h, t: h.update(structure=["tuple", ["*", "*"]]), "a structure for 2"),
    "a structure that is none": (lambda h, t: h.update(structure={"a": 1}), "not a valid structure"),
    "the same key twice": (lambda h, t: h.update(structure=["dict", ["a", "a"], ["*", "*"]]), "not a valid structure"),
    "a tensor too much": (lambda h, t: t.update({"99.weight": torch.zeros(1)}), "belong to no node"),
    "a tensor less": (lambda h, t: t.pop(next(key for key in t if "values" in key)), "node"),
    "a tensor of another shape": (lambda h, t: t.update({key: t[key][:1] for key in t if "bias" in key}), "the shapes"),
    "a tensor of another dtype": (lambda h, t: t.update({key: t[key].half() for key in t}), "must be|node"),
    "a weight that is not there": (
        lambda h, t: first_layer(h)["layer"]["operation"].update(rows=2**30, channels=2**30),
        "too small for a weight",
    ),
    "a kernel of another operation": (
        lambda h, t: first_layer(h)["layer"].update(kernels={"1": ["pool", "nhwc"]}),
        "layer 0",
    ),
    "an unknown family": (lambda h, t: first_layer(h)["layer"].update(packed="x"), "unknown kernel family"),
    "a kernel of an unknown family": (
        lambda h, t: first_layer(h)["layer"].update(kernels={"1": ["x", "y"]}),
        "unknown kernel family",
    ),
    "a size of zero": (lambda h, t: first_layer(h)["layer"].update(kernels={"0": ["dense", "torch"]}), "positive"),
    "a layer with three inputs": (lambda h, t: first_layer(h).update(args=[{"value": 0}] * 3), "node"),
    "a residual that is broadcast": (with_residual, "one more input, of the shape of the result"),
    "a layer without inputs": (lambda h, t: first_layer(h).update(args=[]), "node"),
    "guards of another shape": (lambda h, t: h["guards"].update(sizes=[[[0, None]]]), "each dimension"),
    "guards that do not hold": (
        lambda h, t: h["guards"].update(conditions=["L['input'].size()[0] == 1"]),
        "its own example does not have",
    ),
    "guards without end": (lambda h, t: h["guards"].update(conditions=["1 == 1"] * 200_000), "characters at most"),
    "nested guards": (lambda h, t: h["guards"].update(conditions=["(" * 9000 + "1" + ")" * 9000]), "own example|nest"),
    "a long guard": (lambda h, t: h["guards"].update(conditions=["1" + "+1" * 9000]), "recursion"),
    "a plan of nothing": (lambda h, t: h.update(plan=[]), "damaged"),
    "an entry of nothing": (lambda h, t: h["plan"].update(batches={"1": [{}]}), "must have the fields"),
    "no inputs": (
        lambda h, t: h.update(inputs=[], nodes=[], outputs=[], structure=["tuple", []]),
        "must have an input",
    ),
    "a key too much": (lambda h, t: h.update(code=1), "must have the keys"),
    "a key less": (lambda h, t: h.pop("guards"), "must have the keys"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_network_is_refused_with_one_error(saved, name):
    edit, message = HOSTILE[name]
    with pytest.raises(FileError, match=message) as caught:
        halve.load_compiled(edited(saved, edit))
    assert "damaged" in str(caught.value)
    assert len(str(caught.value)) < 600

"""Everything that captured graphs contain is saved and loaded."""

import collections

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn
from torch.fx import GraphModule

import halve
from halve.engine.saved import graph
from halve.errors import EngineError
from tests.engine.nets import Net, compiled, sparsely
from tests.engine.saved.edited import contents
from tests.families import family, size
from tests.tiny import images


def same_leaves(one, other):
    (mine, structure), (theirs, expected) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    assert structure == expected
    for a, b in zip(mine, theirs, strict=True):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        else:
            assert a == b


def saved_and_loaded(fast, path, *batches):
    """The loaded network, after comparing its outputs bit by bit."""
    assert isinstance(fast.body, GraphModule)
    fast.save(path)
    again = halve.load_compiled(path)
    for inputs in batches:
        same_leaves(again(*inputs), fast(*inputs))
    return again


GRAPHS = {
    "antialiasing": lambda n, x: F.interpolate(n.a(x), scale_factor=0.5, mode="bilinear", antialias=True),
    "sizes": lambda n, x: F.interpolate(n.a(x), size=(x.shape[2] * 2, x.shape[3] // 2 + x.shape[2] % 3)),
    "a maximum of sizes": lambda n, x: n.a(x)[:, :, : max(x.shape[2] - 3, 4)],
    "a power of a size": lambda n, x: n.a(x) / x.shape[2] ** 0.5,
    "a mask of values": lambda n, x: n.a(x)[x > 0].sum(),
    "a number of values": lambda n, x: n.a(x).flatten()[:5] + torch.nonzero(x > -9)[:5, 0],
    "a value": lambda n, x: n.a(x) * x.max().item(),
    "infinity": lambda n, x: n.a(x).masked_fill(x > 0, float("-inf")).clamp(max=float("nan")),
    "dtypes": lambda n, x: n.a(x).half().softmax(1).to(torch.float64).round().long(),
    "a device": lambda n, x: n.a(x) + torch.arange(x.shape[3], device=x.device),
    "new tensors": lambda n, x: torch.cat([n.a(x), torch.zeros(x.shape[0], 1, x.shape[2], x.shape[3])], 1),
    "memory that is not set": lambda n, x: n.a(x) + torch.empty(4, 8, 8).fill_(2) + torch.empty_like(x).zero_(),
    "memory formats": lambda n, x: n.a(x).contiguous(memory_format=torch.channels_last).clone(),
    "constants": lambda n, x: n.a(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1, 1),
    "a complex constant": lambda n, x: torch.fft.fft2(n.a(x)) * torch.tensor([1j, 2j, 3j, 4j]).view(1, 4, 1, 1),
    "a text": lambda n, x: torch.einsum("nchw,nkhw->nck", n.a(x), F.pad(x, (0, 0, 0, 0), mode="reflect")),
    "several results": lambda n, x: torch.stack(n.a(x).sort(1)[0].unbind(1)),
    "indices": lambda n, x: n.a(x)[..., ::2][:, None, 1:-1][:, :, torch.tensor([0, 1])],
    "attention": lambda n, x: F.scaled_dot_product_attention(n.a(x), x, x, is_causal=True),
    "norms": lambda n, x: F.group_norm(F.instance_norm(n.a(x)), 2) + F.layer_norm(x, (8, 8)) + F.normalize(x),
    "a norm by its own batch": lambda n, x: F.batch_norm(n.a(x).sin(), None, None, training=True),
    "a layer that is not fused": lambda n, x: F.conv_transpose2d(x, n.a.weight, dilation=2),
}


@pytest.mark.parametrize("any_size", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_are_the_same_after_loading(tmp_path, name, any_size):
    fast = compiled(Net(GRAPHS[name]).eval(), halve.MaskSet({}), images(2), any_size=any_size)
    again = saved_and_loaded(fast, tmp_path / "net", (images(2),), (images(5, seed=3),))
    saved_and_loaded(again, tmp_path / "twice", (images(3),))
    assert contents(tmp_path / "twice")[0] == contents(tmp_path / "net")[0]


OUTPUTS = {
    "tuples": lambda x, y: (x, (y,), ()),
    "lists": lambda x, y: [x, [y, y], []],
    "a dict": lambda x, y: {"b": x, "a": {"it's": y, 3: [x]}},
    "an ordered dict": lambda x, y: collections.OrderedDict(out=x, aux=y),
    "a type of PyTorch's": lambda x, y: x.flatten(1).topk(3),
    "constants": lambda x, y: (x, None, 5, 0.5, True, "text"),
    "sizes": lambda x, y: (x, x.shape[0], x.shape[0] * 2, x.shape[0] > 1),
    "the input": lambda x, y: (y, y, x),
    "nothing": lambda x, y: None,
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_come_in_the_same_containers(tmp_path, name):
    fast = compiled(Net(lambda n, x: OUTPUTS[name](n.a(x), x)).eval(), halve.MaskSet({}), images(2))
    again = saved_and_loaded(fast, tmp_path / "net", (images(2),), (images(4),))
    assert list(pytree.tree_leaves_with_path(again(images(2)))[0][0]) == list(
        pytree.tree_leaves_with_path(fast(images(2)))[0][0]
    )


def test_several_inputs_of_different_dtypes(tmp_path):
    def how(net, which, x, scale):
        return net.a(x) * which.reshape(-1, 1, 1, 1) + scale.reshape(-1, 1, 1, 1)

    inputs = (torch.tensor([1, 2]), images(2), torch.rand(2, 1).double())
    fast = compiled(Net(how).eval(), halve.MaskSet({}), inputs, dtype=torch.bfloat16)
    saved_and_loaded(fast, tmp_path / "net", inputs, (torch.tensor([1, 2, 3]), images(3), torch.rand(3, 1).double()))


RECURRENT = {
    "LSTM": nn.LSTM(8, 4, num_layers=2, batch_first=True),
    "LSTM in both directions": nn.LSTM(8, 4, batch_first=True, bidirectional=True, num_layers=3, bias=False),
    "GRU": nn.GRU(8, 4, batch_first=True, bidirectional=True),
    "RNN": nn.RNN(8, 4, batch_first=True, nonlinearity="relu"),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(tmp_path, name):
    fast = compiled(RECURRENT[name].eval(), halve.MaskSet({}), torch.randn(2, 5, 8))
    saved_and_loaded(fast, tmp_path / "net", (torch.randn(3, 5, 8),))


def test_weight_norm(tmp_path):
    layers = [nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1), dim=dim) for dim in (0, 1, None)]
    fast = compiled(nn.Sequential(*layers).eval(), halve.MaskSet({}), images(2))
    saved_and_loaded(fast, tmp_path / "net", (images(3),))


@pytest.mark.parametrize("name", ["convnext", "deeplabv3", "densenet", "shufflenet_v2", "vit"])
def test_networks_of_torchvision(tmp_path, name):
    fast = sparsely(compiled(family(name), example=torch.randn(2, 3, size(name), size(name))))
    saved_and_loaded(fast, tmp_path / "net", (torch.randn(1, 3, size(name), size(name)),))


REFUSED = {
    "control flow": (
        lambda n, x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (n.a(x),)),
        r"true_graph_0 is a .*, not a tensor",
    ),
    "an operator of somebody else's": (lambda n, x: torch.ops.strange.double(n.a(x)), "'strange.double.default'"),
}


@torch.library.custom_op("strange::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.mark.parametrize("name", REFUSED)
def test_what_files_do_not_hold_is_refused_when_saving(tmp_path, name):
    how, message = REFUSED[name]
    fast = compiled(Net(how).eval(), halve.MaskSet({}), images(2))
    with pytest.raises(EngineError, match=f"the network cannot be saved: .*{message}"):
        fast.save(tmp_path / "net")
    assert not list(tmp_path.iterdir())


def test_too_large_a_graph_is_refused_when_saving(tmp_path, monkeypatch):
    fast = compiled(Net(lambda n, x: n.b(n.a(x)).sin().cos()).eval(), halve.MaskSet({}), images(2))
    monkeypatch.setattr(graph, "MOST_NODES", 3)
    with pytest.raises(EngineError, match="4 nodes, more than 3"):
        fast.save(tmp_path / "net")


def test_a_loaded_network_can_be_traced_copied_and_moved(tmp_path):
    model = Net(lambda n, x: {"out": n.b(n.a(x).relu()) + torch.arange(8)}).eval()
    fast = sparsely(compiled(model, halve.prune(model, also="*"), images(2)))
    again = saved_and_loaded(fast, tmp_path / "net", (images(2),))
    expected = fast(images(3))["out"]
    traced = torch.compile(again, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(traced(images(3))["out"], expected)
    program = torch.export.export(again, (images(2),), strict=False)
    torch.testing.assert_close(program.module()(images(2)), fast(images(2)))
    assert torch.equal(torch.compile(again.body, backend="eager")(images(3))["out"], expected)
    assert again.to("meta")(images(2).to("meta"))["out"].shape == (2, 4, 8, 8)

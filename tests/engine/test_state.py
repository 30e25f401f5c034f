"""Networks that hold more than weights, and code that looks at what it calls."""

import threading
from collections import namedtuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halve
from halve.errors import EngineError, FileError
from tests.engine.test_compile import compiled
from tests.engine.test_compiled import Net
from tests.tiny import convnet, images


def same(model, *inputs, calls=1, **options):
    """The compiled network, after checking that it gives what the model gives, call by call."""
    fast = compiled(model.eval(), halve.MaskSet({}), inputs if len(inputs) > 1 else inputs[0], **options)
    with torch.no_grad():
        for _ in range(calls):
            got = fast(*(x.clone() for x in inputs))
            torch.testing.assert_close(got, model(*(x.clone() for x in inputs)), rtol=1e-4, atol=1e-4)
    return fast


def test_complex_numbers_stay_complex():
    class Rotated(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.o = nn.Linear(16, 16), nn.Linear(16, 4)
            self.register_buffer("angles", torch.polar(torch.ones(5, 8), torch.rand(5, 8)))

        def forward(self, x):
            turned = torch.view_as_complex(self.q(x).unflatten(-1, (8, 2))) * self.angles
            return self.o(torch.view_as_real(turned).flatten(-2))

    same(Rotated(), torch.randn(2, 5, 16))


def test_views_of_images_that_lie_channels_last():
    same(Net(lambda n, x: n.b(n.a(x)).view(x.size(0), -1)), images(2))
    last = images(2).contiguous(memory_format=torch.channels_last)
    fast = compiled(Net(lambda n, x: n.b(n.a(x)).view(x.size(0), -1)).eval(), halve.MaskSet({}), last)
    torch.testing.assert_close(fast(last), fast(images(2)))
    fast = same(Net(lambda n, x: n.a(x).as_strided((2, 4), (256, 1))), images(2))
    assert "by strides" in fast.plan.left["the network"]


class Counting(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.conv, self.norm, self.how = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), how
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        y = self.conv(x)
        if self.how == "in place":
            self.calls += 1
        if self.how == "anew":
            self.calls = self.calls + 1
        if self.how == "statistics":
            self.norm.running_mean.lerp_(y.mean((0, 2, 3)), 0.5)
        return self.norm(y) * (1 + self.calls)


@pytest.mark.parametrize("how", ["in place", "anew", "statistics"])
def test_what_a_network_changes_in_itself_begins_where_the_model_is(how):
    fast = same(Counting(how), images(2) + 3, calls=3)
    assert "changes" in fast.plan.left["the network"]
    assert "not recorded" in fast.plan.left["CUDA graph"]


class Outer(nn.Module):
    """Cannot be captured whole."""

    def __init__(self, how):
        super().__init__()
        self.inner, self.pair, self.how = Inner(), nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), how

    def forward(self, x):
        y = self.how(self, self.pair(self.inner(x)), x)
        return y + float(y.sum()) * 0


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.scale = nn.Conv2d(4, 4, 1), 1.0

    def forward(self, x):
        return self.conv(x) * self.scale


def louder(net, y, x):
    net.inner.scale = 3.0
    y = y + net.inner(x)
    net.inner.scale = 1.0
    return y


def of_a_kind(net, y, x):
    assert isinstance(net.pair, nn.Sequential)
    return y


def test_a_part_that_code_sets_up_otherwise_runs_as_it_was():
    fast = same(Outer(louder), images(2))
    assert "gives something else" in fast.plan.left["inner"]
    assert "pair" not in fast.plan.left


def test_code_may_count_what_it_calls_and_ask_for_its_kind():
    assert "pair" not in same(Outer(lambda net, y, x: y * len(net.pair)), images(2)).plan.left
    assert "does not run around its graph" in same(Outer(of_a_kind), images(2)).plan.left["pair"]


@pytest.mark.parametrize("count", [1, 4])
def test_networks_that_are_captured_for_two_images_alone_run_as_they_were(count):
    def one_by_one(net, x):
        return torch.stack([net.a(image[None])[0] for image in x])

    fast = same(Net(one_by_one), images(count))
    assert "the network" in fast.plan.left
    same(Net(lambda n, x: n.a(x) * 2 if len(x) == 1 else n.a(x)), images(1))


def test_images_that_are_not_square_are_tried_too():
    def padded(net, x):
        return net.a(F.pad(x, (0, 0, 1, 0)) if x.shape[2] % 2 == 1 and x.shape[3] % 2 == 0 else x)

    def wide(net, x):
        return net.a(x) * (2 if x.shape[2] // 4 == 1 and x.shape[3] // 4 > 1 else 1)

    for how, shape in ((padded, (2, 4, 7, 8)), (wide, (2, 4, 5, 8))):
        with pytest.raises(EngineError, match="compile it again with an example of that shape"):
            same(Net(how), images(2))(torch.randn(shape))


def test_the_example_stays_as_it_is():
    x = images(2).contiguous(memory_format=torch.channels_last)
    before = x.clone()
    compiled(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1)).eval(), halve.MaskSet({}), x)
    assert torch.equal(x, before)


def test_layers_are_named_by_their_weights():
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 8)).eval()
    fast = compiled(model, halve.prune(model), torch.randn(2, 5, 16))
    assert "0.self_attn.out_proj" in {layer.name for layer in fast.layers}
    assert "0.self_attn.out_proj" not in fast.plan.left


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"masks": None}, "masks must be a MaskSet"),
        ({"dtype": "float16"}, "dtype must be a type such as"),
        ({"batch_sizes": 8}, "batch_sizes must be a tuple"),
        ({"like": "foo"}, "like must be what halve.compile gave"),
    ],
)
def test_what_is_no_option_is_refused_with_what_is(options, message):
    given = {"masks": halve.MaskSet({}), **options}
    with pytest.raises(EngineError, match=message):
        halve.compile(convnet(), example=images(2), **given)


def test_numbers_of_any_kind_are_batch_sizes():
    fast = compiled(convnet())
    assert fast.warmup(4) is fast.warmup([np.int64(2)]) is fast
    with pytest.raises(EngineError, match="from 1 on"):
        fast.warmup(0)


def test_a_damaged_file_is_refused(tmp_path):
    fast = compiled(convnet())
    fast.save(tmp_path / "net.pt2")
    content = bytearray((tmp_path / "net.pt2").read_bytes())
    weight = next(layer.dense() for layer in fast.layers).contiguous().numpy().tobytes()
    content[bytes(content).index(weight) + 5] ^= 64
    (tmp_path / "net.pt2").write_bytes(content)
    with pytest.raises(FileError, match="is damaged"):
        halve.load_compiled(tmp_path / "net.pt2")


Pair = namedtuple("Pair", ["a", "b"])


def test_what_the_format_does_not_take_is_not_saved(tmp_path):
    fast = same(Net(lambda n, x: Pair(n.a(x), n.b(x))), images(2))
    with pytest.raises(EngineError, match="cannot be saved"):
        fast.save(tmp_path / "net.pt2")


@pytest.mark.filterwarnings("ignore:running dense")
def test_networks_are_compiled_searched_and_saved_in_threads(tmp_path):
    failures = []

    def work(number):
        try:
            model = convnet()
            masks = halve.prune(model, permute=number % 2 == 0, permute_seconds=1, example=images(2))
            fast = halve.compile(model, masks, images(2))
            fast.save(tmp_path / f"{number}.pt2")
            assert not fast.plan.left
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures

import copy
import io
import warnings

import pytest
import torch
from torch import nn

import halve
from halve.errors import EngineError, EngineWarning, ModelError, OptionError
from tests.engine.nets import Net, compiled, same, sparsely
from tests.families import family
from tests.tiny import convnet, images
from tests.untouched import untouched


@pytest.fixture(scope="module")
def resnet():
    """(a model, its masks, the model compiled with them)"""
    model = family("resnet_basic")
    masks, example = halve.prune(model), torch.randn(2, 3, 64, 64)
    with untouched(model):
        fast = compiled(model, masks, example)
    return model, masks, fast


@pytest.mark.parametrize("packed", [False, True])
def test_a_compiled_network_gives_what_the_masked_one_gives(resnet, packed):
    model, masks, fast = resnet
    fast = sparsely(copy.deepcopy(fast)) if packed else fast
    sparse = halve.apply(model, masks)
    with torch.no_grad():
        for count in (2, 1, 5):
            x = torch.randn(count, 3, 64, 64)
            torch.testing.assert_close(fast(x), sparse(x), rtol=1e-4, atol=1e-4)


def test_every_masked_layer_of_a_resnet_is_captured_as_two_of_four(resnet):
    _, masks, fast = resnet
    assert {layer.name for layer in fast.layers if layer.is_2_4} == set(masks)


def test_masks_with_channel_orders_are_put_in_one_piece():
    model = convnet()
    masks = halve.prune(model, permute=True, example=images(2))
    assert masks.moves
    fast = sparsely(compiled(model, masks))
    assert {layer.name for layer in fast.layers if layer.is_2_4} == set(masks)
    x = images(4, seed=1)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), halve.apply(model, masks)(x), rtol=1e-4, atol=1e-5)


def test_without_sparse_kernels_it_runs_dense_and_says_why():
    with pytest.warns(EngineWarning, match="running dense: our CPU kernels need AVX-512"):
        fast = halve.compile(convnet(), halve.prune(convnet()), images(2))
    assert "this CPU has no avx512f" in fast.reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(images(2))


def test_another_type_is_computed_in_and_outputs_come_in_the_examples():
    model = convnet()
    fast = compiled(model, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = halve.apply(model, halve.prune(model))(images(3))
    got = fast(images(3))
    assert got.dtype == torch.float32
    assert 0 < (got - expected).abs().max() < 0.1 * expected.abs().max()
    for layer in fast.layers:
        assert [layer.tensors()[name].dtype for name in ("weight", "bias")] == [torch.bfloat16, torch.float32]


def test_wrong_inputs_are_refused():
    fast = compiled(convnet())
    x = images(2)
    for bad, why in (
        (x.half(), r"is torch.float16, the network was compiled for torch.float32"),
        (x[0], r"has shape"),
        (x[:, :2], r"compiled for inputs with \(N, 4, 8, 8\), got \(2, 2, 8, 8\)"),
        (x.to("meta"), r"on meta, the network on cpu"),
        ([x], r"must be tensors, got a list"),
    ):
        with pytest.raises(EngineError, match=why):
            fast(bad)
    with pytest.raises(EngineError, match=r"for 1 input\(s\), got 2"):
        fast(x, x)
    with pytest.raises(OptionError, match="example must be"):
        compiled(convnet(), example="images")
    with pytest.raises(OptionError, match="batch_sizes must be positive integers, got 0"):
        fast.warmup([0])


def test_another_image_size_is_an_error_that_names_the_option():
    fast = compiled(convnet())
    with pytest.raises(EngineError, match=r"compiled for inputs with \(N, 4, 8, 8\), got .*any_size=True"):
        fast(torch.randn(2, 4, 12, 8))


def test_any_size_takes_other_image_sizes_where_the_model_does():
    model = convnet()
    masks = halve.prune(model)
    fast = sparsely(compiled(model, masks, any_size=True))
    with torch.no_grad():
        for shape in ((2, 4, 8, 8), (3, 4, 12, 9), (1, 4, 17, 8)):
            x = torch.randn(shape)
            torch.testing.assert_close(fast(x), halve.apply(model, masks)(x), rtol=1e-4, atol=1e-5)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
    fast = compiled(model, example=torch.randn(2, 4, 6, 6), any_size=True)
    assert fast(torch.randn(3, 4, 6, 6)).shape == (3, 4)
    with pytest.raises(EngineError, match="with an example of that shape"):
        fast(torch.randn(3, 4, 8, 8))


def test_copies_and_pickles_give_the_same():
    fast = sparsely(compiled(convnet()))
    x = images(3)
    expected = fast(x)
    assert torch.equal(copy.deepcopy(fast)(x), expected)
    buffer = io.BytesIO()
    torch.save(fast, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), expected)


def test_an_updated_checkpoint_takes_over_the_plan(resnet):
    model = convnet()
    masks = halve.prune(model)
    old = sparsely(compiled(model, masks))
    updated = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in updated.parameters():
            parameter.mul_(1.1)
    with warnings.catch_warnings(action="ignore", category=EngineWarning):
        new = halve.compile(updated, masks, images(2), on_changed="ignore")
    new.use_plan_of(old)
    assert [layer.kernels for layer in new.layers] == [layer.kernels for layer in old.layers]
    x = images(2, seed=2)
    with torch.no_grad():
        expected = halve.apply(updated, masks, on_changed="ignore")(x)
    torch.testing.assert_close(new(x), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(EngineError, match="other layers"):
        new.use_plan_of(resnet[2])


class Branching(nn.Module):
    """Looks at its numbers, which no graph can hold."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = convnet()[:6], nn.Sequential(nn.Flatten(), nn.LazyLinear(4))

    def forward(self, x):
        y = self.stem(x)
        return self.head(y if y.mean() > -1e9 else -y)


def test_a_network_that_cannot_be_captured_whole_is_compiled_in_parts(tmp_path):
    model = Branching().eval()
    model(images(2))
    masks = halve.prune(model)
    fast = sparsely(compiled(model, masks))
    assert "parts" in fast.plan.uncompiled["the network"]
    assert any(layer.is_2_4 for layer in fast.layers)
    with torch.no_grad():
        torch.testing.assert_close(fast(images(3)), halve.apply(model, masks)(images(3)), rtol=1e-4, atol=1e-5)
    with pytest.raises(EngineError, match="outside of its graph"):
        fast.save(tmp_path / "net.compiled.safetensors")


class Strange(nn.Module):
    """Asks for numbers on the way, also inside of its layer."""

    class Hop(nn.Conv2d):
        def forward(self, x):
            return super().forward(x if x.sum().item() > 0 else -x)

    def __init__(self):
        super().__init__()
        self.hop = Strange.Hop(4, 8, 3)

    def forward(self, x):
        return self.hop(x)


def test_a_network_that_cannot_be_captured_at_all_falls_back_to_eager():
    model = Strange().eval()
    masks = halve.prune(model)
    with pytest.warns(EngineWarning, match="running dense"):
        fast = halve.compile(model, masks, images(2))
    for x in (images(3), -images(3)):
        assert torch.equal(fast(x), halve.apply(model, masks)(x))
    assert "torch.export cannot capture any part" in fast.plan.uncompiled["the network"]
    with pytest.raises(EngineError, match="cannot be saved"):
        fast.save("nowhere.safetensors")


def test_a_network_that_does_not_run_is_an_error():
    with pytest.raises(ModelError, match="does not run on the example"):
        compiled(nn.Sequential(nn.Linear(5, 8)).eval(), halve.MaskSet({}))


def test_masked_layers_that_the_engine_has_no_operation_for_are_named():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ConvTranspose2d(8, 8, 3), nn.Conv2d(8, 8, 2, padding="same")).eval()
    fast = compiled(model)
    assert list(fast.plan.uncompiled) == ["1", "2"]
    assert "ConvTranspose2d" in fast.plan.uncompiled["1"]
    assert "1: not compiled: this ConvTranspose2d did not run on the example input" in str(fast.plan)
    assert not compiled(convnet()).plan.uncompiled


def test_the_plan_says_why_all_layers_are_dense():
    plan = str(compiled(convnet()).plan)
    assert plan.startswith("all layers dense: our CPU kernels need AVX-512 or AVX2 in torch.float32")


def test_double_precision_stays_double():
    model = convnet().double()
    masks, x = halve.prune(model), images(2).double()
    expected = halve.apply(model, masks)(x).detach()
    assert float((compiled(model, masks, x)(x) - expected).abs().max()) <= 1e-13 * float(expected.abs().max())


def test_inputs_by_name_are_refused():
    with pytest.raises(EngineError, match="must be positional, as in the example, got keywords input"):
        compiled(convnet())(input=images(2))


def test_it_can_be_exported_and_has_no_training_mode():
    fast = sparsely(compiled(convnet()))
    program = torch.export.export(fast, (images(2),), strict=False)
    torch.testing.assert_close(program.module()(images(2)), fast(images(2)))
    kernels = [node.args[4] for node in program.graph.nodes if "run_kernel" in str(node.target)]
    assert kernels.count("mma_sp") == sum(layer.is_2_4 for layer in fast.layers)
    assert not fast.train().training


def test_not_a_number_in_an_image_stays_with_that_image(resnet):
    model, masks, fast = resnet
    fast = sparsely(copy.deepcopy(fast))
    x = torch.randn(3, 3, 64, 64)
    x[1, 0, 10, 10] = float("nan")
    with torch.no_grad():
        expected = halve.apply(model, masks)(x)
    assert torch.equal(fast(x).isnan(), expected.isnan())
    assert expected[1].isnan().all()
    assert not expected[0].isnan().any()


@pytest.mark.parametrize("count", [1, 4])
def test_networks_that_are_captured_for_two_images_alone_fall_back_to_eager(count):
    def one_by_one(net, x):
        return torch.stack([net.a(image[None])[0] for image in x])

    fast = same(Net(one_by_one), images(count))
    assert "the network" in fast.plan.uncompiled


def test_a_network_that_treats_one_image_differently_runs_one_in_eager_mode():
    same(Net(lambda n, x: n.a(x) * 2 if len(x) == 1 else n.a(x)), images(1))
    fast = same(Net(lambda n, x: n.a(x) * 2 if x.shape[0] == 1 else n.a(x)), images(1))
    assert "treats single images differently" in fast.plan.uncompiled["the network"]


def test_the_example_stays_as_it_is():
    x = images(2).contiguous(memory_format=torch.channels_last)
    before = x.clone()
    compiled(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1)).eval(), halve.MaskSet({}), x)
    assert torch.equal(x, before)


def test_what_is_made_in_inference_mode_works_outside_of_it(tmp_path):
    with torch.inference_mode():
        fast = compiled(convnet(), example=images(2), inductor=False).warmup(3)
        fast.save(tmp_path / "net.compiled.safetensors")
        loaded = halve.load_compiled(tmp_path / "net.compiled.safetensors")
        expected = fast(images(2))
    for net in (fast, loaded):
        assert not any(tensor.is_inference() for tensor in net.tensors())
        net.load_state_dict(net.state_dict())  # writes to the weights
        assert torch.equal(net.warmup(5)(images(2)), expected)
        assert not net(images(3)).is_inference()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"masks": {}}, "masks must be a MaskSet"),
        ({"dtype": "float16"}, "dtype must be a dtype such as"),
        ({"batch_sizes": 8}, "batch_sizes must be a sequence"),
        ({"plan_from": "foo"}, "plan_from must be a network that halve.compile returned"),
    ],
)
def test_what_is_no_option_is_refused_with_what_is(options, message):
    given = {"masks": halve.MaskSet({}), **options}
    with pytest.raises(OptionError, match=message):
        halve.compile(convnet(), example=images(2), **given)

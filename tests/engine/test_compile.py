import copy
import io
import threading
import warnings

import pytest
import torch
import torchvision
from torch import nn

import halve
from halve.errors import EngineError, EngineWarning, FileError, ModelError
from tests.tiny import convnet, images
from tests.untouched import untouched


def compiled(model, masks=None, example=None, **options):
    example = images(2) if example is None else example
    with warnings.catch_warnings(action="ignore", category=EngineWarning):
        return halve.compile(model, halve.prune(model) if masks is None else masks, example, **options)


def sparsely(fast):
    """Let every layer that can run on packed weights; without a GPU the reference does."""
    for layer in fast.layers:
        layer.take({1: "sparse 64x64" if layer.halved else "torch"})
    return fast


def resnet():
    model = torchvision.models.resnet18(num_classes=10).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("packed", [False, True])
def test_a_compiled_network_gives_what_the_masked_one_gives(packed):
    model = resnet()
    masks = halve.prune(model)
    x = torch.randn(2, 3, 64, 64)
    with untouched(model):
        fast = compiled(model, masks, x)
    fast = sparsely(fast) if packed else fast
    sparse = halve.apply(model, masks)
    with torch.no_grad():
        for shape in ((2, 3, 64, 64), (1, 3, 64, 64), (5, 3, 64, 64), (2, 3, 96, 33)):
            x = torch.randn(shape)
            torch.testing.assert_close(fast(x), sparse(x), rtol=1e-4, atol=1e-4)


def test_every_masked_layer_of_a_resnet_is_captured_as_two_of_four():
    model = resnet()
    masks = halve.prune(model)
    fast = compiled(model, masks, torch.randn(2, 3, 64, 64))
    assert {layer.name for layer in fast.layers if layer.halved} == set(masks)


def test_masks_with_channel_orders_are_put_in_one_piece():
    model = convnet()
    masks = halve.prune(model, permute=True, example=images(2))
    assert masks.moves
    fast = sparsely(compiled(model, masks))
    assert {layer.name for layer in fast.layers if layer.halved} == set(masks)
    x = images(4, seed=1)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), halve.apply(model, masks)(x), rtol=1e-4, atol=1e-5)


def test_without_a_gpu_it_runs_dense_and_says_why():
    with pytest.warns(EngineWarning, match="running dense: .*NVIDIA GPUs"):
        fast = halve.compile(convnet(), halve.prune(convnet()), images(2))
    assert "NVIDIA" in fast.reason
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
    assert all(layer.dense().dtype == torch.bfloat16 and layer.bias32.dtype == torch.float32 for layer in fast.layers)


def test_wrong_inputs_are_refused():
    fast = compiled(convnet())
    x = images(2)
    for bad, why in (
        (x.half(), r"is torch.float16, the network was compiled for torch.float32"),
        (x[0], r"has shape"),
        (x[:, :2], r"captured for \(any, 4, any, any\)"),
        (x.to("meta"), r"on meta, the network on cpu"),
        ([x], r"is a list"),
    ):
        with pytest.raises(EngineError, match=why):
            fast(bad)
    with pytest.raises(EngineError, match=r"for 1 input\(s\), not 2"):
        fast(x, x)
    with pytest.raises(EngineError, match="example must be"):
        compiled(convnet(), example="images")
    with pytest.raises(EngineError, match="whole numbers"):
        fast.warmup([0])


def test_sizes_that_the_model_insists_on_are_kept():
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
    fast = compiled(model, example=torch.randn(2, 4, 6, 6))
    assert fast(torch.randn(3, 4, 6, 6)).shape == (3, 4)
    with pytest.raises(EngineError, match="captured for"):
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


@pytest.mark.parametrize("packed", [False, True])
def test_saved_and_loaded_it_is_the_same(tmp_path, packed):
    model = resnet()
    fast = compiled(model, example=torch.randn(2, 3, 64, 64))
    fast = sparsely(fast) if packed else fast
    path = tmp_path / "net.pt2"
    fast.save(path)
    again = halve.load_compiled(path)
    x = torch.randn(3, 3, 64, 96)
    assert torch.equal(again(x), fast(x))
    assert [(layer.name, layer.ways) for layer in again.layers] == [(a.name, a.ways) for a in fast.layers]
    assert again.reason == fast.reason
    with pytest.raises(EngineError, match=r"is torch\.float16"):
        again(x.half())
    if packed:
        assert path.stat().st_size < 0.7 * sum(p.numel() * 4 for p in model.parameters())


def test_files_that_are_something_else_are_refused(tmp_path):
    path = tmp_path / "net.pt2"
    path.write_bytes(b"not a network")
    with pytest.raises(FileError, match="no compiled network"):
        halve.load_compiled(path)
    compiled(convnet()).save(path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(FileError, match="no compiled network"):
        halve.load_compiled(path)
    with pytest.raises(FileError, match="no compiled network"):
        halve.load_compiled(tmp_path / "missing.pt2")


def test_an_updated_checkpoint_takes_over_the_plan():
    model = convnet()
    masks = halve.prune(model)
    old = sparsely(compiled(model, masks))
    updated = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in updated.parameters():
            parameter.mul_(1.1)
    with warnings.catch_warnings(action="ignore", category=EngineWarning):
        new = halve.compile(updated, masks, images(2), changed="ignore")
    new.take_plan_of(old)
    assert [layer.ways for layer in new.layers] == [layer.ways for layer in old.layers]
    x = images(2, seed=2)
    with torch.no_grad():
        expected = halve.apply(updated, masks, changed="ignore")(x)
    torch.testing.assert_close(new(x), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(EngineError, match="other layers"):
        new.take_plan_of(compiled(resnet(), example=torch.randn(2, 3, 64, 64)))


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
    assert "parts" in fast.plan.left["the network"]
    assert any(layer.halved for layer in fast.layers)
    with torch.no_grad():
        torch.testing.assert_close(fast(images(3)), halve.apply(model, masks)(images(3)), rtol=1e-4, atol=1e-5)
    with pytest.raises(EngineError, match="captured in parts"):
        fast.save(tmp_path / "net.pt2")


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


def test_a_network_that_cannot_be_captured_at_all_runs_as_it_was():
    model = Strange().eval()
    masks = halve.prune(model)
    with pytest.warns(EngineWarning, match="running dense"):
        fast = halve.compile(model, masks, images(2))
    for x in (images(3), -images(3)):
        assert torch.equal(fast(x), halve.apply(model, masks)(x))
    assert "torch.export can capture no part" in fast.plan.left["the network"]
    with pytest.raises(EngineError, match="cannot be saved"):
        fast.save("nowhere.pt2")


def test_a_network_that_does_not_run_is_an_error():
    with pytest.raises(ModelError, match="does not run on the example"):
        compiled(nn.Sequential(nn.Linear(5, 8)).eval(), halve.MaskSet({}))


def test_masked_layers_that_the_engine_has_no_operation_for_are_named():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ConvTranspose2d(8, 8, 3), nn.Conv2d(8, 8, 2, padding="same")).eval()
    fast = compiled(model)
    assert list(fast.plan.left) == ["1", "2"]
    assert "ConvTranspose2d" in fast.plan.left["1"]
    assert "1: as it was (ConvTranspose2d, which does not run on the example, or not as an operation" in str(fast.plan)
    assert not compiled(convnet()).plan.left


def test_the_plan_says_why_all_layers_are_dense():
    assert str(compiled(convnet()).plan) == "all layers dense: the sparse kernels are for NVIDIA GPUs, and this is cpu"


def test_double_precision_stays_double():
    model = convnet().double()
    masks, x = halve.prune(model), images(2).double()
    expected = halve.apply(model, masks)(x).detach()
    assert float((compiled(model, masks, x)(x) - expected).abs().max()) <= 1e-13 * float(expected.abs().max())


def test_inputs_by_name_are_refused():
    with pytest.raises(EngineError, match="by place, as in the example, not by name: input"):
        compiled(convnet())(input=images(2))


def test_several_threads_get_their_own_results():
    fast = compiled(convnet())
    batches = [images(2, seed=seed) for seed in range(8)]
    expected = [fast(x) for x in batches]
    got = [None] * 8

    def work(index):
        for _ in range(5):
            got[index] = fast(batches[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_it_can_be_exported_and_has_no_training_mode():
    fast = sparsely(compiled(convnet()))
    program = torch.export.export(fast, (images(2),), strict=False)
    torch.testing.assert_close(program.module()(images(2)), fast(images(2)))
    assert sum("packed" in str(node.target) for node in program.graph.nodes) == sum(a.halved for a in fast.layers)
    assert not fast.train().training


def test_not_a_number_in_an_image_stays_with_that_image():
    model = resnet()
    masks = halve.prune(model)
    fast = sparsely(compiled(model, masks, torch.randn(2, 3, 64, 64)))
    x = torch.randn(3, 3, 64, 64)
    x[1, 0, 10, 10] = float("nan")
    with torch.no_grad():
        expected = halve.apply(model, masks)(x)
    assert torch.equal(fast(x).isnan(), expected.isnan())
    assert expected[1].isnan().all()
    assert not expected[0].isnan().any()

import pytest
import torch
from torch import nn

import halve
from halve.errors import FileError, LearningError, LearningWarning, ModelError
from halve.learn.frozen import FrozenNorm
from halve.sources.digits import digits, train_digits
from tests.tiny import convnet, images, interrupting, labels, loader
from tests.untouched import untouched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
    pytest.mark.filterwarnings("ignore:the quality of the masks will be unknown"),  # of so few images
]


@pytest.mark.parametrize("precision", ["auto", "float32"])
def test_masks_are_legal_and_the_model_stays_as_it_is(precision):
    model = convnet().cuda().train()
    state = torch.cuda.get_rng_state()
    with untouched(model):
        masks = halve.learn(
            model, loader(), steps=25, precision=precision, pattern={"3": "1:4", "*": "2:4"}, remainder="pad", also="10"
        )
    assert list(masks) == ["0", "3", "8", "10"]
    assert halve.verify(halve.apply(model, masks), masks).ok
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_learned_masks_beat_magnitude_by_far():
    model = train_digits(epochs=3).cuda()
    x = digits("train").tensors[0]
    masks = halve.learn(model, x, steps=80)
    test = [digits("test").tensors]
    learned, magnitude = (halve.evaluate(model, m, test) for m in (masks, halve.prune(model)))
    assert learned.agreement > 0.8
    assert learned.agreement > magnitude.agreement + 0.2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_half_precision_learn(dtype):
    model = convnet().to("cuda", dtype)
    with untouched(model):
        masks = halve.learn(model, loader(), steps=5)
    assert halve.verify(halve.apply(model, masks), masks).ok


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ([nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 3)], (3, 4, 9)),
        ([nn.Conv3d(4, 8, 2), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 8, 2)], (3, 4, 4, 4, 4)),
        ([nn.ConvTranspose2d(4, 8, 2, 2), nn.ReLU(), nn.Conv2d(8, 8, 3)], (3, 4, 4, 4)),
    ],
    ids=["1d", "3d", "transposed"],
)
def test_convolutions_of_every_kind_learn(layers, shape):
    model = nn.Sequential(*layers, nn.Flatten(2), nn.ReLU()).cuda().eval()
    masks = halve.learn(model, [torch.randn(shape)], steps=2, also=[str(len(layers) - 1)])
    assert halve.verify(halve.apply(model, masks), masks).ok


def test_an_interrupted_run_goes_on(tmp_path):
    path = tmp_path / "run"
    expected = halve.learn(convnet().cuda(), loader(), steps=30, precision="float32")
    with pytest.warns(LearningWarning, match="interrupted after 20 steps"):
        halve.learn(convnet().cuda(), loader(), steps=30, precision="float32", run_state=path, report=interrupting(20))
    masks = halve.learn(convnet().cuda(), loader(), steps=30, precision="float32", run_state=path, resume=True)
    assert masks.recipe["steps_done"] == 30
    assert masks.difference(expected) < 0.05


def test_a_run_that_began_on_a_gpu_goes_on_on_a_cpu(tmp_path):
    path = tmp_path / "run"
    with pytest.warns(LearningWarning, match="interrupted"):
        halve.learn(convnet().cuda(), loader(), steps=20, run_state=path, report=interrupting(10), precision="float32")
    assert halve.learn(convnet(), loader(), steps=20, run_state=path, resume=True).recipe["steps_done"] == 20


def test_a_run_in_bfloat16_does_not_go_on_in_float32(tmp_path):
    path = tmp_path / "run"
    with pytest.warns(LearningWarning, match="interrupted"):
        halve.learn(convnet().cuda(), loader(), steps=20, run_state=path, report=interrupting(10))
    with pytest.raises(FileError, match=r"precision \(bfloat16 there, float32 here\)"):
        halve.learn(convnet(), loader(), steps=20, run_state=path, resume=True)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        return self.head(self.layers(x).mean((2, 3)))


@pytest.fixture
def small_gpu():
    """A GPU of one GiB."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((1 << 30) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("objective", ["distill", "task"])
def test_a_batch_that_does_not_fit_is_an_error_with_the_largest_half_that_does(small_gpu, objective):
    model = Wide().cuda().eval()
    x, y = torch.randn(512, 4, 64, 64), labels(512)

    def learned(size):
        return halve.learn(model, [(x[:size], y[:size])], steps=2, objective=objective, validation=False)

    with untouched(model), pytest.raises(ModelError, match=r"a batch of 512 images .*use batches of \d+") as error:
        learned(512)
    fits = int(str(error.value).split("use batches of ")[1].split()[0])
    del error
    assert halve.verify(model, learned(fits)).status == "not applied"
    with pytest.raises(ModelError, match=f"a batch of {2 * fits} images does not fit"):
        learned(2 * fits)


def test_a_loss_that_is_not_finite_is_blamed_on_the_batch_that_was_bad():
    bad = images(6)
    bad[0] = float("nan")
    data = [images(6, seed=i) for i in range(12)]
    data[3] = bad
    with pytest.raises(LearningError, match="first in layer 0") as error:
        halve.learn(convnet().cuda(), data, steps=20)
    assert halve.verify(halve.apply(convnet(), error.value.masks), error.value.masks).ok


def test_the_estimate_speaks_of_the_gpus_memory():
    seen, held = [], torch.cuda.memory_allocated()  # by other tests
    halve.learn(convnet().cuda(), loader(), steps=2, report=seen.append)
    assert 0 < seen[0].peak_bytes - held < 1 << 28
    assert seen[0].seconds_per_step > 0


def test_a_budget_on_the_drop_works_on_a_gpu():
    model = convnet().cuda()
    masks = halve.learn(model, loader(), steps=3, max_drop=1.0, drop_data=loader())
    assert masks.recipe["drop"] <= 1.0


def test_channel_orders_are_found_on_a_gpu():
    model = convnet().cuda()
    masks = halve.prune(model, "reconstruct", images(), permute=True)
    assert masks["3"].layout.channel_order is not None
    moved = halve.apply(model, masks, permute=True)
    with torch.no_grad():
        x = images().cuda()
        torch.testing.assert_close(moved(x), halve.apply(model, masks)(x), rtol=1e-3, atol=1e-3)
    assert halve.verify(moved, masks).ok


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_learned_norms_are_those_of_pytorch(layout, dtype):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(24).cuda().eval()
    for tensor in (norm.running_mean, norm.running_var, norm.weight.data, norm.bias.data):
        nn.init.uniform_(tensor, 0.5, 1.5)
    x = torch.randn(8, 24, 9, 7, device="cuda", dtype=dtype).contiguous(memory_format=layout)
    pull = torch.randn_like(x)
    statistics = norm.running_mean, norm.running_var
    ours = FrozenNorm.apply(x, *statistics, norm.weight, norm.bias, norm.eps)
    theirs = nn.functional.batch_norm(x.float(), *statistics, norm.weight, norm.bias, False, 0.0, norm.eps)
    found = torch.autograd.grad(ours, (norm.weight, norm.bias), pull)
    for mine, wanted in zip(found, torch.autograd.grad(theirs, (norm.weight, norm.bias), pull.float()), strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-3, atol=1e-2)


def test_norms_are_learned_in_a_recorded_step():
    model, x = convnet().cuda(), images(64).cuda()
    masks = halve.learn(model, x, steps=40, norms="learn", fallback=False)
    assert masks.recipe["step_graph"]
    assert masks.corrections
    assert halve.verify(halve.apply(model, masks), masks).ok

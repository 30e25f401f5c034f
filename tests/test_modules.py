import copy
import threading
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import halve
from halve.errors import ModelError
from halve.modules import clone, kind_of, plain_weight_, set_weight_, weight_key, weight_of, zeros_stay_zero
from tests.masks.computed import Doubled, wrapped
from tests.random_masks import random
from tests.tiny import convnet, images, labels, learn
from tests.untouched import same_bits, untouched


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.Linear(4, 4), "linear"),
        (nn.Conv1d(4, 4, 1), "conv"),
        (nn.Conv2d(4, 4, 1), "conv"),
        (nn.Conv3d(4, 4, 1), "conv"),
        (nn.ConvTranspose1d(4, 4, 1), "conv_transpose"),
        (nn.ConvTranspose2d(4, 4, 1), "conv_transpose"),
        (nn.ConvTranspose3d(4, 4, 1), "conv_transpose"),
        (nn.LazyLinear(4), "linear"),
        (parametrizations.weight_norm(nn.Conv2d(4, 4, 1)), "conv"),
        (nn.Embedding(4, 4), None),
        (nn.Bilinear(4, 4, 4), None),
        (nn.BatchNorm2d(4), None),
        (nn.ReLU(), None),
        (nn.Sequential(nn.Linear(4, 4)), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_the_kind_of_a_layer(module, kind):
    assert kind_of(module) == kind


def test_the_weight_of_a_plain_layer_is_its_own_detached():
    layer = nn.Linear(8, 4)
    assert weight_of(layer).data_ptr() == layer.weight.data_ptr()
    assert not weight_of(layer).requires_grad


@wrapped
@pytest.mark.parametrize("training", [True, False])
def test_the_weight_is_the_one_that_forward_uses_in_eval_mode(wrap, training):
    layer = wrap(nn.Linear(8, 4))
    layer(random(3, 8))  # in training mode: spectral norm moves its buffers, hooks leave their weight behind
    layer.train(training)
    with untouched(layer):
        weight = weight_of(layer)
    image = random(3, 8, seed=1)
    assert torch.equal(F.linear(image, weight, layer.bias), layer.eval()(image))
    assert not weight.requires_grad


@wrapped
def test_a_weight_that_was_changed_after_the_last_forward_is_seen(wrap):
    layer = wrap(nn.Linear(8, 4)).eval()
    before = weight_of(layer).clone()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(-1.5)
    image = random(3, 8)
    assert not torch.equal(weight_of(layer), before) or wrap is parametrizations.orthogonal
    assert torch.equal(F.linear(image, weight_of(layer), layer.bias), layer(image))


def test_a_layer_without_a_weight_is_refused():
    layer = nn.Linear(8, 4)
    layer.weight = None
    with pytest.raises(ModelError, match="Linear has no weight"):
        weight_of(layer)
    del layer.weight
    with pytest.raises(ModelError, match="Linear has no weight"):
        weight_of(layer)


def test_a_layer_without_a_weight_does_not_stop_the_selection():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    model[1].weight = None
    assert [choice.name for choice in halve.select(model).masked] == ["0"]


def test_layers_that_share_a_weight_have_the_same_key():
    one, other, third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    other.weight = one.weight
    assert weight_key(one) == weight_key(other)
    assert weight_key(one) != weight_key(third)


@wrapped
def test_the_key_of_a_layer_stays_over_a_forward_in_eval_mode(wrap):
    layer, other = wrap(nn.Linear(8, 8)), wrap(nn.Linear(8, 8))
    layer.eval()
    layer(random(1, 8))
    key = weight_key(layer)
    assert key == weight_key(layer)
    assert key != weight_key(other)


@wrapped
def test_select_masks_a_layer_whose_weight_is_computed(wrap):
    model = nn.Sequential(wrap(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 2))
    with untouched(model):
        chosen = halve.select(model)
    assert [choice.name for choice in chosen.masked] == ["0"]


@wrapped
@pytest.mark.parametrize("gradients", [True, False])
def test_a_weight_can_be_set_on_a_copy_of_any_layer(wrap, gradients):
    model = nn.Sequential(wrap(nn.Linear(8, 4)))
    model.requires_grad_(gradients)
    image = random(3, 8)
    with untouched(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        copy = clone(model)
        value = random(4, 8)
        set_weight_(copy[0], value)
        assert type(copy[0]) is nn.Linear
        assert set(copy.state_dict()) == {"0.weight", "0.bias"}
        assert isinstance(copy[0].weight, nn.Parameter)
        assert copy[0].weight.requires_grad == gradients
        assert same_bits(copy[0].weight, value)
        assert torch.allclose(copy(image), F.linear(image, value, model[0].bias), atol=1e-6)
        assert not copy[0]._forward_pre_hooks
    assert torch.allclose(model.eval()(image), F.linear(image, weight_of(model[0]), model[0].bias), atol=1e-6)


@wrapped
def test_a_weight_can_be_set_where_gradients_are_off(wrap):
    model = nn.Sequential(wrap(nn.Linear(8, 4)))
    with torch.no_grad():
        copy = clone(model)
        set_weight_(copy[0], random(4, 8))
    assert isinstance(copy[0].weight, nn.Parameter)
    assert copy[0].weight.requires_grad


def test_setting_a_weight_keeps_other_parametrizations():
    layer = parametrizations.weight_norm(nn.Linear(8, 4))
    parametrize.register_parametrization(layer, "bias", Doubled())
    model = nn.Sequential(layer)
    bias = layer.bias.detach().clone()
    with untouched(model):
        copy = clone(model)
        set_weight_(copy[0], random(4, 8))
    assert torch.equal(copy[0].bias, bias)
    assert same_bits(copy[0].weight, random(4, 8))


def all_tensors(model):
    return [*model.parameters(), *model.buffers()]


def tied_model():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    model.register_buffer("hidden", torch.ones(2), persistent=False)
    return model


def test_a_clone_shares_no_tensor_and_keeps_ties():
    model = tied_model()
    with untouched(model):
        copy = clone(model)
        assert not {t.data_ptr() for t in all_tensors(model)} & {t.data_ptr() for t in all_tensors(copy)}
        assert copy[0].weight is copy[2].weight
        assert all(same_bits(a, b) for a, b in zip(all_tensors(model), all_tensors(copy), strict=True))
        for tensor in all_tensors(copy):
            tensor.data.zero_()


@wrapped
def test_a_model_can_be_cloned_after_a_training_step(wrap):
    model = nn.Sequential(wrap(nn.Linear(8, 8)), nn.Linear(8, 2))
    model(random(3, 8)).sum().backward()
    with untouched(model):
        copy = clone(model)
    image = random(3, 8, seed=1)
    assert torch.equal(copy.eval()(image), model.eval()(image))
    copy.train()(image).sum().backward()


def test_a_model_that_cannot_be_copied_is_refused_with_the_reason():
    model = nn.Sequential(nn.Linear(8, 8))
    model.lock = threading.Lock()
    with untouched(model), pytest.raises(ModelError, match=r"Sequential cannot be copied.*lock.*deepcopy"):
        clone(model)


class Closing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)
        self.through = lambda x: self.inner(x)

    def forward(self, x):
        return self.head(self.through(x))


class Same(nn.Linear):
    def __deepcopy__(self, memo):
        return self


class Shallow(nn.Linear):
    def __deepcopy__(self, memo):
        return copy.copy(self)


def patched():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    original = model.forward
    model.forward = lambda x: original(x)
    return model


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Closing(), "Closing.through is a function that holds layers"),
        (patched(), "Sequential.forward is a function that holds layers"),
        (nn.Sequential(Same(8, 8), nn.Linear(8, 2)), "returns modules of the original: 0"),
        (nn.Sequential(Shallow(8, 8), nn.Linear(8, 2)), "returns tensors of the original"),
    ],
    ids=["closure", "patched forward", "itself", "shallow"],
)
def test_a_copy_that_would_still_use_the_model_is_refused(model, says):
    with untouched(model), pytest.raises(ModelError, match=says):
        clone(model)
    with untouched(model), pytest.raises(ModelError, match=says):
        halve.prune(model)


def ddp(model):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        return nn.parallel.DistributedDataParallel(model)
    finally:
        torch.distributed.destroy_process_group()


WRAPPERS = {
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": ddp,
    "compile": partial(torch.compile, backend="eager"),
    "both": lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.filterwarnings("ignore::halve.errors.EngineWarning")
def test_every_public_call_unwraps_the_model(wrap, tmp_path):
    model = convnet()
    wrapped_model, data, masks = wrap(model), [(images(8), labels(8))], halve.prune(model)
    with untouched(model):
        assert halve.prune(wrapped_model) == masks
        assert list(halve.select(wrapped_model)) == list(halve.select(model))
        assert list(learn(wrapped_model, data, steps=1)) == list(masks)
        assert sorted(halve.recalibrate(wrapped_model, masks, data).statistics)[0] == "1.running_mean"
        for copied in (halve.apply(wrapped_model, masks), halve.restore_order(wrapped_model, masks)):
            assert type(copied) is nn.Sequential
            assert list(copied.state_dict()) == list(model.state_dict())
        assert halve.verify(wrapped_model, masks) == halve.verify(model, masks)
        assert halve.evaluate(wrapped_model, masks, data) == halve.evaluate(model, masks, data)
        assert halve.evaluate(model, None, data, dense=wrapped_model).agreement == 1.0
        state = halve.unpack(halve.pack(wrapped_model, masks, tmp_path / "packed.safetensors")).state
        assert state.keys() == model.state_dict().keys()
        fast = halve.compile(wrapped_model, masks, images(2))
        assert torch.allclose(fast(images(2)), halve.apply(model, masks)(images(2)), atol=1e-5)
        options = {"batch_sizes": [2], "systems": ["eager"], "dtype": torch.float32, "seconds": 0.001}
        assert halve.bench(wrapped_model, masks, images(2), **options)[0].error is None


@pytest.mark.parametrize("what", [5, None, "net", {"0.weight": torch.zeros(2)}])
def test_what_is_no_model_is_refused_by_every_public_call(what, tmp_path):
    masks, x = halve.prune(convnet()), images(2)
    for call in (
        lambda: halve.select(what),
        lambda: halve.prune(what),
        lambda: halve.learn(what, x),
        lambda: halve.recalibrate(what, masks, x),
        lambda: halve.apply(what, masks),
        lambda: halve.restore_order(what, masks),
        lambda: halve.verify(what, masks),
        lambda: halve.evaluate(what, masks, x),
        lambda: halve.pack(what, masks, tmp_path / "packed.safetensors"),
        lambda: halve.compile(what, masks, x),
        lambda: halve.bench(what, masks, x),
    ):
        with pytest.raises(ModelError, match=f"model must be a torch.nn.Module, got {type(what).__name__}"):
            call()


@pytest.mark.parametrize("part", [lambda model: model, lambda model: model[3]], ids=["the model", "a layer"])
@pytest.mark.parametrize("how", ["compile()", "forward"])
@torch.no_grad()
def test_a_copy_of_a_model_that_was_compiled_in_place_runs_its_own_weights(how, part):
    plain, model, x = convnet(), convnet(), images(2)
    if how == "compile()":
        part(model).compile(backend="eager")
    else:
        part(model).forward = torch.compile(part(model).forward, backend="eager")
    model(x)
    with untouched(model):
        masks = halve.prune(model)
        assert same_bits(halve.apply(model, masks)(x), halve.apply(plain, masks)(x))


def test_the_head_is_found_inside_of_a_wrapped_part():
    chosen = halve.select(nn.Sequential(nn.DataParallel(convnet()), nn.Softmax(1)))
    assert [choice.name for choice in chosen.masked] == ["0.module.0", "0.module.3", "0.module.8"]


class Standardised(nn.Conv2d):
    """Weight standardisation, as in BiT and in timm's StdConv2d."""

    def forward(self, x):
        mean, deviation = self.weight.mean((1, 2, 3), keepdim=True), self.weight.std((1, 2, 3), keepdim=True)
        return self._conv_forward(x, (self.weight - mean) / (deviation + 1e-5), self.bias)


class StandardisedInside(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean(), bias)


class SamePadded(nn.Conv2d):
    """Padding as in TensorFlow, as in timm's Conv2dSame."""

    def forward(self, x):
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class Scaled(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) * 3


class Renamed(nn.Conv2d):
    pass


class Shifted(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight + 0.1, self.bias)


class Halved(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight / 2, self.bias)


class ShiftedTransposed(nn.ConvTranspose2d):
    def forward(self, x):
        return F.conv_transpose2d(x, self.weight + 0.1, self.bias)


class PlainTransposed(nn.ConvTranspose2d):
    def forward(self, x):
        return F.conv_transpose2d(x, self.weight, self.bias)


class TakesTwo(nn.Conv2d):
    def forward(self, x, y):
        return super().forward(x + y)


class TakesAnObject(nn.Conv2d):
    def forward(self, sample):
        return super().forward(sample.image)


class TakesADict(nn.Conv2d):
    def forward(self, sample):
        return super().forward(sample["image"])


class Asserts(nn.Linear):
    def forward(self, x):
        assert x.dim() == 7
        return super().forward(x)


ZEROS = [
    (nn.Linear(8, 4), True),
    (nn.Conv2d(8, 4, 3), True),
    (nn.Conv3d(8, 4, 3, groups=2, dilation=2), True),
    (nn.ConvTranspose1d(8, 4, 3), True),
    (Renamed(8, 4, 3), True),
    (SamePadded(8, 4, 3), True),
    (SamePadded(8, 4, (1, 5), dilation=3), True),
    (SamePadded(8, 8, 3, groups=8), True),
    (SamePadded(8, 4, 3).half(), True),
    (SamePadded(8, 4, 3).train(), True),
    (Scaled(8, 4, 3), True),
    (Halved(8, 4), True),
    (PlainTransposed(8, 4, 3), True),
    (Standardised(8, 4, 3), False),
    (Standardised(8, 4, 3, dilation=2, groups=2), False),
    (Standardised(8, 4, 1).bfloat16(), False),
    (StandardisedInside(8, 4, 3), False),
    (Shifted(8, 4), False),
    (ShiftedTransposed(8, 4, 3), False),
    (TakesTwo(8, 4, 3), False),
    (TakesAnObject(8, 4, 3), False),
    (TakesADict(8, 4, 3), False),
    (Asserts(8, 4), False),
]


@pytest.mark.parametrize(("layer", "stay"), ZEROS, ids=[f"{type(layer).__name__}-{stay}" for layer, stay in ZEROS])
def test_whether_zeros_in_a_weight_stay_zero(layer, stay):
    with untouched(layer):
        assert zeros_stay_zero(layer) is stay


@wrapped
def test_zeros_stay_zero_in_a_harmless_subclass_whatever_computes_its_weight(wrap):
    layer = wrap(SamePadded(8, 4, 3))
    with untouched(layer):
        assert zeros_stay_zero(layer) is True


@wrapped
def test_zeros_do_not_stay_zero_under_standardisation_whatever_computes_the_weight(wrap):
    layer = wrap(Standardised(8, 4, 3))
    with untouched(layer):
        assert zeros_stay_zero(layer) is False


def test_asking_whether_zeros_stay_leaves_random_numbers_alone():
    layer = SamePadded(8, 4, 3)
    before = torch.get_rng_state()
    zeros_stay_zero(layer)
    assert torch.equal(torch.get_rng_state(), before)


@wrapped
def test_a_plain_weight_has_the_value_of_the_computed_one(wrap):
    layer = wrap(nn.Conv2d(8, 4, 3))
    weight = weight_of(layer).clone()
    plain_weight_(layer)
    assert same_bits(layer.weight.detach(), weight)
    assert isinstance(layer._parameters["weight"], nn.Parameter)

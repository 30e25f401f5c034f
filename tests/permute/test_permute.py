import copy
import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halve
from halve.errors import ChangedWeightsWarning, ChannelOrderWarning, DataError, LearningWarning, MaskError, OptionError
from halve.learn import initialization
from halve.masks.layout import unpermuted
from halve.masks.mask import MaskSet
from halve.permute import permute as of_permute
from halve.permute import permute as permute_module
from halve.select.select import select
from tests import tiny
from tests.untouched import untouched


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def residual(seed=0):
    """A residual network with lively BatchNorm."""
    torch.manual_seed(seed)
    stem, head = nn.Conv2d(3, 32, 3, bias=False), nn.Linear(32, 7)
    model = nn.Sequential(stem, nn.BatchNorm2d(32), Block(32), Block(32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model.eval()


def energy(model, masks):
    """Share of the magnitudes that is kept."""
    kept = total = 0.0
    for name, mask in masks.items():
        weight = model.get_submodule(name).weight.detach()
        kept, total = kept + float(mask.apply_to(weight).abs().sum()), total + float(weight.abs().sum())
    return kept / total


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def small():
    """A smaller network, its images and masks."""
    model, images = tiny.convnet(), tiny.images()
    return model, images, halve.prune(model, permute=True, example=images)


@pytest.fixture(scope="module")
def permuted():
    model, example = residual(), torch.randn(1, 3, 8, 8)
    with untouched(model):
        masks = halve.prune(model, permute=True, example=example)
    return model, masks


def test_blocks_keep_more_in_the_orders_that_were_found(permuted):
    model, masks = permuted
    dense = halve.prune(model)
    assert energy(model, masks) > energy(model, dense) + 0.005
    summary = masks.recipe["permute"]
    assert summary["kept_before"] < summary["kept_after"]
    assert summary["layers"] == len(masks) == 4
    assert summary["fixed"] == {}


def test_masks_can_be_applied_in_the_checkpoints_order_with_a_warning(permuted):
    model, masks = permuted
    with pytest.warns(ChannelOrderWarning, match="4 of 4 masked layers are not N:M in place, and no hardware"):
        sparse = halve.apply(model, masks, permute=False)
    for name, mask in masks.items():
        weight = model.get_submodule(name).weight
        assert torch.equal(sparse.get_submodule(name).weight, mask.apply_to(weight))
    report = halve.verify(sparse, masks)
    assert report.status == "failed"  # as it stands
    assert set(report.not_accelerated) == set(report.failures) == set(masks)
    assert not halve.verify(sparse).ok  # its blocks do not lie in one piece


def test_what_apply_returns_is_two_of_four_where_it_stands(permuted):
    model, masks = permuted
    with untouched(model):
        sparse = halve.apply(model, masks)
    for name in masks:
        blocks = sparse.get_submodule(name).weight.movedim(1, -1).reshape(-1, 4)
        assert int((blocks != 0).sum(1).max()) <= 2
    assert halve.verify(sparse).ok
    assert halve.verify(sparse, masks).ok
    assert {name: x.shape for name, x in sparse.state_dict().items()} == {
        name: x.shape for name, x in model.state_dict().items()
    }
    x = torch.randn(3, 3, 16, 16)
    with pytest.warns(ChannelOrderWarning):
        reference = halve.apply(model, masks, permute=False)
    with torch.no_grad():
        torch.testing.assert_close(sparse(x), reference(x), rtol=1e-4, atol=1e-5)


def test_applying_twice_and_restoring_are_recognised(permuted):
    model, masks = permuted
    once = halve.apply(model, masks)
    twice = halve.apply(once, masks, on_changed="error")
    assert all(torch.equal(a, b) for a, b in zip(once.parameters(), twice.parameters(), strict=True))
    with pytest.warns(ChannelOrderWarning):
        unmoved = halve.apply(model, masks, permute=False)
    with untouched(once):
        restored = halve.restore_order(once, masks)
    for name, value in unmoved.state_dict().items():
        assert torch.equal(restored.state_dict()[name], value), name
    again = halve.restore_order(restored, masks)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), restored.parameters(), strict=True))


def test_an_updated_checkpoint_in_moved_order_is_recognised(permuted):
    model, masks = permuted
    tuned = halve.apply(model, masks)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.mul_(1.02)
    with pytest.warns(ChangedWeightsWarning, match="by about (1|2)"):
        again = halve.apply(tuned, masks)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), tuned.parameters(), strict=True))


def test_packed_checkpoints_are_read_as_apply_returns_them(permuted, tmp_path):
    model, masks = permuted
    state, again = halve.unpack(halve.pack(model, masks, tmp_path / "net.packed.safetensors"))
    assert again == masks
    expected = halve.apply(model, masks).state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_moved_channels_compute_the_same_and_blocks_lie_in_one_piece(permuted):
    model, masks = permuted
    images = torch.randn(4, 3, 8, 8)
    with untouched(model):
        moved = halve.apply(model, masks, permute=True)
    assert type(moved) is type(model)
    assert moved.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        torch.testing.assert_close(moved(images), halve.apply(model, masks)(images), rtol=1e-4, atol=1e-4)
    assert halve.verify(moved).ok
    checks = halve.verify(moved, masks)
    assert checks.ok
    assert checks.moved
    assert checks.not_accelerated == {}


def test_a_moved_model_that_was_changed_afterwards_is_told(permuted):
    model, masks = permuted
    moved = halve.apply(model, masks, permute=True)
    with torch.no_grad():
        moved[2].conv1.weight.mul_(1.5)
    assert list(halve.verify(moved, masks).failures) == ["2.conv1"]


def test_orders_travel_in_files(permuted, tmp_path):
    model, masks = permuted
    again = halve.load(masks.save(tmp_path / "a.masks.safetensors"))
    assert again == masks
    assert again.moves == masks.moves
    state, from_packed = halve.unpack(halve.pack(model, masks, tmp_path / "a.packed.safetensors"))
    assert from_packed == masks
    assert all(torch.equal(value, state[name]) for name, value in halve.apply(model, masks).state_dict().items())


def test_recalibrated_statistics_move_along(permuted):
    model, masks = permuted
    images = torch.randn(8, 3, 8, 8)
    masks = halve.recalibrate(model, masks, images)
    assert masks.moves
    with torch.no_grad():
        expected, got = halve.apply(model, masks)(images), halve.apply(model, masks, permute=True)(images)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("score", ["magnitude", "wanda", "reconstruct", "random"])
def test_every_score_can_be_permuted(score):
    model, images = tiny.convnet(), tiny.images()
    masks = halve.prune(model, score, images, permute=True)
    assert masks["3"].layout.channel_order is not None
    assert masks["0"].layout.channel_order is None  # it reads the images
    moved = halve.apply(model, masks, permute=True)
    with torch.no_grad():
        torch.testing.assert_close(moved(images), halve.apply(model, masks)(images), rtol=1e-5, atol=1e-5)


def test_a_score_of_the_users_own_can_be_permuted_though_it_is_negative():
    model = tiny.convnet()
    masks = halve.prune(model, lambda name, w: w.abs() - 10, tiny.images(), permute=True)
    assert masks["3"].layout.channel_order is not None
    assert masks == halve.prune(model, lambda name, w: w.abs() - 10, tiny.images(), permute=True)


def test_data_that_can_be_read_once_is_enough():
    model = tiny.convnet()
    once = halve.prune(model, "reconstruct", iter(tiny.images().split(6)), permute=True)
    assert once == halve.prune(model, "reconstruct", tiny.images().split(6), permute=True)


def test_without_an_example_there_is_no_structure():
    with pytest.raises(DataError, match="example"):
        halve.prune(tiny.convnet(), permute=True)


def test_learning_in_permuted_order():
    model, images = tiny.convnet(), tiny.images()
    with untouched(model):
        masks = tiny.learn(model, images, steps=3, permute=True)
    assert masks["3"].layout.channel_order is not None
    assert masks.recipe["permute"]["layers"] == 1
    moved = halve.apply(model, masks, permute=True)
    with torch.no_grad():
        torch.testing.assert_close(moved(images), halve.apply(model, masks)(images), rtol=1e-5, atol=1e-5)


def test_learning_goes_on_in_the_order_of_the_masks_to_start_from(small):
    model, images, start = small
    masks = tiny.learn(model, images, steps=1, lr=1e-9, start=start, permute=None)
    assert masks.moves == start.moves
    assert [mask.layout for mask in masks.values()] == [mask.layout for mask in start.values()]
    assert masks.difference(start) < 0.2
    with pytest.raises(OptionError, match="bring their own channel orders"):
        tiny.learn(model, images, steps=1, start=start, permute=True)


def test_a_run_in_another_order_is_not_resumed(tmp_path):
    model, images = tiny.convnet(), tiny.images()
    state = tmp_path / "x.learning.safetensors"
    tiny.learn(model, images, steps=2, run_state=state, save_every=0.0)
    with pytest.raises(halve.HalveError, match=r"another run: layers\.3"):
        tiny.learn(model, images, steps=2, run_state=state, resume=True, permute=True)


def test_layers_left_dense_keep_the_moves(small):
    model, images, masks = small
    fewer = masks.without(["8"])
    assert list(fewer) == ["0", "3"]
    moved = halve.apply(model, fewer, permute=True)
    with torch.no_grad():
        torch.testing.assert_close(moved(images), halve.apply(model, fewer)(images), rtol=1e-5, atol=1e-5)


def test_masks_in_the_checkpoints_own_order_need_no_moves():
    model = tiny.convnet()
    masks = halve.prune(model)
    plain_copy, moved = halve.apply(model, masks), halve.apply(model, masks, permute=True)
    assert all(torch.equal(a, b) for a, b in zip(plain_copy.parameters(), moved.parameters(), strict=True))


def test_an_order_without_its_moves_cannot_be_made(small):
    model, _, masks = small
    masks = MaskSet(dict(masks))
    with pytest.raises(MaskError, match="does not say how to move the channels"):
        halve.apply(model, masks)
    with pytest.warns(ChannelOrderWarning):
        unmoved = halve.apply(model, masks, permute=False)
    assert not halve.verify(unmoved, masks).ok


def test_different_patterns_flat_order_padding_and_groups_do_not_get_in_the_way():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 1),
        nn.Conv2d(8, 16, 3, groups=2),
        nn.ReLU(),
        nn.Conv2d(16, 10, 1),
        nn.Conv2d(10, 16, 1),
        nn.Conv2d(16, 8, 1),
        nn.Conv2d(8, 3, 1),
    )
    rules = {"5": "1:8", "*": "2:4"}
    example = torch.randn(2, 4, 6, 6)
    masks = halve.prune(model, pattern=rules, also=["1", "6"], remainder="pad", permute=True, example=example)
    assert masks["1"].layout.channel_order is None
    assert masks["5"].layout.channel_order is not None
    assert "1" in masks.recipe["permute"]["fixed"]
    moved = halve.apply(model, masks, permute=True)
    with torch.no_grad():
        torch.testing.assert_close(moved(example), halve.apply(model, masks)(example), rtol=1e-5, atol=1e-5)
    flat = halve.prune(model, order="flat", permute=True, example=example)
    assert not flat.moves
    assert set(flat.recipe["permute"]["fixed"]) == set(flat)


def test_a_network_that_is_captured_in_parts_moves_inside_them():
    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Conv2d(4, 16, 1), nn.Conv2d(16, 8, 1)), nn.Linear(8, 3)

        def forward(self, x):
            x = self.body(x).mean((2, 3))
            return self.head(x) if float(x.sum()) < 1e9 else x

    model = Stubborn()
    masks = halve.prune(model, permute=True, example=tiny.images())
    assert masks["body.1"].layout.channel_order is not None
    assert masks["body.0"].layout.channel_order is None


class Auxiliary(nn.Module):
    """Has a head that only runs in training; `how` calls it."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Conv2d(4, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 3, 1)
        self.aux, self.drop, self.how = nn.Conv2d(16, 3, 1), nn.Dropout(0.5), how

    def forward(self, x):
        x = self.b(self.a(x).relu()).relu()
        return (self.c(x), self.how(self, x)) if self.training else self.c(x)


@pytest.mark.parametrize("how", [lambda n, x: n.aux(n.drop(x)), lambda n, x: n.aux(x) if float(x.sum()) < 1e9 else x])
def test_what_a_head_reads_that_only_runs_in_training_does_not_change_it(how):
    model = Auxiliary(how).eval()
    masks = halve.prune(model, permute=True, example=tiny.images(), also="c")
    assert masks.recipe["permute"]["not_run"] == ["aux"]
    sparse, x = halve.apply(model, masks), torch.randn(2, 4, 8, 8)
    with warnings.catch_warnings(action="ignore"):
        unmoved = halve.apply(model, masks, permute=False)
    for net in (sparse, unmoved):
        net.train()
        net.drop.eval()
    with torch.no_grad():
        for got, expected in zip(sparse(x), unmoved(x), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_model_that_was_moved_in_part_is_not_ok(permuted):
    model, masks = permuted
    with pytest.warns(ChannelOrderWarning):
        sparse, moved = halve.apply(model, masks, permute=False), halve.apply(model, masks)
    sparse[2].conv1.weight = moved[2].conv1.weight
    failures = halve.verify(sparse, masks).failures
    assert set(failures) == set(masks)
    assert "were not moved" in failures["2.conv2"]
    assert "weights that its mask drops are not zero" in failures["2.conv1"]


def test_an_update_of_a_moved_model_is_measured_in_its_own_order(permuted):
    model, masks = permuted
    moved = halve.apply(model, masks, permute=True)
    with torch.no_grad():
        moved[2].conv1.weight.mul_(1.3)
    layer = next(layer for layer in halve.verify(moved, masks).layers if layer.name == "2.conv1")
    assert layer.update == pytest.approx(0.3, rel=0.3)


def test_moves_without_the_order_are_refused(permuted):
    model, masks = permuted
    half = halve.prune(model, "random")
    with pytest.raises(MaskError, match="does not say how to move the channels"):
        halve.apply(model, MaskSet(dict(half), moves=masks.moves), permute=True)


def test_a_run_that_is_resumed_goes_on_in_the_order_that_was_found(tmp_path, monkeypatch):
    model, images = tiny.convnet(), tiny.images()
    options = {"run_state": tmp_path / "run", "save_every": 0.0, "permute": True}
    whole = tiny.learn(model, images, steps=6, **(options | {"run_state": tmp_path / "whole"}))

    def interrupt(event):
        if getattr(event, "step", 0) == 3:
            raise KeyboardInterrupt

    with pytest.warns(LearningWarning, match="interrupted"):
        tiny.learn(model, images, steps=6, report=interrupt, **options)
    monkeypatch.setattr(initialization, "permute", None)  # nobody searches again
    assert tiny.learn(model, images, steps=6, resume=True, **options) == whole


def test_time_is_kept_also_where_one_pass_would_take_longer():
    scores = {f"{i}": torch.rand(1024, 1024) for i in (1, 2)}
    model = nn.Sequential(nn.Linear(8, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 2))
    choices = [choice for choice in select(model).masked if choice.name in scores]
    started = time.monotonic()
    found = permute_module.permute(model, choices, scores, torch.randn(2, 8), seconds=0.02)
    assert time.monotonic() - started < 5
    assert found.summary["finished"] is False


@pytest.mark.parametrize("seconds", [-1, None, "5", float("nan")])
def test_times_that_are_none_are_refused(seconds):
    with pytest.raises(OptionError, match="permute_seconds"):
        halve.prune(tiny.convnet(), permute=True, permute_seconds=seconds, example=tiny.images())


@pytest.mark.parametrize("scale", [1e300, 1e-300])
def test_scores_of_any_size_can_be_permuted_and_saved(scale, tmp_path):
    masks = halve.prune(tiny.convnet(), lambda name, w: w.abs().double() * scale, tiny.images(), permute=True)
    assert halve.load(masks.save(tmp_path / "a")) == masks
    assert masks["3"].layout.channel_order is not None


def test_the_reason_why_an_order_stays_is_told():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Flatten(), nn.Linear(512, 12), nn.Linear(12, 8), nn.Linear(8, 3))
    fixed = halve.prune(model, permute=True, example=tiny.images()).recipe["permute"]["fixed"]
    assert "input of the model" in fixed["0"]
    assert fixed["2"] == "several neighbouring weights belong to one channel"


def test_a_forward_of_the_users_own_is_captured_as_it_runs():
    model = tiny.convnet()
    batches = [{"left": part, "right": part} for part in tiny.images().split(6)]
    masks = halve.prune(model, "wanda", batches, permute=True, forward=lambda net, b: net(b["left"] + b["right"]))
    assert masks["3"].layout.channel_order is not None


def test_progress_and_time_are_told():
    seen = []

    def progress(items, what):
        seen.append(what)
        return items

    masks = halve.prune(
        residual(), permute=True, permute_seconds=0.0, example=torch.randn(1, 3, 8, 8), progress=progress
    )
    assert "channel orders" in seen
    assert masks.recipe["permute"]["finished"] is False


def test_half_precision_models_can_be_permuted():
    model = tiny.convnet().bfloat16()
    masks = halve.prune(model, permute=True, example=tiny.images())
    assert masks["3"].layout.channel_order is not None


def test_layouts_differ_from_the_plain_ones_by_their_order_alone(permuted):
    model, masks = permuted
    for choice in select(model).masked:
        assert unpermuted(masks[choice.name].layout) == choice.layout


def test_masks_that_are_already_applied_are_refused_where_the_dense_model_is_needed(permuted):
    model, masks = permuted
    x = torch.randn(4, 3, 16, 16)
    with warnings.catch_warnings(action="ignore"):
        applied = [halve.apply(model, masks), halve.apply(model, masks, permute=False)]
    tuned = copy.deepcopy(applied)
    for sparse in tuned:
        for parameter in sparse.parameters():
            parameter.data.mul_(1.01)
    for sparse in (*applied, *tuned):
        for call in (halve.evaluate, halve.recalibrate, lambda m, k, d: tiny.learn(m, d, start=k, steps=1)):
            with pytest.raises(MaskError, match=r"already applied.*pass the dense model"):
                call(sparse, masks, x)


def test_another_training_run_is_not_taken_for_a_moved_one(permuted):
    model, masks = permuted
    for seed in range(4):
        other = copy.deepcopy(model)
        torch.manual_seed(seed)
        for module in other.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        restored = halve.restore_order(other, masks)
        assert all(torch.equal(a, b) for a, b in zip(restored.parameters(), other.parameters(), strict=True))


def test_capturing_does_not_use_up_the_time_of_the_search(monkeypatch):
    def slow(*arguments, **options):
        time.sleep(0.3)
        return captured(*arguments, **options)

    captured = of_permute.capture
    monkeypatch.setattr(of_permute, "capture", slow)
    masks = halve.prune(tiny.convnet(), permute=True, permute_seconds=0.25, example=tiny.images(2))
    assert masks.recipe["permute"]["finished"]


class Flagged(nn.Module):
    """Has a second path, which a flag selects, with something else than a convolution or Linear at its end."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Conv2d(4, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 3, 1)
        self.kind = kind
        if kind == "module":
            self.other = nn.GRU(16, 4, batch_first=True)
        elif kind == "parameter":
            self.other = nn.Parameter(torch.randn(16, 5))
        else:
            self.register_buffer("other", torch.tensor([3, 7, 11]))

    def forward(self, x, flag=False):
        x = self.b(self.a(x).relu()).relu()
        if not flag:
            return self.c(x)
        x = x.mean((2, 3))
        if self.kind == "module":
            return self.other(x[:, None])[0]
        return x @ self.other if self.kind == "parameter" else x[:, self.other]


@pytest.mark.parametrize("kind", ["module", "parameter", "index"])
def test_channels_that_anything_may_read_that_did_not_run_do_not_move(kind):
    model, x = Flagged(kind).eval(), torch.randn(2, 4, 8, 8)
    masks = halve.prune(model, permute=True, example=tiny.images())
    assert masks.recipe["permute"]["not_run"] == ["other"]
    with warnings.catch_warnings(action="ignore"):
        unmoved = halve.apply(model, masks, permute=False)
    with torch.no_grad():
        torch.testing.assert_close(halve.apply(model, masks)(x, True), unmoved(x, True), rtol=1e-4, atol=1e-5)


def test_what_a_loss_holds_does_not_keep_channels_from_moving():
    class Training(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(4, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 8, 1))
            self.loss = nn.CrossEntropyLoss(weight=torch.rand(8))

        def forward(self, x):
            return self.body(x)

    model = Training().eval()
    masks = halve.prune(model, permute=True, example=tiny.images())
    assert masks.recipe["permute"]["not_run"] == []
    assert masks["body.1"].layout.channel_order is not None

"""Where learning starts, and what becomes of channel orders that nobody asked for."""

import hashlib

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import halve
from halve.errors import DataError, FileError, LearningWarning, ModelError, OptionError
from halve.learn import initialization
from halve.learn.run_state import FORMAT
from halve.masks import storage
from tests.tiny import convnet, images, interrupting, labels, loader
from tests.untouched import same_bits, untouched

pytestmark = pytest.mark.filterwarnings("ignore:the quality of the masks will be unknown")  # of so few images


def moved(masks):
    """Layers whose channels are in another order."""
    return [name for name, mask in masks.items() if mask.layout.channel_order is not None]


class Moody(nn.Module):
    """Rolls dice even in eval mode, so that whether channels may move cannot be checked."""

    def __init__(self):
        super().__init__()
        self.net = convnet()

    def forward(self, x):
        return self.net(x) + torch.rand(())


class Proud(nn.Module):
    """Refuses images that it does not expect, such as noise."""

    def __init__(self):
        super().__init__()
        self.net = convnet()

    def forward(self, x):
        if not torch.compiler.is_exporting() and float(x.min()) < 0:
            raise RuntimeError("not an image\nand more lines")
        return self.net(x)


def test_orders_are_looked_for_wherever_the_model_can_be_captured():
    model = convnet()
    with untouched(model):
        masks = halve.learn(model, loader(), steps=2)
    assert moved(masks) == ["3"]
    assert masks.recipe["permute"]["layers"] == 1
    assert masks.recipe["permute"]["kept_after"] > masks.recipe["permute"]["kept_before"]
    assert "not_permuted" not in masks.recipe
    assert masks == halve.learn(convnet(), loader(), steps=2, permute=True)
    assert halve.verify(halve.apply(model, masks, permute=True)).ok
    plain = halve.learn(convnet(), loader(), steps=2, permute=False)
    assert (moved(plain), plain.recipe["permute"]) == ([], None)


@pytest.mark.parametrize(
    ("model", "data", "why"),
    [
        (Moody, lambda: loader(), "is not deterministic"),
        (Proud, lambda: [images(6).abs()], "RuntimeError: not an image"),
    ],
    ids=["chance", "refuses noise"],
)
def test_a_model_that_cannot_be_checked_is_learned_in_its_own_order_and_the_recipe_says_why(model, data, why, tmp_path):
    net = model().eval()
    with untouched(net):
        masks = halve.learn(net, data(), steps=2, augment=False)
    assert moved(masks) == []
    assert why in masks.recipe["not_permuted"]
    assert "\n" not in masks.recipe["not_permuted"]
    assert halve.load(masks.save(tmp_path / "net.masks.safetensors")).recipe == masks.recipe
    with pytest.raises((ModelError, RuntimeError), match=why.removeprefix("RuntimeError: ")):
        halve.learn(net, data(), steps=2, augment=False, permute=True)


class Peeking(nn.Linear):
    """Looks at numbers, of which a graph has none."""

    def forward(self, x):
        return super().forward(x) if x.detach().numpy().sum() < 1e9 else x


def test_a_model_that_cannot_be_captured_is_learned_in_its_own_order_and_the_recipe_says_why():
    model = nn.Sequential(Peeking(8, 8), nn.ReLU(), Peeking(8, 8), nn.ReLU(), Peeking(8, 3)).eval()
    data = [torch.randn(4, 8)]
    with untouched(model):
        masks = halve.learn(model, data, steps=2)
    assert moved(masks) == []
    assert masks.recipe["permute"] is None
    assert "torch.export cannot capture any part of Sequential: 0: " in masks.recipe["not_permuted"]
    with pytest.raises(ModelError, match="cannot capture any part"):
        halve.learn(model, [torch.randn(4, 8)], steps=2, permute=True)


@pytest.mark.parametrize(
    "options",
    [{"preset": "paper"}, {"order": "flat"}, {"start": "glorot"}, {"start": "masks"}],
    ids=lambda options: next(iter(options.values())),
)
def test_presets_flat_blocks_random_starts_and_masks_are_left_alone(options, monkeypatch):
    monkeypatch.setattr(initialization, "permute", None)  # nobody searches
    if options.get("start") == "masks":
        options = {"start": halve.prune(convnet())}
    masks = halve.learn(convnet(), loader(), steps=2, **options)
    assert moved(masks) == []
    assert masks.recipe["permute"] is None
    assert "not_permuted" not in masks.recipe


class Once(IterableDataset):
    """A stream that is the same one for everybody who asks."""

    def __init__(self, count=4):
        self.batches = iter([images(6, seed=i) for i in range(count)])

    def __iter__(self):
        return self.batches


@pytest.mark.parametrize("make", [lambda: Once().batches, lambda: Once(), lambda: DataLoader(Once(), batch_size=None)])
def test_an_example_is_not_missing_among_the_batches_of_a_stream(make):
    seen = []

    def objective(views):
        seen.append(views.dense_output.sum().item())
        return views.output.square().mean()

    with pytest.warns(LearningWarning, match="exhausted after 4 steps"):
        masks = halve.learn(convnet(), make(), steps=9, objective=objective)
    assert moved(masks) == ["3"]
    with torch.no_grad():
        expected = [convnet()(batch).sum().item() for batch in Once().batches]
    assert seen[-4:] == pytest.approx(expected, abs=1e-5)


def test_all_batches_come_in_their_order_with_and_without_a_search():
    seen = {}
    for permute in (None, True, False):
        taken = seen.setdefault(permute, [])

        def forward(model, batch, taken=taken):
            if not torch.compiler.is_exporting():
                taken.append(batch[0].sum().item())
            return model(batch[0])

        halve.learn(convnet(), loader(), steps=8, forward=forward, permute=permute, permute_seconds=1)
    steps = {permute: taken[-16:] for permute, taken in seen.items()}  # the dense and the masked network in each step
    assert steps[None] == steps[True] == steps[False]


@pytest.mark.parametrize("start", ["magnitude", "reconstruct"])
def test_persistent_workers_give_each_image_once_in_an_epoch(start):
    data = TensorDataset(images(), labels())
    shuffled = DataLoader(
        data, 6, shuffle=True, num_workers=2, persistent_workers=True, generator=torch.Generator().manual_seed(0)
    )
    seen = []

    def objective(views):
        seen.extend(views.dense_output.detach().sum(1).tolist())
        return (views.output - views.dense_output).square().mean()

    masks = halve.learn(convnet(), shuffled, epochs=2, start=start, objective=objective, augment=False)
    assert moved(masks) == ["3"]
    with torch.no_grad():
        expected = sorted(convnet()(images()).sum(1).tolist())
    for epoch in (seen[-48:-24], seen[-24:]):
        assert sorted(epoch) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("start", "model"),
    [("magnitude", convnet), ("wanda", convnet), ("reconstruct", convnet), ("wanda", Moody), ("reconstruct", Moody)],
)
def test_resumed_is_uninterrupted_with_a_shuffling_loader_whatever_reads_it_before(tmp_path, start, model, monkeypatch):
    def run(path, **options):
        torch.manual_seed(0)  # for the dice
        options = {"steps": 9, "start": start, "match": "features", "features": "*1"} | options
        return halve.learn(model().eval(), loader(), run_state=tmp_path / path, save_every=0, **options)

    whole = run("whole")
    assert bool(moved(whole)) == (model is convnet)
    with pytest.warns(LearningWarning, match="after 5 steps"):
        run("run", report=interrupting(5))
    monkeypatch.setattr(initialization, "permute", None)  # nobody searches again
    resumed = run("run", resume=True)
    assert resumed == whole
    assert same_bits(*(storage.read(tmp_path / path, [FORMAT])[2]["logits"] for path in ("whole", "run")))
    assert resumed.moves == whole.moves
    assert resumed.recipe.get("not_permuted") == whole.recipe.get("not_permuted")


def test_a_run_that_was_begun_without_orders_goes_on_without(tmp_path):
    options = {"steps": 6, "start": "wanda", "save_every": 0}
    whole = halve.learn(convnet(), loader(), permute=False, run_state=tmp_path / "whole", **options)
    with pytest.warns(LearningWarning, match="after 2 steps"):
        halve.learn(convnet(), loader(), permute=False, run_state=tmp_path / "run", report=interrupting(2), **options)
    assert halve.learn(convnet(), loader(), run_state=tmp_path / "run", resume=True, **options) == whole
    assert same_bits(*(storage.read(tmp_path / path, [FORMAT])[2]["logits"] for path in ("whole", "run")))


def test_a_run_that_was_begun_with_orders_is_not_resumed_without(tmp_path):
    halve.learn(convnet(), loader(), steps=2, run_state=tmp_path / "run")
    _, header, _ = storage.read(tmp_path / "run", [FORMAT])
    order = tuple(header["permutation"]["orders"][header["permutation"]["layers"]["3"]])
    digest = hashlib.sha256(repr(order).encode()).hexdigest()[:16]
    assert header["identity"]["layers"]["3"] == ["2:4", "channels", False, [8, 8, 3, 3], digest]
    with pytest.raises(FileError, match=r"another run: layers\.3"):
        halve.learn(convnet(), loader(), steps=2, run_state=tmp_path / "run", resume=True, permute=False)


def test_a_search_that_runs_out_of_time_says_so_and_learning_goes_on():
    torch.manual_seed(0)
    layers = [nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 3)]
    masks = halve.learn(nn.Sequential(*layers).eval(), [torch.randn(4, 8)], steps=1, permute_seconds=0)
    assert masks.recipe["permute"]["finished"] is False
    assert masks.recipe["steps_done"] == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"start": "magnitud"}, OptionError),
        ({"objective": "distil"}, OptionError),
        ({"features": "nothing"}, OptionError),
        ({"precision": "fp8"}, OptionError),
        ({"run_state": __file__}, FileError),
        ({"data": []}, DataError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_mistakes_are_told_before_a_search(options, error, monkeypatch):
    monkeypatch.setattr(initialization, "ScoreInputs", lambda *_, **__: pytest.fail("too late"))
    with pytest.raises(error):
        halve.learn(convnet(), **{"data": loader(), "steps": 1} | options)


def test_a_budget_for_accuracy_keeps_the_orders_of_what_stays_masked():
    model = convnet()
    masks = halve.learn(model, loader(), steps=2, max_drop=0.2, drop_data=images(60, seed=5))
    assert masks.recipe["drop"] <= 0.2
    with torch.no_grad():
        torch.testing.assert_close(
            halve.apply(model, masks, permute=True)(images()),
            halve.apply(model, masks)(images()),
            rtol=1e-4,
            atol=1e-4,
        )

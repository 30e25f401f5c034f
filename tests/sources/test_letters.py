import pytest
import torch

from halve.errors import DataError
from halve.sources import letters as module
from halve.sources.data import load_data
from halve.sources.letters import NAMES, SIZE, LettersResNet, letters, train_letters
from tests.untouched import same_bits

pytestmark = pytest.mark.usefixtures("few_letters")


def test_there_are_letters_of_every_kind_to_train_and_to_test_on():
    for split, count in (("train", 2048), ("test", 512)):
        images, labels = letters(split).tensors
        assert images.shape == (count, 1, SIZE, SIZE)
        assert images.dtype == torch.float32
        assert images.isfinite().all()
        assert abs(float(images.mean())) < 0.5
        assert sorted(labels.unique().tolist()) == list(range(26))
    assert "".join(NAMES) == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def test_letters_are_the_same_each_time_and_no_image_is_in_both_splits():
    train, test = (letters(split).tensors[0] for split in ("train", "test"))
    state = torch.get_rng_state()
    letters.cache_clear()
    assert same_bits(letters("test").tensors[0], test)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(torch.cat([train, test]).flatten(1).unique(dim=0)) == 2048 + 512


def test_strokes_are_bright_where_the_letter_is(monkeypatch):
    for name, value in (("_CLUTTER", 1), ("_NOISE", 0.0), ("_ROTATION", 0.0)):
        monkeypatch.setattr(module, name, value)
    count = 200
    drawn = module._drawn(torch.full((count,), NAMES.index("I")), torch.Generator().manual_seed(0))
    profile = drawn.mean(0)[0].mean(0)  # by column: the upright stroke is in the middle
    assert profile[SIZE // 4 : -SIZE // 4].mean() > profile[: SIZE // 4].mean() + 0.2
    assert profile[SIZE // 4 : -SIZE // 4].mean() > profile[-SIZE // 4 :].mean() + 0.2


def test_training_depends_on_the_seed_alone():
    one, same, other = (train_letters(epochs=1, seed=seed) for seed in (3, 3, 4))
    assert not one.training
    assert all(same_bits(a, b) for a, b in zip(one.state_dict().values(), same.state_dict().values(), strict=True))
    assert not torch.equal(one.conv1.weight, other.conv1.weight)
    assert one(torch.zeros(3, 1, SIZE, SIZE)).shape == (3, 26)


def test_the_network_is_small():
    assert 40_000 < sum(parameter.numel() for parameter in LettersResNet().parameters()) < 50_000


@pytest.mark.parametrize(("where", "count"), [("letters", 512), ("letters:test", 512), ("letters:train", 2048)])
def test_letters_can_be_named_as_data(where, count):
    data = load_data(where, batch_size=100)
    assert (data.images, data.class_names) == (count, NAMES)
    assert next(iter(data.loader))[0].shape == (100, 1, SIZE, SIZE)


@pytest.mark.parametrize("call", [letters, lambda split: load_data(f"letters:{split}")])
def test_an_unknown_split_lists_those_that_exist(call):
    with pytest.raises(DataError, match="letters:train or letters:test"):
        call("validation")

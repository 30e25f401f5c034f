import sys

import pytest
import torch

from halve.errors import DataError, SourceError
from halve.sources.digits import DigitsResNet, digits, train_digits
from tests.untouched import same_bits

pytest.importorskip("sklearn")


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other make such small steps slow on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_there_are_1297_digits_to_train_and_500_to_test_on():
    for split, count in (("train", 1297), ("test", 500)):
        images, labels = digits(split).tensors
        assert images.shape == (count, 1, 8, 8)
        assert images.dtype == torch.float32
        assert -1 <= images.min() < images.max() <= 1
        assert sorted(labels.unique().tolist()) == list(range(10))


def test_no_digit_is_in_both_splits_and_the_splits_are_always_the_same():
    train, test = (digits(split).tensors[0].flatten(1) for split in ("train", "test"))
    assert len(torch.cat([train, test]).unique(dim=0)) == 1797
    assert torch.equal(test, digits("test").tensors[0].flatten(1))


def test_training_depends_on_the_seed_alone_and_reports_its_epochs():
    seen = []

    def progress(items, what):
        for item in items:
            seen.append((what, item))
            yield item

    torch.manual_seed(1)
    one = train_digits(epochs=1, seed=3, progress=progress)
    assert seen == [("training", 0)]
    assert not one.training
    torch.manual_seed(2)
    state = torch.get_rng_state()
    same, other = train_digits(epochs=1, seed=3), train_digits(epochs=1, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(same_bits(a, b) for a, b in zip(one.state_dict().values(), same.state_dict().values(), strict=True))
    assert not torch.equal(one.conv1.weight, other.conv1.weight)


def test_the_network_gives_ten_scores_per_image():
    assert DigitsResNet(width=4).eval()(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_an_unknown_split_lists_those_that_exist():
    with pytest.raises(DataError, match="digits:train or digits:test"):
        digits("validation")


def test_without_scikit_learn_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SourceError, match=r"pip install 'halve\[digits\]'"):
        digits("test")

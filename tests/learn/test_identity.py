import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from halve.errors import FileError, LearningWarning
from halve.learn.held_back import hold_back, hold_back_none
from halve.learn.identity import identity_of_data, identity_of_model
from halve.learn.stream import BatchStream
from tests.tiny import convnet, images, interrupting, labels, learn, loader


def started(path, model=None, data=None, **options):
    """The state of a run that was interrupted."""
    with pytest.warns(LearningWarning, match="interrupted"):
        learn(model or convnet(), loader() if data is None else data, **run(path, **options), report=interrupting(2))


def run(path, **options):
    return {"steps": 4, "run_state": path} | options


def resumed(path, model=None, data=None, **options):
    return learn(model or convnet(), loader() if data is None else data, **run(path, **options), resume=True)


def changed(change):
    model = convnet()
    with torch.no_grad():
        change(model)
    return model


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (changed(lambda m: m[8].weight.mul_(1.01)), r"model\.8\.weight"),
        (changed(lambda m: m[10].bias.add_(1)), r"model\.10\.bias"),
        (changed(lambda m: m[1].running_mean.add_(1)), r"model\.1\.running_mean"),
        (changed(lambda m: m.__setitem__(5, nn.GELU())), r"model\.architecture"),
    ],
    ids=["masked weight", "head", "statistics", "activation"],
)
def test_a_run_is_not_resumed_with_another_model_and_what_differs_is_named(tmp_path, model, name):
    started(tmp_path / "run")
    with pytest.raises(FileError, match=rf"state of another run: {name} \(.* there, .* here\) differ"):
        resumed(tmp_path / "run", model)


def test_how_often_batchnorm_was_trained_is_no_difference(tmp_path):
    started(tmp_path / "run")
    resumed(tmp_path / "run", changed(lambda m: m[1].num_batches_tracked.add_(1)))


def test_a_run_is_not_resumed_in_another_precision(tmp_path):
    started(tmp_path / "run")
    with pytest.raises(FileError, match=r"precision \(float32 there, bfloat16 here\)"):
        resumed(tmp_path / "run", precision="bfloat16")


def random_images(count=24):
    return DataLoader(RandomImages(count), 6)


class RandomImages(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return images(self.count)[index] + torch.randn(1)


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        (loader(24, 6), loader(24, 4), r"data\.batches \(4 there, 6 here\), data\.batch_size \(6 there, 4 here\)"),
        (loader(24, 6), loader(30, 6), r"data\.batches \(4 there, 5 here\)"),
        (images(24), images(24, seed=2), r"data\.images"),
        ([images(24)], [images(12), images(12)], r"data\.batch"),
        ([images(24), images(24)], [images(24), images(24, seed=2)], r"data\.images"),
    ],
    ids=["batch size", "more images", "other tensor", "other batches", "other list"],
)
def test_a_run_is_not_resumed_with_other_data_where_that_is_certain(tmp_path, before, after, name):
    started(tmp_path / "run", data=before)
    with pytest.raises(FileError, match=f"state of another run: {name}"):
        resumed(tmp_path / "run", data=after)


def test_a_run_is_not_resumed_with_other_images_held_back(tmp_path):
    started(tmp_path / "run", data=loader(128), validation=[images(8)], fallback=False)
    with pytest.raises(FileError, match=r"data\.held_back \(0 there, 8 here\)"):
        resumed(tmp_path / "run", data=loader(128), validation=None)


def other_images():
    return DataLoader(TensorDataset(images(24, seed=5), labels()), 6)


class Stream:
    def __init__(self, seed=1, size=6):
        self.seed, self.size = seed, size

    def __iter__(self):
        return iter(images(24, self.seed).split(self.size))


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        (loader(), other_images(), r"data\.images"),
        (Stream(), Stream(seed=2), r"data\.images"),
        (Stream(), Stream(size=4), r"data\.batch_size \(6 there, 4 here\)"),
    ],
    ids=["loader", "stream", "stream in other batches"],
)
def test_data_that_only_seems_to_be_other_data_is_a_warning_that_names_it(tmp_path, before, after, name):
    started(tmp_path / "run", data=before)
    with pytest.warns(LearningWarning, match=f"seems to be learned from other data: {name}"):
        masks = resumed(tmp_path / "run", data=after)
    assert masks.recipe["steps_done"] == 4


@pytest.mark.parametrize(
    "make",
    [loader, random_images, Stream, lambda: images(24), lambda: [images(12)] * 2],
    ids=["loader", "random images", "stream", "tensor", "list"],
)
def test_the_same_data_is_resumed_without_a_word_also_if_it_is_shuffled_or_transformed_at_random(tmp_path, make):
    torch.manual_seed(1)
    started(tmp_path / "run", data=make())
    torch.manual_seed(2)
    resumed(tmp_path / "run", data=make())


def test_nothing_is_said_of_an_iterator():
    data = iter([images(6)])
    assert identity_of_data(hold_back_none(data), BatchStream(data), 0) == ({}, {})


def test_looking_at_the_data_changes_neither_its_order_nor_random_numbers():
    one, other = loader(128), loader(128)
    split, same = hold_back(one), hold_back(other)
    stream, untouched = BatchStream(split.data), BatchStream(same.data)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    identity_of_data(split, stream, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(stream.next()[0], untouched.next()[0]) for _ in range(50))


def test_a_model_that_prints_addresses_is_the_same_in_another_process():
    class Act(nn.Module):
        def __init__(self):
            super().__init__()
            self.function = lambda x: x

        def extra_repr(self):
            return repr(self.function)

    one, other = identity_of_model(nn.Sequential(Act())), identity_of_model(nn.Sequential(Act()))
    assert one == other

import pytest
import torch
from PIL import Image

from halve.errors import DataError, OptionError
from halve.sources.data import load_data
from halve.sources.preprocessing import IMAGENET_MEAN, Preprocessing
from tests.pictures import class_folders, encoded, tar_of


@pytest.fixture
def folder(tmp_path):
    return str(class_folders(tmp_path / "d", ("ape", "cat", "dog"), each=4))


def batches(data):
    return [(images.clone(), labels.tolist()) for images, labels in data.loader]


def same(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) and x == y for (a, x), (b, y) in zip(one, other, strict=True)
    )


def test_a_folder_becomes_batches_with_labels(folder):
    data = load_data(folder, batch_size=5)
    found = batches(data)
    assert [images.shape for images, _ in found] == [(5, 3, 8, 8), (5, 3, 8, 8), (2, 3, 8, 8)]
    assert [label for _, labels in found for label in labels] == [0] * 4 + [1] * 4 + [2] * 4
    assert (data.images, data.class_names, data.classes) == (12, ("ape", "cat", "dog"), None)
    assert same(batches(data), found)


def test_pictures_without_classes_become_batches_without_labels(tmp_path):
    (tmp_path / "0.png").write_bytes(encoded())
    (batch,) = load_data(str(tmp_path)).loader
    assert isinstance(batch, torch.Tensor)
    assert batch.shape == (1, 3, 8, 8)


def test_the_models_own_preprocessing_is_used(folder):
    data = load_data(folder, lambda image: torch.tensor([image.width, image.height], dtype=torch.float32))
    assert next(iter(data.loader))[0].tolist() == [[8.0, 8.0]] * 12


def test_preprocessing_resizes_crops_and_normalises():
    white = Image.new("RGB", (20, 10), (255, 255, 255))
    assert Preprocessing()(white).shape == (3, 10, 20)
    assert Preprocessing(size=6)(white).shape == (3, 6, 6)
    assert Preprocessing(size=6, resize=8)(white).shape == (3, 6, 6)
    assert Preprocessing(size=30)(white).shape == (3, 30, 30)
    result = Preprocessing(mean=(0.5, 0.5, 0.0), std=(0.5, 0.25, 1.0))(white)
    assert result[:, 0, 0].tolist() == [1.0, 2.0, 1.0]
    black = Preprocessing(std=(1.0, 1.0, 1.0))(Image.new("RGB", (4, 4)))
    assert torch.allclose(black[:, 0, 0], -torch.tensor(IMAGENET_MEAN))


def test_the_middle_is_cropped():
    image = Image.new("RGB", (4, 2))
    image.putpixel((1, 0), (255, 255, 255))
    result = Preprocessing(size=2, mean=(0.0,) * 3, std=(1.0,) * 3)(image)
    assert result[0].tolist() == [[1.0, 0.0], [0.0, 0.0]]


def error_of(data):
    """The message of the error that iterating raises; it keeps no traceback, and so no worker process, alive."""
    try:
        list(data.loader)
    except DataError as error:
        return str(error)
    return ""


def test_different_sizes_in_a_batch_are_an_error_that_names_the_option(tmp_path):
    for i, size in enumerate([(8, 8), (9, 8)]):
        (tmp_path / f"{i}.png").write_bytes(encoded(i, size))
    assert "different sizes: (3, 8, 8), (3, 8, 9); --size N" in error_of(load_data(str(tmp_path)))
    assert len(list(load_data(str(tmp_path), Preprocessing(size=8)).loader)) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_picture_is_named_without_a_traceback(tmp_path, workers):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    message = error_of(load_data(str(tmp_path), workers=workers))
    assert "broken.png is not a readable image" in message
    assert "Traceback" not in message


def test_worker_processes_give_the_same_batches(folder):
    options = {"batch_size": 5, "limit": 9, "shuffle": True, "seed": 3}
    assert same(batches(load_data(folder, workers=1, **options)), batches(load_data(folder, **options)))


def test_a_limit_takes_images_of_all_kinds_by_seed(folder):
    def chosen(seed):
        data = load_data(folder, limit=6, seed=seed)
        assert data.images == 6
        (batch,) = batches(data)
        return batch

    images, labels = chosen(0)
    assert len(labels) == 6
    assert labels == sorted(labels)
    assert len(set(labels)) > 1
    assert torch.equal(chosen(0)[0], images)
    assert any(not torch.equal(chosen(seed)[0], images) for seed in range(1, 4))


def test_a_limit_above_the_number_of_images_takes_all(folder):
    assert load_data(folder, limit=100).images == 12


def test_shuffling_depends_on_the_seed_alone_and_differs_from_pass_to_pass(folder):
    def two(seed):
        data = load_data(folder, batch_size=12, shuffle=True, seed=seed)
        return [batches(data)[0][0], batches(data)[0][0]]

    torch.manual_seed(1)
    first = two(0)
    state = torch.get_rng_state()
    again = two(0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], two(1)[0])


@pytest.mark.parametrize(("where", "count"), [("digits", 500), ("digits:test", 500), ("digits:train", 1297)])
def test_digits_are_built_in(where, count):
    pytest.importorskip("sklearn")
    data = load_data(where, batch_size=2000)
    ((images, labels),) = data.loader
    assert (data.images, images.shape) == (count, (count, 1, 8, 8))
    assert data.class_names == tuple("0123456789")
    assert len(labels) == count


def test_another_split_of_the_digits_is_an_error():
    with pytest.raises(DataError, match="digits:train or digits:test"):
        load_data("digits:all")


@pytest.mark.parametrize(
    "options", [{"batch_size": 0}, {"batch_size": -1}, {"limit": 0}, {"limit": -5}, {"workers": -1}]
)
def test_numbers_that_make_no_sense_are_refused(folder, options):
    with pytest.raises(OptionError):
        load_data(folder, **options)


@pytest.mark.parametrize("options", [{"size": 0}, {"size": -4}, {"size": 4, "resize": -1}, {"resize": 4}])
def test_sizes_that_make_no_sense_are_refused(options):
    with pytest.raises(OptionError, match="size"):
        Preprocessing(**options)


@pytest.mark.parametrize("options", [{"mean": (0.5, 0.5)}, {"std": (0.0, 1.0, 1.0)}, {"std": (1.0,) * 4}])
def test_means_and_deviations_that_make_no_sense_are_refused(options):
    with pytest.raises(OptionError, match="three numbers each"):
        Preprocessing(**options)


def test_a_class_list_maps_folders_to_the_outputs_of_the_classifier(folder, tmp_path):
    (tmp_path / "classes.txt").write_text("dog\nbee\n  ape  \r\ncat\n")
    assert load_data(folder, classes_file=tmp_path / "classes.txt").classes == (2, 3, 0)


def test_a_class_that_is_not_listed_is_named(folder, tmp_path):
    (tmp_path / "classes.txt").write_text("dog\nape\n")
    with pytest.raises(DataError, match=r"classes that .*classes\.txt does not list: cat"):
        load_data(folder, classes_file=tmp_path / "classes.txt")


def test_a_class_list_that_names_a_class_twice_is_refused(folder, tmp_path):
    (tmp_path / "classes.txt").write_text("dog\nape\ncat\ndog\n")
    with pytest.raises(DataError, match="dog"):
        load_data(folder, classes_file=tmp_path / "classes.txt")


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00ape"])
def test_a_class_list_that_cannot_be_read_is_named(folder, tmp_path, content):
    if content is not None:
        (tmp_path / "classes.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"cannot read the class list .*classes\.txt"):
        load_data(folder, classes_file=tmp_path / "classes.txt")


def test_a_class_list_for_data_without_class_folders_is_refused(tmp_path):
    (tmp_path / "classes.txt").write_text("dog\n")
    path = tar_of(tmp_path / "x.tar", {"1.png": encoded(), "1.cls": b"7"})
    with pytest.raises(DataError, match="no class folders"):
        load_data(str(path), classes_file=tmp_path / "classes.txt")


def test_a_class_list_may_begin_with_a_mark_and_end_with_blank_lines(folder, tmp_path):
    (tmp_path / "classes.txt").write_bytes(b"\xef\xbb\xbfdog\r\nape\r\ncat\r\n\r\n\r\n")
    assert load_data(folder, classes_file=tmp_path / "classes.txt").classes == (1, 2, 0)

import importlib.util
import io
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision import models, transforms
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

import halve
from halve.errors import DataError, OptionError, SourceError
from halve.sources.dali import EncodedPictures, Steps, steps_of
from halve.sources.data import load_data
from halve.sources.images import find_pictures
from halve.sources.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from tests.pictures import tar_of

installed = pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None,
    reason="needs NVIDIA DALI: pip install 'halve[dali]'",
)
PLAIN = {"mean": (0.0,) * 3, "std": (1 / 255,) * 3}  # tensors hold pixels, 0 to 255
ROUNDING = 2.001  # Pillow and DALI both round after each of two passes
SIZES = [(60, 40), (40, 61), (37, 53), (64, 64), (33, 90), (128, 97)]


def photo(seed, size, kind="JPEG", mode="RGB", **options):
    """A smooth image with some detail, encoded."""
    pixels = np.random.default_rng(seed).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).convert(mode).save(file, kind, **options)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path):
    for index, size in enumerate(SIZES):
        path = tmp_path / "d" / ("ape", "cat")[index % 2] / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo(index, size, subsampling=index % 3, progressive=index % 2 == 1))
    return str(tmp_path / "d")


def both(where, preprocess=None, **options):
    """The batches of our own loader and of DALI."""
    return [list(load_data(where, preprocess, loader=name, **options).loader) for name in ("pillow", "dali")]


def compare(ours, dalis, most):
    assert len(ours) == len(dalis) > 0
    for own, other in zip(ours, dalis, strict=True):
        assert torch.equal(own[1], other[1])
        assert own[0].shape == other[0].shape
        assert other[0].is_contiguous()
        assert (own[0] - other[0]).abs().max() <= most


@installed
@pytest.mark.parametrize(
    ("size", "resize"), [(32, 36), (32, None), (33, 37), (48, 40)], ids=["even", "no margin", "odd", "padded"]
)
def test_pixels_are_those_of_our_own_loader(folder, size, resize):
    ours, dalis = both(folder, Preprocessing(size, resize, **PLAIN), batch_size=4)
    compare(ours, dalis, most=ROUNDING)
    difference = torch.cat([(own[0] - other[0]).abs() for own, other in zip(ours, dalis, strict=True)])
    assert difference.mean() < 0.25
    assert (difference > 1.5).float().mean() < 1e-3


@installed
def test_images_are_normalised_as_ours_are(folder):
    compare(*both(folder, Preprocessing(32)), most=ROUNDING / 255 / min(IMAGENET_STD))


@installed
@pytest.mark.parametrize("mode", [InterpolationMode.BILINEAR, InterpolationMode.BICUBIC])
def test_presets_of_libraries_give_the_same_pixels(folder, mode):
    scaled = transforms.Normalize([0.0] * 3, [1 / 255] * 3)
    steps = [transforms.Resize(40, mode), transforms.CenterCrop((32, 32)), transforms.ToTensor(), scaled]
    compare(*both(folder, transforms.Compose(steps)), most=ROUNDING)
    compare(*both(folder, models.ResNet18_Weights.DEFAULT.transforms()), most=ROUNDING / 255 / min(IMAGENET_STD))


@installed
def test_random_crops_are_torchvisions_and_follow_the_seed(folder):
    scaled = transforms.Normalize([0.0] * 3, [1 / 255] * 3)
    steps = transforms.Compose([transforms.Resize(40), transforms.RandomCrop(32), transforms.ToTensor(), scaled])
    found = []
    for name in ("pillow", "dali", "dali"):
        torch.manual_seed(len(found) // 2)
        found.append(list(load_data(folder, steps, loader=name).loader))
    compare(found[0], found[1], most=ROUNDING)
    assert (found[1][0][0] - found[2][0][0]).abs().max() > 10


@installed
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *(("PNG", mode) for mode in ("RGB", "RGBA", "P", "I;16")),
        *(("JPEG", mode) for mode in ("L", "CMYK")),
        *(("WEBP", "RGB"), ("TIFF", "F"), ("BMP", "1")),
    ],
)
def test_all_formats_and_modes_are_read_as_ours_are(tmp_path, kind, mode):
    if mode in ("I;16", "F"):
        values = np.linspace(0, 65535 if mode == "I;16" else 1, 40 * 30).reshape(30, 40)
        Image.fromarray(values.astype(np.uint16 if mode == "I;16" else np.float32)).save(tmp_path / f"0.{kind}", kind)
    else:
        (tmp_path / f"0.{kind.lower()}").write_bytes(photo(0, (40, 30), kind, mode))
    [ours], [dalis] = both(str(tmp_path), Preprocessing(24, 26, **PLAIN))
    assert ours.std() > 10
    assert (ours - dalis).abs().max() <= ROUNDING


@installed
def test_the_orientation_of_cameras_is_ignored_as_by_our_own_loader(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    (tmp_path / "0.jpg").write_bytes(photo(0, (40, 30), exif=exif))
    [ours], [dalis] = both(str(tmp_path), Preprocessing(**PLAIN))
    assert dalis.shape == (1, 3, 30, 40)
    assert torch.equal(ours.round(), dalis.round())


@installed
def test_order_limit_labels_and_workers_are_the_same(folder, tmp_path):
    (tmp_path / "classes.txt").write_text("cat\nbee\nape\n")
    options = {"batch_size": 2, "limit": 5, "shuffle": True, "seed": 3, "workers": 1}
    options |= {"classes_file": tmp_path / "classes.txt", "relabel": True}
    ours, dalis = both(folder, Preprocessing(32, **PLAIN), **options)
    compare(ours, dalis, most=ROUNDING)
    assert [len(labels) for _, labels in dalis] == [2, 2, 1]
    assert {int(label) for _, labels in dalis for label in labels} == {0, 2}


@installed
def test_tars_are_read_by_dali_too(tmp_path):
    for shard in range(2):
        members = {}
        for index in range(3):
            members |= {f"{index}.jpg": photo(3 * shard + index, (40, 30)), f"{index}.cls": b"%d" % index}
        tar_of(tmp_path / f"{shard}.tar", members)
    compare(*both(str(tmp_path / "{0..1}.tar"), Preprocessing(24, **PLAIN), batch_size=4), most=ROUNDING)


@installed
def test_batches_are_lists_for_detectors(folder):
    ours, dalis = both(folder, Preprocessing(**PLAIN), lists=True)
    for own, other in zip(ours[0], dalis[0], strict=True):
        assert torch.equal(own.round(), other.round())


@installed
def test_different_sizes_in_a_batch_are_the_same_error(folder):
    messages = []
    for name in ("pillow", "dali"):
        with pytest.raises(DataError) as caught:
            list(load_data(folder, loader=name).loader)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "different sizes" in messages[0]


@installed
@pytest.mark.parametrize(
    "content", [b"no picture", photo(0, (200, 160))[:900], b""], ids=["text", "truncated", "empty"]
)
def test_a_broken_picture_is_named(folder, tmp_path, content):
    (tmp_path / "d" / "cat" / "broken.jpg").write_bytes(content)
    with pytest.raises(DataError, match=r"broken\.jpg is not a readable image"):
        list(load_data(folder, Preprocessing(32), loader="dali", batch_size=2).loader)


@installed
def test_batches_that_are_kept_do_not_change_while_others_are_read(folder):
    data = load_data(folder, Preprocessing(32), loader="dali", batch_size=2)
    kept = list(data.loader)
    again = [images.clone() for images, _ in data.loader]
    assert all(torch.equal(images, other) for (images, _), other in zip(kept, again, strict=True))


@installed
def test_masks_are_learned_from_it_with_the_same_images_held_back(tmp_path):
    for index in range(80):
        (tmp_path / f"{index:02}.jpg").write_bytes(photo(index, (20, 18)))
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(8, 10)).eval()
    found = [
        halve.learn(
            model,
            load_data(str(tmp_path), Preprocessing(16), loader=name, batch_size=16, shuffle=True).loader,
            steps=3,
            permute=False,
            fallback=False,
        )
        for name in ("pillow", "dali")
    ]
    ours, dalis = (masks.recipe["quality"] for masks in found)
    assert ours["images"] == dalis["images"] == 8
    assert ours["kl"] == pytest.approx(dalis["kl"], rel=0.05)


def test_without_dali_the_error_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "0.jpg").write_bytes(photo(0, (20, 20)))
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)  # importing it raises
    with pytest.raises(SourceError, match=r"pip install 'halve\[dali\]'"):
        load_data(str(tmp_path), loader="dali")


@pytest.mark.parametrize("where", ["digits", "letters:train"])
def test_built_in_images_have_no_files_to_decode(where):
    with pytest.raises(OptionError, match="has no files to decode"):
        load_data(where, loader="dali")


def test_a_loader_that_does_not_exist_is_refused(folder):
    with pytest.raises(OptionError, match="one of pillow, dali, got 'ffcv'"):
        load_data(folder, loader="ffcv")


def test_the_steps_of_preprocessing_are_known():
    known = (IMAGENET_MEAN, IMAGENET_STD)
    assert steps_of(Preprocessing(224, 256)) == Steps(256, 224, *known)
    assert steps_of(Preprocessing()) == Steps(None, None, *known)
    assert steps_of(models.ConvNeXt_Tiny_Weights.DEFAULT.transforms()) == Steps(236, 224, *known)
    timm = pytest.importorskip("timm")
    transform = timm.data.create_transform((3, 224, 224), crop_pct=0.95)
    steps = steps_of(transform)
    assert (steps.resize, steps.size, steps.interpolation) == (235, 224, "bilinear")
    assert steps.mean == pytest.approx(IMAGENET_MEAN)


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([transforms.RandomHorizontalFlip()], "RandomHorizontalFlip"),
        ([transforms.Resize((40, 32)), transforms.Normalize([0.5], [0.5])], r"\(40, 32\)"),
        ([transforms.Resize((40, 40)), transforms.Normalize([0.5], [0.5])], r"\(40, 40\)"),
        ([transforms.CenterCrop(32), transforms.Resize(40), transforms.Normalize([0.5], [0.5])], "Resize"),
        ([transforms.Resize(40, InterpolationMode.NEAREST), transforms.Normalize([0.5], [0.5])], "Compose"),
        ([transforms.Resize(40), transforms.ToTensor()], "Compose"),
        ([transforms.RandomCrop(32, padding=4), transforms.Normalize([0.5], [0.5])], "RandomCrop"),
    ],
)
def test_steps_that_dali_cannot_do_are_named(steps, says):
    with pytest.raises(OptionError, match=says):
        steps_of(transforms.Compose(steps))
    with pytest.raises(OptionError, match="function"):
        steps_of(lambda image: image)


@pytest.mark.parametrize("size", [*SIZES, (1, 500), (224, 300), (225, 300), (500, 333)])
def test_sizes_and_crops_are_torchvisions(size):
    steps, image = Steps(232, 224, (0.5,) * 3, (0.5,) * 3), Image.new("RGB", size)
    resized = TF.resize(image, 232)
    assert steps.resized(size[1], size[0]) == (resized.height, resized.width)
    column = torch.arange(float(resized.width)).expand(1, 1, resized.width)
    assert TF.center_crop(column, [1, 224])[0, 0, 0] == steps.start(224, resized.width)[1]


def test_pictures_are_read_and_not_decoded(folder):
    pictures, _ = find_pictures(folder)
    dataset = EncodedPictures(pictures, Steps(32, 32, (0.5,) * 3, (0.5,) * 3))
    item = dataset[0]
    assert len(dataset) == len(SIZES)
    assert bytes(item.content) == pictures[0].read()
    assert (item.label, item.size, item.resized) == (0, (40, 60), (32, 48))

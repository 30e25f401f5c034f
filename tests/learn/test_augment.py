import pytest
import torch

from halve.learn import augment
from halve.learn.augment import augmented


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def pictures(count=64, size=32, channels=3, dtype=torch.float32):
    return torch.rand(count, channels, size, size, generator=generator(9)).to(dtype) + 1


@pytest.fixture
def alone(monkeypatch):
    """No image meets another one."""
    monkeypatch.setattr(augment, "MIXED", 0.0)
    monkeypatch.setattr(augment, "PASTED", 0.0)


@pytest.mark.parametrize("size", [8, 9, 32, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_shape_dtype_and_range_stay(size, dtype):
    images = pictures(6, size, 4, dtype)
    found = augmented(images, generator())
    assert (found.shape, found.dtype) == (images.shape, dtype)
    assert 0 <= float(found.min()) <= float(found.max()) <= 2.01
    assert torch.isfinite(found).all()


def test_the_generator_decides():
    images = pictures()
    assert torch.equal(augmented(images, generator(1)), augmented(images, generator(1)))
    assert not torch.equal(augmented(images, generator(1)), augmented(images, generator(2)))


def test_the_images_given_stay_as_they_are():
    images = pictures()
    before = images.clone()
    augmented(images, generator())
    assert torch.equal(images, before)


@pytest.mark.parametrize("size", [32, 64])
def test_images_stay_apart_where_their_labels_count(size, monkeypatch):
    images = pictures(size=size)
    apart = augmented(images, generator(), mixed=False)
    assert not torch.equal(apart, augmented(images, generator()))
    monkeypatch.setattr(augment, "MIXED", 0.0)
    monkeypatch.setattr(augment, "PASTED", 0.0)
    assert torch.equal(apart, augmented(images, generator()))


def test_small_images_are_flipped_and_shifted_by_whole_pixels(alone):
    images = pictures()
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
    seen = set()
    for image, found, wide in zip(images, augmented(images, generator()), padded, strict=True):
        places = [
            (flip, down, across)
            for flip in (False, True)
            for down in range(9)
            for across in range(9)
            if torch.equal(found, _cut(wide, flip, down, across))
        ]
        assert len(places) == 1, image.shape
        seen.update(places)
    assert {flip for flip, _, _ in seen} == {False, True}
    assert {down for _, down, _ in seen} == {across for _, _, across in seen} == set(range(9))


def _cut(wide, flip, down, across):
    part = wide[:, down : down + 32, across : across + 32]
    return part.flip(2) if flip else part


def test_large_images_are_cut_out_smoothly(alone):
    ramp = torch.linspace(0, 1, 96).expand(50, 1, 96, 96)  # from left to right
    found = augmented(ramp, generator())
    slopes = found.diff(dim=3)[:, 0, 20:70, 20:70].mean((1, 2)) * 95
    assert 0.59 < float(slopes.abs().min()) < 0.7
    assert 0.9 < float(slopes.abs().max()) < 1.01
    assert (slopes > 0).any()
    assert (slopes < 0).any()
    assert float(found.diff(dim=2).abs().max()) < 1e-5  # and nothing from top to bottom


def test_images_are_blended_and_pasted():
    shades = torch.arange(200.0).reshape(200, 1, 1, 1).expand(200, 1, 64, 64)
    found = augmented(shades, generator())
    levels = [(image * 100).round().unique() / 100 for image in found]
    alike = sum(len(level) == 1 and float(level[0]) == n for n, level in enumerate(levels))
    pasted = sum(len(level) > 1 for level in levels)
    assert 0.3 < alike / 200 < 0.7
    assert 0.15 < pasted / 200 < 0.45

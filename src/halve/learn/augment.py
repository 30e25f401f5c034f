"""Augmentation for distillation: the dense network labels any image, so images may be changed freely.

Flips and crops as in common training recipes for the image size, and mixtures of two images.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_SMALL = 64  # images below this size are shifted by whole pixels, others are cropped and resized
_SHIFT = 8  # shift by up to 1/8 of the size
_LEAST = 0.6  # relative side of the smallest crop
MIXED = 0.3  # share of images that are blended with another image
PASTED = 0.3  # share of images with a patch of another image


def augmented(images: Tensor, generator: torch.Generator, mixed: bool = True) -> Tensor:
    """Return augmented images of the same shape, (n, channels, height, width).

    Args:
        images: The images.
        generator: Random numbers, on the images' device.
        mixed: Also mix images with each other; labels would not hold any more. Default: True.

    >>> images = torch.rand(4, 3, 32, 32)
    >>> augmented(images, torch.Generator().manual_seed(0)).shape
    torch.Size([4, 3, 32, 32])
    """
    small = min(images.shape[2:]) < _SMALL
    images = _shifted(images, generator) if small else _cropped(images, generator)
    return _pasted(_blended(images, generator), generator) if mixed else images


def _uniform(images: Tensor, generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(len(images), *shape, device=images.device, generator=generator)


def _shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Randomly flipped and shifted by whole pixels, zero-padded."""
    count, channels, height, width = images.shape
    index = []
    for size in (height, width):
        most = size // _SHIFT
        start = (_uniform(images, generator, 1) * (2 * most + 1)).long().clamp_(max=2 * most) - most
        index.append(start + torch.arange(size, device=images.device))
    rows, columns = index
    columns = torch.where(_uniform(images, generator, 1) < 0.5, columns.flip(1), columns)
    inside = ((rows >= 0) & (rows < height))[:, None, :, None] & ((columns >= 0) & (columns < width))[:, None, None, :]
    rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    taken = images.gather(2, rows[:, None, :, None].expand(count, channels, height, width))
    return taken.gather(3, columns[:, None, None, :].expand(count, channels, height, width)) * inside


def _cropped(images: Tensor, generator: torch.Generator) -> Tensor:
    """Random crops, randomly flipped and resized to the original size."""
    side = _LEAST + (1 - _LEAST) * _uniform(images, generator)
    mirror = torch.where(_uniform(images, generator) < 0.5, -side, side)
    across, down = ((2 * _uniform(images, generator) - 1) * (1 - side) for _ in range(2))
    nothing = torch.zeros_like(side)
    rows = torch.stack([mirror, nothing, across, nothing, side, down], 1).reshape(-1, 2, 3)
    grid = F.affine_grid(rows.float(), list(images.shape), align_corners=False)
    cut = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    return cut.to(images.dtype)


def _blended(images: Tensor, generator: torch.Generator) -> Tensor:
    chosen = _uniform(images, generator, 1, 1, 1) < MIXED
    share = torch.where(chosen, _uniform(images, generator, 1, 1, 1), 0.0).to(images.dtype)
    return torch.lerp(images, images.flip(0), share)


def _pasted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Random square patches replaced by those of the next image."""
    chosen = _uniform(images, generator, 1, 1, 1) < PASTED
    half = 0.5 * _uniform(images, generator, 1, 1, 1).sqrt() * chosen
    inside = None
    for dim in (2, 3):
        size = images.shape[dim]
        places = ((torch.arange(size, device=images.device) + 0.5) / size).reshape(
            [size if d == dim else 1 for d in range(4)]
        )
        near = (places - _uniform(images, generator, 1, 1, 1)).abs() < half
        inside = near if inside is None else inside & near
    assert inside is not None
    return torch.where(inside, images.roll(1, 0), images)

"""Scenes for detection and segmentation, rendered on the fly: ten kinds of shapes on textured backgrounds.

Shapes differ in size, rotation, colour and texture, and hide one another. Boxes and classes of pixels are exact.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_MOST = 5  # shapes in an image
_VISIBLE = 0.4  # share of a shape that must be seen for it to count
_RADIUS = (0.07, 0.22)  # of a shape, relative to the image
_OUTLINE = 180  # points


class Shape(NamedTuple):
    """A disc or polygon with waves along its outline, stretched, with a hole."""

    sides: int = 0  # 0 for a disc
    waves: int = 0
    depth: float = 0.0  # of the waves
    stretch: float = 1.0
    hole: float = 0.0  # its radius, relative to the shape


SHAPES = {
    "disc": Shape(),
    "ring": Shape(hole=0.55),
    "ellipse": Shape(stretch=2.0),
    "triangle": Shape(sides=3),
    "square": Shape(sides=4),
    "frame": Shape(sides=4, hole=0.55),
    "diamond": Shape(sides=4, stretch=2.5),
    "star": Shape(waves=5, depth=0.35),
    "clover": Shape(waves=3, depth=0.35),
    "gear": Shape(waves=9, depth=0.15),
}


@dataclass(frozen=True)
class Scenes:
    """Rendered images.

    Args:
        images: (n, 3, size, size), from 0 to 1.
        pixels: The class of every pixel, (n, size, size); 0 is background, SHAPES follow.
        targets: Boxes (left, top, right, bottom) and labels of each image, as torchvision's detectors take them.
    """

    images: Tensor
    pixels: Tensor
    targets: list[dict[str, Tensor]]


def render(count: int, size: int, generator: torch.Generator) -> Scenes:
    """Render scenes on the generator's device."""
    device = generator.device

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator, device=device)

    side = (torch.arange(size, device=device) + 0.5) / size
    x, y = side.expand(size, size), side[:, None].expand(size, size)

    def stripes(strength: float) -> Tensor:
        angle, frequency, phase = (uniform(*ends, 1, 1, 1) for ends in ((0, math.pi), (10, 120), (0, 2 * math.pi)))
        waves = (frequency * (angle.cos() * x + angle.sin() * y) + phase).sin()
        return strength * uniform(0, 1, 1, 1, 1) * uniform(-1, 1, 3, 1, 1) * waves

    def patches() -> Tensor:
        grids = [(uniform(-1, 1, 3, cells, cells), strength) for cells, strength in ((3, 0.35), (12, 0.2), (48, 0.1))]
        return sum(
            (s * F.interpolate(grid, size=size, mode="bilinear", align_corners=False) for grid, s in grids),
            torch.zeros((), device=device),
        )

    images = uniform(0.2, 0.8, 3, 1, 1) + patches() + stripes(0.25)
    owners = torch.zeros(count, size, size, dtype=torch.long, device=device)  # which shape a pixel shows, from 1 on
    kinds = torch.randint(len(SHAPES), (count, _MOST), generator=generator, device=device)
    shown = torch.arange(_MOST, device=device) < torch.randint(
        1, _MOST + 1, (count, 1), generator=generator, device=device
    )
    table = torch.tensor(list(SHAPES.values()), device=device)
    areas, boxes = [], []
    for place in range(_MOST):
        shape = table[kinds[:, place]]
        center = uniform(0.08, 0.92, 2)
        radius = (uniform(*map(math.log, _RADIUS))).exp()
        turn = uniform(0, 2 * math.pi)
        inside = _inside(x, y, shape, center, radius, turn, size) * shown[:, place, None, None]
        fill = uniform(0, 1, 3, 1, 1) + stripes(0.4)
        images = torch.lerp(images, fill, inside[:, None])
        covered = inside > 0.5
        owners = torch.where(covered, place + 1, owners)
        areas.append(covered.sum((1, 2)))
        boxes.append(_box(shape, center, radius, turn) * size)
    noise = uniform(0, 0.1, 1, 1, 1) * torch.randn(images.shape, generator=generator, device=device)
    seen = torch.stack([(owners == place + 1).sum((1, 2)) for place in range(_MOST)], 1)
    counted = shown & (seen > 0) & (seen >= _VISIBLE * torch.stack(areas, 1))
    labels = torch.cat([torch.zeros_like(kinds[:, :1]), kinds + 1], 1)
    targets = [
        {"boxes": corners[chosen].clamp(0, size), "labels": kind[chosen] + 1}
        for corners, kind, chosen in zip(torch.stack(boxes, 1), kinds, counted, strict=True)
    ]
    return Scenes((images + noise).clamp(0, 1), labels.gather(1, owners.flatten(1)).reshape(owners.shape), targets)


def _outline(angle: Tensor, shape: Tensor) -> Tensor:
    """Distance of a shape's outline from its centre at an angle, before it is stretched."""
    sides, waves, depth = (shape[:, i].reshape(-1, *[1] * (angle.dim() - 1)) for i in range(3))
    sector = 2 * math.pi / sides.clamp(min=1)
    straight = (sector / 2).cos() / (angle % sector - sector / 2).cos()
    return torch.where(sides > 0, straight, 1 - depth + depth * (waves * angle).cos())


def _inside(x: Tensor, y: Tensor, shape: Tensor, center: Tensor, radius: Tensor, turn: Tensor, size: int) -> Tensor:
    """How far each pixel belongs to a shape, from 0 to 1."""
    (left, top), cos, sin = center[:, :, None, None].unbind(1), turn.cos()[:, None, None], turn.sin()[:, None, None]
    across, down = x - left, y - top
    across, down = cos * across + sin * down, (cos * down - sin * across) * shape[:, 3, None, None]
    distance = torch.hypot(across, down)
    outline = radius[:, None, None] * _outline(torch.atan2(down, across), shape)
    hole = outline * shape[:, 4, None, None]
    return ((torch.minimum(outline - distance, distance - hole + (hole == 0)) * size) + 0.5).clamp(0, 1)


def _box(shape: Tensor, center: Tensor, radius: Tensor, turn: Tensor) -> Tensor:
    angle = torch.linspace(0, 2 * math.pi, _OUTLINE + 1, device=shape.device).expand(len(shape), -1)
    distance = radius[:, None] * _outline(angle, shape)
    across, down = distance * angle.cos(), distance * angle.sin() / shape[:, 3:4]
    cos, sin = turn.cos()[:, None], turn.sin()[:, None]
    points = center[:, None] + torch.stack([cos * across - sin * down, sin * across + cos * down], 2)
    return torch.cat([points.amin(1), points.amax(1)], 1)


class Stream:
    """Batches of new scenes, the same ones in every pass; as many as wanted."""

    def __init__(self, batches: int, batch: int, size: int, seed: int, device: str, task: str) -> None:
        self.batches, self.batch, self.size, self.seed, self.device = batches, batch, size, seed, device
        self.task = task  # "detection" yields (list of images, targets), "segmentation" (images, classes of pixels)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[list[Tensor] | Tensor, list[dict[str, Tensor]] | Tensor]]:
        generator = torch.Generator(self.device).manual_seed(self.seed)
        for _ in range(self.batches):
            scenes = render(self.batch, self.size, generator)
            yield (
                (list(scenes.images), scenes.targets) if self.task == "detection" else (scenes.images, scenes.pixels)
            )

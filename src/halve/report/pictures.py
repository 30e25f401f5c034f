"""Images that the masked network sees differently, worst first, so that a person can judge whether it matters."""

import base64
import heapq
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from halve.agreement import Agreement, compare
from halve.batches import Forward, Progress, images_of, iterate
from halve.batches import run as output_of
from halve.binomial import interval
from halve.errors import ModelError, OptionError
from halve.markup import text
from halve.masks.apply import OnChanged, apply, check_dense
from halve.masks.mask import MaskSet
from halve.modules import clone, unwrapped
from halve.report import figures as f
from halve.report.agreed import Agreed

PICTURES = 24
_SIDE = 160  # pixels of a thumbnail
_TINY = 64  # images up to this size are shown pixel by pixel


@dataclass(frozen=True)
class Difference:
    """An image on which the networks differ.

    Args:
        place: Its place in the data.
        dense: The class that the dense network predicts.
        masked: The class that the masked network predicts.
        dense_probability: What the dense network gives to its class.
        masked_probability: What the masked network gives to its class.
        lost: Probability of the dense network's class that the masked network takes away.
        picture: The image as a data URI; None if the input is no image.
        tiny: Whether it is shown pixel by pixel.
    """

    place: int
    dense: int
    masked: int
    dense_probability: float
    masked_probability: float
    lost: float
    picture: str | None = None
    tiny: bool = False


@dataclass(frozen=True)
class Seen:
    """How many images were compared, and the worst of those that differ."""

    agreed: Agreed
    differing: int
    worst: Sequence[Difference]


@torch.no_grad()
def seen_differently(
    model: nn.Module,
    masks: MaskSet,
    data: Any,
    *,
    most: int = PICTURES,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    forward: Forward | None = None,
    progress: Progress = True,
    on_changed: OnChanged = "warn",
) -> Seen:
    """Run the dense and the masked model, and keep the images on which they differ most. See `halve.report`."""
    if isinstance(most, bool) or not isinstance(most, int) or most < 0:
        raise OptionError(f"pictures must be a non-negative integer, got {most!r}")
    model = unwrapped(model)
    check_dense(model, masks)
    masked, dense = apply(model, masks, on_changed=on_changed).eval(), clone(model).eval()
    found: list[tuple[float, int, Difference, Tensor | None]] = []  # a heap, the least bad one first
    counted, place, order = Agreement(), 0, itertools.count()
    for batch in iterate(data, progress, "images"):
        ours, theirs = output_of(masked, batch, forward).float().cpu(), output_of(dense, batch, forward).float().cpu()
        if ours.dim() != 2 or ours.shape[1] < 2 or ours.shape != theirs.shape:
            raise ModelError(
                f"pictures need class scores (images, classes), got outputs of shape {tuple(ours.shape)}; "
                f"pass forward= to reduce them, or no data="
            )
        counted += compare(ours, theirs)
        images = None if forward is not None else images_of(batch)
        for i in (ours.argmax(1) != theirs.argmax(1)).nonzero().flatten().tolist():
            one = _difference(place + i, ours[i].softmax(0), theirs[i].softmax(0))
            image = None if images is None else images[i].detach().float().cpu().clone()
            entry = (one.lost, -next(order), one, image)
            if len(found) < most:
                heapq.heappush(found, entry)
            elif found and entry > found[0]:
                heapq.heapreplace(found, entry)
        place += len(ours)
    worst = []
    for _, _, one, image in sorted(found, key=lambda entry: entry[:2], reverse=True):
        picture = None if image is None else drawn(image, mean, std)
        tiny = image is not None and max(image.shape[-2:]) <= _TINY
        worst.append(replace(one, picture=picture, tiny=tiny))
    share = Agreed(counted.share, interval(counted.same, counted.images), counted.images, kl=counted.kl)
    return Seen(share, counted.images - counted.same, worst)


def pictures_html(seen: Seen, names: Sequence[str] | None) -> str:
    """The images, with both predictions and their probabilities."""
    differing, images = seen.differing, seen.agreed.images
    if not differing:
        return f"<p>Both networks predict the same class for all {images:,} images.</p>"
    shown = f"the {len(seen.worst)} worst" if len(seen.worst) < differing else "worst first"
    intro = (
        f"{f.plural(differing, 'image')} of {images:,} ({f.percent(differing / images)}) get another class from the "
        f"masked network; {shown}, by the probability that the dense network's class loses."
    )
    items = "".join(_item(one, names) for one in seen.worst)
    return f'<p>{text(intro)}</p><ol class="pictures">{items}</ol>'


def _item(one: Difference, names: Sequence[str] | None) -> str:
    dense, masked = (_name(index, names) for index in (one.dense, one.masked))
    what = f"image {one.place}: dense {dense}, masked {masked}"
    image = ""
    if one.picture is not None:
        tiny = ' class="tiny"' if one.tiny else ""
        image = f'<img{tiny} src="{one.picture}" alt="{text(what)}" width="160" height="160">'
    rows = "".join(
        f'<dt>{who}</dt><dd class="{who}">{text(name)}</dd>'
        f'<dd class="share" data-value="{share}">{f.percent(share)}</dd>'
        for who, name, share in (
            ("dense", dense, one.dense_probability),
            ("masked", masked, one.masked_probability),
        )
    )
    return f'<li data-image="{one.place}">{image}<dl>{rows}</dl></li>'


def _name(index: int, names: Sequence[str] | None) -> str:
    return names[index] if names is not None and index < len(names) else f"class {index}"


def _difference(place: int, ours: Tensor, theirs: Tensor) -> Difference:
    dense, masked = int(theirs.argmax()), int(ours.argmax())
    lost = float(theirs[dense] - ours[dense])
    return Difference(place, dense, masked, float(theirs[dense]), float(ours[masked]), lost)


def drawn(image: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None) -> str | None:
    """The image as a data URI, in its own colours if its normalisation is known, otherwise from its least value to its
    largest. None for an input that is not an image of 1 or 3 channels."""
    if image.dim() != 3 or image.shape[0] not in (1, 3):
        return None
    if mean is not None and std is not None and len(mean) == len(std) == image.shape[0]:
        image = image * torch.tensor(std).view(-1, 1, 1) + torch.tensor(mean).view(-1, 1, 1)
    elif image.min() < 0 or image.max() > 1:
        image = (image - image.min()) / (image.max() - image.min()).clamp_min(1e-12)
    from PIL import Image

    pixels = (255 * image.nan_to_num().clamp(0, 1)).round().byte().permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    buffer, kind = io.BytesIO(), "png"
    if max(picture.size) > _TINY:
        picture.thumbnail((_SIDE, _SIDE))
        picture.save(buffer, "JPEG", quality=85)
        kind = "jpeg"
    else:
        picture.save(buffer, "PNG")
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"

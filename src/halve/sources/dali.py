"""Images decoded by NVIDIA DALI, on the CPU or a GPU: the same batches as those of `data`, up to rounding.

A DataLoader samples and reads files, so that order, labels and held-back images do not depend on who decodes. DALI
decodes JPEG, resizes, crops and normalises. Other formats and colour modes are decoded by Pillow and resized by DALI.
Sizes and crops are computed here as torchvision does, because DALI rounds them differently.
"""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torch.utils.dlpack import from_dlpack

from halve.errors import DataError, OptionError, SourceError, first_line
from halve.sources.images import Picture, as_rgb, different_sizes, reading
from halve.sources.preprocessing import Preprocessing

_CROPS = ("CenterCrop", "RandomCrop")
_DECODED = ("RGB", "L")  # colour modes of JPEG files that DALI decodes as Pillow does


@dataclass(frozen=True)
class Steps:
    """What preprocessing does to an image.

    Args:
        resize: Length of the shorter side after resizing (None: not resized).
        size: Side of the square that is cropped (None: not cropped).
        mean: Mean of each channel, after scaling to 0..1.
        std: Standard deviation of each channel.
        interpolation: "bilinear" or "bicubic", antialiased.
        random: Whether crops are random, by torch's random numbers, instead of from the centre.
    """

    resize: int | None
    size: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    random: bool = False

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after resizing, rounded as torchvision does.

        >>> Steps(232, 224, (0.5,) * 3, (0.5,) * 3).resized(375, 500)
        (232, 309)
        """
        if self.resize is None:
            return height, width
        longer = int(self.resize * max(height, width) / min(height, width))
        return (self.resize, longer) if height <= width else (longer, self.resize)

    def start(self, height: int, width: int) -> tuple[int, int]:
        """Where the crop starts; negative if the image is smaller and padded."""
        size = self.size
        if size is None:
            return 0, 0
        if self.random and min(height, width) >= size:
            if (height, width) == (size, size):
                return 0, 0
            down, right = (int(torch.randint(0, length - size + 1, (1,))) for length in (height, width))
            return down, right
        down, right = (
            round((length - size) / 2) if length >= size else -((size - length) // 2) for length in (height, width)
        )
        return down, right


def steps_of(preprocess: Any) -> Steps:
    """The steps of our own preprocessing, torchvision's presets for classification, or a `Compose` of such steps.

    Raises `OptionError` for any other: DALI cannot run Python functions on images.

    >>> from torchvision.models import ResNet50_Weights
    >>> steps = steps_of(ResNet50_Weights.IMAGENET1K_V1.transforms())
    >>> steps.resize, steps.size, steps.interpolation
    (256, 224, 'bilinear')
    """
    from torchvision import transforms as T
    from torchvision.transforms._presets import ImageClassification

    if isinstance(preprocess, Preprocessing):
        return Steps(preprocess.resize or preprocess.size, preprocess.size, preprocess.mean, preprocess.std)
    found: dict[str, Any] = {"resize": None, "size": None}
    if isinstance(preprocess, ImageClassification):
        given = [preprocess.resize_size, preprocess.crop_size]
        found |= {"resize": _side(given[0], preprocess), "size": _side(given[1], preprocess)}
        found |= {"mean": preprocess.mean, "std": preprocess.std, "interpolation": preprocess.interpolation.value}
    for step in getattr(preprocess, "transforms", ()):
        if isinstance(step, T.Resize) and "mean" not in found and found["size"] is None:
            found |= {"resize": _side(step.size, preprocess), "interpolation": step.interpolation.value}
        elif isinstance(step, T.CenterCrop) and "mean" not in found:
            found["size"] = _side(step.size, preprocess)
        elif isinstance(step, T.RandomCrop) and "mean" not in found and not step.padding and not step.pad_if_needed:
            found |= {"size": _side(step.size, preprocess), "random": True}
        elif isinstance(step, T.Normalize):
            found |= {"mean": step.mean, "std": step.std}
        elif type(step).__name__ not in ("ToTensor", "MaybeToTensor"):
            raise _unknown(preprocess, f"its step {type(step).__name__}")
    if "mean" not in found or found.get("interpolation", "bilinear") not in ("bilinear", "bicubic"):
        raise _unknown(preprocess, type(preprocess).__name__)
    mean, std = (tuple(map(float, found.pop(key))) for key in ("mean", "std"))
    return Steps(mean=mean, std=std, **found)


def _side(size: Any, preprocess: Any) -> int:
    sides = [size] if isinstance(size, int) else list(size)
    if len(set(sides)) != 1 or (len(sides) == 2 and not _crops(preprocess, sides)):
        raise _unknown(preprocess, f"the size {size}")
    return int(sides[0])


def _crops(preprocess: Any, sides: Sequence[int]) -> bool:
    """Whether a square is that of a crop: resizing to a square would change the proportions."""
    crops = [getattr(preprocess, "crop_size", None)]
    crops += [step.size for step in getattr(preprocess, "transforms", ()) if type(step).__name__ in _CROPS]
    return any(list(crop) == list(sides) for crop in crops if isinstance(crop, list | tuple))


def _unknown(preprocess: Any, what: str) -> OptionError:
    return OptionError(
        f"DALI cannot do the model's preprocessing: it knows resizing the shorter side, centre and random crops and "
        f"normalisation, not {what}; pass --size, or use --loader pillow"
    )


@dataclass(frozen=True)
class Encoded:
    """An encoded picture with its label, its size before and after resizing, and where it is cropped."""

    content: np.ndarray[Any, np.dtype[np.uint8]]
    label: int | None
    where: str
    size: tuple[int, int]  # height and width
    resized: tuple[int, int]
    start: tuple[int, int]  # of the crop, down and right


class EncodedPictures(Dataset[Encoded]):
    """A dataset of pictures that are read, but not decoded."""

    def __init__(self, pictures: Sequence[Picture], steps: Steps) -> None:
        self.pictures, self.steps = list(pictures), steps

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Encoded:
        picture = self.pictures[index]
        with reading(picture):
            content = picture.read()
            with Image.open(io.BytesIO(content)) as image:  # reads the header only
                width, height = image.size
                if image.format != "JPEG" or image.mode not in _DECODED:
                    file = io.BytesIO()
                    as_rgb(image).save(file, "PPM")
                    content = file.getvalue()
        resized = self.steps.resized(height, width)
        start = self.steps.start(*resized)
        return Encoded(np.frombuffer(content, np.uint8), picture.label, picture.where, (height, width), resized, start)


class Decoder:
    """Decodes batches of encoded pictures with DALI; every call has its own pipeline.

    Args:
        steps: What to do with each image.
        batch_size: Images per batch, at most.
        threads: CPU threads that decode.
        device: A CUDA device decodes JPEG and holds the batches; the CPU otherwise.
        lists: Batches are lists of images of any sizes, without labels.
    """

    def __init__(self, steps: Steps, batch_size: int, threads: int, device: torch.device, lists: bool = False) -> None:
        self.steps, self.batch_size, self.threads = steps, batch_size, max(1, threads)
        self.device, self.lists = device, lists
        _dali()

    def __call__(self, batches: Iterable[Sequence[Encoded]]) -> Iterator[Any]:
        """Decode batches in order, the next one while the caller uses the one before."""
        pipeline, waiting = self._pipeline(), None
        for batch in batches:
            result = None if waiting is None else self._result(pipeline, waiting)
            self._feed(pipeline, batch)
            if result is not None:
                yield result
            waiting = batch
        if waiting is not None:
            yield self._result(pipeline, waiting)

    def _pipeline(self) -> Any:
        dali = _dali()
        fn, types, steps = dali.fn, dali.types, self.steps
        gpu = self.device.type == "cuda"
        device = (self.device.index if self.device.index is not None else torch.cuda.current_device()) if gpu else None
        pipeline = dali.Pipeline(self.batch_size, self.threads, device, prefetch_queue_depth=1)
        with pipeline:
            encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
            # Our own loader ignores the orientation in EXIF too.
            images = fn.decoders.image(
                encoded,
                device="mixed" if gpu else "cpu",
                output_type=types.RGB,
                adjust_orientation=False,
                jpeg_fancy_upsampling=True,
            )
            if steps.resize is not None:
                filters = {"bilinear": types.INTERP_TRIANGULAR, "bicubic": types.INTERP_CUBIC}
                sizes = fn.external_source(name="sizes", dtype=types.FLOAT, ndim=1)
                images = fn.resize(
                    images, size=sizes, interp_type=filters[steps.interpolation], antialias=True, dtype=types.UINT8
                )
            if steps.size is not None:
                starts = fn.external_source(name="starts", dtype=types.INT32, ndim=1)
                shape = [steps.size, steps.size]
                images = fn.slice(
                    images, start=starts, shape=shape, axes=[0, 1], out_of_bounds_policy="pad", fill_values=0
                )
            scaled = {name: [255 * value for value in getattr(steps, name)] for name in ("mean", "std")}
            images = fn.crop_mirror_normalize(images, dtype=types.FLOAT, output_layout="CHW", **scaled)
            pipeline.set_outputs(images)
        pipeline.build()
        return pipeline

    def _feed(self, pipeline: Any, batch: Sequence[Encoded]) -> None:
        pipeline.feed_input("encoded", [item.content for item in batch])
        if self.steps.resize is not None:
            pipeline.feed_input("sizes", [np.array(item.resized, np.float32) for item in batch])
        if self.steps.size is not None:
            pipeline.feed_input("starts", [np.array(item.start, np.int32) for item in batch])
        pipeline.schedule_run()

    def _result(self, pipeline: Any, batch: Sequence[Encoded]) -> Any:
        try:
            (decoded,) = pipeline.share_outputs()
        except RuntimeError as error:
            raise _failure(batch, error) from error
        if self.lists:
            images: Any = [from_dlpack(decoded[index]).clone() for index in range(len(batch))]
        else:
            if not decoded.is_dense_tensor():
                raise DataError(different_sizes({(3, *item.resized) for item in batch}))
            images = from_dlpack(decoded.as_tensor()).clone()  # DALI reuses its memory
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # the copy is queued: DALI must not write before it
        pipeline.release_outputs()
        if self.lists or batch[0].label is None:
            return images
        return [images, torch.tensor([item.label for item in batch])]


def _failure(batch: Sequence[Encoded], error: RuntimeError) -> DataError:
    number = re.search(r"sample #(\d+)", str(error))
    if number is not None and int(number[1]) < len(batch):
        return DataError(f"{batch[int(number[1])].where} is not a readable image: DALI could not decode it")
    return DataError(f"DALI failed on a batch that starts with {batch[0].where}: {first_line(error)}")


def _dali() -> Any:
    try:
        import nvidia.dali
        import nvidia.dali.fn
        import nvidia.dali.types
    except ImportError as error:
        raise SourceError(
            f"--loader dali needs NVIDIA DALI: pip install 'halve[dali]' ({first_line(error)})"
        ) from error
    return nvidia.dali

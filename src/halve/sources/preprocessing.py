"""How an image becomes a tensor."""

from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from halve.errors import OptionError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preprocessing:
    """Turn an image into a normalised tensor, optionally resized and centre-cropped.

    Args:
        size: Crop the centre square of this many pixels (default: no crop).
        resize: First resize the shorter side to this many pixels (default: `size`).
        mean: Mean of each channel, after scaling to 0..1. Default: ImageNet's.
        std: Standard deviation of each channel. Default: ImageNet's.
    """

    size: int | None = None
    resize: int | None = None
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def __post_init__(self) -> None:
        if self.resize is not None and self.size is None:
            raise OptionError("--resize needs --size, the square that is cropped from the resized image")
        if any(value is not None and value < 1 for value in (self.size, self.resize)):
            raise OptionError(f"--size and --resize must be at least 1 pixel, got {self.size} and {self.resize}")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise OptionError(
                f"mean and std must be three numbers each, and std positive; got {self.mean} and {self.std}"
            )

    def __call__(self, image: Image.Image) -> Tensor:
        from torchvision.transforms import functional as TF

        if self.size is not None:
            image = TF.center_crop(TF.resize(image, self.resize or self.size), [self.size, self.size])
        tensor: Tensor = TF.normalize(TF.to_tensor(image), self.mean, self.std)
        return tensor

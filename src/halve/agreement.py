"""Compare the class scores of two models: top-1 agreement and KL divergence."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Agreement:
    """Counts over some images. Two of them add up.

    >>> import torch
    >>> dense = torch.tensor([[3.0, 1.0], [0.0, 2.0]])
    >>> compare(dense, dense).share, compare(dense, dense).kl
    (1.0, 0.0)
    >>> (compare(dense, dense) + compare(dense.flip(1), dense)).share
    0.5
    """

    images: int = 0
    same: int = 0
    kl_sum: float = 0.0

    @property
    def share(self) -> float:
        """Share of images with the same top-1 class."""
        return self.same / self.images

    @property
    def kl(self) -> float:
        """Mean KL divergence from the reference, in nats; NaN if a score is NaN."""
        mean = self.kl_sum / self.images
        return 0.0 if mean < 0 else mean  # rounding

    def __add__(self, other: "Agreement") -> "Agreement":
        return Agreement(self.images + other.images, self.same + other.same, self.kl_sum + other.kl_sum)


def compare(scores: Tensor, reference: Tensor) -> Agreement:
    """Compare class scores of shape (images, classes) with those of a reference model."""
    return Agreement(len(scores), correct(scores, reference.argmax(1)), float(kl_divergence(scores, reference).sum()))


def correct(scores: Tensor, labels: Tensor) -> int:
    """Number of images whose top-1 class is the label. An image with a NaN has no top-1 class."""
    return int(((scores.argmax(1) == labels) & ~scores.isnan().any(1)).sum())


def kl_divergence(scores: Tensor, reference: Tensor) -> Tensor:
    """KL divergence from the reference's class probabilities, for each image; computed in double precision.

    >>> import torch
    >>> kl_divergence(torch.zeros(1, 2), torch.zeros(1, 2))
    tensor([0.], dtype=torch.float64)
    """
    ours, theirs = scores.double().log_softmax(1), reference.double().log_softmax(1)
    return (theirs.exp() * (theirs - ours)).sum(1)

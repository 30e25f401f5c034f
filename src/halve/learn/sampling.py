"""Sample masks from logits. All random numbers of learning derive from a seed, a step and a rank."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from halve.masks.layout import Layout
from halve.masks.mask import Mask, wasteful
from halve.masks.pattern import Pattern
from halve.select.select import Choice

Final = Literal["argmax", "sample"]
FORBIDDEN = -1e4  # added to the logits, not stored in them, where weight decay would shrink it
_STEP, _RANK = 1_000_003, 7_919  # keep the seeds of steps and ranks apart
_TINY = 1e-30  # keeps the noise finite, which may be multiplied by zero


@dataclass(frozen=True)
class Family:
    """The layers of one pattern, whose blocks are concatenated."""

    pattern: Pattern
    names: tuple[str, ...]
    layouts: tuple[Layout, ...]

    @property
    def sizes(self) -> list[int]:
        """Number of blocks of each layer."""
        return [layout.rows * layout.blocks for layout in self.layouts]


class Sampler(nn.Module):
    """Owns the logits of all layers, one flat parameter, and samples masked weights from them.

    The parameter may hold more numbers after the logits, which others read: `rest`.

    >>> choice = Choice("fc", "Linear", (2, 4), Pattern("2:4"), Layout("linear", (2, 4), 4), "")
    >>> sampler = Sampler([choice], {"fc": torch.ones(2, 4)}, {"fc": torch.zeros(2, 4)}, 1.0)
    >>> weight = sampler.sample(temperature=1.0, seed=0, step=0)["fc"]
    >>> (weight != 0).sum(1).tolist()
    [2, 2]
    """

    def __init__(
        self, choices: Sequence[Choice], weights: Mapping[str, Tensor], scores: Mapping[str, Tensor], alpha: float
    ) -> None:
        """Initialize the logits from `scores`, which are not negative, with sharpness `alpha`."""
        super().__init__()
        self.contiguous = False  # otherwise the layout of the blocks: channels last for images
        self.families = _families(choices)
        parts = []
        for index, family in enumerate(self.families):
            layers = list(zip(family.names, family.layouts, strict=True))
            blocks = torch.cat([layout.to_blocks(weights[name].float()).flatten(0, 1) for name, layout in layers])
            score = torch.cat([layout.to_blocks(scores[name].float()).flatten(0, 1) for name, layout in layers])
            self.register_buffer(f"weights{index}", blocks, persistent=False)
            self.register_buffer(f"table{index}", family.pattern.table().float().to(blocks.device), persistent=False)
            self.register_buffer(f"forbidden{index}", self._forbidden(index), persistent=False)
            for number, layout in enumerate(family.layouts):
                if layout.channel_order is not None:  # a recorded step cannot create it
                    there, back = layout.orders(blocks.device)
                    self.register_buffer(f"order{index}_{number}", there, persistent=False)
                    self.register_buffer(f"inverse{index}_{number}", back, persistent=False)
            parts.append((alpha * relative(score) @ self._table(index).T).flatten())
        self.logits = nn.Parameter(torch.cat(parts))

    @torch.no_grad()
    def favour_(self, scores: Mapping[str, Tensor], lead: float) -> None:
        """Put the best code of each block, by these scores, ahead of all others by `lead`."""
        for index, (family, logits) in enumerate(zip(self.families, self.split(self.logits), strict=True)):
            layers = zip(family.names, family.layouts, strict=True)
            score = torch.cat([layout.to_blocks(scores[name].float()).flatten(0, 1) for name, layout in layers])
            forbidden = self.get_buffer(f"forbidden{index}")
            best = (score @ self._table(index).T + (forbidden if forbidden.numel() else 0)).argmax(1, keepdim=True)
            logits.scatter_(1, best, logits.amax(1, keepdim=True) + lead)

    def extend_(self, size: int) -> None:
        """Learn more numbers beside the logits, which start at zero."""
        self.logits = nn.Parameter(torch.cat([self.logits.detach(), self.logits.new_zeros(size)]))

    @property
    def rest(self) -> Tensor:
        """What is learned beside the logits."""
        return self.logits[self._size() :]

    def sample(
        self, *, temperature: float, seed: int, step: int, rank: int = 0, hard: bool = True, noise: float = 1.0
    ) -> dict[str, Tensor]:
        """Return masked weights by layer name: one Gumbel-Softmax sample, differentiable with respect to the logits."""
        return self.masked(self.draw(seed, step, rank), temperature, noise, hard)

    def draw(self, seed: int, step: int, rank: int = 0) -> list[Tensor]:
        """Draw the Gumbel noise of one sample, for each family."""
        generator = generator_of(self.logits.device, seed, step, rank)
        noises = [exponential(logits, generator) for logits in self.split(self.logits.detach())]
        return [noise.clamp_(min=_TINY).log_().neg_() for noise in noises]

    def masked(
        self, gumbel: Sequence[Tensor], temperature: float | Tensor, noise: float | Tensor, hard: bool = True
    ) -> dict[str, Tensor]:
        """Return masked weights for given Gumbel noise, scaled by `noise`; zero selects the most likely codes."""
        result: dict[str, Tensor] = {}
        for index, logits in enumerate(self.legal_logits()):
            scaled = gumbel[index] * noise
            if hard:
                kept: Tensor = _HardSample.apply(logits, scaled, self._table(index), temperature)
            else:
                kept = ((logits + scaled) / temperature).softmax(1) @ self._table(index)
            result |= self._layers(index, kept * self._weights(index))
        return result

    @torch.no_grad()
    def masks(self, final: Final = "argmax", seed: int = 0) -> dict[str, Mask]:
        """Return the final masks: the most likely code of each block, or one last sample."""
        result = {}
        generator = torch.Generator(self.logits.device).manual_seed(seed)
        for family, logits in zip(self.families, self.legal_logits(), strict=True):
            if final == "sample":
                logits = logits - exponential(logits, generator).log_()
            codes = logits.argmax(1)
            for name, layout, part in zip(family.names, family.layouts, codes.split(family.sizes), strict=True):
                result[name] = Mask(family.pattern, layout, part.reshape(layout.rows, layout.blocks))
        return result

    @torch.no_grad()
    def codes(self) -> Tensor:
        """Return the most likely code of every block."""
        return torch.cat([logits.argmax(1) for logits in self.legal_logits()])

    @torch.no_grad()
    def entropy(self) -> float:
        """Return the mean entropy of the codes relative to its maximum, from 0 (decided) to 1."""
        total, blocks = 0.0, 0
        for family, logits in zip(self.families, self.legal_logits(), strict=True):
            if family.pattern.count > 1:
                total += float(_entropies(logits).sum()) / math.log(family.pattern.count)
            blocks += len(logits)
        return total / max(blocks, 1)

    def legal_logits(self) -> list[Tensor]:
        """Return the logits of each family, with codes that keep a virtual column far below all others."""
        offsets = [self.get_buffer(f"forbidden{index}") for index in range(len(self.families))]
        parts = zip(self.split(self.logits), offsets, strict=True)
        return [logits + offset if offset.numel() else logits for logits, offset in parts]

    def split(self, flat: Tensor) -> list[Tensor]:
        """Split a flat tensor such as the logits into one (blocks, codes) view per family."""
        sizes = [(sum(family.sizes), family.pattern.count) for family in self.families]
        parts = torch.split(flat[: self._size()], [blocks * count for blocks, count in sizes])
        return [part.reshape(size) for part, size in zip(parts, sizes, strict=True)]

    def _size(self) -> int:
        """Number of logits."""
        return sum(sum(family.sizes) * family.pattern.count for family in self.families)

    def _layers(self, index: int, blocks: Tensor) -> dict[str, Tensor]:
        family = self.families[index]
        parts = torch.split(blocks, family.sizes)
        result = {}
        for number, (name, layout, part) in enumerate(zip(family.names, family.layouts, parts, strict=True)):
            orders = None
            if layout.channel_order is not None:
                orders = self.get_buffer(f"order{index}_{number}"), self.get_buffer(f"inverse{index}_{number}")
            weight = layout.from_blocks(part.reshape(layout.rows, layout.blocks, layout.block), orders)
            if weight.dim() == 3 or (self.contiguous and weight.dim() > 3):
                weight = weight.clone(memory_format=torch.contiguous_format)  # unlike `contiguous`, also 1x1 kernels
            result[name] = weight
        return result

    def _forbidden(self, index: int) -> Tensor:
        """Offsets of the logits, (blocks, codes); empty if no layer is padded."""
        family, table = self.families[index], self._table(index)
        if not any(layout.virtual for layout in family.layouts):
            return table.new_empty(0)
        rows = [wasteful(family.pattern, layout).to(table).repeat(layout.rows, 1) for layout in family.layouts]
        return FORBIDDEN * torch.cat(rows)

    def _weights(self, index: int) -> Tensor:
        return self.get_buffer(f"weights{index}")

    def _table(self, index: int) -> Tensor:
        return self.get_buffer(f"table{index}")


def generator_of(device: torch.device, seed: int, step: int, rank: int = 0) -> torch.Generator:
    """Return the generator of all random numbers of one step on one rank."""
    return torch.Generator(device).manual_seed(seed + _STEP * (step + 1) + _RANK * rank)


def exponential(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw exponential numbers, as many as there are in a tensor."""
    found = torch.empty_like(like)
    if found.is_cuda:
        return found.exponential_(generator=generator)
    # `exponential_` takes several times as long. A uniform number may be zero, which stands for all below 2**-24.
    return found.uniform_(generator=generator).neg_().log1p_().neg_().clamp_(min=2**-25)


def relative(scores: Tensor) -> Tensor:
    """Divide scores (blocks, M) by the mean magnitude of their block; a block of zeros stays zero."""
    return scores / scores.abs().mean(1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


def glorot(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw normal numbers with Glorot's deviation for (blocks, codes), as the paper initializes its logits."""
    return torch.randn(shape, generator=generator) * math.sqrt(2.0 / sum(shape))


class _HardSample(torch.autograd.Function):
    """Gumbel-Max sample in the forward pass, gradient of Gumbel-Softmax in the backward pass (straight-through)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, noise: Tensor, table: Tensor, temperature: float | Tensor) -> Tensor:
        noisy = noise.add_(logits)
        kept = table.index_select(0, noisy.argmax(1))
        ctx.save_for_backward(_softmax_(noisy.div_(temperature)), table)
        ctx.temperature = temperature
        return kept

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        soft, table = ctx.saved_tensors
        pull = (grads[0] @ table.T).mul_(soft)
        return pull.addcmul_(soft, pull.sum(1, keepdim=True), value=-1).div_(ctx.temperature), None, None, None


def _softmax_(logits: Tensor) -> Tensor:
    """The softmax over the codes of each block, which may overwrite the logits."""
    if logits.is_cuda:
        return logits.softmax(1)
    shares = logits.sub_(logits.amax(1, keepdim=True)).exp_()  # over so few codes `softmax` takes several times as long
    return shares.div_(shares.sum(1, keepdim=True))


def _entropies(logits: Tensor) -> Tensor:
    """The entropy of the codes of each block."""
    below = logits - logits.amax(1, keepdim=True)
    parts = below.exp()
    total = parts.sum(1)
    return total.log() - (parts * below).sum(1) / total


def _families(choices: Sequence[Choice]) -> tuple[Family, ...]:
    grouped: dict[Pattern, list[Choice]] = {}
    for choice in choices:
        assert choice.pattern is not None
        grouped.setdefault(choice.pattern, []).append(choice)
    return tuple(
        Family(pattern, tuple(c.name for c in members), tuple(c.layout for c in members if c.layout is not None))
        for pattern, members in grouped.items()
    )

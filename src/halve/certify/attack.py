"""Attacks: look for inputs, updates and masks that change a prediction.

What an attack finds is a fact, and what it does not find proves nothing. Attacks show how tight bounds are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from halve.certify.rounding import Interval
from halve.masks.mask import MaskSet
from halve.modules import weight_name

_STEPS, _STARTS = 20, 2
_MOST_BLOCKS = 4096  # of a layer, at a time


def margin_of(scores: Tensor, label: int) -> Tensor:
    """How far the score of a class is above all others."""
    others = torch.cat([scores[..., :label], scores[..., label + 1 :]], -1)
    return scores[..., label] - others.max(-1).values


def attack_input(
    model: nn.Module, box: Interval, label: int, steps: int = _STEPS, starts: int = _STARTS, seed: int = 0
) -> float:
    """The smallest margin found among the inputs in a box, by projected gradient descent.

    Args:
        model: The network, in float64.
        box: The inputs, (1, ...).
        label: The class.
        steps: Steps of the descent. Default: 20.
        starts: Where it starts: the center, and random inputs. Default: 2.
        seed: Seed of the random inputs. Default: 0.
    """
    generator = torch.Generator().manual_seed(seed)
    low, high, least = box.low, box.high, float("inf")
    for start in range(starts):
        share = torch.rand(low.shape, generator=generator, dtype=low.dtype).to(low.device) if start else 0.5
        x = low + (high - low) * share
        for step in range(steps + 1):
            x = x.detach().requires_grad_(True)
            with torch.enable_grad():
                margin = margin_of(model(x)[0], label)
            least = min(least, float(margin.detach()))
            if step == steps:
                break
            [gradient] = torch.autograd.grad(margin, x)
            x = x.detach() - (high - low) / 2 * (1.0 if step == 0 else 0.3) * gradient.sign()
            x = torch.minimum(torch.maximum(x, low), high)
    return least


def attack_weights(
    model: nn.Module, image: Tensor, label: int, radii: Mapping[str, Tensor], steps: int = _STEPS
) -> float:
    """The smallest margin found among updates of the weights, by projected gradient descent.

    Args:
        model: The network, in float64.
        image: The input, without a batch dimension.
        label: The class.
        radii: How far each weight may move, by layer.
        steps: Steps of the descent. Default: 20.
    """
    return min(
        margin for margin, _ in _updates(lambda moved: margin_of(_moved(model, moved, image), label), radii, steps)
    )


def attack_agreement(
    masked: nn.Module, dense: nn.Module, image: Tensor, radii: Mapping[str, Tensor], masks: MaskSet
) -> tuple[bool, bool]:
    """Whether updates were found that change the class of either network, and after which their classes differ.

    Both networks get the same update; what the masks drop stays 0 in the masked one. Each network is attacked in turn.

    Args:
        masked: The masked network, in float64.
        dense: The dense network, in float64.
        image: The input, without a batch dimension, for which both predict the same class.
        radii: How far each weight of the dense network may move, by layer.
        masks: The masks.
    """
    label, flips, differs = int(dense(image[None]).argmax()), False, False
    for scores in _updates_of_both(masked, dense, image, radii, masks, (0.0,), _STEPS):
        classes = [int(one.argmax()) for one in scores]
        flips |= classes != [label, label]
        differs |= classes[0] != classes[1]
    return flips, differs


def attack_lead(
    masked: nn.Module, dense: nn.Module, image: Tensor, radii: Mapping[str, Tensor], masks: MaskSet, steps: int = _STEPS
) -> float | None:
    """The largest margin of the dense network found after updates for which the masked one predicts another class.

    None if no such update was found. Both networks get the same update, as in `attack_agreement`.

    Args:
        masked: The masked network, in float64.
        dense: The dense network, in float64.
        image: The input, without a batch dimension.
        radii: How far each weight of the dense network may move, by layer.
        masks: The masks.
        steps: Steps of each descent. Default: 20.
    """
    most = None
    for ours, theirs in _updates_of_both(masked, dense, image, radii, masks, (0.0, 0.5, 1.0), steps):
        label = int(theirs.argmax())
        if int(ours.argmax()) != label:
            lead = float(margin_of(theirs, label))
            most = lead if most is None else max(most, lead)
    return most


_Scores = tuple[Tensor, Tensor]  # of the masked and of the dense network


def _updates_of_both(
    masked: nn.Module,
    dense: nn.Module,
    image: Tensor,
    radii: Mapping[str, Tensor],
    masks: MaskSet,
    weights: Sequence[float],
    steps: int,
) -> Iterator[_Scores]:
    """The scores of both networks after updates that flip one of them, or come close.

    Each network is attacked in turn: its margin descends, minus that of the other one times each of some weights.
    """
    kept = {
        name: masks[name].kept().to(image.device) if name in masks else torch.ones_like(r) for name, r in radii.items()
    }
    label = int(dense(image[None]).argmax())

    def scores(moved: Mapping[str, Tensor]) -> _Scores:
        both = {name: change * kept[name] for name, change in moved.items()}
        return _moved(masked, both, image), _moved(dense, moved, image)

    for attacked in (0, 1):
        for weight in weights:

            def objective(moved: Mapping[str, Tensor], attacked: int = attacked, weight: float = weight) -> Tensor:
                margins = [margin_of(one, label) for one in scores(moved)]
                return margins[attacked] - weight * margins[1 - attacked]

            for _, moved in _updates(objective, radii, steps):
                with torch.no_grad():
                    yield scores(moved)


def _moved(model: nn.Module, moved: Mapping[str, Tensor], image: Tensor) -> Tensor:
    """The scores of a network whose weights have moved."""
    parameters = dict(model.named_parameters())
    weights = {weight_name(name): parameters[weight_name(name)].detach() + change for name, change in moved.items()}
    return torch.func.functional_call(model, weights, (image[None],))[0]  # type: ignore[no-any-return]


def _updates(
    objective: Callable[[Mapping[str, Tensor]], Tensor], radii: Mapping[str, Tensor], steps: int
) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """The values of an objective, and the updates, that projected gradient descent comes by."""
    moved = {name: torch.zeros_like(radius) for name, radius in radii.items()}
    for step in range(steps + 1):
        leaves = {name: change.requires_grad_(True) for name, change in moved.items()}
        with torch.enable_grad():
            value = objective(leaves)
        found = {name: change.detach() for name, change in leaves.items()}
        yield float(value.detach()), found
        if step == steps:
            return
        gradients = torch.autograd.grad(value, list(leaves.values()))
        moved = {}
        for (name, radius), gradient in zip(radii.items(), gradients, strict=True):
            change = found[name] - radius * (1.0 if step == 0 else 0.3) * gradient.sign()
            moved[name] = torch.minimum(torch.maximum(change, -radius), radius)


def attack_masks(model: nn.Module, dense: nn.Module, masks: MaskSet, image: Tensor, label: int) -> int | None:
    """The smallest number of changed blocks found, over all layers, that changes the class; None if all were changed.

    Blocks are changed in the order of what that takes off the margin, to first order, a few at a time and more and more
    of them. In each, the best legal choice is made.

    Args:
        model: The masked network, in float64.
        dense: The dense network, in float64.
        masks: The masks.
        image: The input, without a batch dimension.
        label: The class.
    """
    weights = {name: dense.get_submodule(name).weight.detach() for name in masks}  # type: ignore[operator]
    first = {name: mask.layout.to_blocks(mask.kept()).to(image.device) for name, mask in masks.items()}
    kept = dict(first)

    def run(now: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        """The margin, and its derivative by the weights."""
        used = {
            weight_name(name): torch.where(
                masks[name].layout.from_blocks(now[name]), weights[name], 0.0
            ).requires_grad_(True)
            for name in masks
        }
        with torch.enable_grad():
            margin = margin_of(torch.func.functional_call(model, used, (image[None],))[0], label)
        gradients = torch.autograd.grad(margin, list(used.values()))
        return float(margin.detach()), dict(zip(masks, gradients, strict=True))

    def changed(now: Mapping[str, Tensor]) -> int:
        return sum(int((now[name] != first[name]).any(-1).sum()) for name in masks)

    most, batch = sum(len(block.flatten(0, 1)) for block in first.values()), 1
    while changed(kept) < most:
        _, gradients = run(kept)
        best = _best_blocks(masks, weights, gradients, kept)
        if not best:
            return None
        before, chosen = kept, best[:batch]
        kept = _with(before, chosen)
        if run(kept)[0] < 0:
            low, high = 0, len(chosen)  # how many of the last blocks are needed
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if run(_with(before, chosen[:middle]))[0] < 0 else (middle, high)
            return changed(_with(before, chosen[:high]))
        batch *= 2
    return None


_Choice = tuple[float, str, int, int, Tensor]  # what it takes off the margin, layer, row, block, what is kept


def _best_blocks(
    masks: MaskSet, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], kept: Mapping[str, Tensor]
) -> list[_Choice]:
    """The changes of blocks that take most off the margin, to first order."""
    found: list[_Choice] = []
    for name, mask in masks.items():
        gained = mask.layout.to_blocks(gradients[name] * weights[name])
        order = gained.argsort(-1)[..., : mask.pattern.kept]
        other = torch.zeros_like(kept[name]).scatter_(-1, order, True)
        less = (gained * kept[name]).sum(-1) - (gained * other).sum(-1)
        values, places = less.flatten().sort(descending=True)
        for value, place in zip(values.tolist()[:_MOST_BLOCKS], places.tolist(), strict=False):
            if value <= 0:
                break
            row, block = divmod(place, less.shape[1])
            found.append((value, name, row, block, other[row, block]))
    return sorted(found, key=lambda choice: -choice[0])


def _with(kept: Mapping[str, Tensor], chosen: Sequence[_Choice]) -> dict[str, Tensor]:
    result = {name: blocks.clone() for name, blocks in kept.items()}
    for _, name, row, block, other in chosen:
        result[name][row, block] = other
    return result

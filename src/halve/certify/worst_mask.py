"""Worst mask: how many blocks of the masks must change to change a prediction.

That no legal mask changes a prediction is false on real networks. What can be said: no change of at most k blocks does,
where that is proven, and that a certain number does, where an attack finds them.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from halve.batches import Progress
from halve.certify.attack import attack_masks
from halve.certify.certificate import Certificate
from halve.certify.changes import BlockChanges
from halve.certify.margins import proven_margins
from halve.certify.proofs import EXACT, Pair, Proof, described, prove
from halve.certify.rounding import Interval
from halve.errors import ModelError, listed
from halve.masks.mask import MaskSet
from halve.modules import weight_of


def worst_mask(
    masked: nn.Module,
    dense: nn.Module,
    masks: MaskSet,
    data: Any,
    digests: dict[str, str],
    *,
    blocks: int,
    optimise: bool,
    branches: int,
    progress: Progress,
) -> Certificate:
    """Certify all masks that differ in at most `blocks` blocks, and attack them; see `halve.certify`."""
    if grouped := [name for name, mask in masks.items() if mask.layout.groups > 1]:
        raise ModelError(f"certify has no bounds for changed masks of grouped convolutions: {listed(grouped)}")
    pair = Pair(masked, dense)
    changes = {
        name: BlockChanges(weight_of(dense.get_submodule(name)).detach().double(), mask, blocks)
        for name, mask in masks.items()
    }
    attacked: list[int | None] = []

    def several(images: Tensor, labels: Sequence[int]) -> list[Proof]:
        network, point = pair["masked"], Interval(images, images)
        network.check_changes(changes)
        found = proven_margins(network, point, changes, labels, optimise, branches)
        attacked.extend(
            attack_masks(masked, dense, masks, image, label) for image, label in zip(images, labels, strict=True)
        )
        return [
            Proof(label, one.bound, agree=True, assumed=one.assumed) for label, one in zip(labels, found, strict=True)
        ]

    proofs = prove(pair, data, several, progress)
    known = [count for count in attacked if count is not None]
    statement = f"no change of at most {blocks:,} of the masks' blocks to other legal ones changes the prediction"
    sentence = described(proofs, statement)
    if known:
        sentence = f"{sentence[:-1]}; an adversary that may choose changes it with {min(known):,} to {max(known):,}."
    result = proofs.result() | {"attack_blocks": attacked, "blocks": sum(mask.codes.numel() for mask in masks.values())}
    settings: dict[str, Any] = {
        "changed_blocks": blocks,
        "optimise": optimise,
        "branches": branches,
        "interrupted": proofs.interrupted,
    }
    settings["method"] = "backward linear relaxation (CROWN) in the masks, float64; greedy search"
    assumptions = (*EXACT, "the weights stay, and every block keeps as many as the pattern says", *proofs.assumptions)
    digests = digests | {"images": proofs.images.hexdigest()}
    return Certificate("worst mask", sentence, settings, assumptions, result, digests)

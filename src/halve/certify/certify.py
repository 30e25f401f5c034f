"""Certify what masks do not change."""

from pathlib import Path
from typing import Any

from torch import nn

from halve.batches import Forward, Progress
from halve.certify import flips
from halve.certify.certificate import Certificate
from halve.certify.digests import digest_of_masks, digest_of_model
from halve.errors import CertificateError, OptionError, listed
from halve.masks.apply import OnChanged, apply, check_dense
from halve.masks.mask import MaskSet
from halve.modules import check_initialised, clone, unwrapped
from halve.process_state import preserved_process_state


@preserved_process_state()
def certify(
    model: nn.Module,
    masks: MaskSet | None,
    data: Any,
    *,
    share: float | None = None,
    confidence: float = 0.999,
    by: flips.By | None = None,
    against: MaskSet | None = None,
    reference: nn.Module | None = None,
    check: Certificate | str | Path | None = None,
    forward: Forward | None = None,
    progress: Progress = True,
    on_changed: OnChanged = "warn",
) -> Certificate:
    """Certify how often a masked network predicts what the dense one predicts, from images without labels.

    The bound is exact (binomial) and holds for any network. `print(certificate)` says it in a sentence.

    Args:
        model: The dense model. It is not changed. For an updated checkpoint, the updated model.
        masks: Its masks; None compares the model itself with `reference`, such as a compiled network.
        data: Batches of images, drawn at random from those that the statement is about.
        share: Stop counting as soon as this share is proven, or refuted. The bound then holds at all times at once,
            which takes about half as many images again. The images must come in random order.
        confidence: How sure the statement is, below 1. Default: 0.999.
        by: Also certify groups, with bounds that hold together: "class", as the reference predicts, "label", or a
            function that returns the group of each image of a batch.
        against: Other masks: certify by how much `masks` agree more often than these, on the same images.
        reference: The network whose predictions are to be kept. Default: `model`, without masks.
        check: A certificate or its file: compute it again with its own settings. Raises `CertificateError` unless
            weights, masks and images are the same, and the result is at least as good.
        forward: `forward(model, batch)` runs a network on an unusual batch.
        progress: Show progress in terminals and notebooks, or a function such as `tqdm.tqdm` that wraps loops.
            Default: True.
        on_changed: What to do if the weights are not those the masks were made for: "warn" (default), "error" or
            "ignore".

    >>> import torch, halve
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    >>> certificate = halve.certify(model, halve.prune(model), torch.randn(1000, 8), confidence=0.99)
    >>> 0 < certificate.result["share"] < certificate.result["agreement"] < 1
    True
    """
    model = unwrapped(model)
    if check is not None:
        claimed = check if isinstance(check, Certificate) else Certificate.load(check)
        share, confidence = claimed.settings.get("share"), claimed.settings.get("confidence", confidence)
        by = claimed.settings.get("by") if by is None else by
        if claimed.settings.get("interrupted") or by == "function":
            raise OptionError("this certificate cannot be computed again: it was interrupted, or grouped by a function")
    _check_options(masks, share, confidence, by, against, reference)
    check_initialised(model)
    digests = {"weights": digest_of_model(model)}
    networks = []
    for name, one in (("masks", masks), ("other_masks", against)):
        if one is not None:
            check_dense(model, one)
            networks.append(apply(model, one, on_changed=on_changed).eval())
            digests[name] = digest_of_masks(one)
    networks = networks or [clone(model).eval()]
    compared = model if reference is None else unwrapped(reference)
    if reference is not None:
        digests["reference"] = digest_of_model(compared)
    compared = clone(compared).eval()
    if against is not None:
        pair = (networks[0], networks[1])
        found = flips.compare(pair, compared, data, digests, confidence=confidence, forward=forward, progress=progress)
    else:
        names = ("this" if masks is None else "masked", "dense" if reference is None else "reference")
        found = flips.flips(
            *(networks[0], compared, data, digests),
            share=share,
            confidence=confidence,
            by=by,
            names=names,
            forward=forward,
            progress=progress,
        )
    if check is not None:
        _check_same(claimed, found)
    return found


def _check_options(
    masks: MaskSet | None, share: Any, confidence: Any, by: Any, against: MaskSet | None, reference: nn.Module | None
) -> None:
    if not isinstance(confidence, int | float) or not 0 < confidence < 1:
        raise OptionError(f"confidence must be between 0 and 1, such as 0.999; got {confidence!r}")
    if share is not None and (not isinstance(share, int | float) or not 0 < share < 1):
        raise OptionError(f"share must be between 0 and 1, such as 0.99; got {share!r}")
    if isinstance(by, str) and by not in ("class", "label"):
        raise OptionError(f"by must be 'class', 'label' or a function of a batch, got {by!r}")
    if masks is None and reference is None:
        raise OptionError("certify needs masks, or reference= with the network to compare the model with")
    if against is not None and (masks is None or share is not None or by is not None):
        raise OptionError("against= compares two sets of masks; it cannot be combined with share= or by=")


def _check_same(claimed: Certificate, found: Certificate) -> None:
    """Raise unless what was found supports what is claimed."""
    if claimed.statement != found.statement:
        raise CertificateError(
            f"the certificate states {claimed.statement!r}, but the options ask for {found.statement!r}"
        )
    names = sorted({*claimed.digests, *found.digests})
    if other := [name for name in names if claimed.digests.get(name) != found.digests.get(name)]:
        raise CertificateError(f"the certificate was made for other {listed(other)}")
    if claimed.assumptions != found.assumptions:
        raise CertificateError("the certificate names other assumptions than the statement has")
    if claimed.result != found.result or claimed.sentence != found.sentence:
        raise CertificateError(f"the certificate does not hold: it says {claimed.sentence!r}, but: {found.sentence}")

"""Certify what masks do not change."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from halve.batches import Forward, Progress
from halve.certify import flips
from halve.certify.certificate import Certificate
from halve.certify.digests import digest_of_masks, digest_of_model
from halve.certify.region import region as certify_region
from halve.certify.reuse import Update
from halve.certify.reuse import reuse as certify_reuse
from halve.certify.worst_mask import worst_mask as certify_worst_mask
from halve.errors import CertificateError, OptionError, listed
from halve.masks.apply import OnChanged, applied_in_checkpoint_order, apply, check_dense, restore_order
from halve.masks.mask import MaskSet
from halve.modules import check_initialised, clone, unwrapped
from halve.process_state import preserved_process_state

PROOFS = ("region", "reuse", "changed_blocks")  # options that ask for proofs of single images
_DEFAULTS = {"confidence": 0.999, "relative": True, "agreement": False, "optimise": True, "branches": 0}
_CLOSE = 1e-6  # how far recomputed margins may differ, relative to 1 + their size: other machines round differently


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
    region: float | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    reuse: float | Literal["radius"] | None = None,
    relative: bool = True,
    layers: Sequence[str] | str | None = None,
    also_dense: bool = False,
    agreement: bool = False,
    changed_blocks: int | None = None,
    optimise: bool = True,
    branches: int = 0,
    device: Literal["cpu", "cuda"] = "cpu",
    check: Certificate | str | Path | None = None,
    forward: Forward | None = None,
    progress: Progress = True,
    on_changed: OnChanged = "warn",
) -> Certificate:
    """Certify what masks do not change, from images without labels.

    There are four kinds of statements, each with its assumptions in the certificate. By default: how often the masked
    network predicts what the dense one predicts, on images like these, by an exact binomial bound; this works for any
    network. `region=`: for each image, that no input close to it changes the prediction of either network. `reuse=`:
    for each image, that no small update of the weights does, with the same masks; with `agreement=`, that masked and
    dense network agree after every such update. `changed_blocks=`: that no change of a few blocks of the masks does,
    and how many an adversary needs. All but the first are proofs by linear bounds, which take seconds for each image
    and are useful for small networks, or for the last layers of large ones.

    Args:
        model: The dense model. It is not changed. For an updated checkpoint, the updated model.
        masks: Its masks; None compares the model itself with `reference`, such as a compiled network, or an exported
            one that `halve.load_onnx` has loaded.
        data: Batches of images, drawn at random from those that the statement is about.
        share: Stop counting as soon as this share is proven, or refuted. The bound then holds at all times at once,
            which takes about half as many images again. The images must come in random order.
        confidence: Confidence level of the statement, below 1. Default: 0.999.
        by: Also certify groups, with bounds that hold together: "class", as the reference predicts, "label", or a
            function that returns the group of each image of a batch.
        against: Other masks: certify by how much `masks` agree more often than these, on the same images.
        reference: The network whose predictions are to be kept. Default: `model`, without masks.
        region: Certify all inputs whose pixels differ by at most this, such as 2 / 255.
        mean: For `region`, what was subtracted from each channel of pixels in 0..1, so that it is measured in pixels,
            which stay in 0..1. Default: it is measured in the values that the network is given.
        std: For `region`, what each channel was then divided by.
        reuse: Certify all updates of single weights by at most this; "radius" finds the largest for each image.
        relative: Whether `reuse` is relative to the root mean square of the layer's dense weights. Default: True.
        layers: For `reuse`, globs of the layers that are updated. Default: all layers with weights.
        also_dense: For `reuse`, also prove that the dense network with the update predicts the class. Default: False.
        agreement: For `reuse`, certify that masked and dense network predict the same class after the same update,
            whichever it is; `also_dense` adds nothing then. Where that is not proven, bound how far the dense one leads
            after updates for which they differ, with at most 100 classes and not with "radius". Default: False.
        changed_blocks: Certify that no change of at most this many blocks of the masks changes the prediction, and find
            how many an adversary needs.
        optimise: Optimise the bounds where they do not suffice at first (alpha-CROWN). Default: True.
        branches: Divide proofs that do not suffice even so, by the signs of ReLU inputs, into up to this many parts for
            each class (beta-CROWN); 500 take about half a minute on a small network. Default: 0.
        device: Where bounds are computed: "cpu" (default) or "cuda", which takes several images at once and pays for
            deep networks.
        check: A certificate or its file: compute it again with its own settings. Raises `CertificateError` unless
            weights, masks and images are the same, and the result is too.
        forward: `forward(model, batch)` runs a network on an unusual batch; for flips.
        progress: Show progress in terminals and notebooks, or a function such as `tqdm.tqdm` that wraps loops.
            Default: True.
        on_changed: What to do if the weights are not those the masks were made for: "warn" (default), "error" or
            "ignore".

    >>> import torch, halve
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    >>> masks = halve.prune(model)
    >>> certificate = halve.certify(model, masks, torch.randn(1000, 8), confidence=0.99)
    >>> 0 < certificate.result["share"] < certificate.result["agreement"] < 1
    True
    >>> halve.certify(model, masks, torch.randn(10, 8), reuse=1e-9).result["vacuous"]
    False
    >>> images = torch.randn(10, 8)
    >>> both = halve.certify(model, masks, images, reuse=1e-9, agreement=True)
    >>> both.statement, both.result["certified"] == both.result["agree"]
    ('agreement', True)
    """
    model = unwrapped(model)
    options: dict[str, Any] = {
        "share": share,
        "confidence": confidence,
        "by": by,
        "region": region,
        "mean": mean,
        "std": std,
    }
    options |= {"reuse": reuse, "relative": relative, "also_dense": also_dense, "agreement": agreement}
    options |= {"optimise": optimise, "branches": branches, "changed_blocks": changed_blocks}
    options["layers"] = [layers] if isinstance(layers, str) else layers
    options |= {name: _numbers(name, options[name]) for name in ("mean", "std")}
    claimed = None
    if check is not None:
        claimed = check if isinstance(check, Certificate) else Certificate.load(check)
        options = _options_of(claimed, options)
    _check_options(masks, against, reference, forward, device, options)
    check_initialised(model)
    digests = {"weights": digest_of_model(model)}
    for name, one in (("masks", masks), ("other_masks", against)):
        if one is not None:
            check_dense(model, one)
            digests[name] = digest_of_masks(one)
    if reference is not None:
        digests["reference"] = digest_of_model(unwrapped(reference))
    compared = clone(model if reference is None else unwrapped(reference)).eval()
    if any(options[name] is not None for name in PROOFS):
        assert masks is not None
        masked, dense = applied_in_checkpoint_order(model, masks, on_changed), restore_order(model, masks)
        found = _proven(masked.to(device), dense.to(device), masks, data, digests, options, progress)
    else:
        networks = [apply(model, one, on_changed=on_changed).eval() for one in (masks, against) if one is not None]
        found = _counted(networks or [clone(model).eval()], compared, data, digests, options, forward, progress)
    if claimed is not None:
        _check_same(claimed, found)
    return found


def _counted(
    networks: list[nn.Module],
    compared: nn.Module,
    data: Any,
    digests: dict[str, str],
    options: Mapping[str, Any],
    forward: Forward | None,
    progress: Progress,
) -> Certificate:
    running: dict[str, Any] = {"confidence": options["confidence"], "forward": forward, "progress": progress}
    if len(networks) > 1:
        return flips.compare((networks[0], networks[1]), compared, data, digests, **running)
    runtime = getattr(networks[0], "runtime", None)  # of networks that PyTorch does not run: exported ones
    name = "masked" if "masks" in digests else "this" if runtime is None else "exported"
    names = (name, "reference" if "reference" in digests else "dense")
    wanted = {"share": options["share"], "by": options["by"], "runtime": runtime}
    return flips.flips(networks[0], compared, data, digests, names=names, **wanted, **running)


def _proven(
    masked: nn.Module,
    dense: nn.Module,
    masks: MaskSet,
    data: Any,
    digests: dict[str, str],
    options: Mapping[str, Any],
    progress: Progress,
) -> Certificate:
    common: dict[str, Any] = {"optimise": options["optimise"], "branches": options["branches"], "progress": progress}
    if options["region"] is not None:
        pixels = {"eps": options["region"], "mean": options["mean"], "std": options["std"]}
        return certify_region(masked, dense, data, digests, **pixels, **common)
    if options["changed_blocks"] is not None:
        return certify_worst_mask(masked, dense, masks, data, digests, blocks=options["changed_blocks"], **common)
    names = ("relative", "layers", "also_dense", "agreement")
    update = Update(options["reuse"], **{key: options[key] for key in names})
    return certify_reuse(masked, dense, masks, data, digests, update=update, **common)


def _options_of(claimed: Certificate, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a certificate was made with."""
    found = dict(options)
    for name in options:
        given = claimed.settings.get(name, _DEFAULTS.get(name))
        found[name] = options[name] if given == "function" else given
    if claimed.settings.get("interrupted") or (claimed.settings.get("by") == "function" and not callable(found["by"])):
        raise OptionError(
            "this certificate cannot be computed again: it was interrupted, or needs the function that was given as by="
        )
    return found


def _check_options(
    masks: MaskSet | None,
    against: MaskSet | None,
    reference: nn.Module | None,
    forward: Forward | None,
    device: str,
    options: Mapping[str, Any],
) -> None:
    confidence, share, by = options["confidence"], options["share"], options["by"]
    if not isinstance(confidence, int | float) or not 0 < confidence < 1:
        raise OptionError(f"confidence must be between 0 and 1, such as 0.999; got {confidence!r}")
    if share is not None and (not isinstance(share, int | float) or not 0 < share < 1):
        raise OptionError(f"share must be between 0 and 1, such as 0.99; got {share!r}")
    if isinstance(by, str) and by not in ("class", "label"):
        raise OptionError(f"by must be 'class', 'label' or a function of a batch, got {by!r}")
    if by is not None and not isinstance(by, str) and not callable(by):
        raise OptionError(f"by must be 'class', 'label' or a function of a batch, got {by!r}")
    if options["layers"] is not None and not isinstance(options["layers"], list | tuple):
        raise OptionError(f"layers must be a list, got {options['layers']!r}")
    if options["layers"] is not None and not options["layers"]:
        raise OptionError("layers must name a layer, got an empty list")
    for name, needed in (("mean", "region"), ("layers", "reuse"), ("also_dense", "reuse")):
        if options[name] and options[needed] is None:
            raise OptionError(f"{name}= is for {needed}=")
    if not options["relative"] and options["reuse"] is None:
        raise OptionError("relative=False is for reuse=")
    given = [name for name in PROOFS if options[name] is not None]
    counted = [name for name in ("share", "by") if options[name] is not None] + ["against"] * (against is not None)
    for name in given:
        value = options[name]
        radius = name == "reuse" and value == "radius"
        if isinstance(value, bool) or (name == "changed_blocks" and (not isinstance(value, int) or value < 1)):
            kind = "integer" if name == "changed_blocks" else "number"
            raise OptionError(f"{name} must be a positive {kind}, got {value!r}")
        if not radius and (not isinstance(value, int | float) or not 0 < value < math.inf):
            raise OptionError(f"{name} must be a positive number, got {value!r}")
    branches = options["branches"]
    if not isinstance(branches, int) or isinstance(branches, bool) or branches < 0:
        raise OptionError(f"branches must be 0 or a positive integer, got {branches!r}")
    if branches and not (given and options["optimise"]):
        raise OptionError("branches= is for region=, reuse= and changed_blocks=, and needs optimise=True")
    if given and (len(given) > 1 or counted or reference is not None or forward is not None):
        raise OptionError(
            f"{given[0]}= cannot be combined with another statement, nor with share=, by=, "
            f"against=, reference= or forward="
        )
    if options["agreement"] and options["reuse"] is None:
        raise OptionError("agreement= is for reuse=: pass the size of the update, or 'radius'")
    if device not in ("cpu", "cuda"):
        raise OptionError(f"device must be 'cpu' or 'cuda', got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise OptionError("device='cuda' needs a CUDA GPU; bounds are computed on the CPU by default")
    if (options["mean"] is None) != (options["std"] is None):
        raise OptionError("mean= and std= belong together: pass both, or neither")
    if masks is None and (given or reference is None):
        raise OptionError("certify needs masks, or reference= with the network to compare the model with")
    if against is not None and (masks is None or share is not None or by is not None):
        raise OptionError("against= compares two sets of masks; it cannot be combined with share= or by=")


def _numbers(name: str, values: Any) -> list[float] | None:
    try:
        return None if values is None else [float(one) for one in values]
    except (TypeError, ValueError) as error:
        raise OptionError(f"{name} must be a list of numbers, got {values!r}") from error


def _check_same(claimed: Certificate, found: Certificate) -> None:
    """Raise unless what was found supports what is claimed."""
    if claimed.statement != found.statement:
        raise CertificateError(
            f"the certificate states {claimed.statement!r}, but the options ask for {found.statement!r}"
        )
    names = sorted({*claimed.digests, *found.digests})
    if other := [name for name in names if claimed.digests.get(name) != found.digests.get(name)]:
        raise CertificateError(f"the certificate was made for other {listed(other)}")
    names = sorted({*claimed.settings, *found.settings})
    if other := [name for name in names if claimed.settings.get(name) != found.settings.get(name)]:
        raise CertificateError(f"the certificate has other settings than it was computed with: {listed(other)}")
    if claimed.assumptions != found.assumptions:
        raise CertificateError("the certificate names other assumptions than the statement has")
    if not _close(claimed.result, found.result) or claimed.sentence != found.sentence:
        raise CertificateError(f"the certificate does not hold: it says {claimed.sentence!r}, but: {found.sentence}")


def _close(one: Any, other: Any) -> bool:
    """Whether two results are equal, but for differences of rounding in margins."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(
            math.isclose(one[key], other[key], rel_tol=_CLOSE)
            if "radius" in key and isinstance(one[key], float) and isinstance(other[key], float)
            else _close(one[key], other[key])
            for key in one
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= _CLOSE * (1 + abs(other))
    return type(one) is type(other) and bool(one == other)

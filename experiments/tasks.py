"""Tables of networks that are no classifiers: a detector, a segmentation network, and a third party's face detector.

What was not measured yet has no section on its page.
"""

from collections.abc import Callable
from typing import Any

from page_text import prose, table
from records import ROOT, measured_on, recorded

METHODS = {
    "dense": "dense",
    "magnitude": "2:4, magnitude",
    "reconstruct": "2:4, reconstruct",
    "learned": "2:4, `halve.learn`",
    "compiled": "the same, compiled",
    "last": "the same, in O-Net alone",
}
FACES = {"pnet": "P-Net", "rnet": "R-Net", "onet": "O-Net"}


def _if_measured(name: str, made: Callable[[Any], str]) -> str:
    path = f"experiments/results/{name}.json"
    return made(recorded(path)) if (ROOT / path).exists() else ""


def scenes() -> str:
    """What the detector and the segmentation network were trained on."""
    if not any((ROOT / f"experiments/results/{name}.json").exists() for name in ("detection", "segmentation")):
        return ""
    return prose(
        "The detector and the segmentation network are trained by their experiments, on scenes that are rendered on "
        "the fly: one to five shapes of ten kinds on textured backgrounds, in any size, rotation and colour, some "
        "hidden by others. That is easier than photos are; what can be read from it is how masks compare."
    )


def detection() -> str:
    """mAP of a detector that was trained on rendered scenes."""
    return _if_measured("detection", _detection)


def _detection(found: dict[str, Any]) -> str:
    rows = [
        [METHODS[r["method"]], f"{100 * r['map']:.1f}", f"{100 * r['map_50']:.1f}", percent(r["agreement"])]
        for r in found["accuracy"]
    ]
    heads = ["RetinaNet, ResNet-18", "mAP, %", "mAP at IoU 0.5, %", "boxes that agree with the dense network's, %"]
    note = (
        f"{_setup(found)}. mAP is COCO's, by torchmetrics and pycocotools; boxes are counted from a score of 0.3 on "
        f"(`experiments/detection.py`)."
    )
    return f"## Detection\n\n{table(heads, rows)}\n\n{prose(note)}\n\n{_speed_and_file(found)}"


def segmentation() -> str:
    """mIoU of a segmentation network that was trained on rendered scenes."""
    return _if_measured("segmentation", _segmentation)


def _segmentation(found: dict[str, Any]) -> str:
    rows = [
        [METHODS[r["method"]], f"{100 * r['miou']:.1f}", f"{100 * r['pixels_right']:.1f}", percent(r["agreement"])]
        for r in found["accuracy"]
    ]
    heads = ["DeepLabV3, MobileNetV3", "mIoU, %", "pixels right, %", "pixels that agree with the dense network, %"]
    note = f"{_setup(found)} (`experiments/segmentation.py`)."
    return f"## Segmentation\n\n{table(heads, rows)}\n\n{prose(note)}\n\n{_speed_and_file(found)}"


def percent(share: float | None) -> str:
    """A share in percent; nothing for what is not known.

    >>> percent(0.987), percent(None)
    ('98.7', '')
    """
    return "" if share is None else f"{100 * share:.1f}"


def _setup(found: dict[str, Any]) -> str:
    by = {r["method"]: r for r in found["accuracy"]}
    dense, learned = by["dense"], by["learned"]
    return (
        f"{found['images']} rendered images of {found['size']} px, as those that it was trained on "
        f"({dense['train_steps']:,} steps in {dense['train_seconds']:.0f} seconds). Masks were learned in "
        f"{learned['steps']:,} steps and {learned['seconds']:.0f} seconds, without labels; "
        f"{learned['masked_layers']} layers, {learned['masked_weights'] / 1e6:.1f} million weights. "
        f"{measured_on([learned])}"
    )


def _speed_and_file(found: dict[str, Any]) -> str:
    speed, file = found["speed"], found["export"]
    ms = speed["median_ms"]
    dense, sparse = ms["compiled, dense"], ms["compiled, 2:4"]
    words = (
        f"A call with {speed['batch']} images takes {ms['eager']:.1f} ms in eager mode, {dense:.1f} ms compiled with "
        f"all weights and {sparse:.1f} ms compiled with masks: {dense / sparse:.2f}x ({speed['dtype']}, "
        f"{measured_on([speed])}). The ONNX file, {file['summary']}, differs by {file['difference']:.0e} of the "
        f"largest output."
    )
    return prose(words)


def faces() -> str:
    """What masks do to a third party's face detector."""
    return _if_measured(
        "faces", lambda found: f"## A pretrained face detector\n\n{_faces(found)}\n\n{_networks(found)}"
    )


def faces_table() -> str:
    """The same for the tutorial, without the networks one by one."""
    return _if_measured("faces", lambda found: f"## What came of it\n\n{_faces(found)}")


def _faces(found: dict[str, Any]) -> str:
    rows = [
        [METHODS[r["method"]], f"{r['boxes']}", f"{100 * r['agreement']:.1f}"]
        + [percent(r["output_errors"].get(name)) for name in FACES]
        for r in found["accuracy"]
    ]
    dense = found["accuracy"][0]["dense_boxes"]
    heads = ["MTCNN", f"faces (dense: {dense})", "boxes that agree, %", *(f"error of {n}, %" for n in FACES.values())]
    ms = found["speed"]["median_ms"]
    height, width = found["size"]
    note = (
        f"{found['photos']} photos of {height} x {width} px; errors are of all outputs, relative, on what the networks "
        f"see in these photos. One photo takes {ms['eager']:.0f} ms in eager mode, {ms['compiled, dense']:.0f} ms with "
        f"the networks compiled dense, {ms['compiled, 2:4']:.0f} ms with masks. {measured_on([found['speed']])} "
        f"(`experiments/faces.py`)."
    )
    return f"{table(heads, rows)}\n\n{prose(note)}"


def _networks(found: dict[str, Any]) -> str:
    rows = [
        [
            FACES[r["network"]],
            f"{r['weights']:,}",
            f"{r['masked_weights']:,} in {len(r['masked'])}",
            f"{r['images']:,}",
            f"{r['steps']:,}",
            f"{r['difference']:.0e}",
        ]
        for r in found["networks"]
    ]
    heads = ["network", "weights", "masked, in layers", "images learned from", "steps", "difference of the ONNX file"]
    speed = found["speed"]
    ms = speed["median_ms"]
    faster = ms["compiled, dense"] / ms["compiled, 2:4"]
    words = (
        f"P-Net has one layer to mask: the other two have 3 and 10 input channels, which are not divisible by 4. The "
        f"networks take {100 * speed['share_in_networks']:.0f} % of the time in eager mode; the rest scales and crops "
        f"photos and chooses boxes. "
    )
    words += (
        f"Masks gain {faster:.2f}x."
        if faster > 1.05
        else f"Layers as small as these gain no time: with masks it is {faster:.2f}x as fast as compiled dense."
    )
    return f"{table(heads, rows)}\n\n{prose(words)}"

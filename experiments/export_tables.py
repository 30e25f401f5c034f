"""Tables and sentences about exported files, from experiments/results/export.json."""

from typing import Any

from page_text import prose, table
from records import measured_on, name_of, recorded

EXPORTED = {
    "resnet18": "ResNet-18",
    "resnet50_v1": "ResNet-50",
    "convnext_tiny": "ConvNeXt-T",
    "swin_t": "Swin-T",
    "mobilenet_v3_large": "MobileNetV3-L",
    "efficientnet_b0": "EfficientNet-B0",
    "deeplabv3_resnet50": "DeepLabV3, ResNet-50",
    "retinanet_resnet50_fpn_v2": "RetinaNet, up to its heads",
    "ssdlite320_mobilenet_v3_large": "SSDlite, up to its heads",
}


def export_networks() -> str:
    """Exported files, compared with the masked networks."""
    records = recorded("experiments/results/export.json")["networks"]
    rows = [
        [
            EXPORTED[r["network"]],
            *(f"{r[dtype]['difference']:.0e}" for dtype in ("float32", "float16")),
            f"{r['eligible']} of {r['layers']}",
            str(r["likely"]),
            "yes" if r["polygraphy_agrees"] else "no",
        ]
        for r in records
    ]
    heads = ["file", "difference in float32", "in float16", "eligible", "likely", "Polygraphy agrees"]
    note = prose(
        f"Largest difference of the file in onnxruntime to `halve.apply`, relative to the largest output. "
        f"{measured_on(records)} (`experiments/export.py`)."
    )
    return f"{table(heads, rows)}\n\n{note}"


def export_photos() -> str:
    """ResNet-50's files on photos."""
    records = recorded("experiments/results/export.json")["photos"]
    shown = [r for r in records if not r["run"].startswith("dense")]
    rows = [[r["run"], f"{100 * r['agreement']:.1f}", f"{r['flips']}"] for r in shown]
    heads = [
        name_of(records[0]["network"]),
        "agreement with dense float32, %",
        "predictions that differ from 2:4 in float32",
    ]
    [quantized] = [r["quantization"] for r in records if "quantization" in r]
    count, left = len(quantized["costs"]), quantized["costs"].keys() & set(quantized["left"])
    note = prose(
        f"{records[0]['data']}, {records[0]['size']} px; masks {mask_words(records[0]['mask'])}. Files run in "
        f"onnxruntime on a CPU, which computes float16 in float32; PyTorch computes it in float16 on the GPU. int8 was "
        f"calibrated on {quantized['images']} other photos, ranges by {quantized['method']}, "
        f"{count - len(left)} of {count} layers quantised. {measured_on(records)}."
    )
    return f"{table(heads, rows)}\n\n{note}"


def export_sums() -> str:
    """What Q/DQ on residual sums costs."""
    records = recorded("experiments/results/export.json")["sums"]
    kinds = ("layers", "layers and sums")
    rows = [
        [
            EXPORTED[r["network"]],
            str(len(r["sums"])),
            *(f"{100 * r['agreement'][kind]:.1f}" for kind in kinds),
            *(f"{r['kl'][kind]:.4f}" for kind in kinds),
        ]
        for r in records
    ]
    heads = [
        "int8",
        "residual sums",
        "agreement, layers alone, %",
        "with sums, %",
        "mean KL, layers alone",
        "with sums",
    ]
    data = ", ".join(f"{EXPORTED[r['network']]} on {r['data']}" for r in records)
    note = prose(
        f"Compared with the same masked network in float32: {data}. ResNet-50 has its checkpoint's weights and learned "
        f"masks. The others have random weights, masks by magnitude, and heads that were fitted to 20 classes: their "
        f"scores are close together, so that predictions change easily, and outliers, as trained transformers have "
        f"them, are missing. {measured_on(records)} (`experiments/export.py --sums`)."
    )
    return f"{table(heads, rows)}\n\n{note}"


def export_brief() -> str:
    """What the README says about exported files."""
    found = recorded("experiments/results/export.json")
    photos = {r["run"]: r for r in found["photos"]}
    agreement = {
        dtype: f"{100 * photos[f'2:4, file in {dtype}']['agreement']:.1f} %" for dtype in ("float32", "float16", "int8")
    }
    largest = max(r["float32"]["difference"] for r in found["networks"])
    data = photos["2:4, file in int8"]["data"]
    learned = photos["2:4, file in int8"]["mask"]["method"] == "learn"
    return prose(
        f"{name_of(found['photos'][0]['network'])} with {'learned' if learned else 'one-shot'} masks keeps "
        f"{agreement['float32']} of the dense predictions as a float32 file, {agreement['float16']} in float16 and "
        f"{agreement['int8']} in int8, on {data}. "
        f"{len(found['networks'])} networks, from ResNet-18 to RetinaNet, differ from `halve.apply` by at most "
        f"{largest:.0e} of the largest output in float32."
    )


def mask_words(mask: dict[str, Any]) -> str:
    """How masks were made.

    >>> mask_words({"method": "learn", "steps_done": 2100, "seed": 0, "sha256": "0123456789abcdef"})
    'learned in 2,100 steps with seed 0 (sha256 0123456789ab)'
    """
    words = ["learned" if mask["method"] == "learn" else "made in one shot"]
    if not {"steps_done", "seed"} & mask.keys():
        words.append("(steps and seed were not recorded)")
    if "steps_done" in mask:
        words.append(f"in {mask['steps_done']:,} steps")
    if "seed" in mask:
        words.append(f"with seed {mask['seed']}")
    if "sha256" in mask:
        words.append(f"(sha256 {mask['sha256'][:12]})")
    return " ".join(words)

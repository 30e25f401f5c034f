"""halve apply, halve inspect, halve pack, halve unpack."""

import json as json_
from pathlib import Path
from typing import Annotated

import typer

import halve
from halve.cli import options as o
from halve.cli import show
from halve.cli.output import MASKS, PACKED, SPARSE_CHECKPOINT, Output, reads
from halve.masks import file, packed, storage
from halve.masks.mask import MaskSet
from halve.sources.weights import save_state


def apply(
    context: typer.Context,
    model: o.Model,
    masks: o.Masks,
    out: o.Out,
    weights: o.Weights = None,
    permute: Annotated[
        bool,
        typer.Option(help="Move channels so that hardware finds N:M in place, for masks with channel orders."),
    ] = True,
    on_changed: o.OnChanged = "warn",
    force: o.Force = False,
    json: o.Json = False,
) -> None:
    """Write a checkpoint with the masks applied: same names and shapes, zeros where weights are dropped.

    \b
    halve apply zoo.py:net --weights net.safetensors --masks net.masks.safetensors --out sparse.safetensors
    """
    output = Output.open(context, out, SPARSE_CHECKPOINT, reads(MODEL=model, weights=weights, masks=masks), force)
    opened = o.open_model(model, weights, "cpu")
    read = halve.load(masks)
    sparse = halve.apply(opened.model, read, permute=permute, on_changed=on_changed)  # type: ignore[arg-type]
    path = output.write(lambda path: save_state(sparse.state_dict(), path, "halve apply"))
    zeros = sum(int((p == 0).sum()) for p in sparse.parameters())
    total = sum(p.numel() for p in sparse.parameters())
    if json:
        show.as_json({"file": str(path), "zeros": zeros, "parameters": total})
        return
    moved = f", channels of {len(read.moves)} tensors moved" if permute and read.moves else ""
    show.say(f"{path}: {zeros:,} of {total:,} parameters are zero ({show.percent(zeros / total, 1)}){moved}")


def inspect(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A mask file or a packed checkpoint.")],
    json: o.Json = False,
) -> None:
    """Describe a mask file or a packed checkpoint.

    \b
    halve inspect net.masks.safetensors
    """
    kind, _, _ = storage.read(path, [file.FORMAT, packed.FORMAT])
    masks = halve.load(path) if kind == file.FORMAT else halve.unpack(path).masks
    if json:
        show.as_json(_described(path, kind.name, masks))
        return
    rows = [
        (
            name,
            str(mask.pattern),
            "x".join(map(str, mask.layout.shape)),
            mask.layout.order
            + (", permuted" if mask.layout.channel_order else "")
            + (", padded" if mask.layout.virtual else ""),
            show.percent(mask.density, 1),
            mask.fingerprint.dense[:12] if mask.fingerprint else "-",
        )
        for name, mask in masks.items()
    ]
    show.table(str(path), ("layer", "pattern", ">weights", "blocks", ">kept", "weight digest"), rows)
    bits = 8 * path.stat().st_size / max(masks.weights, 1)
    show.say(
        f"{kind.name}, {show.formatted_bytes(path.stat().st_size)}, {len(masks)} layers, {masks.weights:,} weights, "
        f"{show.percent(masks.density, 1)} kept, {bits:.2f} bits per weight"
    )
    if masks.statistics:
        show.say(f"includes recalibrated statistics of {len(masks.statistics) // 2} BatchNorm layers")
    if masks.corrections:
        show.say(f"includes learned corrections of {len(masks.corrections)} scales and shifts of norms")
    if masks.moves:
        show.say(f"includes channel orders: 'halve apply' moves the channels of {len(masks.moves)} tensors")
    show.quality(masks.recipe)
    for key, value in masks.recipe.items():
        show.say(f"  {key}: {value if isinstance(value, str) else json_.dumps(value)}")


def pack(
    context: typer.Context,
    model: o.Model,
    masks: o.Masks,
    out: o.Out,
    weights: o.Weights = None,
    dtype: Annotated[str | None, typer.Option(help=f"Cast to one of {', '.join(o.DTYPES)} first.")] = None,
    on_changed: o.OnChanged = "warn",
    force: o.Force = False,
    json: o.Json = False,
) -> None:
    """Write a packed checkpoint: only kept values and their indices, about 56 % of the dense size in fp16.

    \b
    halve pack zoo.py:net --weights net.safetensors --masks net.masks.safetensors --out net.packed.safetensors
    """
    output = Output.open(context, out, PACKED, reads(MODEL=model, weights=weights, masks=masks), force)
    chosen = o.type_of(dtype)
    opened = o.open_model(model, weights, "cpu")
    read = halve.load(masks)
    path = output.write(
        lambda path: halve.pack(
            *(opened.model, read, path),
            dtype=chosen,
            on_changed=on_changed,  # type: ignore[arg-type]
            force=force,
        )
    )
    dense = sum(
        value.numel() * (chosen.itemsize if chosen and value.is_floating_point() else value.element_size())
        for value in opened.model.state_dict().values()
    )
    share = path.stat().st_size / dense
    if json:
        show.as_json({"file": str(path), "bytes": path.stat().st_size, "dense_bytes": dense, "share": share})
        return
    show.say(
        f"{path}: {show.formatted_bytes(path.stat().st_size)}, {show.percent(share, 1)} of the dense "
        f"{show.formatted_bytes(dense)}"
    )


def unpack(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A packed checkpoint.")],
    out: o.Out,
    masks_out: Annotated[Path | None, typer.Option(help="Also write the masks to this file.")] = None,
    force: o.Force = False,
    json: o.Json = False,
) -> None:
    """Convert a packed checkpoint into an ordinary one with zeros, without loss.

    \b
    halve unpack net.packed.safetensors --out sparse.safetensors
    """
    output, also = Output.open(context, out, SPARSE_CHECKPOINT, reads(FILE=path), force), None
    if masks_out is not None:
        also = Output.open(context, masks_out, MASKS, reads(FILE=path, out=out), force, option="--masks-out")
    state, masks = halve.unpack(path)
    written = [output.write(lambda path: save_state(state, path, "halve unpack"))]
    if also is not None:
        written.append(also.write(lambda path: masks.save(path, force=force)))
    if json:
        show.as_json({"files": [str(p) for p in written], "tensors": len(state), "layers": len(masks)})
        return
    show.say(f"{', '.join(map(str, written))}: {len(state)} tensors, {len(masks)} masked layers")


def _described(path: Path, kind: str, masks: MaskSet) -> dict[str, object]:
    layers = file.header_of(masks)["layers"]
    for name, mask in masks.items():
        layers[name] |= {"density": mask.density, "permuted": mask.layout.channel_order is not None}
    return {
        "file": str(path),
        "format": kind,
        "bytes": path.stat().st_size,
        "weights": masks.weights,
        "density": masks.density,
        "layers": layers,
        "statistics": sorted(masks.statistics),
        "corrections": sorted(masks.corrections),
        "moved": sorted(masks.moves),
        "recipe": masks.recipe,
    }

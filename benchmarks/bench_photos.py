"""Top-1 agreement of compiled networks with the masked model in float32: ResNet-50 on photos, on a GPU.

    python benchmarks/bench_photos.py [ASSETS] [--workers 16] [--out FILE]

ASSETS is a folder with zoo.py, resnet50_v1_imagenet.safetensors and the photos in20_train/, in20_val_dev/, in1000_dev/,
all read at 224 px. Masks are recalibrated magnitude masks, which are deterministic. Compared are, in float16 and
bfloat16: PyTorch, PyTorch with BatchNorm folded into the weights before they are converted, the compiled network, and
the compiled network with a sparse kernel in every masked layer. Writes benchmarks/results/photos.json. Does nothing
without a GPU or without ASSETS. Needs torch, torchvision, Pillow, numpy and safetensors.
"""

import argparse
import copy
import datetime
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import halve
from halve.engine.compiled import Compiled
from halve.export.fold import add_biases_, fold_
from halve.graph import capture
from halve.sources.data import load_data
from halve.sources.models import load_model
from halve.sources.preprocessing import Preprocessing

RESULTS = Path(__file__).parent / "results" / "photos.json"
BATCH, SIZE = 50, 224


def photos(folder: Path, workers: int, device: str = "cuda", limit: int | None = None) -> list[Tensor]:
    """Batches of photos at 224 px: a compiled network accepts one size only."""
    loader = load_data(
        *(str(folder), Preprocessing(size=SIZE)),
        batch_size=BATCH,
        limit=limit,
        shuffle=limit is not None,
        workers=workers,
    ).loader
    return [batch[0].to(device) for batch in loader]


def folded(masked: nn.Module, images: Tensor) -> nn.Module:
    """A copy of a model in float32 with BatchNorm folded into the layers before it."""
    result = copy.deepcopy(masked)
    add_biases_(result)
    [part] = capture(result, images).parts
    for name in fold_(result, part):
        result.set_submodule(name, nn.Identity())
    return result


def all_sparse(fast: Compiled) -> Compiled:
    """A copy with a sparse kernel in every masked layer, cycling through the kernels."""
    result = copy.deepcopy(fast)
    for number, layer in enumerate(result.layers):
        kernels = layer.sparse_kernels(fast.device)
        if kernels:
            layer.use({1: kernels[number % len(kernels)]})
    return result


def classes(run: Callable[[Tensor], Tensor], batches: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    with torch.no_grad():
        return torch.cat([run(batch.to(dtype)).argmax(1) for batch in batches])


def compare(model: nn.Module, masks: halve.MaskSet, batches: Sequence[Tensor]) -> Iterator[dict[str, object]]:
    """One record for each dtype and system: how many predictions differ from the masked model in float32."""
    masked = halve.apply(model, masks).eval()
    expected = classes(masked, batches, torch.float32)
    plain = folded(masked, batches[0])
    for dtype in (torch.float16, torch.bfloat16):
        fast = halve.compile(model, masks, batches[0].to(dtype))
        systems = {
            "torch": copy.deepcopy(masked).to(dtype),
            "torch, BatchNorm folded": copy.deepcopy(plain).to(dtype),
            "halve": fast,
            "halve, all sparse": all_sparse(fast),
        }
        for name, system in systems.items():
            flips = int((classes(system, batches, dtype) != expected).sum())
            yield (
                {"network": "resnet50_v1", "dtype": str(dtype).removeprefix("torch."), "system": name}
                | {"photos": len(expected), "flips": flips, "agreement": 1 - flips / len(expected)}
                | ({"sparse_layers": sum(entry.sparse for entry in fast.plan)} if name == "halve" else {})
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("assets", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that decode photos")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_photos: no GPU, nothing measured")
        return
    if options.assets is None:
        print("bench_photos: no ASSETS folder given, nothing measured")
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    assets = options.assets
    model = load_model(f"{assets / 'zoo.py'}:resnet50_v1", assets / "resnet50_v1_imagenet.safetensors").model.cuda()
    calibration = photos(assets / "in20_train", options.workers, limit=512)
    masks = halve.recalibrate(model, halve.prune(model), calibration)
    folders = ("in20_train", "in20_val_dev", "in1000_dev")
    batches = [batch for folder in folders for batch in photos(assets / folder, options.workers)]
    print(f"{sum(map(len, batches))} photos", flush=True)
    records: list[dict[str, object]] = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for record in compare(model, masks, batches):
        print(record, flush=True)
        records.append(
            record
            | {"hardware": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat()}
            | {"versions": {"halve": halve.__version__, "torch": torch.__version__}}
        )
        options.out.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()

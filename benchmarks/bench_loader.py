"""Images per second of the loaders: Pillow and NVIDIA DALI, reading JPEG files for a network of 224 pixels.

    python benchmarks/bench_loader.py [--data FOLDER] [--images 512] [--threads 0 2] [--device cpu] [--out FILE]

Without --data, photos of 500 x 375 pixels are rendered, the usual size in ImageNet. Pillow has `--threads` worker
processes, DALI as many threads beside its readers. With 0, everything runs in one process, whose CPU time per image is
recorded too: it says more than the rate where other programs run. Each loader reads all images once to warm up, then
three times, in turn; the median counts. The largest difference of a pixel is recorded too. On a GPU (--device cuda),
batches of both end up on it. Without DALI only Pillow is measured. Writes benchmarks/results/loader.json.
"""

import argparse
import datetime
import io
import json
import statistics
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from halve.bench.records import versions
from halve.errors import SourceError
from halve.machine import device_name
from halve.sources.data import Data, load_data
from halve.sources.preprocessing import IMAGENET_STD, Preprocessing

RESULTS = Path(__file__).parent / "results" / "loader.json"
PASSES = 3
LOADERS = {"pillow": "pillow", "dali": "nvidia-dali-cuda130"}  # and the packages that decode


def render(folder: Path, images: int) -> None:
    """Write photos: shapes and texture that compress about as real ones do."""
    for seed in range(images):
        random = np.random.default_rng(seed)
        parts = [random.integers(0, 256, (n, n, 3), dtype=np.uint8) for n in (5, 40)]
        smooth, fine = (
            np.asarray(Image.fromarray(part).resize((500, 375), Image.Resampling.BICUBIC)) for part in parts
        )
        file = io.BytesIO()
        Image.fromarray((0.7 * smooth + 0.3 * fine).astype(np.uint8)).save(file, "JPEG", quality=92)
        (folder / f"{seed:05}.jpg").write_bytes(file.getvalue())


def seconds(data: Data, device: torch.device) -> tuple[float, float]:
    """The time of one pass, by the clock and of this process's threads on the CPU."""
    started, busy = time.perf_counter(), time.process_time()
    for batch in data.loader:
        (batch if isinstance(batch, torch.Tensor) else batch[0]).to(device, non_blocking=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, time.process_time() - busy


def difference(one: Data, other: Data) -> float:
    """The largest difference of a pixel, of 255, on the first batch."""
    first, second = (next(iter(data.loader)) for data in (one, other))
    first, second = (batch if isinstance(batch, torch.Tensor) else batch[0] for batch in (first, second))
    std = torch.tensor(IMAGENET_STD).reshape(3, 1, 1)
    return float(((first.cpu() - second.cpu()).abs() * std * 255).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder of JPEG files")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--threads", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--note", default="", help="what else ran on the machine at the same time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as folder:
        where = str(options.data or folder)
        if options.data is None:
            render(Path(folder), options.images)
        found = []
        for threads in options.threads:
            data = {}
            for name in LOADERS:
                reading = {"batch_size": options.batch, "limit": options.images, "workers": threads}
                try:
                    data[name] = load_data(where, Preprocessing(224, 256), loader=name, device=device, **reading)
                except SourceError as error:
                    print(f"bench_loader: {error}")
            for one in data.values():
                seconds(one, device)
            times = [{name: seconds(one, device) for name, one in data.items()} for _ in range(PASSES)]
            for name, one in data.items():
                wall, busy = (statistics.median(time[name][which] for time in times) for which in (0, 1))
                found.append(
                    {
                        "loader": name,
                        "threads": threads,
                        "batch": options.batch,
                        "data": "rendered, 500 x 375 pixels" if options.data is None else options.data.name,
                        "images": one.images,
                        "images_per_s": round(one.images / wall, 1),
                        "cpu_ms_per_image": None if threads else round(1000 * busy / one.images, 2),
                        "largest_difference": round(difference(data["pillow"], one), 2),
                        "device": device.type,
                        "hardware": device_name(device) + (f", {options.note}" if options.note else ""),
                        "versions": versions() | package(name),
                        "date": datetime.date.today().isoformat(),
                    }
                )
                print(
                    {
                        key: found[-1][key]
                        for key in ("loader", "threads", "images_per_s", "cpu_ms_per_image", "largest_difference")
                    }
                )
    measured = {(record["loader"], record["device"]) for record in found}
    old = json.loads(options.out.read_text()) if options.out.exists() else []
    kept = [record for record in old if (record["loader"], record["device"]) not in measured]
    options.out.write_text(json.dumps(kept + found, indent=1) + "\n")


def package(loader: str) -> dict[str, str]:
    """The version of what decodes."""
    name = LOADERS[loader]
    try:
        return {name: version(name)}
    except PackageNotFoundError:
        return {}


if __name__ == "__main__":
    main()

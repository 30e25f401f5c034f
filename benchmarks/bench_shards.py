"""Memory and images per second of WebDataset shards, streamed and listed.

    python benchmarks/bench_shards.py [--images 250000] [--shards 100] [--workers 1] [--note TEXT] [--out FILE]

Writes shards of small labelled JPEG files to a temporary folder (770 MB) and reads all of them once, shuffled, in
batches of 250, with `stream=True` and with `stream=False`, each in its own process. Recorded are the time to open the
data, images per second, and the largest resident size of the process and of its largest worker after a tenth of the
images and after all of them. Linux only. Writes benchmarks/results/shards.json.
"""

import argparse
import datetime
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from halve.bench.records import versions
from halve.machine import device_name
from halve.sources.data import load_data

RESULTS = Path(__file__).parent / "results" / "shards.json"
DIFFERENT = 4096  # images that are encoded; the shards repeat them
PIXELS, BATCH = 32, 250


def write(folder: Path, images: int, shards: int) -> None:
    """Write shards of images with labels."""
    random = np.random.default_rng(0)
    encoded = []
    for _ in range(min(DIFFERENT, images)):
        small = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        file = io.BytesIO()
        small.resize((PIXELS, PIXELS), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        encoded.append(file.getvalue())
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:06}.tar", "w") as tar:
            for image in range(images * shard // shards, images * (shard + 1) // shards):
                members = {"jpg": encoded[image % len(encoded)], "cls": b"%d" % (image % 1000)}
                for ending, content in members.items():
                    member = tarfile.TarInfo(f"{image:09}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def peak_mb(process: int | str = "self") -> float:
    """The largest resident size of a process so far."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return round(int(found[1]) / 1000, 1)


def measured(folder: str, images: int, workers: int, stream: bool) -> dict[str, Any]:
    """Read all images once."""
    torch.set_num_threads(1)
    before, started = peak_mb(), time.perf_counter()
    data = load_data(folder, batch_size=BATCH, shuffle=True, workers=workers, stream=stream)
    opened = time.perf_counter()
    seen, peaks = 0, {}
    for batch, _ in data.loader:
        seen += len(batch)
        if (not peaks and seen >= images // 10) or seen == images:
            processes = [worker.pid for worker in getattr(data.loader.loader._iterator, "_workers", ())]
            peaks[seen] = {"process_mb": peak_mb(), "worker_mb": max(map(peak_mb, processes), default=None)}
    assert seen == images, seen
    seconds = time.perf_counter() - opened
    return {
        "mode": "streamed" if stream else "listed",
        "open_s": round(opened - started, 2),
        "images_per_s": round(images / seconds),
        "before_mb": before,
        "largest_resident_size": peaks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=250_000)
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--note", default="", help="what else ran on the machine at the same time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--read", nargs=2, metavar=("FOLDER", "MODE"), help=argparse.SUPPRESS)  # in a separate process
    options = parser.parse_args()
    if options.read:
        folder, mode = options.read
        print(json.dumps(measured(folder, options.images, options.workers, mode == "streamed")))
        return
    found = []
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), options.images, options.shards)
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        for mode in ("streamed", "listed"):
            command = [sys.executable, __file__, "--images", str(options.images), "--workers", str(options.workers)]
            done = subprocess.run([*command, "--read", folder, mode], check=True, capture_output=True, text=True)
            record = json.loads(done.stdout) | {
                "images": options.images,
                "shards": options.shards,
                "pixels": PIXELS,
                "megabytes": round(size / 1e6),
                "workers": options.workers,
                "batch": BATCH,
                "hardware": device_name(torch.device("cpu")) + (f", {options.note}" if options.note else ""),
                "versions": versions(),
                "date": datetime.date.today().isoformat(),
            }
            found.append(record)
            print({key: record[key] for key in ("mode", "open_s", "images_per_s", "largest_resident_size")}, flush=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

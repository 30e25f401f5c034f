"""What is measured and tested on a GPU, several programs within one time limit.

    python benchmarks/run_gpu.py WORK --seconds 560 --jobs bench tests [--assets ASSETS] [--subjects SUBJECTS]
                                 [--pack results.tgz] [--list]

Jobs that time something run alone, one after the other in the order given; then all others side by side. Each has a log
in WORK, and what it measures is there, too. At the end of the time limit, all that still run are stopped. With --pack,
WORK is packed into that file every few seconds, so that nothing is lost with the machine, but for files larger than
LARGEST, such as checkpoints: left_out.txt in it lists these with their bytes. The times of bench that WORK has are not
measured again.

ASSETS has the layout of experiments/accuracy.py, SUBJECTS that of experiments/certify.py.
"""

import argparse
import contextlib
import io
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACK_SECONDS, STOP_SECONDS = 15.0, 8.0
LARGEST = 12_000_000  # bytes
LEFT_OUT = "left_out.txt"
PYTEST = "-m pytest -m gpu -p no:cacheprovider -p no:benchmark -o addopts=--import-mode=importlib"
NETWORKS = (
    "densenet121 efficientnet_v2_s swin_t regnet_y_8gf convnext_small efficientnet_b0 mobilenet_v3_large vit_b_16 "
    "googlenet convnext_tiny resnext50_32x4d resnet50 vgg16_bn resnet34 resnet18"
)
SPLIT = "resnet18 resnet34 resnet50 convnext_tiny convnext_small"


@dataclass
class Job:
    """A program: its arguments to Python, with {work}, {assets}, {subjects} and {left}, the seconds that are left."""

    arguments: str
    alone: bool = False
    after: str | None = None  # a job that runs alone, whose results it needs
    before: str = ""  # a program that runs this one
    environment: dict[str, str] = field(default_factory=dict)


def certify(run: str) -> Job:
    limits = "--seconds {left} --image-seconds 60"
    return Job(
        f"experiments/certify.py {{subjects}} --device cuda --out {{work}}/certify_{run}.json {limits} --run {run}"
    )


def learn(seed: int) -> Job:
    return Job(
        f"experiments/accuracy.py {{assets}} --network resnet50_v1 --methods halve --seeds {seed} --minutes 2 "
        "--device cuda --masks {work}/masks --out {work}/accuracy.json",
        alone=True,
        environment={"OMP_NUM_THREADS": "8"},
    )


JOBS = {
    "bench": Job(
        f"benchmarks/bench_gpu.py --missing --networks {NETWORKS} --batches 256 1 32 8 --compile-batches 1 8 32 256 "
        f"--systems compile_freezing best_dense halve_dense halve --split-networks {SPLIT} "
        "--processes 16 --images 1600 --seconds 0.2 --out {work}/gpu.json --layers-out {work}/gpu_layers.json",
        alone=True,
    ),
    "gaps": Job(
        "benchmarks/bench_gaps.py --network resnet34 --batch 8 --out {work}/gaps_resnet34_8.json",
        alone=True,
    ),
    "learn": learn(0),
    "learn_1": learn(1),
    "learn_2": learn(2),
    "export": Job(
        "experiments/export.py {assets} {work}/export --gpu-only "
        "--masks {work}/masks/resnet50_v1.halve.0.masks.safetensors",
        after="learn",
    ),
    "photos": Job("benchmarks/bench_photos.py {assets} --workers 8 --out {work}/photos.json"),
    "layers": Job("benchmarks/check_layers.py --out {work}/layers_float64.json"),
    "tests": Job(f"{PYTEST} -n 8 --dist loadgroup -q --durations=20 tests"),
    "memcheck": Job("benchmarks/sanitize.py", before="compute-sanitizer --tool memcheck --error-exitcode 9"),
    "racecheck": Job(
        "benchmarks/sanitize.py --every-lane --once", before="compute-sanitizer --tool racecheck --error-exitcode 9"
    ),
    "probe": Job(
        "experiments/certify_probe.py {subjects} --device cuda --items digits stage3 all region --limit 20 "
        "--out {work}/probe.jsonl"
    ),
    **{name: certify(name) for name in ("resnet20_stage3_0.001", "resnet20_all_1e-05", "resnet20_region_0.0625")},
    "digits_reuse_radius": Job(
        "experiments/certify.py {subjects} --processes 8 --out {work}/certify_digits_reuse_radius.json "
        "--seconds {left} --run digits_reuse_radius"
    ),
    **{
        task: Job(f"experiments/{task}.py {{work}}/{task} --device cuda --out {{work}}/{task}.json")
        for task in ("detection", "segmentation")
    },
    "scale": Job("benchmarks/bench_scale.py --out {work}/scale.json", alone=True),
    "paper_tables": Job(
        "experiments/paper_tables.py --train {assets}/in20_train --val {assets}/in20_val_dev --size 160 "
        "--dense-epochs 60 --seconds {left} --work {work}/paper --out {work}/paper_tables.json"
    ),
    "soundness": Job(
        "benchmarks/soundness.py --cases 100000 --processes 6 --seconds {left} --out {work}/soundness.json"
    ),
}


@dataclass
class Running:
    """A job that was started, in a session with all processes that it starts."""

    name: str
    process: subprocess.Popen[bytes]
    began: float

    def stop(self, number: int) -> None:
        """Send a signal to all of its processes, which may outlive the first one."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def start(name: str, job: Job, options: argparse.Namespace, left: float) -> Running:
    values = {"work": options.work, "assets": options.assets, "subjects": options.subjects, "left": int(left)}
    command = [*shlex.split(job.before), sys.executable, *shlex.split(job.arguments.format(**values))]
    paths = [str(ROOT / "src"), str(ROOT / "experiments"), str(options.assets or ""), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": ":".join(filter(None, paths)),
    }
    with (options.work / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment | job.environment,
            start_new_session=True,
        )
    return Running(name, process, time.monotonic())


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def pack(work: Path, into: Path | None) -> None:
    """Pack the results, of which some may just be written."""
    if into is None:
        return
    unfinished, left_out = into.with_suffix(".new"), list[str]()
    with tarfile.open(unfinished, "w:gz", compresslevel=1) as archive:
        for path in sorted(path for path in work.rglob("*") if path.is_file() and path.suffix != ".lock"):
            try:
                if (size := path.stat().st_size) > LARGEST:
                    left_out.append(f"{path.relative_to(work)} {size}\n")
                    continue
                content = path.read_bytes()
            except FileNotFoundError:  # files are renamed when they are complete
                continue
            add(archive, str(path.relative_to(work)), content)
        if left_out:
            add(archive, LEFT_OUT, "".join(left_out).encode())
    unfinished.replace(into)


def run(names: list[str], options: argparse.Namespace) -> dict[str, int]:
    """Run jobs until the time is over; returns the exit statuses of those that ended."""
    options.work.mkdir(parents=True, exist_ok=True)
    ends, status = time.monotonic() + options.seconds - STOP_SECONDS, dict[str, int]()
    for name in [name for name in names if JOBS[name].alone]:
        run_together([name], options, ends, status)
    run_together([name for name in names if not JOBS[name].alone], options, ends, status)
    for name in names:
        if name not in status:
            print(f"{name}: not finished", flush=True)
    return status


def run_together(names: list[str], options: argparse.Namespace, ends: float, status: dict[str, int]) -> None:
    """Run jobs side by side; what runs at the end is stopped. Adds the exit statuses of those that end before."""
    left, packed = ends - time.monotonic(), time.monotonic()
    wanted = [name for name in names if JOBS[name].after is None or status.get(JOBS[name].after) == 0]
    running = [start(name, JOBS[name], options, left) for name in wanted if left > 0]
    try:
        while running and time.monotonic() < ends:
            time.sleep(0.1)
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                job.stop(signal.SIGKILL)
                status[job.name] = job.process.returncode
                print(f"{job.name}: {job.process.returncode} after {time.monotonic() - job.began:.0f} s", flush=True)
            if time.monotonic() - packed > PACK_SECONDS:
                pack(options.work, options.pack)
                packed = time.monotonic()
    finally:
        for number in (signal.SIGINT, signal.SIGKILL):  # some programs keep what they have when they are interrupted
            for job in running:
                job.stop(number)
            patience = time.monotonic() + STOP_SECONDS / 2
            while time.monotonic() < patience and any(job.process.poll() is None for job in running):
                time.sleep(0.1)
        pack(options.work, options.pack)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, nargs="?")
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--seconds", type=float, default=560.0, help="for all of it")
    parser.add_argument("--assets", type=Path)
    parser.add_argument("--subjects", type=Path)
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--list", action="store_true", help="print the jobs")
    options = parser.parse_args()
    if options.list or options.work is None:
        for name, job in JOBS.items():
            print(f"{name:24} {'alone' if job.alone else 'shared':7} {job.before} {job.arguments}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # end the jobs, too
    status = run(options.jobs, options)
    for name in options.jobs:
        print(f"== {name}")
        log = options.work / f"{name}.log"
        print(
            "\n".join(line[:200] for line in log.read_text(errors="replace").splitlines()[-12:]) if log.exists() else ""
        )
    sys.exit(any(status.get(name) != 0 for name in options.jobs))


if __name__ == "__main__":
    main()

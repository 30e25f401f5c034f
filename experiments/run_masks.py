"""All measurements of masks on one GPU within a time limit: speed plans, screening, final runs, frontier.

    PYTHONPATH=src:ASSETS python experiments/run_masks.py ASSETS --stages plan screen final frontier --seconds 540
        [--networks resnet50_v1 efficientnet_lite0] [--screen-steps 1200] [--final-steps 2500 3000] [--out results]

plan      plan.py, alone on the device
screen    screen.py: one process for each arm, on training images that are held back
final     accuracy.py: one process for each network, method and seed, on the evaluation images, once. It takes the arm
          with the least KL divergence in the screening of that network, unless --chosen says which. With --runs
          NETWORK/METHOD/ARM/SEED ... only these, in this order
frontier  frontier.py for the networks of --frontiers, with the same options

A job that has its results is not run again, so a run that was cut short can be continued. No job is started after
--seconds. Steps are counted, not minutes: processes side by side slow each other down. Logs and results are in --out.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accuracy import PLANNED
from screen import ARMS

HERE = Path(__file__).parent
SCREENED = {  # arms with capitals in screen.py cannot be chosen for the final runs: they are no options of the library
    "resnet50_v1": ("default", "norms", "noise_norms"),
    "efficientnet_lite0": ("default", "norms", "noise_norms", "noise_norms_lr_double", "noise_norms_per_channel"),
}
METHODS = ("halve_norms", "halve_plan_norms")  # by default, or without norms if they are not learned
ONE_SHOT = ("dense", "magnitude", "magnitude_permuted")
SEARCH_SECONDS = 60.0  # for channel orders: beside other processes a search takes longer


@dataclass
class Job:
    """A command with a name for its log, and the file that it writes when it is done."""

    name: str
    arguments: list[str]
    done: Path
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("assets", type=Path)
    stages = ("plan", "screen", "final", "frontier")
    parser.add_argument("--stages", nargs="+", default=list(stages), choices=stages)
    parser.add_argument("--networks", nargs="+", default=list(SCREENED), help="in order of importance")
    parser.add_argument("--arms", nargs="+", help="arms of the screening, for all networks")
    parser.add_argument("--chosen", nargs="+", help="arm of each network in the final runs")
    parser.add_argument("--methods", nargs="+", help="of the final runs")
    parser.add_argument("--runs", nargs="+", help="final runs in order of value, each as NETWORK/METHOD/ARM/SEED")
    parser.add_argument("--frontiers", nargs="+", default=["efficientnet_lite0"], help="networks")
    parser.add_argument("--screen-steps", nargs="+", type=int, default=[1200], help="for each network, or for all")
    parser.add_argument("--final-steps", nargs="+", type=int, default=[2500], help="for each network, or for all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--note", default="side by side on the device")
    parser.add_argument("--size", type=int, help="pixels to learn from")
    parser.add_argument("--batch", type=int, help="images in a step")
    parser.add_argument("--measure", type=int, help="screen on at most as many images of each folder")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    options.deadline = time.monotonic() + options.seconds
    (options.out / "logs").mkdir(parents=True, exist_ok=True)
    made = {"plan": plan, "screen": screen, "final": final, "frontier": frontier}
    for stages in grouped(options.stages):
        jobs = [job for stage in stages for job in made[stage](options) if not job.done.exists()]
        run_all(jobs, 1 if stages == ["plan"] else options.processes, options)


def grouped(stages: list[str]) -> list[list[str]]:
    """Stages that run together: the final runs and the frontier.

    >>> grouped(["plan", "screen", "final", "frontier"])
    [['plan'], ['screen'], ['final', 'frontier']]
    """
    ends = [stage for stage in stages if stage in ("final", "frontier")]
    return [[stage] for stage in stages if stage not in ends] + ([ends] if ends else [])


def plan(options: argparse.Namespace) -> list[Job]:
    """Where masks pay. Only the fastest dense version that needs no compilation is compared with."""
    common = ["--out", str(options.out), "--device", options.device]
    if options.device == "cuda":
        common += ["--dense", "best_dense"]
    return [
        Job(f"plan_{name}", ["plan.py", str(options.assets), "--networks", name, *common], plan_of(name, options))
        for name in options.networks
    ]


def screen(options: argparse.Namespace) -> list[Job]:
    """Each arm of each network, in the same channel orders, which are searched first."""
    orders = {name: options.out / f"orders_{name}.masks.safetensors" for name in options.networks}
    searches = [Job(f"orders_{name}", screening(name, [], 1, path, options), path) for name, path in orders.items()]
    run_all([job for job in searches if not job.done.exists()], options.processes, options)
    jobs = []
    for name, path in orders.items():
        steps = for_network(options.screen_steps, name, options)
        for arm in options.arms or SCREENED[name]:
            done = options.out / "logs" / f"screen_{name}_{arm}_{steps}.done"
            jobs.append(Job(f"screen_{name}_{arm}", screening(name, [arm], steps, path, options), done))
    return jobs


def screening(name: str, arms: list[str], steps: int, orders: Path, options: argparse.Namespace) -> list[str]:
    common = ["--device", options.device, "--note", options.note, "--out", str(options.out / f"screen_{name}.json")]
    common += [
        "--orders",
        str(orders),
        "--steps",
        str(steps),
        "--seconds",
        "600",
        *given(options, "size", "batch", "measure"),
    ]
    return ["screen.py", str(options.assets), "--network", name, *common, "--arms", *arms]


def final(options: argparse.Namespace) -> list[Job]:
    """The evaluation, seed by seed: what is cut short has one seed of everything."""
    if options.runs:
        return listed(options)
    jobs = []
    arms = {name: chosen(name, options) for name in options.networks}
    for seed in options.seeds:
        for name, arm in arms.items():
            for method in options.methods or methods_for(arm):
                if method in PLANNED and not plan_of(name, options).exists():
                    continue
                what = f"final_{name}_{method}_{seed}"
                done = options.out / "logs" / f"{what}.done"
                jobs.append(Job(what, accuracy(name, [method], [seed], arm, options), done))
    for name in options.networks:
        done = options.out / "logs" / f"final_{name}_one_shot.done"
        jobs.append(Job(f"final_{name}_one_shot", accuracy(name, list(ONE_SHOT), [0], {}, options), done))
    return jobs


def listed(options: argparse.Namespace) -> list[Job]:
    """The final runs of --runs."""
    jobs = []
    for run in options.runs:
        name, method, arm, seed = run.split("/")
        if method in PLANNED and not plan_of(name, options).exists():
            print(f"no plan for {run}", flush=True)
            continue
        what = f"final_{run.replace('/', '_')}"
        done = options.out / "logs" / f"{what}.done"
        jobs.append(Job(what, accuracy(name, [method], [int(seed)], dict(ARMS[arm]), options), done))
    return jobs


def accuracy(
    name: str, methods: list[str], seeds: list[int], arm: dict[str, Any], options: argparse.Namespace
) -> list[str]:
    steps = for_network(options.final_steps, name, options)
    learning = {**arm, "steps": steps, "permute_seconds": SEARCH_SECONDS}
    learning |= {"validation": False}  # one-shot masks to compare with would take half a minute of the device each time
    learning.pop("norms", None)  # the method says it
    found = ["accuracy.py", str(options.assets), "--network", name, "--methods", *methods]
    found += ["--seeds", *map(str, seeds), "--device", options.device, "--options", json.dumps(learning)]
    found += [
        "--note",
        options.note,
        "--masks",
        str(options.out / "masks"),
        "--out",
        str(options.out / "accuracy.json"),
    ]
    found += given(options, "size", "batch")
    return [*found, "--plan", str(plan_of(name, options))] if plan_of(name, options).exists() else found


def frontier(options: argparse.Namespace) -> list[Job]:
    """Agreement against milliseconds, for the networks of --frontiers."""
    jobs = []
    for name in [name for name in options.frontiers if plan_of(name, options).exists()]:
        learning = {**chosen(name, options), "permute_seconds": SEARCH_SECONDS}
        arguments = ["frontier.py", str(options.assets), "--network", name, "--plan", str(plan_of(name, options))]
        arguments += [
            "--steps",
            str(for_network(options.final_steps, name, options)),
            "--options",
            json.dumps(learning),
        ]
        arguments += ["--device", options.device, "--note", options.note, "--out", str(options.out / "frontier.json")]
        arguments += ["--masks", str(options.out / "masks"), *given(options, "size", "batch")]
        for seed in options.seeds:
            what = f"frontier_{name}_{seed}"
            jobs.append(Job(what, [*arguments, "--seed", str(seed)], options.out / "logs" / f"{what}.done"))
    return jobs


def chosen(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Options of `halve.learn` for the final runs: of the arm with the least KL divergence on images held back."""
    if options.chosen:
        arm = options.chosen[options.networks.index(name) if len(options.chosen) > 1 else 0]
    else:
        path = options.out / f"screen_{name}.json"
        records = json.loads(path.read_text()) if path.exists() else []
        steps = for_network(options.screen_steps, name, options)
        known = [r for r in records if r["steps"] == steps and not any(key.isupper() for key in r["options"])]
        score = {r["arm"]: sum(value for key, value in r.items() if key.startswith("kl_")) for r in known}
        arm = min(score, key=lambda arm: score[arm]) if score else "norms"
    print(f"{name}: {arm}", flush=True)
    return dict(ARMS[arm])


def methods_for(arm: dict[str, Any]) -> list[str]:
    learned = arm.get("norms") == "learn"
    return [method if learned else method.removesuffix("_norms") for method in METHODS]


def given(options: argparse.Namespace, *names: str) -> list[str]:
    """The options of these names that were given, as arguments."""
    return [text for name in names if getattr(options, name) for text in (f"--{name}", str(getattr(options, name)))]


def plan_of(name: str, options: argparse.Namespace) -> Path:
    path: Path = options.out / f"plan_{name}.json"
    return path


def for_network(values: list[int], name: str, options: argparse.Namespace) -> int:
    return values[options.networks.index(name) if len(values) > 1 else 0]


def run_all(jobs: list[Job], most: int, options: argparse.Namespace) -> None:
    """Run jobs side by side. What runs at the deadline is given until it ends; nothing new is started."""
    waiting, running = list(jobs), list[Job]()
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    while waiting or running:
        while waiting and len(running) < most:
            job = waiting.pop(0)
            if time.monotonic() > options.deadline:
                print(f"no time for {job.name}", flush=True)
                continue
            with (options.out / "logs" / f"{job.name}.txt").open("wb") as log:
                command = [sys.executable, str(HERE / job.arguments[0]), *job.arguments[1:]]
                job.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            job.began = time.monotonic()
            running.append(job)
        time.sleep(0.2)
        for job in [job for job in running if job.process is not None and job.process.poll() is not None]:
            running.remove(job)
            report(job, options)


def report(job: Job, options: argparse.Namespace) -> None:
    """Print how a job ended, and note that it is done if it is."""
    assert job.process is not None
    lines = (options.out / "logs" / f"{job.name}.txt").read_text(errors="replace").strip().splitlines()
    code, seconds = job.process.returncode, time.monotonic() - job.began
    print(f"{job.name}: {'done' if code == 0 else f'failed ({code})'}, {seconds:.0f} s", flush=True)
    for line in lines[-2:]:
        print(f"    {line[:400]}", flush=True)
    if code == 0 and not job.done.exists():
        job.done.touch()


if __name__ == "__main__":
    main()

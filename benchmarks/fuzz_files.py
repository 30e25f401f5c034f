"""Load mutated mask files, packed checkpoints, run states and compiled networks: each must load unchanged or raise a
HalveError.

    python benchmarks/fuzz_files.py --cases 1000000 --networks 10000

A case is a valid file with flipped bits, cut or repeated bytes, another length in its header, edited safetensors
entries, or edited JSON and tensors with a checksum that fits again. Only the last may give other content: it is a valid
file of something else. Half of the compiled networks are of this kind, many with a random call of an operator that
files may contain, and those that load are run. The process has a limit on its memory, and each case one on its time.
Writes benchmarks/results/fuzz_files.json.
"""

import argparse
import collections
import contextlib
import copy
import datetime
import json
import marshal
import platform
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

import halve
from halve.engine.compiled import Compiled
from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.registry import FALLBACK
from halve.engine.saved import file as compiled_file
from halve.engine.saved import graph, operators
from halve.errors import EngineWarning, HalveError
from halve.learn.run_state import FORMAT as RUN_STATE
from halve.learn.run_state import RunState, saved_permutation
from halve.masks import file, packed, storage
from halve.masks.mask import MaskSet
from halve.select.select import select
from halve.version import VERSION

RESULT = Path(__file__).parent / "results" / "fuzz_files.json"
MEMORY = 1 << 30  # bytes above what the process takes at the start
SECONDS = 10  # of processor time, per case
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 255, 2**31, 2**63, 10**30, 10**400, -0.0, 0.5, 1e308, 1e999),
    *("", "0", "2:4", "1:256", "2:256", "٢:٤", "02:4", "\x1b[31m", "\u202e", "\0", "a" * 5000, "weight", "0.weight"),
    *([], {}, [[]], [0], [0, 0], [1] * 300, {"": 0}, {"0": 0}, [[[[[[[[[[]]]]]]]]]], {"a": {"b": {"c": []}}}),
)
NETWORK_VALUES: tuple[Any, ...] = (  # in compiled networks
    *VALUES,
    *({"value": 0}, {"value": 1}, {"value": -1}, {"value": 10**6}, {"dtype": "float16"}, {"float": "nan"}),
    *("aten.full.default", "aten.cat.default", "operator.mul", "operator.getitem", "mma_sp", "float16", "cuda"),
    *("__import__('os').abort()", "L['x'].size()[0] == 2", [2**40], [-1, 2], {"tensor": None}, {"device": "cpu"}),
)


class TooSlow(BaseException):
    """A case took longer than its limit. No reader may catch it."""


@dataclass(frozen=True)
class Target:
    """A valid file and how to read it; two contents are equal if their `plain` texts are."""

    name: str
    format_: storage.Format
    content: bytes
    read: Callable[[Path], Any]
    plain: Callable[[Any], Any]
    run: Callable[[Any], Any] | None = None  # for what was loaded

    @property
    def values(self) -> tuple[Any, ...]:
        """What to put into its header."""
        return VALUES if self.run is None else NETWORK_VALUES


def mutated(value: Any, rng: random.Random, values: tuple[Any, ...] = VALUES) -> Any:
    """A copy of a JSON value with one thing changed: a key, an item, a number, a text, or all of it."""
    result = marshal.loads(marshal.dumps(value))  # a copy
    places = list(_places(result))
    if not places:
        return rng.choice(values)
    box, key = rng.choice(places)
    action = rng.randrange(8)
    if action == 0:
        del box[key]
    elif action == 1 and isinstance(box, dict):
        box[rng.choice(["", "0", "x", f"{key}x", "\x1b]0;", "layers"])] = box.pop(key)
    elif action == 2 and isinstance(box, list):
        box.append(copy.deepcopy(box[key]))
    elif action == 3 and isinstance(box[key], int | float) and not isinstance(box[key], bool):
        number = box[key]
        box[key] = rng.choice(
            [number + 1, number - 1, -number, number * 2, float(number) if abs(number) < 1e9 else 0.5]
        )
    elif action == 4 and isinstance(box[key], str):
        text = box[key]
        at = rng.randrange(len(text) + 1)
        box[key] = text[:at] + rng.choice(["", "\u202e", "\x1b[2J", "0", ":", " "]) + text[at + rng.randrange(2) :]
    elif action == 5:
        other, name = rng.choice(places)
        box[key] = copy.deepcopy(other[name]) if name in _keys(other) else None
    else:
        box[key] = copy.deepcopy(rng.choice(values))
    return result


def _keys(box: Any) -> Any:
    return box if isinstance(box, dict) else range(len(box))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All (container, key) in a JSON value."""
    for key in list(_keys(value)) if isinstance(value, dict | list) else ():
        yield value, key
        yield from _places(value[key])


def _flip_bits(target: Target, rng: random.Random) -> bytes:
    damaged = bytearray(target.content)
    header = 8 + struct.unpack("<Q", target.content[:8])[0]
    for _ in range(rng.choice([1, 1, 2, 8])):
        damaged[rng.randrange(rng.choice([8, header, len(damaged)]))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def _cut(target: Target, rng: random.Random) -> bytes:
    start, end = sorted(rng.choices(range(len(target.content) + 1), k=2))
    return rng.choice([target.content[:start], target.content[:start] + target.content[end:], target.content[start:]])


def _repeat(target: Target, rng: random.Random) -> bytes:
    start, end = sorted(rng.choices(range(len(target.content) + 1), k=2))
    return target.content[:end] + target.content[start:]


def _length(target: Target, rng: random.Random) -> bytes:
    length = struct.unpack("<Q", target.content[:8])[0]
    other = rng.choice([0, 1, 2, length - 1, length + 1, 2 * length, len(target.content), 10**8, 2**63, 2**64 - 1])
    return struct.pack("<Q", other) + target.content[8:]


def _entries(target: Target, rng: random.Random) -> bytes:
    """Another safetensors header in front of the same tensors, of the right length."""
    length = struct.unpack("<Q", target.content[:8])[0]
    header = mutated(json.loads(target.content[8 : 8 + length]), rng)
    text = json.dumps(header, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    return struct.pack("<Q", len(text)) + text + target.content[8 + length :]


def _header(target: Target, rng: random.Random) -> bytes:
    """Another JSON header or other tensors, with a checksum that fits."""
    _, header, tensors = _parts(target)
    for _ in range(rng.choice([1, 1, 2, 4])):
        if target.run is not None and rng.random() < 0.5:
            _call_something(header, rng)
        elif rng.random() < 0.7:
            header = mutated(header, rng, target.values)
        else:
            _change_tensor(tensors, rng)
    text = json.dumps(header, ensure_ascii=rng.random() < 0.5)
    metadata = {"format": target.format_.name, "version": str(target.format_.version), "header": text}
    metadata["sha256"] = storage._checksum(metadata, tensors)
    return safetensors.torch.save(tensors, metadata)


def _call_something(header: Any, rng: random.Random) -> None:
    """Return the result of a random operator on random arguments, too."""
    if not isinstance(header, dict) or not all(isinstance(header.get(key), list) for key in ("nodes", "outputs")):
        return
    name = rng.choice(OPERATORS)
    target = operators.operator_named(name)
    schema = operators.schema_of(target)
    types = [str(argument.type) for argument in schema.arguments] if schema else ["int"] * rng.choice([1, 2, 3])
    last = len(header["nodes"]) + 1
    arguments = [_argument(kind, last, rng) for kind in types]
    positional = len(types) if schema is None else sum(not argument.kwarg_only for argument in schema.arguments)
    header["nodes"].append({"call": name, "args": arguments[: rng.randrange(positional + 1) or positional]})
    header["outputs"].append({"value": last})
    header["structure"] = ["tuple", [_LEAF for _ in header["outputs"]]]


_LEAF = "*"
_NUMBERS = (0, 0, 1, 1, 2, 3, 4, 8, -1, -2, 7, 100, 2**31, 2**40, -(2**63))


def _argument(kind: str, last: int, rng: random.Random) -> Any:
    """An argument of about this type."""
    value = {"value": rng.choice([0, rng.randrange(last)])}
    if rng.random() < 0.03:
        return copy.deepcopy(rng.choice(NETWORK_VALUES))
    if "Tensor" in kind:
        return [value] * rng.randrange(1, 4) if "List" in kind else value
    if "List" in kind:
        return [rng.choice(_NUMBERS) for _ in range(rng.randrange(5))]
    if "Optional" in kind and rng.random() < 0.6:
        return None
    if "bool" in kind:
        return rng.random() < 0.5
    if "float" in kind:
        return rng.choice([0.0, 0.5, 1.0, -1.0, 1e-5, 1e30, {"float": "inf"}, {"float": "nan"}])
    if "str" in kind:
        return rng.choice(["", "none", "reflect", "ab,bc->ac", "mean", "floor", "amax", "x" * 50])
    return rng.choice(_NUMBERS)


def _change_tensor(tensors: dict[str, Tensor], rng: random.Random) -> None:
    if not tensors:
        return
    name = rng.choice(sorted(tensors))
    value = tensors.pop(name)
    action = rng.randrange(6)
    if action == 1:
        tensors[rng.choice([f"{name}x", name[:-1], "codes:", "values:0", "order:9"])] = value
    elif action == 2:
        tensors[name] = value.to(rng.choice([torch.int64, torch.float64, torch.uint8, torch.bool, torch.float16]))
    elif action == 3:
        tensors[name] = value.reshape(-1)[: rng.randrange(value.numel() + 1)].clone()
    elif action == 4:
        tensors[name] = value.unsqueeze(rng.randrange(value.dim() + 1)).clone()
    elif action == 5 and value.numel():
        flat = value.reshape(-1).clone()
        flat[rng.randrange(len(flat))] = rng.choice(
            [0, 1, 3, 127, float("nan")] if value.is_floating_point() else [0, 1, 3]
        )
        tensors[name] = flat.reshape(value.shape)


def _parts(target: Target) -> tuple[dict[str, str], Any, dict[str, Tensor]]:
    length = struct.unpack("<Q", target.content[:8])[0]
    metadata = json.loads(target.content[8 : 8 + length])["__metadata__"]
    return metadata, json.loads(metadata["header"]), safetensors.torch.load(target.content)


def _operator_names() -> Iterator[str]:
    """Every operator that files may contain."""
    yield from operators._FUNCTIONS
    for name in sorted(operators._NAMES | set(operators._SIZES.split())):
        packet, _, only = name.partition(".")
        for overload in getattr(torch.ops.aten, packet).overloads():
            if only in ("", overload):
                with contextlib.suppress(ValueError):
                    operators.operator_named(f"aten.{packet}.{overload}")
                    yield f"aten.{packet}.{overload}"


OPERATORS = list(_operator_names())
MUTATIONS = {
    "flipped bits": _flip_bits,
    "cut": _cut,
    "repeated": _repeat,
    "other length": _length,
    "safetensors entries": _entries,
    "header and tensors": _header,
}
OTHER_CONTENT = "header and tensors"  # the only mutation that makes a valid file of something else


def _same_masks(masks: MaskSet) -> Any:
    tensors = file.tensors_of(masks) | {f"codes:{name}": mask.stored_codes for name, mask in masks.items()}
    return file.header_of(masks), _same_tensors(tensors)


def _same_tensors(tensors: dict[str, Tensor]) -> Any:
    return {name: (str(t.dtype), tuple(t.shape), t.numpy().tobytes()) for name, t in tensors.items()}


def targets(folder: Path) -> list[Target]:
    """A valid file of each kind, small and with everything that a file can hold."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 1)
    ).eval()
    masks = halve.prune(model, permute=True, data=[torch.randn(4, 4, 8, 8)], permute_seconds=1, also="5")
    masks = masks.with_statistics({"1.running_mean": torch.zeros(8), "1.running_var": torch.ones(8)})
    padded = halve.prune(model, pattern="2:3", remainder="pad")
    choices = select(model, also="5").masked
    identity = {"settings": {"lr": 0.1, "betas": [0.9, 0.95]}, "layers": {"0": ["2:4", [8, 4]]}, "processes": 1}
    numbers = masks.moves
    orders = sorted({order for dims in numbers.values() for order in dims.values()})
    permutation = {
        "orders": [list(order) for order in orders],
        "layers": {name: orders.index(m.layout.channel_order) for name, m in masks.items() if m.layout.channel_order},
        "moves": {name: {str(d): orders.index(o) for d, o in dims.items()} for name, dims in numbers.items()},
        "summary": masks.recipe["permute"],
    }
    progress, tensors = (7, 7, 2.5, 0.25), (torch.randn(64), torch.randn(64), torch.rand(64))
    state = RunState(identity, {"data": {"images": "00ff"}}, *progress, *tensors, permutation)

    def run_state(path: Path) -> RunState:
        saved_permutation(path, model, choices)
        return RunState.load(path, identity, torch.zeros(64))

    def plain_state(state: RunState) -> Any:
        tensors = {name: getattr(state, name) for name in ("logits", "exp_avg", "exp_avg_sq")}
        progress = (state.step, state.batches, state.seconds, state.fraction)
        return state.identity, state.data, *progress, state.permutation, _same_tensors(tensors)

    def plain_packed(content: packed.Unpacked) -> Any:
        return _same_masks(content.masks), _same_tensors(content.state)

    def stored(name: str, save: Callable[[Path], Any]) -> bytes:
        save(folder / name)
        return (folder / name).read_bytes()

    pack_both = [("packed", masks), ("padded packed", padded)]
    return [
        Target("masks", file.FORMAT, stored("masks", masks.save), halve.load, _same_masks),
        Target("padded masks", file.FORMAT, stored("padded", padded.save), halve.load, _same_masks),
        *(
            Target(
                name, packed.FORMAT, stored(name, lambda p, m=m: halve.pack(model, m, p)), halve.unpack, plain_packed
            )
            for name, m in pack_both
        ),
        Target("run state", RUN_STATE, stored("run", state.save), run_state, plain_state),
    ]


class _Varied(nn.Module):
    """A network whose graph has sizes, constants, views, attention, norms that are not folded, and nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.project, self.head = nn.Conv2d(8, 4, 1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.norm(self.conv(x).relu())
        y = nn.functional.max_pool2d(self.project(y) + x, 2)
        tokens = y.flatten(2).transpose(1, 2)
        tokens = nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)
        tokens = nn.functional.layer_norm(tokens, (4,)) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        left, right = self.head(tokens).chunk(2, dim=-1)
        return {"scores": (left.softmax(-1), right), "rows": [y, x.shape[2] // 2]}


def networks(folder: Path) -> list[Target]:
    """Valid files of two compiled networks."""
    torch.manual_seed(0)
    plain_model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(288, 4))
    found = []
    for name, model, any_size in (("plain network", plain_model, False), ("varied network", _Varied(), True)):
        images = torch.randn(2, 4, 8, 8)
        model = model.eval()
        with warnings.catch_warnings(action="ignore", category=EngineWarning):
            fast = halve.compile(model, halve.prune(model), images, any_size=any_size)
        for layer in fast.layers:
            layer.use({1: Kernel("mma_sp", "64x64") if layer.is_2_4 else FALLBACK})
        fast.save(folder / name)
        content = (folder / name).read_bytes()
        found.append(Target(name, compiled_file.FORMAT, content, _load_network, _same_network, _run_network))
    return found


def _load_network(path: Path) -> Compiled:
    with warnings.catch_warnings(action="ignore"):
        return halve.load_compiled(path, device="cpu")


def _same_network(fast: Compiled) -> Any:
    assert isinstance(fast.body, torch.fx.GraphModule)
    described, tensors = graph.describe(fast.body, torch.device("cpu"))
    inputs = [(str(x.dtype), tuple(x.shape)) for x in fast.example]
    return described, _same_tensors(tensors), inputs, fast.dtype, fast.guards, fast.plan.as_json()


def _run_network(fast: Compiled) -> None:
    with warnings.catch_warnings(action="ignore"):
        fast(*(torch.zeros((2, *x.shape[1:]), dtype=x.dtype) for x in fast.example))


@contextlib.contextmanager
def _limits(memory: int) -> Iterator[None]:
    """Limit the memory that the process may take on top of what it has."""
    old = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, old[1]))
    handler = signal.signal(signal.SIGPROF, _too_slow)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, old)


def _too_slow(*_: Any) -> None:
    raise TooSlow(f"a case took more than {SECONDS} s")


def fuzz(
    cases: int,
    seed: int = 0,
    seconds: float = float("inf"),
    make: Callable[[Path], list[Target]] = targets,
    first: int = 0,
) -> dict[str, Any]:
    """Run cases until their number or the time is reached; returns the counts, and the failures by case.

    Args:
        cases: how many.
        seed: determines the cases.
        seconds: stop after this time.
        make: makes the valid files.
        first: the number of the first case.
    """
    outcomes: collections.Counter[str] = collections.Counter()
    failures: list[dict[str, Any]] = []
    done, started = 0, time.perf_counter()
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # files on disks take longer than reading them
    with tempfile.TemporaryDirectory(dir=in_memory) as name, _limits(MEMORY):
        folder = Path(name)
        found = make(folder)
        expected = {target.name: target.plain(target.read(folder_file(folder, target))) for target in found}
        path = folder / "case"
        for case in range(first, first + cases):
            if time.perf_counter() - started > seconds:
                break
            rng = random.Random(f"{seed} {case}")
            target = rng.choice(found)
            how = rng.choice([*MUTATIONS] if target.run is None else [*MUTATIONS, *[OTHER_CONTENT] * 4])
            path.write_bytes(MUTATIONS[how](target, rng))
            outcome = _outcome(target, path, expected[target.name], how)
            outcomes[f"{how}: {outcome.partition(': ')[0]}"] += 1
            if outcome.startswith("FAILED"):
                failures.append({"case": case, "target": target.name, "mutation": how, "outcome": outcome})
            done += 1
    counts = dict(sorted(outcomes.items()))
    return {"cases": done, "seed": seed, "outcomes": counts, "failures": failures}


def folder_file(folder: Path, target: Target) -> Path:
    """The target's unchanged file."""
    path = folder / "unchanged"
    path.write_bytes(target.content)
    return path


def _outcome(target: Target, path: Path, expected: Any, how: str) -> str:
    try:
        with _in_time():
            content = target.read(path)
        same = target.plain(content) == expected
    except HalveError:
        return "refused"
    except (Exception, TooSlow) as error:  # what must not happen
        return f"FAILED: {type(error).__name__}: {error}"[:300]
    if same:
        return "loaded, the same"
    if how != OTHER_CONTENT:
        return "FAILED: loaded, but other content"
    try:
        if target.run is not None:
            with _in_time():
                target.run(content)  # which may raise what PyTorch raises, but not end the process
    except (Exception, TooSlow):
        return "loaded, another valid file that does not run"
    return "loaded, another valid file"


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    """Raise `TooSlow` in what takes too long, or after it if something else caught that."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    started = time.process_time()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        if time.process_time() - started > SECONDS:
            _too_slow()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", type=int, default=1_000_000, help="mask files, packed checkpoints and run states; 0 keeps the record"
    )
    parser.add_argument("--networks", type=int, default=10_000, help="compiled networks; 0 keeps the record")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop each of the two after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for part, cases, make in (("files", arguments.cases, targets), ("networks", arguments.networks, networks)):
        if cases:
            result[part] = _timed(cases, arguments.seed, arguments.seconds, make)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    sys.exit(1 if any(part["failures"] for part in result.values()) else 0)


def _timed(*arguments: Any) -> dict[str, Any]:
    """The result of `fuzz`, with its time and versions."""
    started = time.process_time()
    result = fuzz(*arguments)
    result["processor_seconds"] = round(time.process_time() - started, 1)
    result["versions"] = {
        "halve": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
    }
    result["date"] = datetime.date.today().isoformat()
    return result


if __name__ == "__main__":
    main()

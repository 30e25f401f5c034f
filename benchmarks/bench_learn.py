"""One learning step of ResNet-50 on a GPU, compared with training dense weights and with unfold + matmul.

    python benchmarks/bench_learn.py [--batch 256] [--size 224] [--steps 40] [--out FILE]

All three distill from the dense network, including its forward pass, in bf16 with fused AdamW; `halve` and `dense` are
channels last. `halve` is `halve.learn` with its defaults, including sampling, channel permutations, augmentation and
entropy reports. The other two only compare outputs and block features. `unfold` does what the paper's published code
does: unfold, matrix product, a zero bias for layers without one, a concatenation over groups, and a sampled mask with
its entropy in each layer. Rounds are interleaved. Writes benchmarks/results/learn_gpu.json. Does nothing without a GPU.
"""

import argparse
import copy
import datetime
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet50

import halve
from halve.learn.objective import Views, distill_outputs_and_features, find_blocks, watching
from halve.learn.sampling import Sampler
from halve.masks.pattern import Pattern
from halve.modules import weight_of

RESULTS = Path(__file__).parent / "results" / "learn_gpu.json"


class UnfoldedConv(nn.Module):
    """A convolution as unfold and matrix product, with a Gumbel-Softmax mask on its weight."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv
        self.register_buffer("patterns", Pattern("2:4").table().float().to(conv.weight.device))
        self.bias = nn.Parameter(torch.zeros(conv.out_channels, device=conv.weight.device))
        self.logits = nn.Parameter(torch.randn(conv.weight.numel() // 4, 6, device=conv.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        conv = self.conv
        soft = (self.logits - torch.empty_like(self.logits).exponential_().log()).softmax(1)
        self.entropy = -(soft * soft.log()).sum(1)
        hard = torch.zeros_like(soft).scatter_(1, soft.argmax(1, keepdim=True), 1.0) - soft.detach() + soft
        mask = (hard @ self.patterns).reshape(conv.weight.shape)
        columns = F.unfold(x, conv.kernel_size, conv.dilation, conv.padding, conv.stride)
        product = (conv.weight * mask).flatten(1) @ columns + self.bias[:, None]
        height = (x.shape[2] + 2 * conv.padding[0] - conv.kernel_size[0]) // conv.stride[0] + 1
        return torch.cat([product.unflatten(2, (height, -1))], dim=1)


def dense_step(teacher: nn.Module, images: Tensor, blocks: list[str]) -> Callable[[], None]:
    student = copy.deepcopy(teacher)
    trained = [module.weight for name, module in student.named_modules() if isinstance(module, nn.Conv2d)]
    for weight in trained:
        weight.requires_grad_(True)
    return distill_step(teacher, student, trained, images, blocks)


def unfold_step(teacher: nn.Module, images: Tensor, blocks: list[str]) -> Callable[[], None]:
    student = copy.deepcopy(teacher).to(memory_format=torch.contiguous_format)
    for name, module in list(student.named_modules()):
        if isinstance(module, nn.Conv2d) and module.in_channels % 4 == 0:
            student.set_submodule(name, UnfoldedConv(module))
    trained = [module.logits for module in student.modules() if isinstance(module, UnfoldedConv)]
    return distill_step(teacher, student, trained, images, blocks)


def distill_step(
    teacher: nn.Module, student: nn.Module, trained: list[Tensor], images: Tensor, blocks: list[str]
) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(trained, lr=1e-6, weight_decay=0.0, fused=True)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            with torch.no_grad(), watching(teacher, blocks) as theirs:
                dense_output = teacher(images)
            with watching(student, blocks) as ours:
                output = student(images)
        optimizer.zero_grad(set_to_none=True)
        distill_outputs_and_features(Views(output, ours, dense_output, theirs, images)).backward()
        optimizer.step()

    return step


def timed(step: Callable[[], None], steps: int) -> float:
    """Milliseconds per step."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started) / steps


def halve_ms(model: nn.Module, images: Tensor, steps: int) -> list[float]:
    """Milliseconds per step of `halve.learn`, for every ten steps except the first ten."""
    seen: list[tuple[int, float]] = []

    def report(event: object) -> None:
        if hasattr(event, "loss") and event.step % 10 == 0:
            torch.cuda.synchronize()
            seen.append((event.step, time.perf_counter()))

    halve.learn(model, [images], steps=steps, permute_seconds=2.0, report=report, validation=False)
    return [1e3 * (b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(seen)]


def sampling_ms(model: nn.Module, steps: int) -> float:
    """Milliseconds of sampling alone, forward and backward."""
    choices = halve.select(model).masked
    weights = {choice.name: weight_of(model.get_submodule(choice.name)) for choice in choices}
    sampler = Sampler(choices, weights, {name: weight.abs() for name, weight in weights.items()}, 8.0).cuda()
    grads = {name: torch.randn_like(weight) for name, weight in weights.items()}

    def step() -> None:
        sampled = sampler.sample(temperature=1.0, seed=0, step=0)
        sampler.logits.grad = None
        torch.autograd.backward(list(sampled.values()), [grads[name] for name in sampled])

    timed(step, 3)
    return timed(step, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_learn: no GPU, nothing measured")
        return
    torch.manual_seed(0)
    model = resnet50().cuda().to(memory_format=torch.channels_last).eval().requires_grad_(False)
    images = torch.randn(options.batch, 3, options.size, options.size, device="cuda").contiguous(
        memory_format=torch.channels_last
    )
    blocks = find_blocks(model, [choice.name for choice in halve.select(model).masked])
    steps = {"dense": dense_step(model, images, blocks), "unfold": unfold_step(model, images, blocks)}
    times: dict[str, list[float]] = {"halve": [], "dense": [], "unfold": []}
    for step in steps.values():
        timed(step, 3)
    for _ in range(3):
        times["halve"] += halve_ms(model, images, options.steps)
        times["dense"].append(timed(steps["dense"], options.steps // 2))
        times["unfold"].append(timed(steps["unfold"], 3))
    sampling = sampling_ms(model, 20)
    medians = {name: statistics.median(values) for name, values in times.items()}
    record = {
        "network": "resnet50",
        "batch": options.batch,
        "size": options.size,
        "precision": "bfloat16",
        "median_ms": {name: round(value, 2) for name, value in medians.items()},
        "spread_ms": {name: [round(min(v), 2), round(max(v), 2)] for name, v in times.items()},
        "sampling_ms": round(sampling, 2),
        "halve_over_dense": round(medians["halve"] / medians["dense"], 3),
        "unfold_over_halve": round(medians["unfold"] / medians["halve"], 2),
        "sampling_share": round(sampling / medians["halve"], 3),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        "hardware": torch.cuda.get_device_name(),
        "versions": {"halve": halve.__version__, "torch": torch.__version__, "cuda": torch.version.cuda},
        "date": datetime.date.today().isoformat(),
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()

"""Round trips through ONNX: how far exported files agree with the masked networks, and what int8 costs.

    python experiments/export.py ASSETS WORK [--networks resnet18 ...] [--masks FILE] [--photos] [--sums] [--gpu-only]

ASSETS has the checkpoints and photos, as for one_shot.py. WORK keeps masks, and for each of them a folder, named by its
digest, with ONNX files and scores: what is there is used again.
ResNet-50 has the weights of its checkpoint; the other networks have random weights and random BatchNorm statistics, as
only the round trip is looked at. Masks are made in one shot, unless WORK has others. ResNet-50's may be given by
--masks, a file that `accuracy.py --masks` kept. --photos also measures ResNet-50's files on 500 photos. As onnxruntime
computes float16 in float32 on CPUs, PyTorch runs on a GPU, too: --gpu-only runs that alone, and keeps its scores in
WORK for a machine without one. --sums measures what Q/DQ on residual sums costs.
Writes experiments/results/export.json.
"""

import argparse
import copy
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import TensorProto, numpy_helper
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision import models

import halve
from halve.agreement import compare
from halve.export.network import prepared
from halve.export.runtime import Session
from halve.machine import device_name
from halve.masks.file import checksum
from halve.sources.data import load_data
from halve.sources.models import load_model
from halve.sources.preprocessing import Preprocessing

RESULTS = Path(__file__).parent / "results" / "export.json"
CALIBRATION_IMAGES = 256
CPU = torch.device("cpu")
PHOTOS = "500 ImageNet photos of 500 classes"
HALF = "2:4, PyTorch float16 on a GPU"
WITH_SUMS = ("resnet50_v1", "convnext_tiny", "swin_t")
PROBE_IMAGES = 400


def random_network(name: str) -> nn.Module:
    """A torchvision network with random weights and plausible BatchNorm statistics."""
    torch.manual_seed(0)
    detector = name.startswith(("retinanet", "ssd"))
    backbone = {"weights_backbone": None} if detector or name.startswith("deeplab") else {}
    model = models.get_model(name, weights=None, **backbone).eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean, 0, 0.1)
            nn.init.uniform_(norm.running_var, 0.5, 2)
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, 0, 0.1)
    return model


NETWORKS = {  # image size
    "resnet18": 224,
    "resnet50_v1": 224,
    "convnext_tiny": 224,
    "mobilenet_v3_large": 224,
    "efficientnet_b0": 224,
    "deeplabv3_resnet50": 224,
    "retinanet_resnet50_fpn_v2": 256,
    "ssdlite320_mobilenet_v3_large": 320,
}


def round_trip(name: str, assets: Path, work: Path) -> dict[str, Any]:
    """Export a network in float32 and float16, and compare."""
    model, masks, images = opened(name, assets, work)
    record: dict[str, Any] = {"network": name, "masked": len(masks), "mask": described(masks)}
    record |= {"images": len(images), "size": NETWORKS[name]}
    for dtype in (torch.float32, torch.float16):
        key = str(dtype).removeprefix("torch.")
        done = halve.export(model, masks, images, made_from(masks, work) / f"{name}.{key}.onnx", dtype=dtype)
        record[key] = {"difference": done.difference, "bytes": done.size}
    eligible = {layer.weight for layer in done.check.eligible}
    record |= {"layers": len(done.check.layers), "eligible": len(done.check.eligible), "likely": len(done.check.likely)}
    record |= {"notes": list(done.notes), "polygraphy_agrees": judged(done.path) == eligible}
    return record


def opened(name: str, assets: Path, work: Path) -> tuple[nn.Module, halve.MaskSet, Tensor]:
    """A network, its masks, and images to compare on."""
    path = work / f"{name}.masks.safetensors"
    if name == "resnet50_v1":
        model = load_model(f"{assets / 'zoo.py'}:{name}", assets / "resnet50_v1_imagenet.safetensors").model
        images = photos(assets / "in20_train", CALIBRATION_IMAGES)
        if not path.exists():
            masks = halve.prune(model, "wanda", images, permute=True, permute_seconds=60, recalibrate=True)
            masks.save(path)
        return model, halve.load(path), images[:8]
    model, size = random_network(name), NETWORKS[name]
    if not path.exists():
        halve.prune(model).save(path)
    return model, halve.load(path), torch.randn(2, 3, size, size)


def made_from(masks: halve.MaskSet, work: Path) -> Path:
    """The folder for what is made from these masks, so that nothing of others is used again."""
    folder = work / checksum(masks)[:12]
    folder.mkdir(exist_ok=True)
    return folder


def photos(folder: Path, limit: int | None = None) -> Tensor:
    """Images as one tensor."""
    size = NETWORKS["resnet50_v1"]
    loader = load_data(
        str(folder), Preprocessing(size, size), batch_size=64, limit=limit, shuffle=limit is not None
    ).loader
    return torch.cat([batch[0] for batch in loader])


def judged(path: Path) -> set[str]:
    """The weights that NVIDIA's Polygraphy finds sparse, of ungrouped layers."""
    from polygraphy.tools.sparse import SparsityPruner  # not needed on the machine with the GPU

    model = onnx.load(path)
    grouped = {layer.weight for layer in halve.check_onnx(path).layers if "grouped" in layer.reason}
    for tensor in model.graph.initializer:
        if tensor.data_type in (TensorProto.INT8, TensorProto.FLOAT16):  # float32 is what it reads fastest
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype("float32"), tensor.name))
    judge = SparsityPruner(model)
    judge.check()
    return judge.sparse_tensors - grouped


def on_photos(assets: Path, work: Path) -> list[dict[str, Any]]:
    """ResNet-50 on 500 photos of 500 classes, in each precision, compared with the dense network in float32."""
    name = "resnet50_v1"
    model, masks, images = opened(name, assets, work)
    work = made_from(masks, work)
    test = photos(assets / "in1000_dev")
    sparse = halve.apply(model, masks).eval()
    quantized = work / f"{name}.int8.onnx"
    calibrate = photos(assets / "in20_train", CALIBRATION_IMAGES)
    if not quantized.exists():
        done = halve.export(model, masks, images, quantized, int8=True, calibrate=calibrate)
        quantized.with_suffix(".json").write_text(json.dumps(done.as_json()))
    runs: dict[str, Callable[[Tensor], Tensor]] = {
        "dense, PyTorch float32": model,
        "2:4, PyTorch float32": sparse,
        HALF: half_runner(sparse, images),
        **{f"2:4, file in {key}": file_runner(work / f"{name}.{key}.onnx") for key in ("float32", "float16", "int8")},
    }
    if not torch.cuda.is_available() and not scores_file(work, HALF).exists():
        del runs[HALF]  # float16 on a CPU would be another computation
    scores = {key: scored(run, test, scores_file(work, key)) for key, run in runs.items()}
    dense, masked = (scores[key][0] for key in ("dense, PyTorch float32", "2:4, PyTorch float32"))
    quantization = json.loads(quantized.with_suffix(".json").read_text())["quantization"]
    return [
        {
            **made,
            "network": name,
            "run": key,
            "data": PHOTOS,
            "photos": len(test),
            "size": NETWORKS[name],
            "mask": described(masks),
            "agreement": compare(found, dense).share,
            "flips": int((found.argmax(1) != masked.argmax(1)).sum()),
            **({"quantization": quantization} if key.endswith("int8") else {}),
        }
        for key, (found, made) in scores.items()
    ]


def cost_of_sums(name: str, assets: Path, work: Path) -> dict[str, Any]:
    """Int8 with and without Q/DQ on residual sums, compared with the same network in float32, on photos."""
    if name == "resnet50_v1":
        model, masks, images = opened(name, assets, work)
        test, data = photos(assets / "in1000_dev"), PHOTOS
    else:
        model = probed(name, assets)
        masks, images = halve.prune(model), photos(assets / "in20_train", 8)
        test, data = photos(assets / "in20_val_dev", PROBE_IMAGES), f"{PROBE_IMAGES} ImageNet photos of 20 classes"
    folder = made_from(masks, work)
    path = folder / f"{name}.sums.int8.onnx"
    calibrate = photos(assets / "in20_train", CALIBRATION_IMAGES)
    done = halve.export(model, masks, images, path, int8=True, calibrate=calibrate)
    assert done.quantization is not None
    exact = halve.export(model, masks, images, folder / f"{name}.sums.float32.onnx").path
    files = {"float32": exact, "layers": without_sums(path), "layers and sums": path}
    runs = {key: file_runner(file) for key, file in files.items()}
    scores = {key: torch.cat([run(batch) for batch in test.split(20)]) for key, run in runs.items()}
    against = {key: compare(scores[key], scores["float32"]) for key in ("layers", "layers and sums")}
    return {
        "network": name,
        "data": data,
        "photos": len(test),
        "mask": described(masks),
        "polygraphy_agrees": judged(path) == {layer.weight for layer in done.check.eligible},
        "method": done.quantization.method,
        "layers": len(done.quantization.costs),
        "sums": done.quantization.sums,
        "agreement": {key: found.share for key, found in against.items()},
        "kl": {key: found.kl for key, found in against.items()},
    }


def probed(name: str, assets: Path) -> nn.Module:
    """A random network whose head tells 20 classes apart, as well as its masked features allow."""
    torch.manual_seed(0)
    model = models.get_model(name, num_classes=20).eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):  # so that branches are as large as what they are added to
            nn.init.normal_(module.weight, 0, module.weight[0].numel() ** -0.5)
        if hasattr(module, "layer_scale"):
            nn.init.ones_(module.layer_scale)
    head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    loader = load_data(str(assets / "in20_train"), Preprocessing(224, 224), batch_size=16, limit=PROBE_IMAGES).loader
    sparse, seen, labels = halve.apply(model, halve.prune(model)).eval(), [], []
    last = [module for module in sparse.modules() if isinstance(module, nn.Linear)][-1]
    last.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        for images, classes in loader:
            sparse(images)
            labels.append(classes)
        features, wanted = torch.cat(seen).double(), nn.functional.one_hot(torch.cat(labels), 20).double()
        mean = features.mean(0)
        centred = features - mean
        ridge = 1e-2 * centred.square().sum() / len(mean) * torch.eye(len(mean), dtype=torch.float64)
        weight = torch.linalg.solve(centred.T @ centred + ridge, centred.T @ (wanted - wanted.mean(0))).T
        head.weight.copy_(10 * weight)
        head.bias.copy_(10 * (wanted.mean(0) - weight @ mean))
    return model


def without_sums(path: Path) -> Path:
    """The same file without Q/DQ on the inputs of sums."""
    model = onnx.load(path)
    read = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type.endswith("antizeLinear")}
    for node in model.graph.node:
        if node.op_type == "Add":
            for i, name in enumerate(node.input):
                node.input[i] = read.get(read.get(name, name), name)
    target = path.with_suffix(".without.onnx")
    onnx.save(model, target)
    return target


def described(masks: halve.MaskSet) -> dict[str, Any]:
    """How masks were made, and which they are: the files have the same digest."""
    facts = {fact: masks.recipe[fact] for fact in ("method", "steps_done", "seed") if fact in masks.recipe}
    return facts | {"sha256": checksum(masks)}


def half_on_photos(assets: Path, work: Path) -> None:
    """Keep the scores of PyTorch in float16 on a GPU."""
    path = work / "resnet50_v1.masks.safetensors"
    if not path.exists():
        raise SystemExit(f"{path} is missing: these must be the masks that the files are made from")
    model, masks, images = opened("resnet50_v1", assets, work)
    run = half_runner(halve.apply(model, masks).eval(), images)
    scores, made = scored(run, photos(assets / "in1000_dev"), scores_file(made_from(masks, work), HALF))
    print(f"{HALF}: {len(scores)} photos, masks {described(masks)}", made)


def scores_file(work: Path, run: str) -> Path:
    return work / f"scores.{run.replace(' ', '_').replace(':', '_').replace(',', '')}.safetensors"


def scored(run: Callable[[Tensor], Tensor], images: Tensor, path: Path) -> tuple[Tensor, dict[str, Any]]:
    """Class scores of images, and what they were made with; from a file if it is there."""
    if not path.exists():
        with torch.no_grad():
            batches = [run(batch) for batch in images.split(20)]
        scores = torch.cat([batch.float().cpu() for batch in batches])
        save_file({"scores": scores}, path, {"about": json.dumps(about(batches[0].device))})
    with safe_open(path, "pt") as file:
        return file.get_tensor("scores"), json.loads(file.metadata()["about"])


def half_runner(sparse: nn.Module, images: Tensor) -> Callable[[Tensor], Tensor]:
    """What the file in float16 computes, in PyTorch on a GPU."""
    network: list[nn.Module] = []  # folded when needed

    def run(batch: Tensor) -> Tensor:
        if not network:
            network.append(prepared(copy.deepcopy(sparse), (images,), torch.float32).module.half().cuda())
        scores: Tensor = network[0](batch.half().cuda())
        return scores

    return run


def file_runner(path: Path) -> Callable[[Tensor], Tensor]:
    session: list[Session] = []  # loaded when needed

    def run(batch: Tensor) -> Tensor:
        session[:] = session or [Session(path)]
        return session[0].run([batch])[0]

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("assets", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--photos", action="store_true")
    parser.add_argument("--sums", nargs="*", choices=WITH_SUMS, help="what Q/DQ on residual sums costs; default: all")
    parser.add_argument("--masks", type=Path, help="of ResNet-50, to be kept in WORK")
    parser.add_argument("--gpu-only", action="store_true", help="only run what needs a GPU; record nothing")
    options = parser.parse_args()
    options.work.mkdir(exist_ok=True)
    if options.masks:
        (options.work / "resnet50_v1.masks.safetensors").write_bytes(options.masks.read_bytes())
    if options.gpu_only:
        half_on_photos(options.assets, options.work)
        return
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"networks": [], "photos": []}
    for name in options.networks:
        record = about() | round_trip(name, options.assets, options.work)
        found["networks"] = [r for r in found["networks"] if r["network"] != name] + [record]
        found["networks"].sort(key=lambda r: list(NETWORKS).index(r["network"]))
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        print(record, flush=True)
    if options.photos:
        found["photos"] = on_photos(options.assets, options.work)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")

    if options.sums is not None:
        for name in options.sums or WITH_SUMS:
            record = about() | cost_of_sums(name, options.assets, options.work)
            others = [r for r in found.get("sums", []) if r["network"] != name]
            found["sums"] = sorted([*others, record], key=lambda r: WITH_SUMS.index(r["network"]))
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
            print(record, flush=True)


def about(device: torch.device = CPU) -> dict[str, Any]:
    """When and with what something was measured."""
    versions = {"halve": halve.__version__, "torch": torch.__version__, "onnx": onnx.__version__}
    return {
        "date": datetime.date.today().isoformat(),
        "hardware": device_name(device),
        "versions": versions,
    }


if __name__ == "__main__":
    main()

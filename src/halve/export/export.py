"""`halve.export`: write a masked network as an ONNX file, and prove on its bytes what TensorRT can use."""

import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halve.batches import Progress, tracked
from halve.errors import FileError, ModelError, OptionError, first_line, listed
from halve.export import file, packages
from halve.export.check_onnx import OnnxCheck, checked, shapes_of
from halve.export.entry import Entry, Normalization
from halve.export.images import CalibrationImages
from halve.export.int8 import Quantizer
from halve.export.network import Network, add_metadata_, outputs_of, prepared
from halve.export.quantization import Quantization
from halve.export.runtime import Session, has_float16
from halve.masks.apply import OnChanged, apply
from halve.masks.file import checksum
from halve.masks.layout import unpermuted
from halve.masks.mask import Mask, MaskSet
from halve.modules import check_initialised, clone, convert_, unwrapped
from halve.outputs import relative_error
from halve.process_state import preserved_process_state
from halve.version import VERSION

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TOLERANCE = 1e-3  # in float32: beyond it the file computes something else
_HALF_TOLERANCE, _INT8_TOLERANCE = 0.05, 0.5  # beyond these the user is told; usual are 1e-3 and 5e-2
_IN_2_4 = ("2:4", "1:4", "1:2", "1:3")  # patterns with at most two weights in every four


@dataclass(frozen=True)
class Exported:
    """The outcome of `export`. Prints as the table of `check_onnx`, with what was compared.

    Args:
        path: The file.
        size: Its size in bytes, including external data.
        dtype: What it computes in: "float32", "float16", "bfloat16", or "int8, float16" if layers are quantised.
        inputs: The shape of each input by its name; None is a size that may vary.
        outputs: The names of its outputs.
        difference: The largest difference of an output to what `apply` returns, relative to the largest value of that
            output; None if onnxruntime cannot run the dtype.
        images: The number of images that were compared.
        check: What `check_onnx` finds in the file.
        notes: What the user should know.
        quantization: What int8 did to the network; None without int8.
    """

    path: Path
    size: int
    dtype: str
    inputs: Mapping[str, tuple[int | None, ...]]
    outputs: tuple[str, ...]
    difference: float | None
    images: int
    check: OnnxCheck = field(repr=False)
    notes: tuple[str, ...] = ()
    quantization: Quantization | None = None

    @property
    def compared(self) -> str:
        """How far the file agrees with the masked model, in words."""
        if self.difference is None:
            return f"not compared: onnxruntime does not run {self.dtype} on CPUs; the ONNX checker accepts the file"
        count = f"{self.images} image{'' if self.images == 1 else 's'}"
        return f"largest difference to the masked model: {self.difference:.1e} of the largest output, on {count}"

    def as_json(self) -> dict[str, Any]:
        """The outcome as JSON values."""
        return {
            "file": str(self.path),
            "bytes": self.size,
            "dtype": self.dtype,
            "inputs": {name: list(shape) for name, shape in self.inputs.items()},
            "outputs": list(self.outputs),
            "difference": self.difference,
            "images": self.images,
            "notes": list(self.notes),
            "quantization": None if self.quantization is None else self.quantization.as_json(),
            "check": self.check.as_json(),
        }

    def __str__(self) -> str:
        lines = [str(self.check), *(f"note: {note}" for note in self.notes), f"{self.path}: {self.compared}"]
        return "\n".join([*lines, *([] if self.quantization is None else [self.quantization.summary])])


@preserved_process_state()
def export(
    model: nn.Module,
    masks: MaskSet | None,
    example: Any,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    int8: bool = False,
    calibrate: Any = None,
    max_drop: float | None = None,
    preprocess: Normalization | None = None,
    on_changed: OnChanged = "warn",
    force: bool = False,
    progress: Progress = True,
) -> Exported:
    """Write the masked model as an ONNX file that TensorRT takes, and check the file.

    The file computes what `apply(model, masks)` computes: channels are moved so that every block of four is contiguous,
    BatchNorm is folded, the batch size is free, and inputs and outputs keep their names. Before it gets its name it is
    read again, run in onnxruntime and compared with the masked model on the example, and every layer is checked on the
    bytes. The model is not changed.

    Raises `ModelError` if the model cannot be exported as one graph, does not fit the dtype, or if the file computes
    something else.

    Args:
        model: The dense model.
        masks: Its masks; None exports the model as it is, such as a dense baseline.
        example: Images to compare on, or a tuple of inputs. They fix the image size, not the batch size.
        path: The file to write. Weights beyond 2 GB go to `PATH.data` beside it.
        dtype: torch.float32, torch.float16 or torch.bfloat16: what the weights and inputs of the file are, and what
            TensorRT computes in. Default: float32, or float16 with `int8`.
        int8: Quantise convolutions, matrix products and residual sums to int8 with Q/DQ nodes, symmetrically and with
            zero point 0, so that every zero stays a zero. Everything else stays in `dtype`. Default: False.
        calibrate: With `int8`, images of one size to find the ranges of activations: a few hundred, without labels. A
            quarter of them is held out to choose and to measure on.
        max_drop: With `int8`, leave the costliest sums and layers in `dtype` until at most this share of predictions is
            lost compared with the masked model (or this relative error of outputs, if they are not class scores).
        preprocess: (mean, std) of each channel, to let the file take pixels (uint8, 0 to 255) and normalise them. The
            example and calibration images are still normalised ones. Default: the file takes what the model takes.
        on_changed: What to do if the weights are not those the masks were made for: "warn" (default), "error" or
            "ignore".
        force: Replace an existing file, whatever it is. Default: only a file that `export` wrote.
        progress: Show progress in terminals and notebooks, or a function such as `tqdm.tqdm` that wraps loops.

    Returns:
        An object with `.difference`, `.check` (as from `check_onnx`) and `.notes`. It prints as a table.

    >>> import halve, tempfile
    >>> model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = halve.export(model, halve.prune(model), torch.randn(4, 8, 8, 8), f"{folder}/net.onnx")
    >>> done.check.ok, done.difference < 1e-5, dict(done.inputs), done.outputs
    (True, True, {'input': (None, 8, 8, 8)}, ('output',))
    """
    packages.check_exporter()
    path = Path(path)
    chosen = dtype or (torch.float16 if int8 else torch.float32)
    _check_options(chosen, int8, calibrate, max_drop)
    if not force:
        _check_old(path)
    model = unwrapped(model)
    check_initialised(model)
    entry = Entry(model, preprocess)
    masked = clone(model) if masks is None else apply(model, masks, on_changed=on_changed)
    masked = _plain(entry, masked)
    inputs = entry.inputs(example)
    reference = outputs_of(masked, inputs)
    quantizer = None
    if int8:
        images = CalibrationImages.of(calibrate, entry.inputs, inputs)
        quantizer = Quantizer(images, _plain(entry, clone(model)), max_drop, progress)
    [network] = (
        prepared(masked, x, chosen, entry.prefix, entry.names(len(x)))
        for x in tracked([inputs], progress, "capturing the network")
    )
    done = _write(path, network, reference, masks, chosen, quantizer, entry, force)
    return replace(done, notes=(*entry.notes, *done.notes))


def _plain(entry: Entry, model: nn.Module) -> nn.Module:
    """A copy of the model that takes what the file takes, in float32 on the CPU and in eval mode."""
    module = entry.wrapped(model).eval().requires_grad_(False)
    convert_(module, torch.float32, torch.device("cpu"))
    return module


def _check_options(dtype: torch.dtype, int8: bool, calibrate: Any, max_drop: float | None) -> None:
    if dtype not in DTYPES:
        raise OptionError(f"dtype must be one of {listed(DTYPES)}, got {dtype!r}")
    if int8 and calibrate is None:
        raise OptionError("int8=True needs images to calibrate on: pass calibrate=, a few hundred without labels")
    if int8 and dtype == torch.bfloat16:
        raise OptionError("int8=True needs dtype float16 or float32: onnxruntime cannot run bfloat16 to compare")
    if not int8 and (calibrate is not None or max_drop is not None):
        raise OptionError("calibrate= and max_drop= are for int8=True")
    if max_drop is not None and not 0 <= max_drop <= 1:
        raise OptionError(f"max_drop must be between 0 and 1, got {max_drop}")


def _write(
    path: Path,
    network: Network,
    reference: list[Tensor],
    masks: MaskSet | None,
    dtype: torch.dtype,
    quantizer: Quantizer | None,
    entry: Entry,
    force: bool,
) -> Exported:
    network.check_fits(dtype)
    if dtype == torch.float16 and not _finite_like(network.outputs(dtype), reference):
        raise ModelError("the network overflows float16 on the example: export it in float32 or bfloat16")
    proto = network.to_onnx(dtype)
    name = str(dtype).removeprefix("torch.")
    quantization = None
    if quantizer is not None:
        exact = proto if dtype == torch.float32 else network.to_onnx(torch.float32)
        quantization = quantizer.quantize_(proto, name, exact)
        name = f"int8, {name}" if quantization.quantized else name
    add_metadata_(proto, {"format": file.FORMAT, "version": VERSION, "dtype": name})
    if entry.notes:
        add_metadata_(proto, {"notes": entry.notes})
    unread: list[str] = []
    if masks is not None:
        read = network.layers
        unread = [layer for layer, mask in masks.items() if read.isdisjoint((layer, *mask.shared_with))]
        layers = [layer for layer, mask in masks.items() if _is_2_4(mask) and layer not in unread]
        add_metadata_(proto, {"masks": checksum(masks), "layers": layers})
    with tempfile.TemporaryDirectory() as folder:  # nothing gets the name of the file before it is proven
        trial = file.read(file.write(Path(folder) / path.name, proto))
        _check_valid(trial)
        session = None if dtype == torch.bfloat16 else Session(trial.path, float16=has_float16(trial.model))
        difference, images, notes = _compared(trial, session, network.inputs, reference, dtype, quantizer is None)
        if quantizer is not None and quantization is not None and session is not None:
            quantization = quantization.with_quality(int8=quantizer.quality(session))
            notes = (*_notes_on(quantization, str(dtype).removeprefix("torch.")), *notes)
        _check_layers(checked(trial))
        file.copy(trial.path, path, force=force)
    if unread:
        count = f"{len(unread)} masked layer(s)"
        notes = (f"{count} did not run on the example and are not in the file: {listed(unread, 4)}", *notes)
    opened = file.read(path)
    outputs = tuple(value.name for value in opened.model.graph.output)
    about = (path, opened.size, name, shapes_of(opened), outputs, difference, images)
    return Exported(*about, checked(opened), notes, quantization)


def _notes_on(quantization: Quantization, dtype: str) -> list[str]:
    notes = []
    if not quantization.quantized:
        notes.append(f"nothing is in int8: max_drop is too small for any layer, so all stay in {dtype}")
    if unmatched := quantization.unmatched:
        notes.append(
            f"{len(unmatched)} layers and sums stay in {dtype}: the model's code computes their inputs differently "
            f"than in float32, which activations are measured in: {listed(unmatched, 4)}"
        )
    return notes


def _check_valid(trial: file.OnnxFile) -> None:
    try:
        packages.onnx().checker.check_model(str(trial.path), full_check=True)
    except Exception as error:  # the checker's own classes
        raise ModelError(f"the exported graph is not valid ONNX: {first_line(error)}") from error


def _compared(
    trial: file.OnnxFile,
    session: Session | None,
    inputs: tuple[Tensor, ...],
    reference: list[Tensor],
    dtype: torch.dtype,
    exact: bool,
) -> tuple[float | None, int, tuple[str, ...]]:
    """The difference of a file to the masked model, on how many images, and what to note about it."""
    notes = []
    images = len(inputs[0])
    fixed = [size for shape in shapes_of(trial).values() for size in shape[:1] if size is not None]
    if fixed:
        notes.append(f"the batch size is fixed to {fixed[0]}: the model's code depends on it")
        images = min(images, fixed[0])
        inputs = tuple(_repeated(x, fixed[0]) for x in inputs)
    if session is None:  # onnxruntime does not run the dtype
        return None, 0, tuple(notes)
    got = session.run(inputs)
    if not _finite_like([x[:images] for x in got], [x[:images] for x in reference]):
        raise ModelError(f"the file computes NaN or infinity in {dtype} where the model does not")
    difference = _difference(got, reference, images)
    if exact and dtype == torch.float32 and difference > _TOLERANCE:
        raise ModelError(
            f"the file does not compute what the model computes: outputs differ by {difference:.1e} of the largest; "
            f"the model may be random, or depend on more than its inputs"
        )
    if difference > (_HALF_TOLERANCE if exact else _INT8_TOLERANCE):
        notes.append(
            f"the outputs differ from the masked model's by {difference:.1e} of the largest: its values are too small "
            f"or too large for {'float16: export in float32 or bfloat16' if exact else 'int8: set max_drop='}"
        )
    if not fixed and images > 1:
        notes += _differs_alone(session, inputs, reference, 2 * difference)
    return difference, images, tuple(notes)


def _differs_alone(
    session: Session, inputs: tuple[Tensor, ...], reference: list[Tensor], tolerance: float
) -> list[str]:
    """A note if the file does not compute the same for a single image."""
    try:
        difference = _difference(session.run(tuple(x[:1] for x in inputs)), reference, 1)
    except FileError:
        return [f"it does not run on a single image: the model's code depends on the batch size, {len(inputs[0])} here"]
    if difference <= max(_TOLERANCE, tolerance):
        return []
    return [f"for a single image the outputs differ by {difference:.1e}: the model's code treats it differently"]


def _repeated(x: Tensor, count: int) -> Tensor:
    return torch.cat([x] * -(-count // len(x)))[:count]


def _difference(got: list[Tensor], reference: list[Tensor], images: int) -> float:
    """The relative difference of the first images' outputs; outputs without a batch are compared as they are."""

    def first(x: Tensor) -> Tensor:
        return x[:images] if x.dim() and len(x) >= images else x

    return relative_error([first(x).float() for x in got], [first(x).float() for x in reference])


def _finite_like(got: list[Tensor], reference: list[Tensor]) -> bool:
    pairs = zip(got, reference, strict=True)
    return all(bool(g.isfinite().all()) or not bool(r.isfinite().all()) for g, r in pairs)


def _check_layers(check: OnnxCheck) -> None:
    """Raise if a layer that the masks make 2:4 is not 2:4 in the file: a fault of this exporter."""
    if check.failures:
        name, reason = next(iter(check.failures.items()))
        raise ModelError(
            f"{len(check.failures)} masked layers are not 2:4 in the exported graph, such as {name}: {reason}; "
            f"nothing was written"
        )


def _is_2_4(mask: Mask) -> bool:
    """Whether a layer under its mask is what TensorRT's sparse kernels take, at most two of every four channels."""
    layout = unpermuted(mask.layout)
    along_channels = layout.order == "channels" or layout.shape[2:].count(1) == len(layout.shape[2:])
    plain = layout.kind != "conv_transpose" and layout.groups == 1 and layout.channels % 4 == 0
    return plain and along_channels and str(mask.pattern) in _IN_2_4


def _check_old(path: Path) -> None:
    """Raise `FileError` if there is a file that `export` did not write, or that is write-protected."""
    if not path.is_file():
        return
    status = path.stat()
    writable = status.st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)
    if writable and (not status.st_size or _is_exported(path)):
        return
    why = "the file exists and was not written by halve export" if writable else "it is write-protected"
    raise FileError(f"cannot write {path}: {why}; choose another path, or replace it with force=True")


def _is_exported(path: Path) -> bool:
    try:
        return file.is_exported(path)
    except FileError:
        return False

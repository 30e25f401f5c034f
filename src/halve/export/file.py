"""Read and write ONNX files. What others wrote is read with suspicion, and nothing in it is run."""

import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halve.errors import FileError, first_line
from halve.export import packages
from halve.masks import storage

FORMAT = "halve.onnx"  # of files that `export` wrote, in their metadata
MAX_BYTES = 1_900_000_000  # protobuf holds at most 2 GiB; weights of larger networks go to a file beside it
DATA_SUFFIX = ".data"
_DATA_DIGEST = "halve.data_sha256"  # in the metadata of files with external data
_MAX_TENSOR = 1 << 33  # bytes of external data, where a file with holes can have any size: far beyond any layer
_SMALL = 1024  # bytes; smaller tensors stay in the file
_TYPED = {"float_data": 4, "double_data": 8, "int32_data": 4, "int64_data": 8, "uint64_data": 8}
_WIDE = "data that does not fit its shape"


@dataclass(frozen=True)
class OnnxFile:
    """An ONNX model with the file it came from. `values` reads its tensors."""

    path: Path
    model: Any = field(repr=False)
    size: int  # bytes, including external data

    @property
    def metadata(self) -> dict[str, str]:
        return {entry.key: entry.value for entry in self.model.metadata_props}

    def values(self, tensor: Any) -> NDArray[Any]:
        """The values of a tensor, also if they are in another file."""
        return values_of(tensor, self.path.parent)


def values_of(tensor: Any, folder: Path) -> NDArray[Any]:
    """The values of a TensorProto; those of external data are read from the folder."""
    onnx, name = packages.onnx(), _shown(tensor.name)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        where = _External.of(tensor, folder)
        tensor = onnx.helper.make_tensor(tensor.name, tensor.data_type, tensor.dims, where.read(), raw=True)
    try:
        array: NDArray[Any] = onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as error:  # a shape that NumPy cannot hold, such as one of 65 dimensions
        raise FileError(f"the file is damaged: tensor {name} cannot be read: {first_line(error)}") from error
    return array


def read(path: str | Path) -> OnnxFile:
    """Read an ONNX file and check that it is sound: complete, acyclic, its tensors as large as they say.

    Raises `FileError` otherwise. Tensors are only read when they are needed.
    """
    path = Path(path)
    content = storage.read_bytes(path)
    onnx = packages.onnx()
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except Exception as error:  # protobuf's DecodeError; its class depends on the implementation
        raise FileError(f"{path} is not an ONNX file, or is truncated: {first_line(error)}") from error
    if not model.HasField("graph") or not model.graph.node:
        raise FileError(f"{path} is not an ONNX file: it holds no graph with operators")
    size = len(content)
    _check_texts(path, (text for entry in model.metadata_props for text in (entry.key, entry.value)))
    for graph in graphs_in(model.graph):
        _check_texts(path, _texts_of(graph))
        _check_order(path, graph)
        for tensor in _tensors_of(graph):
            size += _check_tensor(path, tensor)
    expected = {entry.key: entry.value for entry in model.metadata_props}.get(_DATA_DIGEST)
    if expected is not None and expected != _sha256(_data_path(path)):
        raise FileError(f"{_data_path(path)} is not the data that {path} was written with; copy both files together")
    return OnnxFile(path, model, size)


def graphs_in(graph: Any) -> Iterator[Any]:
    """The graph, and those inside of its control flow; protobuf limits how deep they nest."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                yield from graphs_in(inner)


def _tensors_of(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def _texts_of(graph: Any) -> Iterator[str | bytes]:
    """The names in a graph."""
    for value in (*graph.input, *graph.output):
        yield value.name
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)
    for tensor in (*_tensors_of(graph), *(one.values for one in graph.sparse_initializer)):
        yield tensor.name
        yield from (text for entry in tensor.external_data for text in (entry.key, entry.value))


def _check_texts(path: Path, texts: Iterable[str | bytes]) -> None:
    """Raise unless all names are text: protobuf gives bytes for what is not UTF-8."""
    for text in texts:
        if isinstance(text, bytes):
            raise FileError(f"{path} is damaged: the name {text[:80]!r} is not valid UTF-8")


def _check_order(path: Path, graph: Any) -> None:
    """Raise unless each node only reads what earlier nodes, inputs or outer graphs produce: so there is no cycle."""
    constants = [*(t.name for t in graph.initializer), *(t.values.name for t in graph.sparse_initializer)]
    produced = [name for node in graph.node for name in node.output if name]
    names = Counter([*constants, *produced])
    if twice := [name for name, count in names.items() if count > 1]:
        raise FileError(f"{path} is damaged: its graph has two tensors with the name {_shown(twice[0])}")
    later = set(produced)
    for node in graph.node:
        if missing := [name for name in node.input if name in later]:
            raise FileError(
                f"{path} is damaged: its graph is cyclic or not sorted: node {_shown(node.name or node.op_type)} reads "
                f"{_shown(missing[0])} before it is computed"
            )
        later.difference_update(node.output)


def _check_tensor(path: Path, tensor: Any) -> int:
    """Raise unless a tensor has as many bytes as it declares; returns the bytes that are in another file."""
    onnx = packages.onnx()
    name = _shown(tensor.name)
    if any(size < 0 for size in tensor.dims):
        raise FileError(f"{path} is damaged: tensor {name} has the negative shape {list(tensor.dims)}")
    count = math.prod(tensor.dims)
    bits = _bits(tensor.data_type)
    if bits is None:
        if tensor.data_type == onnx.TensorProto.STRING and len(tensor.string_data) == count:
            return 0
        raise FileError(f"{path} is damaged: tensor {name} has the unknown type {tensor.data_type}, or {_WIDE}")
    wanted = -(-count * bits // 8)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        external = _External.of(tensor, path.parent)
        if external.length != wanted:
            raise FileError(
                f"{path} is damaged: tensor {name} declares {wanted:,} bytes, its external data has {external.length:,}"
            )
        return external.length
    if tensor.HasField("raw_data"):
        held, shown = len(tensor.raw_data), f"{len(tensor.raw_data):,}"
    else:
        numbers = {key: len(getattr(tensor, key)) for key in _TYPED}
        shown = f"{sum(numbers.values()):,} numbers"
        complex_ = tensor.data_type in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128)
        entries = 2 * count if complex_ else -(-count * bits // 8) if bits < 8 else count
        held = wanted if sum(numbers.values()) == entries else -1
    if held != wanted:
        raise FileError(
            f"{path} is damaged: tensor {name} of shape {list(tensor.dims)} declares {wanted:,} bytes, "
            f"the file has {shown}"
        )
    return 0


def _bits(data_type: int) -> int | None:
    """The size of one element; None for strings and unknown types."""
    onnx = packages.onnx()
    known = {number: name for name, number in onnx.TensorProto.DataType.items()}
    name = str(known.get(data_type, "UNDEFINED"))
    if name in ("UNDEFINED", "STRING"):
        return None
    if name.startswith(("UINT4", "INT4", "FLOAT4")):
        return 4
    if name.startswith(("UINT2", "INT2")):
        return 2
    return int(8 * onnx.helper.tensor_dtype_to_np_dtype(data_type).itemsize)


@dataclass(frozen=True)
class _External:
    """The bytes of a tensor in a file beside the model."""

    path: Path
    offset: int
    length: int

    @classmethod
    def of(cls, tensor: Any, folder: Path) -> "_External":
        """Where the data is. Raises `FileError` if that is outside of the model's folder, or beyond the file's end."""
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location, name = entries.get("location", ""), _shown(tensor.name)
        root = Path(os.path.realpath(folder))
        try:
            target = Path(os.path.realpath(root / location))
            inside = bool(location) and not Path(location).is_absolute() and target.is_relative_to(root)
        except (ValueError, OSError) as error:
            raise FileError(f"the external data of tensor {name} cannot be found: {error}") from error
        if not inside:
            raise FileError(
                f"the external data of tensor {name} is {_shown(location)}, outside of the model's folder; "
                f"it is not read: put the data beside the model"
            )
        if not os.path.isfile(target):  # False for names that are too long, where Path raises
            raise FileError(f"{root} has no file {_shown(location)}; the values of tensor {name} are in it")
        size = target.stat().st_size
        try:
            offset = int(entries.get("offset", "0"))
            length = int(entries.get("length", str(size - offset)))
        except ValueError as error:
            raise FileError(f"the external data of tensor {name} has no valid offset and length: {error}") from error
        if not 0 <= offset <= offset + length <= size:
            raise FileError(
                f"{target} is truncated: tensor {name} is at bytes {offset:,} to {offset + length:,} of {size:,}"
            )
        if length > _MAX_TENSOR:
            raise FileError(f"tensor {name} has {length:,} bytes of external data; at most {_MAX_TENSOR:,} are read")
        return cls(target, offset, length)

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.length)


def digest(opened: OnnxFile) -> str:
    """The SHA-256 of a file and the values that are beside it."""
    state = hashlib.sha256(storage.read_bytes(opened.path))
    for graph in graphs_in(opened.model.graph):
        for tensor in _tensors_of(graph):
            if tensor.data_location == packages.onnx().TensorProto.EXTERNAL:
                state.update(_External.of(tensor, opened.path.parent).read())
    return state.hexdigest()


def is_exported(path: Path) -> bool:
    """Whether a file was written by `export`."""
    return read(path).metadata.get("halve.format") == FORMAT


def _has_data(path: Path) -> bool:
    """Whether a file was written by `export`, together with the data beside it."""
    return path.exists() and _DATA_DIGEST in read(path).metadata


def is_large(model: Any) -> bool:
    """Whether a model does not fit into one file. (protobuf cannot even measure what is larger than that.)"""
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer) > MAX_BYTES


def write(path: Path, model: Any) -> Path:
    """Write a model; weights beyond protobuf's limit go to a file beside it, and leave the model."""
    if is_large(model):
        _move_out_(path, model)
    return storage.write_atomically(path, model.SerializeToString(deterministic=True))


def copy(source: Path, target: Path, *, force: bool = False) -> None:
    """Copy a model with its data to the place of another. Each file is replaced in one step, the model last.

    Data beside the target is only replaced if the target is a model that it belongs to, or by force.
    """
    pairs = [(_data_path(source), _data_path(target)), (source, target)]
    if all(path.exists() for path in pairs[0]) and not force and not _has_data(target):
        raise FileError(
            f"cannot write {pairs[0][1]}: the file exists and was not written by halve export; "
            f"choose another path, or replace it with force=True"
        )
    for one, other in pairs:
        if one.exists():
            storage.write_atomically(other, storage.read_bytes(one))
    if storage.read_bytes(target) != storage.read_bytes(source):
        raise FileError(f"{target} differs from what was written: the disk may be faulty")


def _move_out_(path: Path, model: Any) -> None:
    onnx, content = packages.onnx(), bytearray()
    for tensor in model.graph.initializer:
        raw = tensor.raw_data if tensor.HasField("raw_data") else b""
        if len(raw) < _SMALL:
            continue
        content += bytes(-len(content) % 4096)  # aligned, so that it can be mapped into memory
        place: Mapping[str, object] = {"location": _data_path(path).name, "offset": len(content), "length": len(raw)}
        content += raw
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
    storage.write_atomically(_data_path(path), bytes(content))
    model.metadata_props.add(key=_DATA_DIGEST, value=hashlib.sha256(content).hexdigest())


def _data_path(path: Path) -> Path:
    return path.with_name(path.name + DATA_SUFFIX)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise FileError(f"cannot read {path}, which holds the weights: {error.strerror}") from error


def _shown(name: str) -> str:
    return repr(name[:80])


def from_numpy(array: NDArray[Any], name: str) -> Any:
    """A tensor to put into a graph."""
    return packages.onnx().numpy_helper.from_array(np.asarray(array, order="C"), name)  # also of no dimension

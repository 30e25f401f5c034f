"""Files as `halve.masks.storage` writes them, and files that are not."""

import struct

import safetensors.torch
import torch

from halve.masks import storage
from tests.random_masks import random

FORMAT = "halve.test"
HEADER = {"layers": {}, "note": 'ä "quoted" \n'}


def tensors():
    return {"a": random(3, 4), "b": torch.arange(5, dtype=torch.uint8), "empty": torch.zeros(0, 3)}


def read(path):
    return storage.read(path, [FORMAT])


def write_raw(path, metadata, data=None):
    """A safetensors file with any metadata and a checksum that fits."""
    data = tensors() if data is None else data
    metadata = {"format": FORMAT, "version": "1", **metadata}
    metadata.setdefault("sha256", storage._checksum(metadata, data))
    path.write_bytes(safetensors.torch.save(data, metadata))
    return path


def write_bytes(path, text, data=b""):
    """A file with any text in place of the safetensors header."""
    raw = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path

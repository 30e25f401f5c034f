import pytest
import torch

import halve
from tests.export.nets import images, residual


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """A masked network in a moved channel order, exported in float32: (model, masks, what `export` returned)."""
    model = residual()
    masks = halve.prune(model, also="point", permute=True, permute_seconds=1, example=images())
    path = tmp_path_factory.mktemp("onnx") / "net.onnx"
    with torch.random.fork_rng(devices=[]):
        return model, masks, halve.export(model, masks, images(), path)


@pytest.fixture
def copied(exported, tmp_path):
    """A copy of that file to change."""
    path = tmp_path / "net.onnx"
    path.write_bytes(exported[2].path.read_bytes())
    return path

import json

import onnx
import pytest
import torch

import halve
from halve.errors import ModelError, OptionError
from halve.export.entry import pixels
from halve.export.runtime import Session
from tests.detectors import faster_rcnn, retinanet
from tests.export.nets import TwoInputs, images, residual

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)


def test_a_file_with_preprocessing_takes_pixels(tmp_path):
    model = residual()
    masks = halve.prune(model)
    done = halve.export(model, masks, images(), tmp_path / "net.onnx", preprocess=(MEAN, STD))
    assert [layer.name for layer in done.check.layers] == ["stem", "body", "point", "head"]
    assert done.check.ok
    assert "uint8 from 0 to 255" in done.notes[0]
    assert done.inputs == {"image": (None, 3, 8, 8)}  # the name that it has in the model
    taken = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    mean, std = (torch.tensor(values).reshape(1, 3, 1, 1) for values in (MEAN, STD))
    with torch.no_grad():
        expected = halve.apply(model, masks)((taken / 255 - mean) / std)["scores"]
    torch.testing.assert_close(Session(done.path).run([taken])[0], expected, atol=1e-4, rtol=1e-4)


def test_the_first_of_several_inputs_is_preprocessed(tmp_path):
    torch.manual_seed(0)
    model, pair = TwoInputs().eval(), (images(), images().flip(0))
    done = halve.export(model, None, pair, tmp_path / "net.onnx", preprocess=(MEAN, STD))
    assert done.inputs == {"before": (None, 3, 8, 8), "after": (None, 3, 8, 8)}
    taken = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    mean, std = (torch.tensor(values).reshape(1, 3, 1, 1) for values in (MEAN, STD))
    with torch.no_grad():
        expected = model((taken / 255 - mean) / std, images(3))
    torch.testing.assert_close(Session(done.path).run([taken, images(3)])[0], expected, atol=1e-4, rtol=1e-4)


def test_pixels_are_what_images_were_made_from():
    taken = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    assert torch.equal(pixels((taken / 255 - 0.4) / 0.3, (0.4,), (0.3,)), taken)
    with pytest.raises(OptionError, match="for 1 channels needs images of shape"):
        pixels(images(), (0.4,), (0.3,))


@pytest.mark.parametrize("given", [3, (MEAN,), (MEAN, (1, 1)), (MEAN, (0, 1, 1)), "ab"])
def test_a_bad_normalisation_is_an_error(given, tmp_path):
    with pytest.raises(OptionError, match="preprocess must"):
        halve.export(residual(), None, images(), tmp_path / "net.onnx", preprocess=given)


def test_a_detector_is_exported_up_to_its_heads_and_the_file_says_so(tmp_path):
    model = retinanet()
    masks = halve.prune(model)
    photos = [torch.rand(3, 40, 40), torch.rand(3, 32, 48)]
    done = halve.export(model, masks, photos, tmp_path / "net.onnx")
    assert done.outputs == ("cls_logits", "bbox_regression")
    assert {layer.name for layer in done.check.eligible} == set(masks)
    assert done.difference < 1e-4
    metadata = {entry.key: entry.value for entry in onnx.load(done.path).metadata_props}
    assert "ends at the detector's heads" in json.loads(metadata["halve.notes"])[0]
    assert done.notes == tuple(json.loads(metadata["halve.notes"]))
    sparse = halve.apply(model, masks).eval()
    with torch.no_grad():
        batch = sparse.transform(photos)[0].tensors
        expected = sparse.head([sparse.backbone(batch)])
    found = dict(zip(done.outputs, Session(done.path).run([batch]), strict=True))
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, atol=1e-4, rtol=1e-4)


def test_a_detector_with_two_stages_is_refused(tmp_path):
    with pytest.raises(ModelError, match="detectors with one stage"):
        halve.export(faster_rcnn(), None, [torch.rand(3, 40, 40)], tmp_path / "net.onnx")

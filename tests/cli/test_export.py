import onnx
import pytest
from onnx import numpy_helper

from tests.export.nets import initializer, set_values

OUT = ("--out", "net.onnx", "--size", "8")


@pytest.fixture
def file(halve, net, masks):
    halve("export", *net, "--masks", masks, *OUT)
    return "net.onnx"


def test_a_file_is_written_compared_and_checked(halve, net, masks, folder):
    result = halve("export", *net, "--masks", masks, *OUT, "--dtype", "float16", "--data", "photos", "--images", "3")
    assert "ok: 2 of 5 layers eligible for sparse kernels, 0 likely" in result.out
    assert "float16; largest difference to the masked model: " in result.out
    assert "on 3 images" in result.out
    assert "TensorRT 10: trtexec --onnx=net.onnx" in result.out
    assert (folder / "net.onnx").exists()


def test_calibration_images_are_the_example_if_there_are_no_others(halve, net, masks):
    told = halve(
        "export", *net, "--masks", masks, "--int8", "--calibrate", "photos", "--out", "net.onnx", "--json"
    ).json
    assert told["quantization"]["left"] == []
    assert told["inputs"] == {"x": [None, 3, 8, 8]}
    assert told["images"] > 2


def test_check_onnx_prints_a_table_and_json(halve, file):
    assert "grouped convolution (16 groups)" in halve("check-onnx", file).out
    told = halve("check-onnx", file, "--json").json
    assert told["status"] == "ok"
    assert [layer["name"] for layer in told["layers"] if layer["verdict"] != "no"] == ["body", "point"]


def test_exit_codes_tell_broken_and_dense_files_apart(halve, net, file, folder):
    model = onnx.load(folder / file)
    weight = numpy_helper.to_array(initializer(model, "body.weight")).copy()
    weight[weight == 0] = 1
    set_values(model, "body.weight", weight)
    onnx.save(model, folder / file)
    assert "body: dense" in halve("check-onnx", file, code=1).err
    told = halve("export", *net, "--out", "dense.onnx", "--size", "8", "--json").json
    assert told["check"]["status"] == "none"
    halve("check-onnx", "dense.onnx", code=3)
    (folder / file).write_bytes(b"no model")
    assert "not an ONNX file" in halve("check-onnx", file, code=2).err


def test_other_files_are_not_overwritten(halve, net, masks, folder):
    given = ("export", *net, "--masks", masks, "--size", "8", "--out")
    assert "is the same file as" in halve(*given, masks, code=2).err
    (folder / "notes.onnx").write_text("mine")
    assert "the file exists and is not a file by 'halve export'" in halve(*given, "notes.onnx", code=2).err


DETECTOR = """
from torchvision.transforms._presets import ObjectDetection
from tests.detectors import retinanet

preprocess = ObjectDetection()
"""


def test_a_detector_normalises_pixels_as_its_own_transform_does(halve, folder):
    (folder / "detector.py").write_text(DETECTOR)
    told = halve("export", "detector.py:retinanet", "--with-preprocess", "--out", "net.onnx", "--json").json
    assert told["inputs"] == {"images": [None, 3, 32, 32]}
    assert "the file takes pixels" in told["notes"][1]
    assert told["difference"] < 1e-4

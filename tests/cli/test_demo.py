import functools
import re

import pytest

import halve as package
from halve.cli import demo
from halve.sources import digits
from halve.sources.digits import DigitsResNet
from halve.sources.weights import load_weights_

pytest.importorskip("sklearn")


def test_the_demo_writes_its_files_and_ends_with_a_table_of_what_it_found(halve, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "STEPS", 15)
    monkeypatch.setattr(digits, "train_digits", functools.partial(digits.train_digits, epochs=4))
    result = halve("demo", "--out", "made/here")
    folder = tmp_path / "made" / "here"
    assert sorted(path.name for path in folder.iterdir()) == [
        "digits.masks.safetensors",
        "digits.packed.safetensors",
        "digits.safetensors",
    ]
    assert "training" in result.err
    top1 = {
        name: float(re.search(rf"{re.escape(name)} +([0-9.]+) %", result.out)[1])
        for name in ("none (dense)", "random", "magnitude", "learned, recalibrated")
    }
    assert top1["none (dense)"] > 90
    assert top1["random"] < top1["magnitude"] <= top1["none (dense)"] + 1
    assert top1["learned, recalibrated"] > top1["magnitude"] + 10
    assert "verify: masks applied, all tensors unchanged" in result.out
    assert result.out.splitlines()[-1] == "next: halve inspect made/here/digits.masks.safetensors"

    model = DigitsResNet().eval()
    load_weights_(model, folder / "digits.safetensors")
    masks = package.load(folder / "digits.masks.safetensors")
    assert package.verify(package.apply(model, masks), masks).ok
    assert package.unpack(folder / "digits.packed.safetensors").masks == masks
    halve("inspect", "made/here/digits.masks.safetensors")


def test_a_folder_that_cannot_be_made_is_noticed_before_the_training(halve, tmp_path):
    (tmp_path / "file").write_text("")
    result = halve("demo", "--out", "file/folder", code=2)
    assert "cannot create the folder file/folder" in result.err
    assert "training" not in result.err

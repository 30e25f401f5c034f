import pytest
import torch

from halve.errors import DataError
from halve.export.images import CalibrationImages, batches_of
from tests.export.nets import images


def test_the_last_quarter_is_held_out():
    found = CalibrationImages.of([images(20), images(20)], lambda x: (x,), (images(),))
    assert [len(x) for x in (*found.calibration, *found.held_out)] == [30, 10]
    assert torch.equal(found.held_out[0], images(20)[10:])
    assert len(found.with_held_out(4).held_out[0]) == 4
    assert [len(x) for (x,) in batches_of(found.held_out)] == [8, 2]


def test_unfit_images_are_errors():
    with pytest.raises(DataError, match="at least 8 images, got 3"):
        CalibrationImages.of(images(3), lambda x: (x,), (images(),))
    with pytest.raises(DataError, match=r"they are \(3, 9, 9\), it is \(3, 8, 8\)"):
        CalibrationImages.of([images(8), images(8, 9)], lambda x: (x,), (images(),))
    with pytest.raises(DataError, match="a tuple of 2 tensors"):
        CalibrationImages.of([images(8)], lambda x: x, (images(), images()))
    broken = images(16)
    broken[3, 0, 0, 0] = float("nan")
    with pytest.raises(DataError, match="must be finite"):
        CalibrationImages.of(broken, lambda x: (x,), (images(),))

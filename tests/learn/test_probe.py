import pytest
import torch
from torch import nn

from halve.errors import LearningError, ModelError
from halve.learn import loop
from halve.learn.probe import Estimate, peak_bytes
from halve.learn.reporting import Report
from halve.learn.run_state import FORMAT
from halve.masks import storage
from tests.tiny import convnet, images, labels, learn, loader
from tests.untouched import same_bits, untouched


class Narrow(nn.Module):
    """Has memory for so many images and no more."""

    def __init__(self, most):
        super().__init__()
        self.net, self.most, self.tried = convnet(), most, []

    def forward(self, x):
        self.tried.append(len(x))
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.net(x)


def test_the_estimate_comes_before_the_first_step_with_positive_numbers():
    seen = []
    learn(convnet(), loader(), steps=3, report=seen.append)
    first = seen[0]
    assert isinstance(first, Estimate)
    assert not any(isinstance(report, Estimate) for report in seen[1:])
    assert 0 < first.seconds_per_step < first.seconds < 60
    assert first.seconds == pytest.approx(3 * first.seconds_per_step)
    assert first.peak_bytes > 1 << 20
    assert first.steps == 3


@pytest.mark.filterwarnings("ignore:there is time for only")  # on a machine that is busy
def test_the_estimate_of_a_run_by_the_clock_is_what_is_left_of_the_time():
    seen = []
    learn(convnet(), loader(), minutes=0.02, report=seen.append)
    assert seen[0].steps is None
    assert 0.3 < seen[0].seconds < 1.2


def test_an_estimate_counts_every_batch_of_a_step():
    seen = []
    learn(convnet(), loader(), epochs=2, accumulate=4, report=seen.append)
    assert seen[0].steps == 2


def test_the_dry_run_changes_nothing(tmp_path, monkeypatch):
    def run(path):
        losses = []
        masks = learn(
            convnet(),
            loader(),
            steps=3,
            run_state=path,
            save_every=0,
            report=lambda r: losses.append(r.loss) if isinstance(r, Report) else None,
        )
        _, _, tensors = storage.read(path, [FORMAT])
        return masks, losses, tensors

    masks, losses, tensors = run(tmp_path / "probed")
    monkeypatch.setattr(loop, "probe_step", lambda *_: (1.0, 1))
    expected, expected_losses, expected_tensors = run(tmp_path / "plain")
    assert masks == expected
    assert losses == expected_losses
    assert all(same_bits(tensors[name], expected_tensors[name]) for name in expected_tensors)


@pytest.mark.parametrize(("size", "most", "fits", "accumulate"), [(9, 4, 4, 3), (6, 1, 1, 6)])
def test_a_batch_that_does_not_fit_is_an_error_with_one_that_does(size, most, fits, accumulate):
    model = Narrow(most)
    message = f"a batch of {size} images does not fit .* {fits} do: use batches of {fits} with accumulate={accumulate}"
    with untouched(model), pytest.raises(ModelError, match=message):
        learn(model, [images(size)], steps=3)


def test_when_not_even_one_image_fits_the_error_says_so():
    with pytest.raises(ModelError, match="a single image does not fit"):
        learn(Narrow(0), [images(6)], steps=3)


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        ((images(12), labels(12)), {"objective": "task"}),
        ({"image": images(12), "label": labels(12)}, {"objective": "task"}),
        ({"image": images(12)}, {"forward": lambda m, batch: m(batch["image"])}),
    ],
    ids=["tuple", "dict", "forward"],
)
def test_a_smaller_batch_is_found_for_every_kind_of_batch(batch, options):
    with pytest.raises(ModelError, match=r"a batch of 12 images does not fit .* 6 do: "):
        learn(Narrow(6), [batch], steps=3, **options)


def test_a_smaller_batch_is_found_where_only_the_users_forward_knows_what_is_in_it():
    def forward(model, batch):
        return model(torch.stack(batch["pictures"]))

    with pytest.raises(ModelError, match=r"a batch of 12 images does not fit .* 6 do: "):
        learn(Narrow(6), [{"pictures": list(images(12))}], steps=3, forward=forward)


def test_a_batch_that_cannot_be_cut_gets_advice_without_a_number():
    class Batch:
        pictures = images(12)

    with pytest.raises(ModelError, match=r"does not fit .*smaller batches with accumulate="):
        learn(Narrow(4), [Batch()], steps=3, forward=lambda model, batch: model(batch.pictures))


@pytest.mark.parametrize(
    "options",
    [
        {"objective": lambda views: views.dense_output.mean()},
        {"objective": lambda views: views.output.detach().mean()},
        {"forward": lambda m, batch: m(batch).detach(), "match": "outputs"},
    ],
    ids=["dense alone", "detached", "forward detached"],
)
def test_an_objective_that_does_not_depend_on_the_masks_is_a_learning_error(options):
    with pytest.raises(LearningError, match="no gradient reaches the logits"):
        learn(convnet(), [images(4)], steps=2, **options)


def test_peak_memory_is_that_of_the_process_on_a_cpu():
    assert peak_bytes(torch.device("cpu")) > 10 << 20

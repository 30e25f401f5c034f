from collections import OrderedDict
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer

import halve
from halve.batches import (
    count_of,
    images_of,
    is_detections,
    iterate,
    labels_of,
    main_output,
    peeked,
    pixel_labels_of,
    reiterable,
    result_of,
    run,
    to_device,
    tracked,
)
from halve.errors import DataError, ModelError

IMAGES = torch.arange(24.0).reshape(2, 12)
LABELS = torch.tensor([4, 1])


class Sample(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


class Raising(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error


def test_a_tensor_is_cut_into_batches_of_64_in_order():
    batches = list(iterate(torch.arange(130.0)[:, None]))
    assert [len(batch) for batch in batches] == [64, 64, 2]
    assert torch.equal(torch.cat(batches)[:, 0], torch.arange(130.0))


@pytest.mark.parametrize(
    ("images", "says"),
    [
        (lambda: torch.zeros(2, 3, device="meta"), "meta device have no values"),
        (lambda: torch.zeros(2, 3).to_sparse(), "must be a dense tensor, got layout torch.sparse_coo"),
        (lambda: torch.zeros(2, 3).to_sparse_csr(), "must be a dense tensor, got layout torch.sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "dense tensor, got a nested tensor"),
    ],
    ids=["meta", "sparse", "csr", "nested"],
)
@pytest.mark.filterwarnings("ignore")  # that sparse and nested tensors are in beta
def test_images_that_cannot_be_read_are_refused_by_every_call(images, says):
    images = images()
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)).eval()
    masks = halve.prune(model)
    for call in (
        lambda: images_of((images, LABELS)),
        lambda: halve.prune(model, "wanda", images),
        lambda: halve.prune(model, permute=True, example=images),
        lambda: halve.learn(model, [images], steps=1),
        lambda: halve.learn(model, images, steps=1),
        lambda: halve.evaluate(model, masks, [images]),
        lambda: halve.compile(model, masks, images),
        lambda: halve.bench(model, masks, images),
    ):
        with pytest.raises(DataError, match=says):
            call()


def test_any_iterable_gives_its_own_items():
    assert list(iterate(["a", "b"])) == ["a", "b"]
    assert list(iterate(letter for letter in "ab")) == ["a", "b"]


def test_progress_gets_the_data_and_a_description_and_passes_the_batches_on():
    seen = []

    def progress(items, description):
        seen.append(description)
        for item in items:
            seen.append(item)
            yield item

    assert list(iterate([1, 2], progress, "images")) == [1, 2]
    assert seen == ["images", 1, 2]


@pytest.mark.parametrize("data", [3, None, object()])
def test_data_that_cannot_be_iterated_over_is_refused_by_its_type(data):
    with pytest.raises(DataError, match=type(data).__name__):
        list(iterate(data))


def test_no_batch_at_all_is_an_error_that_says_what_to_pass_instead():
    used_up = iter([1])
    assert list(iterate(used_up)) == [1]
    for data in ([], used_up):
        with pytest.raises(DataError, match="DataLoader or a list"):
            list(iterate(data))


@pytest.mark.parametrize(
    "batch",
    [
        IMAGES,
        (IMAGES, LABELS),
        [IMAGES, LABELS],
        [IMAGES],
        (IMAGES,),
        Sample(IMAGES, LABELS),
        {"image": IMAGES, "label": LABELS},
        {"pixel_values": IMAGES},
        OrderedDict(label=LABELS, x=IMAGES),
        [{"data": IMAGES, "label": LABELS}],
    ],
    ids=["tensor", "tuple", "list", "list of one", "tuple of one", "named", "dict", "transformers", "ordered", "dali"],
)
def test_images_are_found_in_every_customary_batch(batch):
    assert images_of(batch) is IMAGES


PICTURES = [torch.zeros(3, 4, 6), torch.ones(3, 5, 5)]  # of different sizes, as detectors take them
TARGETS = [{"boxes": torch.zeros(1, 4), "labels": torch.tensor([1])}] * 2


@pytest.mark.parametrize(
    "batch",
    [
        PICTURES,
        (PICTURES, TARGETS),
        [PICTURES, TARGETS],
        (tuple(PICTURES), tuple(TARGETS)),
        (PICTURES,),
        {"images": PICTURES, "targets": TARGETS},
    ],
    ids=["list", "torchvision", "as a list", "zipped", "tuple of one", "dict"],
)
def test_a_list_of_images_stays_a_list(batch):
    images = images_of(batch)
    assert isinstance(images, list)
    assert all(one is other for one, other in zip(images, PICTURES, strict=True))
    assert count_of(batch, None, None) == 2
    assert labels_of(batch) is None
    assert pixel_labels_of(batch) is None


def test_pairs_of_sequences_are_no_list_of_images():
    noisy, clean = torch.zeros(6, 4, 9), torch.ones(6, 4, 9)  # (batch, channels, length), for 1d convolutions
    assert images_of([noisy, clean]) is noisy


def test_a_list_of_images_is_moved_and_passed_on_as_one():
    class Detector(nn.Linear):
        def forward(self, images):
            return [{"boxes": image, "labels": 0, "scores": 0} for image in images]

    result = result_of(Detector(1, 1).double(), (PICTURES, TARGETS))
    assert [one["boxes"].dtype for one in result] == [torch.float64] * 2
    assert is_detections(result)
    assert count_of(None, result, lambda model, batch: None) == 2


@pytest.mark.parametrize("result", [[], {}, [{"boxes": IMAGES}], [IMAGES], None, [{"boxes": 1, "labels": 1}]])
def test_other_results_are_no_detections(result):
    assert not is_detections(result)


def test_one_image_where_a_batch_is_needed_gets_advice():
    with pytest.raises(DataError, match=r"\(5, 8, 8\).*if this is one image, pass batches"):
        run(nn.Conv2d(3, 8, 3), torch.zeros(5, 8, 8))


@pytest.mark.parametrize(
    ("labels", "shape"),
    [
        (torch.zeros(2, 4, 6, dtype=torch.long), (2, 4, 6)),
        (torch.zeros(2, 1, 4, 6, dtype=torch.uint8), (2, 4, 6)),
        (LABELS, None),
        (torch.zeros(2, 4, 6), None),
        (TARGETS, None),
    ],
)
def test_labels_of_pixels(labels, shape):
    found = pixel_labels_of((torch.zeros(2, 3, 4, 6), labels))
    assert (None if found is None else tuple(found.shape)) == shape
    assert found is None or found.dtype == torch.int64


def test_labels_of_more_than_pixels_are_refused():
    with pytest.raises(DataError, match="one integer per pixel"):
        pixel_labels_of((torch.zeros(2, 3, 4, 6), torch.zeros(2, 3, 4, 6, dtype=torch.long)))


def test_labels_in_a_tuple_are_not_lost():
    assert labels_of((IMAGES, (4, 1))).tolist() == [4, 1]
    assert labels_of((IMAGES, tuple(LABELS))).tolist() == [4, 1]
    assert labels_of((IMAGES, (IMAGES, LABELS))) is None


def test_an_iterator_is_peeked_at_without_losing_a_batch():
    look_at, data = peeked(iter([1, 2, 3]))
    assert (look_at, list(data)) == ([1], [1, 2, 3])
    batches = [1, 2]
    assert peeked(batches) == (batches, batches)
    with pytest.raises(DataError, match="no batches"):
        peeked(iter([]))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([torch.zeros(3, 4, 4, dtype=torch.uint8)], "uint8.*normalise"),
        (([torch.zeros(5), torch.zeros(5)], TARGETS), r"\(channels, height, width\), got \(5,\)"),
        ({"picture": IMAGES, "name": 1}, r"'picture', 'name'"),
        ((), "tuple"),
        ("file.jpg", "str"),
        ([["a"], ["b"]], "must be a tensor or a list of tensors, got list"),
        (torch.zeros(2, 3, dtype=torch.uint8), "uint8.*normalise"),
        (torch.zeros(3), r"\(3,\)"),
        (torch.zeros(0, 3, 8, 8), r"\(0, 3, 8, 8\)"),
    ],
)
def test_a_batch_without_usable_images_is_refused_with_what_it_holds(batch, message):
    with pytest.raises(DataError, match=message):
        images_of(batch)


@pytest.mark.parametrize(
    "batch",
    [
        (IMAGES, LABELS),
        [IMAGES, LABELS, "more"],
        {"images": IMAGES, "targets": LABELS},
        [{"data": IMAGES, "label": LABELS[:, None].to(torch.int32)}],
        (IMAGES, LABELS.to(torch.uint8)),
    ],
)
def test_labels_come_out_as_one_int64_per_image(batch):
    labels = labels_of(batch)
    assert labels.dtype == torch.int64
    assert torch.equal(labels, LABELS)


@pytest.mark.parametrize("batch", [IMAGES, (IMAGES,), [IMAGES], {"image": IMAGES}, (IMAGES, ["a.jpg", "b.jpg"])])
def test_a_batch_without_labels_has_none(batch):
    assert labels_of(batch) is None


@pytest.mark.parametrize("labels", [torch.zeros(2), torch.zeros(2, 5, dtype=torch.long), torch.tensor(1)])
def test_labels_that_are_not_one_integer_per_image_are_refused(labels):
    with pytest.raises(DataError, match="one integer per image"):
        labels_of((IMAGES, labels))


@pytest.mark.parametrize("kind", [list, lambda labels: labels.numpy()], ids=["list", "numpy"])
def test_integer_labels_that_are_no_tensor_are_not_lost_silently(kind):
    try:
        labels = labels_of((IMAGES, [4, 1] if kind is list else kind(LABELS)))
    except DataError:
        return
    assert labels is not None
    assert labels.tolist() == [4, 1]


@pytest.mark.parametrize(
    "result",
    [
        IMAGES,
        (IMAGES, None),
        [IMAGES, LABELS],
        {"out": IMAGES, "aux": LABELS},
        OrderedDict(hidden=LABELS, logits=IMAGES),
        SimpleNamespace(logits=IMAGES, loss=LABELS),
    ],
)
def test_the_main_output_is_found_in_every_customary_result(result):
    assert main_output(result) is IMAGES


@pytest.mark.parametrize("result", [None, (), {"boxes": IMAGES}, [{"boxes": IMAGES}], "text"])
def test_a_result_without_a_main_output_asks_for_forward(result):
    with pytest.raises(ModelError, match=f"{type(result).__name__}; pass forward="):
        main_output(result)


def test_floating_tensors_take_the_models_dtype_and_others_stay():
    model = nn.Linear(12, 2).bfloat16()
    moved = to_device({"a": [IMAGES, LABELS], "b": Sample(IMAGES, LABELS), "c": "text"}, model)
    assert [item.dtype for item in moved["a"]] == [torch.bfloat16, torch.int64]
    assert isinstance(moved["b"], Sample)
    assert moved["b"].image.dtype == torch.bfloat16
    assert moved["c"] == "text"
    assert IMAGES.dtype == torch.float32


def test_run_gives_the_output_on_the_images_alone():
    model = nn.Linear(12, 3)
    assert torch.equal(run(model, (IMAGES, LABELS)), model(IMAGES))
    assert torch.equal(run(model.double(), IMAGES), model(IMAGES.double()))


def test_forward_gets_the_whole_batch_in_the_models_dtype():
    model = nn.Linear(12, 3).double()
    batch = {"left": IMAGES, "right": [IMAGES, LABELS]}
    result = run(model, batch, lambda m, b: {"logits": m(b["left"] + b["right"][0])})
    assert torch.equal(result, model(2 * IMAGES.double()))


def test_images_that_do_not_fit_are_a_data_error_that_names_model_and_shape():
    with pytest.raises(DataError, match=r"Conv2d failed on images of shape \(2, 5, 8, 8\).*forward="):
        run(nn.Conv2d(3, 8, 3), torch.zeros(2, 5, 8, 8))


def test_images_of_a_size_that_a_transformer_asserts_against_are_a_data_error_too():
    model = VisionTransformer(
        image_size=32, patch_size=16, num_layers=1, num_heads=1, hidden_dim=8, mlp_dim=8, num_classes=2
    )
    with pytest.raises(DataError, match=r"\(1, 3, 40, 40\)"):
        run(model.eval(), torch.zeros(1, 3, 40, 40))


def test_an_error_inside_forward_is_a_data_error():
    with pytest.raises(DataError, match="no tuple"):
        run(nn.Linear(12, 3), IMAGES, lambda m, b: (_ for _ in ()).throw(TypeError("no tuple")))


def test_running_out_of_memory_is_not_blamed_on_the_data():
    with pytest.raises(torch.OutOfMemoryError):
        run(Raising(torch.OutOfMemoryError("full")), IMAGES)


def test_an_iterator_becomes_a_list_and_anything_else_stays():
    batches = [torch.zeros(2, 3)]
    assert reiterable(iter(batches)) == batches
    assert reiterable(batches) is batches


def test_items_pass_through_the_progress_display_if_there_is_one():
    seen = []

    def progress(items, what):
        seen.append(what)
        return reversed(items)

    assert list(tracked([1, 2], None, "layers")) == [1, 2]
    assert list(tracked([1, 2], progress, "layers")) == [2, 1]
    assert seen == ["layers"]

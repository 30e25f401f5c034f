from collections import namedtuple

import numpy as np
import pytest
import torch

from halve.learn.batch_parts import images_in, length_of, part_of, pieces_of
from tests.tiny import images, labels

Pair = namedtuple("Pair", ["image", "label"])


@pytest.mark.parametrize(
    "batch",
    [
        images(6),
        (images(6), labels(6)),
        [images(6), labels(6)],
        Pair(images(6), labels(6)),
        {"image": images(6), "label": labels(6), "scale": torch.tensor(2.0)},
        [{"image": images(6), "label": labels(6)}],
        {"image": list(images(6)), "name": list("abcdef")},
        (list(images(6)), [{"boxes": torch.zeros(0, 4)}] * 6),
        np.zeros((6, 4, 8, 8)),
        list(torch.zeros(6, 3, 8, 8)),
    ],
    ids=["tensor", "tuple", "list", "namedtuple", "dict", "dali", "lists", "detection", "numpy", "image list"],
)
def test_a_part_has_the_images_asked_for_and_everything_that_belongs_to_them(batch):
    assert images_in(batch) == 6
    part = part_of(batch, 4, 6)
    assert type(part) is type(batch)
    assert images_in(part) == 2
    assert part_of(batch, 0, 6) is batch


def test_parts_are_the_right_ones():
    part = part_of({"image": images(6), "label": [labels(6), "cars"]}, 1, 3)
    assert torch.equal(part["image"], images(6)[1:3])
    assert torch.equal(part["label"][0], labels(6)[1:3])
    assert part["label"][1] == "cars"


def test_two_images_with_two_labels_in_a_list_are_not_taken_for_a_list_of_two():
    one, label = part_of([images(2), labels(2)], 1, 2)
    assert (one.shape, label.tolist()) == ((1, 4, 8, 8), [1])


def test_images_are_counted_and_not_what_comes_before_them():
    batch = {"names": ["first"], "scale": torch.tensor(2.0), "image": images(6)}
    assert images_in(batch) == 6
    assert len(part_of(batch, 4, 6)["image"]) == 2


def test_what_cannot_be_cut_counts_as_one_image_and_stays_whole():
    batch = object()
    assert (length_of(batch), images_in(batch)) == (0, 1)
    assert part_of(batch, 0, 1) is batch
    assert list(pieces_of([batch, batch], 1, 4)) == [batch, batch]


def test_pieces_hold_all_images_in_their_order():
    batches = [images(5, seed=1), images(7, seed=2), images(1, seed=3)]
    pieces = list(pieces_of(batches, 2, 3))
    assert [len(piece) for piece in pieces] == [2, 3, 3, 3, 1, 1]
    assert [len(piece) for piece in pieces_of([images(40)], 2, 16)] == [2, 4, 8, 16, 10]
    assert torch.equal(torch.cat(pieces), torch.cat(batches))

"""Compiling, saving and calling networks in several threads."""

import threading

import pytest
import torch

import halve
from tests.engine.nets import compiled
from tests.tiny import convnet, images


@pytest.mark.filterwarnings("ignore:running dense")
def test_networks_can_be_compiled_permuted_and_saved_in_threads(tmp_path):
    failures = []

    def work(number):
        try:
            model = convnet()
            masks = halve.prune(model, permute=number % 2 == 0, permute_seconds=1, example=images(2))
            fast = halve.compile(model, masks, images(2))
            fast.save(tmp_path / f"{number}.safetensors")
            assert not fast.plan.uncompiled
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_several_threads_get_their_own_results():
    fast = compiled(convnet())
    batches = [images(2, seed=seed) for seed in range(8)]
    expected = [fast(x) for x in batches]
    got = [None] * 8

    def work(index):
        for _ in range(5):
            got[index] = fast(batches[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))

import copy

import pytest
import torch

import halve
from halve.errors import FileError, MaskError
from halve.masks.corrections import corrected
from tests.random_masks import random
from tests.tiny import convnet
from tests.untouched import same_bits, untouched


def corrected_masks(model, **options):
    """Magnitude masks with a correction of the first norm."""
    before = torch.stack([model[1].weight.detach(), model[1].bias.detach()])
    after = before * 1.25 + 0.1
    pairs = {f"1.{key}": torch.stack([before[i], after[i]]) for i, key in enumerate(("weight", "bias"))}
    return halve.prune(model, **options).with_corrections(pairs)


def test_apply_puts_corrections_on_a_copy_and_verify_names_them():
    model = convnet()
    masks = corrected_masks(model)
    with untouched(model):
        sparse = halve.apply(model, masks)
    assert same_bits(sparse[1].weight, masks.corrections["1.weight"][1])
    assert same_bits(sparse[4].weight, model[4].weight)
    found = halve.verify(sparse, masks)
    assert found.ok
    assert {check.name for check in found.tensors if check.state == "corrected"} == {"1.weight", "1.bias"}
    assert "2 corrected" in found.notes[0]
    assert halve.verify(model, masks).status == "not applied"


def test_a_masked_model_without_its_corrections_is_not_ok():
    model = convnet()
    masks = corrected_masks(model)
    found = halve.verify(halve.apply(model, masks.with_corrections({})), masks)
    assert found.status == "changed"
    assert "not the corrected one" in found.failures["1.weight"]


@pytest.mark.parametrize("permuted", [False, True])
def test_applying_twice_is_applying_once(permuted):
    model = convnet()
    options = {"permute": True, "example": random(2, 4, 8, 8)} if permuted else {}
    masks = corrected_masks(model, **options)
    once = halve.apply(model, masks)
    twice = halve.apply(once, masks).state_dict()
    assert all(same_bits(tensor, twice[name]) for name, tensor in once.state_dict().items())
    assert halve.verify(once, masks).ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cast_before_or_after_gives_the_same_bits(dtype):
    masks = corrected_masks(convnet())
    before, after = halve.apply(convnet().to(dtype), masks), halve.apply(convnet(), masks).to(dtype)
    loaded = halve.apply(convnet().to(dtype).float(), masks)
    assert same_bits(before[1].weight, after[1].weight)
    assert same_bits(loaded[1].weight, after[1].weight.float())
    assert all(halve.verify(model, masks).ok for model in (before, after, loaded))


def test_a_norm_that_was_trained_further_keeps_what_it_learned():
    model = convnet()
    masks, updated = corrected_masks(model), copy.deepcopy(model)
    with torch.no_grad():
        updated[1].bias += 0.5
    sparse = halve.apply(updated, masks)
    difference = masks.corrections["1.bias"][1] - masks.corrections["1.bias"][0]
    assert torch.allclose(sparse[1].bias, updated[1].bias + difference)
    assert halve.verify(sparse, masks, on_changed="accept").ok
    with torch.no_grad():
        sparse[1].bias += 0.5
    assert same_bits(halve.apply(sparse, masks)[1].bias, sparse[1].bias)  # it has its correction already


def test_files_keep_corrections(tmp_path):
    model = convnet()
    masks = corrected_masks(model)
    assert halve.load(masks.save(tmp_path / "a.masks.safetensors")) == masks
    state, again = halve.unpack(halve.pack(model, masks, tmp_path / "a.packed.safetensors"))
    assert again == masks
    assert same_bits(state["1.weight"], masks.corrections["1.weight"][1])
    assert masks != masks.with_corrections({})


@pytest.mark.parametrize(
    "pair", [torch.zeros(8), torch.zeros(3, 8), torch.zeros(2, 8).double(), torch.full((2, 8), torch.nan)]
)
def test_what_is_not_a_pair_is_refused(pair):
    with pytest.raises(MaskError, match=r"1\.weight"):
        halve.prune(convnet()).with_corrections({"1.weight": pair})


def test_a_file_with_a_damaged_correction_is_refused(tmp_path, monkeypatch):
    masks = corrected_masks(convnet())
    masks._corrections["1.weight"] = torch.zeros(3, 8)
    path = masks.save(tmp_path / "a.masks.safetensors")
    with pytest.raises(FileError, match="correction"):
        halve.load(path)


@pytest.mark.parametrize("name", ["1.weights", "3.weight", "9.weight", "weight"])
def test_corrections_of_another_model_are_refused(name):
    model = convnet()
    masks = halve.prune(model).with_corrections({name: torch.zeros(2, 8)})
    with pytest.raises(MaskError, match=f"another model: {name}"):
        halve.apply(model, masks)


def test_only_norms_can_be_corrected():
    model = convnet()
    masks, others = halve.prune(model), [name for name in model.state_dict() if name[0] not in "14"]
    for name in [*others, "1.running_mean"]:
        own = model.state_dict()[name].float()
        hostile = masks.with_corrections({name: torch.stack([own, own + 1])})
        with pytest.raises(MaskError, match=f"another model: {name} is no scale or shift of a norm"):
            halve.apply(model, hostile)
        with pytest.raises(MaskError, match=f"another model: {name} is no scale or shift of a norm"):
            halve.verify(halve.apply(model, masks), hostile)
        as_statistics = masks.with_statistics({name: own + 1})
        if name != "1.running_mean":
            with pytest.raises(MaskError, match=f"no BatchNorm buffer {name}"):
                halve.apply(model, as_statistics)
            with pytest.raises(MaskError, match=f"no BatchNorm buffer {name}"):
                halve.verify(halve.apply(model, masks), as_statistics)


def test_statistics_must_be_finite():
    model = convnet()
    masks = halve.prune(model)
    damaged = masks.with_statistics({"1.running_var": torch.full((8,), float("nan"))})
    for call in (lambda: halve.apply(model, damaged), lambda: halve.verify(halve.apply(model, masks), damaged)):
        with pytest.raises(MaskError, match="running_var contain NaN"):
            call()


def test_norms_in_double_precision_are_corrected_exactly():
    model = convnet().double()
    model[1].weight.data.fill_(1 + 1e-12)  # 1 in single precision
    pair = torch.tensor([[1.0], [1e-3]]).expand(2, len(model[1].weight))
    masks = halve.prune(model).with_corrections({"1.weight": pair})
    sparse = halve.apply(model, masks)
    assert same_bits(sparse[1].weight, pair[1].double())
    assert halve.verify(sparse, masks).ok


def test_what_is_exported_evaluated_and_recalibrated_is_corrected():
    model, x = convnet(), random(16, 4, 8, 8)
    masks = corrected_masks(model)
    found = halve.evaluate(model, masks, x)
    assert found.kl != halve.evaluate(model, masks.with_corrections({}), x).kl
    again = halve.recalibrate(model, masks, x)
    assert again.corrections.keys() == masks.corrections.keys()
    plain = halve.recalibrate(model, masks.with_corrections({}), x)
    assert not torch.equal(again.statistics["4.running_mean"], plain.statistics["4.running_mean"])
    assert halve.verify(halve.apply(model, again), again).ok


def test_a_tensor_that_is_corrected_already_is_returned():
    pair = torch.stack([random(4), random(4, seed=1)])
    assert same_bits(corrected(pair[1], pair), pair[1])

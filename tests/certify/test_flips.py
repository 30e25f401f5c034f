import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import halve
from halve.binomial import anytime_lower, difference_lower, images_needed, lower
from halve.certify.flips import _points
from halve.errors import CertificateError, DataError, FileError, MaskError, ModelError, OptionError
from tests.tiny import convnet, images
from tests.untouched import untouched


def flipped(model, masks, x):
    with torch.no_grad():
        return int((halve.apply(model, masks)(x).argmax(1) != model(x).argmax(1)).sum())


@pytest.fixture
def model():
    """A network that predicts all of its classes about equally often."""
    found = convnet()
    with torch.no_grad():
        logits = found(images(200, seed=9))
        found[10].bias.sub_(logits.mean(0))
        found[10].bias.div_(logits.std(0))
        found[10].weight.div_(logits.std(0)[:, None])
    return found


@pytest.fixture
def masks(model):
    return halve.prune(model)


def test_the_bound_is_the_exact_one_for_the_flips(model, masks):
    x = images(300)
    with untouched(model):
        found = halve.certify(model, masks, x, confidence=0.99)
    flips = flipped(model, masks, x)
    assert 0 < flips < 300
    assert (found.result["images"], found.result["same"]) == (300, 300 - flips)
    assert found.result["share"] == lower(300 - flips, 300, 1 - 0.99)
    assert f"({flips} of 300 differed)" in str(found)
    assert any("independent" in one for one in found.assumptions)


def test_counting_stops_when_a_share_is_reached_and_when_it_cannot_be(model):
    same, x = halve.prune(model, pattern="4:4"), [images(50, seed) for seed in range(100)]
    found = halve.certify(model, same, x, share=0.98)
    assert found.result["reached"]
    assert found.result["share"] == anytime_lower(found.result["images"], found.result["images"], 1 - 0.999) >= 0.98
    assert found.result["images"] < 1000
    refuted = halve.certify(model, halve.prune(model, "random"), x, share=0.99)
    assert not refuted.result["reached"]
    assert refuted.result["images"] < 500
    assert refuted.result["images_needed"] is None
    assert "99 % is refuted" in str(refuted)


def test_too_few_images_say_how_many_it_would_take(model):
    found = halve.certify(model, halve.prune(model, pattern="4:4"), images(100), share=0.99)
    assert not found.result["reached"]
    needed = found.result["images_needed"]
    assert needed > 688
    assert anytime_lower(math.floor(100.5 / 101 * needed), needed, 1 - 0.999) >= 0.99
    assert needed > images_needed(0.99, 1 - 0.999, 100.5 / 101)  # for a number of images that is fixed before


@pytest.mark.parametrize(
    "by", ["class", "label", lambda batch: ["dark" if x.mean() < 0 else "light" for x in batch[0]]]
)
def test_groups_hold_together(model, masks, by):
    data = [(images(100, seed), torch.arange(100) % 5) for seed in range(2)]
    found = halve.certify(model, masks, data, by=by).result
    groups = found["groups"]
    assert sum(one["images"] for one in groups.values()) == 200
    assert sum(one["same"] for one in groups.values()) == found["same"]
    for one in groups.values():
        assert one["share"] == lower(one["same"], one["images"], (1 - 0.999) / len(groups))


def test_masks_are_compared_on_the_same_images(model):
    x, masks, worse = images(600), halve.prune(model, pattern="3:4"), halve.prune(model, "random")
    found = halve.certify(model, masks, x, against=worse, confidence=0.95)
    same = {"first": 600 - flipped(model, masks, x), "second": 600 - flipped(model, worse, x)}
    assert found.result["same"] == same
    assert found.result["only_first"] - found.result["only_second"] == same["first"] - same["second"]
    assert 0 < found.result["difference"] < (same["first"] - same["second"]) / 600
    assert "by at least" in str(found)
    other = halve.certify(model, worse, x, against=masks, confidence=0.95)
    assert other.result["difference"] < 0
    assert "do not tell" in str(other)


def test_an_updated_checkpoint_and_any_other_network_are_compared_with_a_reference(model, masks):
    updated = convnet()
    with torch.no_grad():
        updated[10].weight.mul_(1.001)
    found = halve.certify(updated, masks, images(200), reference=model, on_changed="ignore")
    assert "reference" in found.digests
    assert "reference network" in str(found)
    itself = halve.certify(model, None, images(200), reference=model)
    assert itself.result["same"] == 200


@pytest.mark.filterwarnings("ignore::halve.errors.EngineWarning")
def test_a_compiled_network_is_compared_with_the_masked_one(model, masks):
    fast = halve.compile(model, masks, images(8))
    found = halve.certify(fast, None, images(100), reference=halve.apply(model, masks))
    assert found.result["same"] == 100


def test_an_interrupted_count_is_reported_by_the_bound_that_allows_stopping(model, masks):
    def batches():
        yield images(64)
        yield images(64, seed=2)
        raise KeyboardInterrupt

    found = halve.certify(model, masks, batches(), progress=False)
    assert found.result["images"] == 128
    assert found.settings["interrupted"]
    assert found.result["share"] == anytime_lower(found.result["same"], 128, 1 - 0.999)
    assert "as far as counted" in str(found)


def test_an_interrupted_comparison_is_reported_by_the_bound_that_allows_stopping(model, masks):
    def batches():
        yield images(640)
        raise KeyboardInterrupt

    found = halve.certify(model, masks, batches(), against=halve.prune(model, "random"), progress=False)
    result = found.result
    bound = difference_lower(result["only_first"], result["only_second"], 640, 1 - 0.999, anytime=True)
    assert result["difference"] == bound < difference_lower(result["only_first"], result["only_second"], 640, 1 - 0.999)
    assert "as far as counted" in str(found)
    assert "the images come in random order" in found.assumptions


@pytest.mark.parametrize("confidence", [0.9, 0.99999999999, np.float64(0.99)])
def test_the_confidence_is_not_rounded_to_certainty(model, masks, confidence):
    assert f"With {confidence * 100:.12g} % confidence" in str(
        halve.certify(model, masks, images(10), confidence=confidence)
    )


@pytest.mark.parametrize(("difference", "shown"), [(0.12516, "12.51"), (-0.12516, "-12.52"), (0.1, "10.00")])
def test_points_are_rounded_to_the_safe_side(difference, shown):
    assert _points(difference) == shown


def test_a_certificate_is_saved_loaded_and_checked(model, masks, tmp_path):
    x, path = images(100), tmp_path / "net.certificate.json"
    made = halve.certify(model, masks, x, by="class")
    made.save(path)
    assert halve.Certificate.load(path) == made
    assert json.loads(path.read_text())["sentence"] == str(made)
    assert halve.certify(model, masks, [x[:30], x[30:]], check=path) == made


@pytest.mark.parametrize("key", ["sentence", "result", "assumptions", "digests", "settings"])
def test_a_tampered_file_is_noticed(model, masks, tmp_path, key):
    x, path = images(100), tmp_path / "net.certificate.json"
    made = halve.certify(model, masks, x)
    content = made.as_json()
    changed = {
        "sentence": "All is well.",
        "result": content["result"] | {"share": 0.9999},
        "assumptions": [],
        "digests": content["digests"] | {"weights": "0" * 64},
        "settings": content["settings"] | {"confidence": 0.99999},
    }[key]
    path.write_text(json.dumps(content | {key: changed}))
    with pytest.raises(FileError, match="was changed after it was written"):
        halve.Certificate.load(path)
    forged = {name: content[name] for name in content if name not in ("format", "version", "sha256")} | {key: changed}
    halve.Certificate(**forged | {"assumptions": tuple(forged["assumptions"])}).save(path)
    with pytest.raises(CertificateError, match=r"does not hold|made for other weights|other assumptions"):
        halve.certify(model, masks, x, check=path)


def test_a_certificate_of_other_weights_masks_or_images_does_not_hold(model, masks):
    made = halve.certify(model, masks, images(50))
    with pytest.raises(CertificateError, match="other weights"):
        halve.certify(convnet(1), masks, images(50), check=made, on_changed="ignore")
    with pytest.raises(CertificateError, match="other masks"):
        halve.certify(model, halve.prune(model, "random"), images(50), check=made)
    with pytest.raises(CertificateError, match="other images"):
        halve.certify(model, masks, images(50, seed=5), check=made)


def test_files_that_are_no_certificates_are_refused_and_not_replaced(model, masks, tmp_path):
    path = tmp_path / "notes.json"
    for text in ("[]", "{", '{"format": "halve.certificate"}', '{"format": "other"}', "\x00"):
        path.write_text(text)
        with pytest.raises(FileError, match=r"not a certificate|is damaged"):
            halve.Certificate.load(path)
    path.write_text("precious")
    made = halve.certify(model, masks, images(20))
    with pytest.raises(FileError, match="is not a certificate"):
        made.save(path)
    assert made.save(path, force=True) == path
    made.save(path)


def test_clear_errors(model, masks):
    x = images(20)
    x[3, 0, 0, 0] = float("nan")
    with pytest.raises(DataError, match="NaN or infinity"):
        halve.certify(model, masks, x)
    with pytest.raises(MaskError, match="another model"):
        halve.certify(nn.Sequential(nn.Linear(8, 4)), masks, torch.randn(4, 8))
    with pytest.raises(ModelError, match="class scores"):
        halve.certify(model[:3], None, images(4), reference=model[:3])
    with pytest.raises(DataError, match="failed on images of shape"):
        halve.certify(model, masks, torch.randn(4, 3, 8, 8))
    with pytest.raises(MaskError, match="already applied"):
        halve.certify(halve.apply(model, masks), masks, images(4))
    for options, message in (
        ({"confidence": 1.0}, "confidence"),
        ({"share": 1.5}, "share"),
        ({"by": "colour"}, "by must be"),
        ({"against": masks, "share": 0.9}, "against="),
    ):
        with pytest.raises(OptionError, match=message):
            halve.certify(model, masks, images(4), **options)
    with pytest.raises(OptionError, match="needs masks"):
        halve.certify(model, None, images(4))
    with pytest.raises(DataError, match="needs labels"):
        halve.certify(model, masks, images(4), by="label")

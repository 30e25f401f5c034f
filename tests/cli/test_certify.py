import json

SMALL = ("--size", "16")


def test_certify_counts_writes_and_checks(halve, net, masks, folder):
    arguments = ("certify", *net, "--masks", masks, "--data", "photos")
    result = halve(*arguments, "--out", "net.certificate.json", "--by", "class")
    assert "With 99.9 % confidence, masked and dense network predict the same class" in result.out
    assert "assuming that the images are independent draws" in result.out
    again = halve(*arguments, "--check", "net.certificate.json", "--batch", "5")
    assert "net.certificate.json holds" in again.out
    path = folder / "net.certificate.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"sentence": "All is well."}))
    assert "was changed" in halve(*arguments, "--check", "net.certificate.json", code=2).err
    halve("prune", *net, "--score", "random", "--out", "random.masks.safetensors")
    halve(*arguments, "--out", "net.certificate.json")
    wrong = ("certify", *net, "--masks", "random.masks.safetensors", "--data", "photos")
    assert "made for other masks" in halve(*wrong, "--check", "net.certificate.json", code=1).err
    both = halve(*arguments, "--masks", "random.masks.safetensors", "--json").json
    assert both["statement"] == "comparison"


def test_a_share_that_is_not_proven_is_a_failure(halve, net, masks):
    result = halve("certify", *net, "--masks", masks, "--data", "photos", "--share", "0.99", code=1)
    assert "99 % is refuted" in result.out


def test_certify_compares_an_updated_checkpoint_and_refuses_three_masks(halve, net, masks, folder):
    found = halve("certify", *net, "--reference", "net.safetensors", "--data", "photos", "--json").json
    assert found["result"]["same"] == 12
    three = [option for _ in range(3) for option in ("--masks", masks)]
    assert "one file, or two" in halve("certify", *net, *three, "--data", "photos", code=2).err
    assert "needs masks" in halve("certify", *net, "--data", "photos", code=2).err


def test_proofs_for_single_images_are_written_and_checked(halve, net, folder):
    halve("prune", *net, "--pattern", "4:4", "--out", "all.masks.safetensors")
    arguments = ("certify", *net, "--masks", "all.masks.safetensors", "--data", "photos", "--images", "1")
    region = halve(*arguments, "--region", "0.001/255", "--out", "region.certificate.json")
    assert "every change of at most 0.001/255 per pixel leaves the class unchanged" in region.out
    assert "holds: computed again" in halve(*arguments, "--check", "region.certificate.json").out
    reuse = halve(*arguments, "--reuse", "radius", "--layers", "head", "--json").json
    assert reuse["result"]["median_radius"] > 0
    both = halve(*arguments, "--reuse", "1e-6", "--agreement", "--out", "agreement.certificate.json")
    assert "masked and dense network predict the same class" in both.out
    assert "holds: computed again" in halve(*arguments, "--check", "agreement.certificate.json").out
    assert "--agreement is for --reuse" in halve(*arguments, "--agreement", code=2).err
    absolute = halve(*arguments, "--reuse", "1e-8", "--absolute", "--out", "absolute.certificate.json")
    assert "by up to 1e-08 each" in absolute.out
    assert "holds: computed again" in halve(*arguments, "--check", "absolute.certificate.json").out
    assert "--absolute is for --reuse" in halve(*arguments, "--absolute", code=2).err
    vacuous = halve(*arguments, "--reuse", "10", "--out", "vacuous.certificate.json", code=1)
    assert "holds: computed again" in halve(*arguments, "--check", "vacuous.certificate.json").out
    assert "Nothing is proven" in vacuous.out
    assert "--region must be a number" in halve(*arguments, "--region", "two", code=2).err


def test_an_exported_file_is_compared_with_the_dense_network(halve, net, masks, folder):
    halve("export", *net, *SMALL, "--masks", masks, "--out", "net.onnx")
    arguments = ("certify", *net, *SMALL, "--onnx", "net.onnx", "--data", "photos")
    result = halve(*arguments, "--out", "onnx.certificate.json")
    assert "exported and reference network predict the same class" in result.out
    assert "assuming that the exported network was run in onnxruntime on the CPU" in result.out
    found = json.loads((folder / "onnx.certificate.json").read_text())
    masked = halve("certify", *net, *SMALL, "--masks", masks, "--data", "photos", "--json").json
    assert found["result"]["same"] == masked["result"]["same"]
    assert found["digests"]["reference"] == masked["digests"]["weights"]
    assert "holds: computed again" in halve(*arguments, "--check", "onnx.certificate.json").out
    assert "--masks" in halve(*arguments, "--masks", masks, code=2).err
    halve("export", *net, *SMALL, "--out", "net.onnx", "--with-preprocess")
    assert "made for other weights" in halve(*arguments, "--check", "onnx.certificate.json", code=1).err
    assert halve(*arguments, "--json").json["result"]["agreement"] == 1  # it takes pixels


def test_a_certificate_does_not_replace_the_exported_file(halve, net, masks, folder):
    halve("export", *net, *SMALL, "--masks", masks, "--out", "net.onnx")
    before = (folder / "net.onnx").read_bytes()
    halve("certify", *net, *SMALL, "--onnx", "net.onnx", "--data", "photos", "--out", "net.onnx", "--force", code=2)
    assert (folder / "net.onnx").read_bytes() == before

import json

import pytest

import halve as library

NAMES = ("ant", "bee", "cat", "dog", "emu", "fox")


def test_a_page_is_written_beside_the_masks(halve, masks, folder):
    shown = halve("report", masks).out
    assert "net: 2 of 5 layers masked; agreement not measured; speed not measured." in " ".join(shown.split())
    assert (folder / "net.report.html").read_text().startswith("<!doctype html>")
    halve("report", masks)  # an older page is replaced


def test_the_output_of_evaluate_is_taken_with_its_layers(halve, net, masks, folder):
    found = halve("evaluate", *net, "--masks", masks, "--data", "photos", "--per-layer", "--json").json
    (folder / "evaluation.json").write_text(json.dumps(found))
    made = halve("report", masks, "--evaluation", "evaluation.json", "--json").json
    assert made["agreement"] == found["agreement"]
    assert f'data-value="{found["layers"]["point"]["kl"]}"' in (folder / made["file"]).read_text()


def test_evaluate_lists_what_each_mask_costs(halve, net, masks):
    shown = halve("evaluate", *net, "--masks", masks, "--data", "photos", "--per-layer").out
    assert "each layer masked alone" in shown
    assert {line.split()[0] for line in shown.splitlines()[-2:]} == {"body", "point"}


def test_images_that_are_seen_differently_have_the_names_of_their_classes(halve, net, folder):
    halve("prune", *net, "--score", "random")
    model = ("--model", net[0], *net[1:], "--data", "photos")
    made = halve("report", "net.masks.safetensors", *model, "--pictures", "3", "--json").json
    page = (folder / made["file"]).read_text()
    assert made["images"] == 12
    assert page.count("<img") == min(3, round(12 * (1 - made["agreement"])))
    shown = [name for name in NAMES if f'<dd class="dense">{name}</dd>' in page]
    assert shown or made["agreement"] == 1


def test_mask_files_are_compared(halve, net, masks, folder):
    halve("prune", *net, "--score", "random", "--out", "other.masks.safetensors")
    halve("report", masks, "other.masks.safetensors", "--out", "page.html")
    assert "other.masks.safetensors" in (folder / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--log", "zoo.py"], "zoo.py is not a log of 'halve learn'"),
        (["--plan", "zoo.py"], "zoo.py is not a plan"),
        (["--plan", "nothing.json"], "nothing.json: no such file"),
        (["--out", "zoo.py"], "the file exists and is not a page of 'halve report'"),
        (["--out", "net.masks.safetensors", "--force"], "it is the same file as MASKS"),
        (["--data", "photos"], "pictures need both --model and --data"),
    ],
)
def test_bad_input_is_refused(halve, masks, arguments, message):
    assert message in " ".join(halve("report", masks, *arguments, code=2).err.split())


def test_learn_writes_a_page(halve, net, folder):
    options = ("--steps", "12", "--no-permute", "--validation", "photos", "--augment")
    halve("learn", *net, "--data", "photos", *options, "--report", "page.html")
    page = (folder / "page.html").read_text()
    assert 'http-equiv="refresh"' not in page
    quality = library.load("net.masks.safetensors").recipe["quality"]
    assert f"of {quality['images']} held-back images" in page
    assert "step 12," in page


def test_the_page_of_a_run_is_written_while_it_learns_and_names_what_failed(halve, net, folder, monkeypatch):
    seen = []
    real = library.learn

    def failing(*arguments, report, **options):
        def look(event):
            report(event)
            seen.append((folder / "page.html").read_text())
            if len(seen) == 3:
                raise OSError("the disk <b>failed</b>")

        return real(*arguments, report=look, **options)

    monkeypatch.setattr(library, "learn", failing)
    options = ("--steps", "12", "--no-permute", "--validation", "none")
    halve("learn", *net, "--data", "photos", *options, "--report", "page.html", code=2)
    assert 'http-equiv="refresh"' in seen[0]
    page = (folder / "page.html").read_text()
    assert 'http-equiv="refresh"' not in page
    assert "Learning failed: " in page
    assert "&lt;b&gt;failed" in page


def test_the_page_may_not_replace_what_the_run_reads_or_writes(halve, net):
    for taken in ("net.masks.safetensors", "net.safetensors"):
        shown = halve("learn", *net, "--data", "photos", "--steps", "1", "--report", taken, "--force", code=2)
        assert f"cannot write --report {taken}" in shown.err

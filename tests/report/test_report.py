import base64
import io
import json
import re

import pytest
import torch
from PIL import Image

import halve
from halve.binomial import interval
from halve.errors import FileError, HalveError, OptionError
from halve.report import figures as f
from halve.report.curve import history_of
from halve.report.pictures import drawn
from halve.report.report import while_learning
from tests.report.html_tree import parsed
from tests.report.inputs import CLASSES, HOSTILE, log_lines, network, pictures, plan
from tests.untouched import untouched

LARGEST = 1_000_000  # bytes, without pictures


@pytest.fixture(scope="session")
def tree(full_page):
    return parsed(full_page[0].html)


@pytest.fixture
def masks():
    return halve.prune(network())


def section(tree, name):
    return tree.one("section", id=name)


def rows(part, title):
    """The cells of a table as elements, by its caption."""
    [table] = [one for one in part.all("table") if one.one("caption").text == title]
    return [list(row.children) for row in table.one("tbody").all("tr")]


def test_a_page_has_a_part_for_each_input_and_no_other(masks, everything, tree):
    given = {"learning": "log", "pictures": "data", "certificate": "certificate", "export": "export"}
    assert {one.attributes["id"] for one in tree.all("section")} == {*given, "layers", "comparison"}
    _, options = everything
    alone = parsed(halve.report(masks).html)
    assert {one.attributes["id"] for one in alone.all("section")} == {"layers"}
    for name, option in given.items():
        inputs = {option: options[option]} | ({"model": network()} if option == "data" else {})
        page = parsed(halve.report(masks, **inputs, progress=False).html)
        assert {one.attributes["id"] for one in page.all("section")} == {"layers", name}


def test_a_page_needs_nothing_but_itself(full_page):
    page, path = full_page
    assert not re.search(r"https?:|@import|url\(", page.html)
    sources = {one.attributes[key] for one in parsed(page.html) for key in ("src", "href") if key in one.attributes}
    assert all(source.startswith(("#", "data:")) for source in sources)
    assert path.stat().st_size < LARGEST


def test_names_stay_text(tree, full_page):
    scripts = tree.all("script")
    assert [one.attributes.get("type") for one in scripts].count(None) == 1  # the page's own
    assert not [one for one in tree for key in one.attributes if key.startswith("on")]
    assert tree.one("h1").text == HOSTILE
    assert HOSTILE in [one.text for one in section(tree, "layers").all("th", kind="name")]
    assert HOSTILE not in full_page[0].html
    assert "H200</b>" not in full_page[0].html


def test_a_command_to_copy_quotes_names(masks):
    page = halve.report({"x; rm -rf ~": masks.with_recipe(source="zoo.py:$(reboot)")})
    assert page.facts["command"].startswith("halve evaluate 'zoo.py:$(reboot)' --masks 'x; rm -rf ~'")


def test_characters_that_reorder_text_are_shown_as_escapes(masks):
    tree = parsed(halve.report(masks.with_recipe(source="zoo.py:\u202egnp.exe")).html)
    assert tree.one("h1").text == "\\u202egnp.exe"


def test_the_verdict_has_the_numbers_of_the_evaluation_and_the_plan(full_page, tree, everything):
    page, _ = full_page
    evaluation = json.loads(everything[1]["evaluation"].read_text())
    assert page.facts["agreement"] == evaluation["agreement"]
    assert page.facts["agreement_interval"] == evaluation["agreement_interval"]
    assert page.facts["speedup"] == plan().speedup({"body", HOSTILE, "point"})
    said = tree.one("p", kind="verdict").text
    assert "3 of 5 layers masked" in said
    assert f.percent(evaluation["agreement"]) in said
    assert "1.25x the best dense at batch 256, estimated" in said
    assert str(page) == f"{HOSTILE}: {said}"


def test_the_layers_have_the_numbers_of_their_sources(tree, everything):
    evaluation = json.loads(everything[1]["evaluation"].read_text())
    shown = {cells[0].text: cells for cells in rows(section(tree, "layers"), "Layers")}
    assert list(shown) == ["stem", "body", HOSTILE, "point", "head"]  # as in the network
    for name, layer in plan().items():
        weights, error, flips, kl, dense, sparse = (float(cell.attributes["data-value"]) for cell in shown[name][2:])
        lost = evaluation["layers"][name]
        assert (error, kl) == (lost["feature_error"], lost["kl"])
        assert flips == 1 - lost["agreement"]
        assert (dense, sparse) == (layer.dense_ms, layer.sparse_ms)
        assert weights == torch.Size(layer.weight).numel()
    assert [cells[1].text for cells in shown.values()][1:4] == ["2:4, runs densenot faster sparse", "2:4", "2:4"]
    assert "output head" in shown["head"][1].text
    assert "data-value" not in shown["head"][2].attributes


def test_the_curve_has_the_numbers_of_the_log(tree):
    part = section(tree, "learning")
    [shown] = [rows(part, one.text) for one in part.all("caption")]
    keys = ("step", "seconds", "loss", "entropy", "changed")
    assert [[float(cell.attributes["data-value"]) for cell in cells] for cells in shown] == [
        [line[key] for key in keys] for line in log_lines()
    ]
    said = [json.loads(one.text) for one in part.all("script")]
    assert said[0]["say"][0] == "step 10, 1.5 s: loss 4.000, entropy 0.80, 1.0 % of blocks changed"
    assert said[0]["at"][0] == 0
    assert said[0]["at"][-1] == 1
    assert said[2]["say"] == ["step 10, 1.5 s: 55.0 %", "step 30, 4.5 s: 65.0 %", "step 50, 7.5 s: 75.0 %"]


def test_a_long_log_gives_a_short_page(masks, tmp_path):
    lines = [line | {"step": i, "seconds": i / 10} for i, line in enumerate(log_lines(1) * 20_000, start=1)]
    page = halve.report(masks, log=lines)
    assert len(page.html) < 200_000
    assert "each is the mean of up to 50 reports" in page.html


def test_a_log_that_was_cut_off_is_read_to_its_last_whole_line(masks, tmp_path):
    log = tmp_path / "net.jsonl"
    log.write_text("\n".join(map(json.dumps, log_lines(3)))[:-20])
    assert "step 20" in halve.report(masks, log=log).html


def test_the_strip_shows_every_layer(tree):
    figure = section(tree, "layers").one("svg", kind="strip")
    assert [one.attributes["class"] for one in figure.all("rect")] == ["out", "unused", "sparse", "sparse", "out"]
    assert "2 masked, 1 masked, runs dense, 2 not masked" in figure.attributes["aria-label"]


def test_layers_left_dense_have_their_cost(masks):
    left = masks.without(["point"]).with_recipe(left_dense={"point": 0.25})
    cells = {c[0].text: c for c in rows(parsed(halve.report(left).html), "Layers")}["point"]
    assert cells[1].text == "left denseleft dense for accuracy: its mask costs a KL of 0.2500"


def test_pictures_are_those_that_differ_worst_first(tree):
    model, images = network(), pictures()
    with torch.no_grad():
        dense, masked = model(images).softmax(1), halve.apply(model, halve.prune(model))(images).softmax(1)
    differ = (dense.argmax(1) != masked.argmax(1)).nonzero().flatten().tolist()
    lost = {i: float(dense[i].max() - masked[i, dense[i].argmax()]) for i in differ}
    items = section(tree, "pictures").all("li")
    shown = [int(item.attributes["data-image"]) for item in items]
    assert [lost[i] for i in shown] == pytest.approx(sorted(lost.values(), reverse=True)[: len(shown)], abs=1e-6)
    for i, item in zip(shown, items, strict=True):
        assert item.one("dd", kind="dense").text == CLASSES[dense[i].argmax()]
        assert item.one("dd", kind="masked").text == CLASSES[masked[i].argmax()]
        values = [float(one.attributes["data-value"]) for one in item.all("dd", kind="share")]
        assert values == pytest.approx([float(dense[i].max()), float(masked[i].max())], abs=1e-6)
        assert item.one("img").attributes["src"].startswith("data:image/png;base64,")
        assert item.one("img").attributes["alt"]
    assert f"{len(differ)} images of 96" in section(tree, "pictures").one("p").text


def test_pictures_give_the_agreement_if_there_is_no_evaluation(masks):
    page = halve.report(masks, model=network(), data=pictures(), progress=False)
    found = halve.evaluate(network(), masks, pictures(), progress=False)
    assert page.facts["agreement"] == found.agreement
    assert page.facts["agreement_interval"] == list(interval(round(96 * found.agreement), 96))


def test_a_model_that_agrees_everywhere_has_no_pictures():
    all_kept = halve.prune(network(), pattern="4:4")
    tree = parsed(halve.report(all_kept, model=network(), data=pictures(), progress=False).html)
    assert section(tree, "pictures").one("p").text == "Both networks predict the same class for all 96 images."


def decoded(uri):
    kind, _, content = uri.removeprefix("data:image/").partition(";base64,")
    return kind, Image.open(io.BytesIO(base64.b64decode(content)))


def test_large_images_are_thumbnails_in_their_own_colours():
    mean, std, colour = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3), (0.2, 0.4, 0.6)
    flat = torch.tensor([(c - m) / s for c, m, s in zip(colour, mean, std, strict=True)]).view(3, 1, 1)
    kind, image = decoded(drawn(flat.expand(3, 300, 200), mean, std))
    assert (kind, image.size) == ("jpeg", (107, 160))
    assert image.getpixel((50, 50)) == pytest.approx([255 * c for c in colour], abs=3)


def test_small_and_grey_images_are_exact_and_other_inputs_are_not_drawn():
    grey = torch.arange(64).view(1, 8, 8) / 63
    kind, image = decoded(drawn(grey, None, None))
    assert (kind, image.mode, image.getpixel((7, 7)), image.getpixel((0, 0))) == ("png", "L", 255, 0)
    _, image = decoded(drawn(4 * grey - 2, None, None))  # normalised in a way that nobody knows
    assert (image.getpixel((7, 7)), image.getpixel((0, 0))) == (255, 0)
    assert drawn(torch.zeros(12), None, None) is None
    assert drawn(torch.zeros(4, 8, 8), None, None) is None


def test_several_mask_files_are_compared(tree, everything):
    first, other = rows(section(tree, "comparison"), "Mask files")
    assert [int(float(row[1].attributes["data-value"])) for row in (first, other)] == [3, 2]
    assert float(other[4].attributes["data-value"]) == 0.5
    assert float(first[-1].attributes["data-value"]) == 0
    files = [halve.load(path) for path in everything[1]["masks"]]
    shared = [one.without(["body"]) for one in files[:1]] + files[1:]
    assert float(other[-1].attributes["data-value"]) == shared[0].difference(shared[1])
    dots = section(tree, "comparison").all("circle", kind="dot")
    assert len(dots) == 4  # and the network without masks, compiled and dense


def test_a_certificate_is_stated_with_what_it_assumes(tree, everything):
    known = halve.Certificate.load(everything[1]["certificate"])
    part = section(tree, "certificate")
    assert part.one("blockquote").text == known.sentence
    assert [one.text for one in part.all("li")][: len(known.assumptions)] == list(known.assumptions)


def test_bench_results_give_the_speed_of_each_batch_and_the_kernels(masks, tmp_path):
    def record(batch, system, ms):
        return {"batch": batch, "system": system, "median_ms": ms, "hardware": "H200", "dtype": "float16"}

    times = {"best_dense": 0.8, "compile_freezing": 0.6, "halve": 0.4, "eager": 2.0}
    entry = {"batch": 32, "layer": "body", "kernel": "wgmma_sp 64x64", "sparse": True, "dense_ms": 0.2}
    results = {
        "measurements": [record(batch, name, batch * ms) for batch in (1, 32) for name, ms in times.items()],
        "layers": [entry | {"sparse_ms": 0.1, "reason": "fastest"}],
    }
    (tmp_path / "bench.json").write_text(json.dumps(results))
    page = halve.report(masks, plan=tmp_path / "bench.json")
    assert page.facts["speedup"] == pytest.approx(1.5)  # against the faster of the two dense ones
    assert page.facts["estimated"] is False
    tree = parsed(page.html)
    assert [[cell.text for cell in row] for row in rows(section(tree, "speed"), "Speed")] == [
        ["1", "compile_freezing", "0.600", "0.400", "1.50x"],
        ["32", "compile_freezing", "19.20", "12.80", "1.50x"],
    ]
    cells = {row[0].text: row for row in rows(section(tree, "layers"), "Layers")}
    assert cells["body"][-1].text == "wgmma_sp 64x64"


@pytest.mark.filterwarnings("ignore::halve.errors.EngineWarning")
def test_the_plan_of_a_compiled_network_is_taken(masks):
    fast = halve.compile(network(), masks, pictures(2), progress=False)
    assert parsed(halve.report(masks, plan=fast.plan).html)


@pytest.mark.parametrize("option", ["log", "plan", "evaluation", "export", "certificate"])
@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"{}", b"\xff\xfe", b"[" * 5000, b'{"a": NaN}'])
def test_a_file_that_is_something_else_is_one_clear_error(masks, tmp_path, option, content):
    (tmp_path / "wrong").write_bytes(content)
    if option == "log" and content == b"":
        assert 'id="learning"' not in halve.report(masks, log=tmp_path / "wrong").html  # a run without a report yet
        return
    with pytest.raises(HalveError, match="wrong"):
        halve.report(masks, **{option: tmp_path / "wrong"})


def test_a_recipe_may_hold_anything(masks):
    for value in (None, 3, "x", [1], {"a": None}, {"point": "b"}):
        keys = ("quality", "not_masked", "left_dense", "source", "model", "steps_done", "seconds", "ended", "method")
        strange = masks.with_recipe(**dict.fromkeys(keys, value))
        assert parsed(halve.report(strange).html)


def test_options_that_make_no_sense_are_refused(masks):
    with pytest.raises(OptionError, match="both model= and data="):
        halve.report(masks, model=network())
    with pytest.raises(OptionError, match="masks must be masks"):
        halve.report([])
    with pytest.raises(OptionError, match="pictures must be"):
        halve.report(masks, model=network(), data=pictures(), pictures=-1, progress=False)


def test_the_model_is_not_changed(masks):
    model = network()
    with untouched(model):
        halve.report(masks, model=model, data=pictures(), progress=False)


@pytest.mark.parametrize(
    ("facts", "step"),
    [
        ({}, "measure how often predictions change"),
        ({"ended": "interrupted"}, "continue learning; the run was interrupted"),
        ({"agreement": 0.8}, "learn masks; these are one-shot"),
        ({"agreement": 0.8, "method": "learn", "steps_done": 50}, "learn longer; 50 steps are few"),
        ({"agreement": 0.8, "method": "learn", "steps_done": 5000}, "leave the costliest layers dense"),
        ({"agreement": 0.99, "method": "learn", "steps_done": 500, "returned": "wanda"}, "learn longer; one-shot"),
        ({"agreement": 0.99}, "measure the speed"),
    ],
)
def test_the_next_step_follows_from_what_is_known(masks, facts, step):
    quality = {key: facts[key] for key in ("agreement", "returned") if key in facts} | {"images": 512}
    recipe = {key: value for key, value in facts.items() if key not in quality}
    assert halve.report(masks.with_recipe(quality=quality, **recipe)).facts["next"].startswith(step)


def test_a_page_replaces_only_a_page(masks, tmp_path):
    page = halve.report(masks)
    assert page.save(tmp_path / "a.html").read_text() == page.html
    page.save(tmp_path / "a.html")
    (tmp_path / "b.html").write_text("<p>mine</p>")
    with pytest.raises(FileError, match="not a report"):
        page.save(tmp_path / "b.html")
    page.save(tmp_path / "b.html", force=True)


def test_a_page_of_a_running_run_refreshes_itself_and_one_of_a_failed_run_does_not():
    running, failed = (
        while_learning("net", None, history_of(log_lines())),
        while_learning("net", None, [], error="CUDA <b>"),
    )
    assert parsed(running.html).all("meta", **{"http-equiv": "refresh"})
    assert not parsed(failed.html).all("meta", **{"http-equiv": "refresh"})
    assert parsed(failed.html).one("p", kind="verdict").text == "Learning failed: CUDA <b>"


def test_notebooks_show_masks_plans_evaluations_and_pages(masks):
    evaluation = halve.evaluate(network(), masks, pictures(), per_layer=True, progress=False)
    for shown in (masks, plan(), evaluation):
        tree = parsed(shown._repr_html_())
        assert HOSTILE in [one.text for one in tree.all("td")]
    assert f"{evaluation.agreement:.4f}" in [one.text for one in parsed(evaluation._repr_html_()).all("td")]
    page = halve.report(masks)
    assert parsed(page._repr_html_()).one("iframe").attributes["srcdoc"] == page.html

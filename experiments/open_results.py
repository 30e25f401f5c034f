"""What the studies of open questions found: tables and figures of docs/results/open-questions.md."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from charts import Panel, Point, cells, log_ticks, panels, rows_of_points
from drawing import drawing, line, lines, text
from page_text import prose, table
from records import measured_on, name_of, recorded_if_any, span

SHOWN = "digits"  # the network in the figures
LARGER = "cifar_resnet20"  # for spatial frequencies, which maps of 8x8 pixels hardly have
NETWORKS = {"digits": "digits", "cifar_resnet20": "ResNet-20", "resnet50_v1": "ResNet-50"}
HELD_BACK = {
    "digits": "the test digits",
    "cifar_resnet20": "training images that masks were not learned from",
    "resnet50_v1": "training photos of classes that masks were not learned from",
}
KL = "KL divergence from the dense network (less is better)"
BANDS = ("constant", "low", "middle", "high")
STARTS = {
    "magnitude": "magnitude (default)",
    "permuted": "magnitude, permuted",
    "wanda": "Wanda",
    "reconstruct": "reconstruct",
    "masks": "masks by reconstruct",
    "random": "random masks",
    "glorot": "random logits",
}
OBJECTIVES = {
    "auto": "auto (default)",
    "outputs+features": "outputs and features",
    "outputs": "outputs",
    "features": "features",
    "probabilities": "probabilities",
    "task": "labels (task loss)",
}
VIEWS = {
    "none": "none",
    "shifted": "flips and shifts",
    "mixed": "mixtures of two images",
    "both": "both (default)",
}


def found(study: str, network: str = SHOWN) -> list[dict[str, Any]]:
    """The records of a study: those with the most steps in the budget."""
    records = [
        r
        for r in recorded_if_any("experiments/results/open_questions.json")
        if (r["study"], r["network"]) == (study, network)
    ]
    most = max((r["budget"] for r in records), default=0)
    return [r for r in records if r["budget"] == most]


def by_arm(study: str, network: str = SHOWN) -> dict[str, list[dict[str, Any]]]:
    """The records of a study by arm."""
    arms: dict[str, list[dict[str, Any]]] = {}
    for record in found(study, network):
        arms.setdefault(record["arm"], []).append(record)
    return arms


def kl(records: Sequence[dict[str, Any]]) -> Point:
    return Point.of([r["kl"] for r in records])


def about(study: str, network: str = SHOWN) -> list[str]:
    """How a study was made, in two lines."""
    records = found(study, network)
    seeds, steps = len({r["seed"] for r in records}), records[0]["budget"]
    learned = f"Learned in {steps:,} steps of {records[0]['batch']} images"
    repeated = f"mean, least and greatest of {seeds} seeds" if seeds > 1 else "one seed"
    images = max(r["images"] for r in records)
    where = HELD_BACK[network].replace("the test", f"{images:,} test") if network == SHOWN else HELD_BACK[network]
    if network != SHOWN:
        where = f"{images:,} {where}"
    return [f"{name(network)}; {learned[0].lower()}{learned[1:]}; {repeated}.", f"Measured on {where}."]


def name(network: str) -> str:
    return "The digits network" if network == "digits" else name_of(network)


def shares(records: Sequence[dict[str, Any]] | None) -> list[str]:
    """Cells of a table: top-1, agreement, and KL divergence with its range."""
    if not records:
        return ["", "", ""]
    percents = [f"{100 * statistics.mean(r[key] for r in records):.1f}" for key in ("top1", "agreement")]
    return [*percents, number(kl(records))]


def number(point: Point) -> str:
    """
    >>> number(Point(0.00712, 0.0081, 0.0102)), number(Point(4.1, 4.1, 4.1))
    ('0.0081 (0.0071 to 0.0102)', '4.10')
    """
    form = "{:.4f}" if point.mean < 0.1 else "{:.3f}" if point.mean < 1 else "{:.2f}"
    ends = f" ({span([point.low, point.high], form)})" if point.low < point.high else ""
    return form.format(point.mean) + ends


def study_table(study: str, first: str, rows: Callable[[str], list[tuple[list[str], str]]], heads: list[str]) -> str:
    """A table of all networks: for each row some cells and the arm whose numbers follow."""
    parts = []
    for network in NETWORKS:
        arms = by_arm(study, network)
        if not arms:
            continue
        shown = [[*cells_, *shares(arms[arm])] for cells_, arm in rows(network) if arm in arms]
        heads_ = [first, *heads, "top-1, %", "agreement, %", "KL"]
        records = found(study, network)
        dense = span([100 * r["dense_top1"] for r in records], "{:.1f}")
        note = " ".join(about(study, network))
        parts += [table(heads_, shown), prose(f"{note} Dense top-1: {dense} %. {measured_on(records)}.")]
    return "\n\n".join(parts) or "Not measured yet."


# temperature and noise


def _grid(network: str = SHOWN) -> tuple[list[str], list[str]]:
    arms = [arm.split(", ") for arm in by_arm("temperature", network) if "longer" not in arm]
    return list(dict.fromkeys(arm[0] for arm in arms)), list(dict.fromkeys(arm[1] for arm in arms))


def temperature_figure() -> str:
    """KL divergence for each temperature and noise, as shaded cells."""
    arms = by_arm("temperature")
    temperatures, noises = _grid()
    title = "Temperature and noise: KL divergence from the dense network"
    values = [kl(arms[f"{t}, {noise}"]).mean for t in temperatures for noise in noises]
    parts = [text(40, 44, title, "title"), text(280, 88, "noise", "bold")]
    for place, noise in enumerate(noises):
        parts.append(text(280 + 134 * place + 65, 116, noise.replace("1 to 0", "1, falling to 0"), "middle"))
    for place, t in enumerate(temperatures):
        y = 130 + 30 * place
        parts.append(text(260, y + 18, f"temperature {t}", "end"))
        row = [kl(arms[f"{t}, {noise}"]).mean if f"{t}, {noise}" in arms else None for noise in noises]
        parts += cells(280, y, 130, row, "{:.4f}", min(values), max(values))
    y = 150 + 30 * len(temperatures)
    note = [
        "Darker is worse. Default: temperature 1, noise 1 falling to 0.",
        *(words.replace("mean, least and greatest", "means") for words in about("temperature")),
    ]
    parts += lines(40, y + 16, note)
    return drawing(980, y + 16 + 20 * len(note), title, parts)


def temperature_table() -> str:
    return study_table(
        "temperature",
        "temperature",
        lambda network: [
            ([t, noise.replace("1 to 0", "1, falling to 0"), words], f"{t}, {noise}{more}")
            for more, words in (("", "all"), ("; longer", "four times as many"))
            for t in _grid(network)[0]
            for noise in _grid(network)[1]
        ],
        ["noise", "steps"],
    )


# start


def start_figure() -> str:
    """KL divergence of masks by where learning starts: in one shot, after few and after all steps."""
    arms = by_arm("start")
    kinds = {"one shot": "dense", "short": "magnitude", "long": "halve"}
    rows = [
        (words, {kinds[k]: kl(arms[f"{start}, {k}"]) for k in kinds if f"{start}, {k}" in arms})
        for start, words in STARTS.items()
    ]
    steps = {k: max(r["steps"] for arm, records in arms.items() if arm.endswith(k) for r in records) for k in kinds}
    names = {"dense": "in one shot", "magnitude": f"{steps['short']} steps", "halve": f"{steps['long']} steps"}
    return rows_of_points("Where learning starts", KL, rows, names, about("start"))


def start_table() -> str:
    return study_table(
        "start",
        "start",
        lambda network: [
            ([words, kind], f"{start}, {key}")
            for start, words in STARTS.items()
            for key, kind in (("one shot", "none: in one shot"), ("short", "an eighth"), ("long", "all"))
        ],
        ["steps"],
    )


# objective


def objective_figure() -> str:
    """KL divergence by objective, with images of all classes and of half of them."""
    arms = by_arm("objective")
    rows = []
    for objective, words in OBJECTIVES.items():
        half = arms[f"{objective}; half"]
        rows.append((words, {"halve": kl(arms[objective]), "magnitude": Point.of([r["unseen"]["kl"] for r in half])}))
    names = {"halve": "images of all classes", "magnitude": "half of the classes, measured on the other half"}
    return rows_of_points("What is matched", KL, rows, names, about("objective"))


def objective_table() -> str:
    parts = [study_table("objective", "objective", lambda _: [([v], k) for k, v in OBJECTIVES.items()], [])]
    for network in NETWORKS:
        arms = by_arm("objective", network)
        rows = [
            [words, *shares([r["unseen"] for r in arms[f"{objective}; half"]])]
            for objective, words in OBJECTIVES.items()
            if f"{objective}; half" in arms
        ]
        if rows:
            heads = ["half of the classes, measured on the others", "top-1, %", "agreement, %", "KL"]
            parts.append(table(heads, rows))
            parts.append(f"{name(network)}, as above.")
    return "\n\n".join(parts)


# amount of data and augmentation


def data_figure() -> str:
    """KL divergence against the number of images, with and without augmentation."""
    arms = by_arm("data")
    amounts = sorted({r["learned_from"] for records in arms.values() for r in records})
    kinds = {"augmented": "halve", "not augmented": "magnitude"}
    curves = {
        colour: sorted(
            (records[0]["learned_from"], kl(records)) for arm, records in arms.items() if arm.split(", ")[1] == kind
        )
        for kind, colour in kinds.items()
    }
    panel = Panel(KL, "images to learn from", curves, {n: f"{n:,}" for n in amounts})
    names = {"halve": "augmented (default)", "magnitude": "not augmented"}
    return panels("How many images masks are learned from", [panel], names, about("data"))


def data_table() -> str:
    def rows(network: str) -> list[tuple[list[str], str]]:
        arms = by_arm("data", network)
        order = sorted(arms, key=lambda arm: (arm.split(", ")[1], arms[arm][0]["learned_from"]))
        return [([f"{arms[arm][0]['learned_from']:,}", arm.split(", ")[1]], arm) for arm in order]

    return study_table("data", "images", rows, ["augmentation"])


def augmentation_figure() -> str:
    """KL divergence by kind of augmentation, with few and with all images."""
    arms = by_arm("augmentation")
    rows = [
        (words, {"halve": kl(arms[f"{view}; all"]), "magnitude": kl(arms[f"{view}; few"])})
        for view, words in VIEWS.items()
    ]
    few, many = (arms[f"none; {amount}"][0]["learned_from"] for amount in ("few", "all"))
    names = {"halve": f"{many:,} images", "magnitude": f"{few:,} images"}
    return rows_of_points("Augmentation", KL, rows, names, about("augmentation"))


def augmentation_table() -> str:
    def rows(network: str) -> list[tuple[list[str], str]]:
        arms = by_arm("augmentation", network)
        return [
            ([words, f"{arms[arm][0]['learned_from']:,}"], arm)
            for amount in ("few", "all")
            for view, words in VIEWS.items()
            if (arm := f"{view}; {amount}") in arms
        ]

    return study_table("augmentation", "augmentation", rows, ["images"])


# N:M

KEPT = {"1:2": "50 %", "2:4": "50 %", "4:8": "50 %", "1:4": "25 %", "2:8": "25 %"}


def pattern_figure() -> str:
    """KL divergence by N:M pattern, magnitude and learned."""
    arms = by_arm("pattern")
    rows = [
        (f"{rule} ({share} kept)", {"magnitude": kl(arms[f"{rule}, magnitude"]), "halve": kl(arms[f"{rule}, learned"])})
        for rule, share in KEPT.items()
    ]
    names = {"magnitude": "magnitude", "halve": "learned"}
    return rows_of_points("N of M weights kept", KL, rows, names, about("pattern"))


def pattern_table() -> str:
    return study_table(
        "pattern",
        "N:M",
        lambda _: [([rule, kind], f"{rule}, {kind}") for rule in KEPT for kind in ("magnitude", "learned")],
        ["masks"],
    )


# layers


def layer_rows(network: str = SHOWN) -> list[dict[str, Any]]:
    """What is lost by each layer: means over seeds of learned masks, and magnitude masks."""
    arms = by_arm("layers", network)
    rows = []
    for layer in arms["magnitude"][0]["layers"]:
        magnitude = arms["magnitude"][0]["layers"][layer]
        learned = [r["layers"][layer] for r in arms["learned"]]
        worst = min(magnitude["agreement_by_class"], key=magnitude["agreement_by_class"].__getitem__)
        rows.append(
            {
                "layer": layer,
                "magnitude": magnitude["kl"],
                "learned": Point.of([one["kl"] for one in learned]),
                "error": magnitude["feature_error"],
                "learned_error": statistics.mean(one["feature_error"] for one in learned),
                "offset": magnitude["offset"],
                "learned_offset": statistics.mean(one["offset"] for one in learned),
                "agreement": magnitude["agreement"],
                "learned_agreement": statistics.mean(one["agreement"] for one in learned),
                "worst_class": (worst, magnitude["agreement_by_class"][worst]),
                "dropped": magnitude["dropped"],
                "weights": magnitude["weights"],
                "bands": {kind: _bands(ones) for kind, ones in (("magnitude", [magnitude]), ("learned", learned))},
            }
        )
    return rows


def _bands(layers: list[dict[str, Any]]) -> list[float | None]:
    """The relative error of each band of spatial frequencies."""
    errors: list[float | None] = []
    for band in BANDS:
        parts = [(one["feature_error"], one["bands"][band]) for one in layers]
        known = [e * (b["error"] / b["power"]) ** 0.5 for e, b in parts if b["power"]]
        errors.append(statistics.mean(known) if known else None)
    return errors


def layers_figure() -> str:
    """Each layer masked alone: KL divergence, and the relative error of its features by spatial frequency."""
    network = next(one for one in (LARGER, SHOWN) if found("layers", one))
    rows, title = layer_rows(network), "Which layers hurt, and which spatial frequencies they lose"
    left, right, top = 210.0, 540.0, 130.0
    ticks = log_ticks(min(r["learned"].low for r in rows), max(r["magnitude"] for r in rows))
    bottom = top + 30 * len(rows)

    def at(value: float) -> float:
        first, last = ticks[0], ticks[-1]
        return left + (right - left) * math.log(max(value, first) / first) / math.log(last / first)

    parts = [text(40, 44, title, "title"), text(left, 84, "KL if this layer alone is masked", "bold")]
    parts += [text(590, 84, "error of its outputs, magnitude masks, %", "bold")]
    for place, band in enumerate(BANDS):
        parts.append(text(590 + 88 * place + 42, 112, band, "small middle"))
    for tick in ticks:
        parts += [line(at(tick), top, at(tick), bottom), text(at(tick), bottom + 20, f"{tick:g}", "small middle")]
    for place, row in enumerate(rows):
        y = top + 30 * place
        parts.append(text(left - 14, y + 18, row["layer"], "code end"))
        point = row["learned"]
        parts.append(line(at(point.low), y + 13, at(point.high), y + 13, "curve"))
        for kind, value in (("halve", point.mean), ("magnitude", row["magnitude"])):
            parts.append(f'<circle class="{kind}" cx="{at(value):.1f}" cy="{y + 13:g}" r="5.5"/>')
        errors = [None if e is None else 100 * e for e in row["bands"]["magnitude"]]
        parts += cells(590, y, 84, errors, "{:.0f}", 10, 60)
    note = ["Green: learned masks. Yellow: magnitude. Errors are relative to the dense network's in the same band,"]
    note += ["from the constant part of a map to changes from pixel to pixel; small maps lack the bands between."]
    parts += lines(40, bottom + 52, [*note, *about("layers", network)])
    return drawing(980, bottom + 52 + 20 * (len(note) + 2), title, parts)


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """The rank correlation.

    >>> round(spearman([1, 2, 3, 4], [10, 20, 40, 30]), 2)
    0.8
    """

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(values)
        return [float(order.index(value)) for value in values]

    return statistics.correlation(ranks(one), ranks(other))


def layers_table() -> str:
    parts = []
    for network in NETWORKS:
        if not by_arm("layers", network):
            continue
        rows = layer_rows(network)
        shown = [
            [
                f"`{r['layer']}`",
                f"{r['magnitude']:.4f} / {r['learned'].mean:.4f}",
                f"{100 * r['agreement']:.1f} / {100 * r['learned_agreement']:.1f}",
                f"{100 * r['error']:.0f} / {100 * r['learned_error']:.0f}",
                f"{100 * r['offset']:.0f} / {100 * r['learned_offset']:.0f}",
                f"{100 * r['dropped']:.0f}",
                f"{r['worst_class'][0]}: {100 * r['worst_class'][1]:.0f}",
            ]
            for r in rows
        ]
        heads = ["magnitude / learned", "KL", "agreement, %", "error of outputs, %", "of it a constant offset, %"]
        heads += ["weights dropped, % of squares", "class that loses most: agreement, %"]
        note = f"{_causes(rows)} {_together(network)} {' '.join(about('layers', network))}"
        parts += [table(heads, shown), prose(note)]
    return "\n\n".join(parts) or "Not measured yet."


def _together(network: str) -> str:
    """The divergence of all masks together, and the sum of those of single layers."""
    words = []
    for arm, records in by_arm("layers", network).items():
        alone = statistics.mean(sum(layer["kl"] for layer in r["layers"].values()) for r in records)
        words.append(f"{arm} masks {alone:.3f} and {kl(records).mean:.3f}")
    return f"KL divergence, the sum of all layers alone and all together: {'; '.join(words)}."


def _causes(rows: list[dict[str, Any]]) -> str:
    """How KL divergence goes along with other facts of layers."""
    kinds = {
        "the error of the outputs": [r["error"] for r in rows],
        "that of their constant part": [r["bands"]["magnitude"][0] for r in rows],
        "that of high frequencies": [r["bands"]["magnitude"][-1] for r in rows],
        "the squares that are dropped": [r["dropped"] for r in rows],
        "the offset's share": [r["offset"] for r in rows],
        "the number of weights": [r["weights"] for r in rows],
        "depth": list(range(len(rows))),
    }
    found = [f"{words} {spearman([r['magnitude'] for r in rows], values):.2f}" for words, values in kinds.items()]
    return f"Rank correlation of the KL divergence of magnitude masks over layers with {', '.join(found)}."


# large weights


def bound_figure() -> str:
    """KL divergence when weights above a quantile may not be dropped."""
    arms = by_arm("bound")
    rows = [(_bound_name(arm), {"halve": kl(records)}) for arm, records in arms.items()]
    return rows_of_points("If large weights may not be dropped", KL, rows, {"halve": "learned"}, about("bound"))


def _bound_name(arm: str) -> str:
    return "no bound (default)" if arm == "none" else f"the largest {100 - 100 * float(arm):.0f} %"


def bound_table() -> str:
    def rows(network: str) -> list[tuple[list[str], str]]:
        arms = by_arm("bound", network)
        return [
            (
                [
                    _bound_name(arm),
                    "" if arm == "none" else f"{100 * _dropped(arms['none'], arm):.1f}",
                    "" if arm == "none" else f"{100 * _dropped(arms[arm], arm):.1f}",
                ],
                arm,
            )
            for arm in arms
        ]

    heads = ["of these dropped without the bound, %", "with it, %"]
    return study_table("bound", "weights that may not be dropped", rows, heads)


def _dropped(records: list[dict[str, Any]], arm: str) -> float:
    return statistics.mean(r["dropped_above"][arm] for r in records)


# weight decay


def decays() -> dict[str, list[dict[str, Any]]]:
    """The records of the study by weight decay, in its order."""
    return dict(sorted(by_arm("weight_decay").items(), key=lambda arm: float(arm[0])))


def weight_decay_figure() -> str:
    """Accuracy, norms of what is dropped, and proofs against the weight decay of the dense training."""
    arms = decays()
    places = {float(arm): arm.replace("e-0", "e-") for arm in arms}

    def curve(value: Callable[[dict[str, Any]], float]) -> list[tuple[float, Point]]:
        return [(float(arm), Point.of([value(r) for r in records])) for arm, records in arms.items()]

    shown = [
        Panel(
            "top-1, %",
            "weight decay",
            {"halve": curve(lambda r: 100 * r["top1"]), "dense": curve(lambda r: 100 * r["dense_top1"])},
            places,
            log=False,
        ),
        Panel(
            "norm of what masks drop",
            "weight decay",
            {
                "magnitude": curve(lambda r: r["norms"]["stored"]),
                "halve": curve(lambda r: r["norms"]["folded"]),
            },
            places,
            log=False,
        ),
        Panel(
            "margin that proofs leave, %",
            "weight decay",
            {
                "halve": curve(lambda r: 100 * r["region"]["margin_left"]),
                "magnitude": curve(lambda r: 100 * r["reuse"]["margin_left"]),
            },
            places,
            log=False,
        ),
    ]
    note = ["Top-1: gray dense, green 2:4. Norm: yellow of the stored weights, green with BatchNorm folded in."]
    note += ["Margin: green if pixels change by 4/255, yellow if weights change by 0.4 % of their layer's RMS."]
    return panels("Weight decay of the dense training", shown, {}, [*note, *about("weight_decay")])


def weight_decay_table() -> str:
    arms = decays()
    if not arms:
        return "Not measured yet."
    rows = []
    for arm, records in arms.items():
        mean = {key: statistics.mean(_at(r, key) for r in records) for key in ("dense_top1", *_PROVEN)}
        rows.append(
            [
                arm.replace("e-0", "e-"),
                f"{100 * mean['dense_top1']:.1f}",
                *shares(records),
                f"{mean['norms.stored']:.2f} / {mean['norms.folded']:.2f} / {mean['norms.relative']:.2f}",
                *(
                    f"{100 * mean[f'{proof}.share']:.0f} / {100 * mean[f'{proof}.margin_left']:.0f}"
                    for proof in ("region", "reuse")
                ),
            ]
        )
    heads = ["weight decay", "dense top-1, %", "top-1, %", "agreement, %", "KL"]
    heads += ["norm of what is dropped: stored / folded / relative"]
    heads += ["pixels: certified / margin left, %", "weights: certified / margin left, %"]
    records = found("weight_decay")
    note = (
        f"{' '.join(about('weight_decay'))} A network is trained for each seed. Norms are the largest singular value, "
        f"mean over layers; relative to the layer's own. Proofs are of {records[0]['proven_images']} test "
        f"digits per network, without optimised slopes: pixels by 4/255, or any update of single weights by 0.4 % of "
        f"the layer's root mean square. The margin left is the median share of the masked network's margin that is "
        f"proven to remain. "
        f"{measured_on(records)}."
    )
    return f"{table(heads, rows)}\n\n{prose(note)}"


_PROVEN = (
    *("norms.stored", "norms.folded", "norms.relative"),
    *("region.share", "region.margin_left", "reuse.share", "reuse.margin_left"),
)


def _at(record: dict[str, Any], path: str) -> float:
    value: Any = record
    for key in path.split("."):
        value = value[key]
    return float(value)


FIGURES: dict[str, Callable[[], str]] = {
    "temperature": temperature_figure,
    "start": start_figure,
    "objective": objective_figure,
    "data": data_figure,
    "augmentation": augmentation_figure,
    "pattern": pattern_figure,
    "layers": layers_figure,
    "bound": bound_figure,
    "weight_decay": weight_decay_figure,
}
TABLES: dict[str, Callable[[], str]] = {
    "temperature": temperature_table,
    "start": start_table,
    "objective": objective_table,
    "data": data_table,
    "augmentation": augmentation_table,
    "pattern": pattern_table,
    "layers": layers_table,
    "bound": bound_table,
    "weight_decay": weight_decay_table,
}

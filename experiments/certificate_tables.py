"""Tables and sentences about certificates, from results/certify.json and the records of benchmarks/soundness.py."""

from typing import Any

from page_text import prose, table
from records import name_of, recorded

CERTIFIED = {  # runs, and how they are called
    "digits_intervals_0.25": ("digits, pixels change by 0.25/255", "intervals"),
    "digits_region_2": ("digits, pixels change by 2/255", "CROWN"),
    "digits_region_4": ("digits, pixels change by 4/255", "CROWN"),
    "digits_region_8": ("digits, pixels change by 8/255", "CROWN"),
    "digits_region_radius": ("digits, radius in pixels", "CROWN"),
    "digits_reuse_radius": ("digits, radius of an update of all layers", "CROWN"),
    "resnet20_stage3_0.001": ("ResNet-20, stage 3 and head updated by 1e-3", "CROWN"),
    "resnet20_stage3_0.003": ("ResNet-20, stage 3 and head updated by 3e-3", "CROWN"),
    "resnet20_all_1e-05": ("ResNet-20, all layers updated by 1e-5", "CROWN"),
    "resnet20_all_0.0001": ("ResNet-20, all layers updated by 1e-4", "CROWN"),
    "resnet20_region_0.0625": ("ResNet-20, pixels change by 0.0625/255", "CROWN"),
    "resnet20_region_0.125": ("ResNet-20, pixels change by 0.125/255", "CROWN"),
    "resnet20_region_0.25": ("ResNet-20, pixels change by 0.25/255", "CROWN"),
    "resnet50_last_0.0001": ("ResNet-50, last block and head updated by 1e-4", "CROWN"),
    "resnet50_last_0.001": ("ResNet-50, last block and head updated by 1e-3", "CROWN"),
}


def certify_proofs() -> str:
    """Regions and updates: what is proven, and how far attacks get."""
    records = {record["run"]: record for record in recorded("experiments/results/certify.json")}
    rows = []
    for run, (name, method) in CERTIFIED.items():
        record = records.get(run)
        if record is None or not record.get("n"):
            continue
        certified, attack, loss = f"{100 * record['share_certified']:.0f} %", "", ""
        if "median_radius" in record:
            unit, scale = ("/255", 255.0) if record["statement"] == "region" else ("", 1.0)
            certified = f"median {scale * record['median_radius']:.2g}{unit}"
            if record["median_attack_radius"] is not None:
                attack = f"from {scale * record['median_attack_radius']:.2g}{unit} on"
        else:
            attack = "" if record["attack"] is None else f"{100 * record['attack']:.0f} %"
            loss = "" if record["tightness"] is None else f"{record['tightness']:.1f}"
            if record["out_of_time"]:
                certified += f" ({record['out_of_time']} not finished in {record.get('image_seconds', 200):.0f} s)"
        method += f", up to {record['branches']:,} parts" if record.get("branches") else ""
        seconds = record["seconds_per_image"]
        time = f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
        if "NVIDIA" in (record.get("device") or ""):
            time += f", {record['device'].removeprefix('NVIDIA ')}"
        rows.append([name, method, str(record["n"]), certified, attack, loss, time])
    heads = ["statement", "method", "images", "certified", "attack flips", "loss over attack", "time per image"]
    return table(heads, rows)


def certify_agreement() -> str:
    """Agreement after updates: what is proven, and that agreeing is no weaker than keeping the class."""
    records = {record["run"]: record for record in recorded("experiments/results/certify.json")}
    attacked = records["digits_agreement"]
    text = "The networks agreed on none of the digits that were attacked."
    if attacked["n"]:
        text = prose(
            f"For {attacked['differ']} of {attacked['n']} digits, an attack finds an update after which the networks "
            f"differ at most 5 % above the largest update for which it flips neither of them (median "
            f"{attacked['median_attack_radius']:.2g})."
        )
    rows = []
    for record in records.values():
        if record["statement"] != "joint agreement" or not record["n"]:
            continue
        name = name_of(record["network"])
        updated = "stage 3 and head" if record["layers"] else "all layers"
        lead = f"{record['lead']:.2g} (now {record['margin']:.2g})" if record["open"] else ""
        counts = [str(record[key]) for key in ("n", "keeps", "only_joint", "differ")]
        late = sum(None in one["bounds"].values() for one in record["per_image"] if one["agree"])
        counts[1] += f" ({late} not finished)" if late else ""
        limit = "" if record["image_seconds"] is None else f" (limit {record['image_seconds']:.0f} s per network)"
        time = f"{record['seconds_per_image']:.0f} s{limit}"
        rows.append([f"{name}, {updated} by {record['size']:g}", *counts, lead, time])
    heads = ["update", "images", "proven: both keep the class", "only by joint bounds", "attack makes them differ"]
    heads += ["others: median bound of the dense lead", "time per image"]
    note = prose(
        "*Others* are images for which agreement is not proven: the median of the bound, and of the dense margin now. "
        "A bound far above that margin says nothing."
    )
    return f"{text}\n\n{table(heads, rows)}\n\n{note}" if rows else text


def certify_lemmas() -> str:
    """The paper's lemmas on real networks."""
    records = [r for r in recorded("experiments/results/certify.json") if r["statement"] == "lemmas" and r["n"]]
    rows = [
        [
            *(name_of(r["network"]), str(r["n"]), f"{r['median_margin']:.2g}"),
            *(f"{r[f'median_lemma_{number}']:.2g}" for number in range(1, 7)),
        ]
        for r in records
    ]
    lemmas = ["1: gain", "2: gain, masked", "3: removable", "4: masks", "5: any masks", "6: masks and an update"]
    return table(["network", "images", "margin", *lemmas], rows)


def certify_flips() -> str:
    """Flips on real networks."""
    data = {"cifar_resnet20": "CIFAR-10 test", "resnet50_v1": "ImageNet photos"}
    rows = []
    for record in recorded("experiments/results/certify.json"):
        if record["statement"] == "flips":
            agreement, share = f"{100 * record['agreement']:.2f} %", f"{int(1e4 * record['share']) / 100:.2f} %"
            name = f"{name_of(record['network'])}, {record['mask']}"
            rows.append([name, f"{record['images']:,} ({data[record['network']]})", agreement, share])
    return table(["masks", "images", "agreement measured", "certified with 99.9 % confidence"], rows)


def certify_soundness() -> str:
    """The long search for wrong bounds."""
    record = recorded("benchmarks/results/soundness.json")
    return prose(
        f"`benchmarks/soundness.py` searches for wrong bounds: random networks of all these operators, with boxes "
        f"around inputs and weights, against sampling and projected gradient descent. In {record['cases']:,} cases on "
        f"{record['networks']:,} networks, {len(record['broken'])} bounds were wrong; "
        f"{100 * record['proven'] / record['cases']:.0f} % of the cases were proven.{_in_parts(record)}{_joint()}"
    )


def _joint() -> str:
    record = recorded("benchmarks/results/soundness_joint.json")
    return (
        f" Bounds of a masked and a dense network together were searched in {record['cases']:,} cases on "
        f"{record['networks']:,} networks: {len(record['broken'])} were wrong, agreement was proven in "
        f"{record['proven']:,} cases, and updates after which the networks differ were found in {record['differ']:,}."
    )


def _in_parts(record: dict[str, Any]) -> str:
    if "bounds" not in record:
        return " These were earlier bounds, without proofs in parts."
    return (
        f" {record['in_parts']:,} proofs were also divided into parts, of which {record['proven_in_parts_alone']:,} "
        f"succeeded only so. The sources of these bounds have the digest {record['bounds'][:12]}."
    )

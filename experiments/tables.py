"""Write the tables of README and docs from the recorded results; a test fails when they differ.

python experiments/tables.py
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NAMES = {"cifar_resnet20": "ResNet-20", "cifar_resnet56": "ResNet-56", "resnet50_v1": "ResNet-50"}
METHODS = {
    "random": "random",
    "magnitude": "magnitude",
    "wanda": "Wanda",
    "magnitude_recalibrated": "magnitude, recalibrated",
    "wanda_recalibrated": "Wanda, recalibrated",
}


def one_shot() -> str:
    """Top-1 and agreement for each network, data set and one-shot method."""
    records = json.loads((ROOT / "experiments/results/one_shot.json").read_text())
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for record in records:
        rows.setdefault((record["network"], record["data"]), {})[record["method"]] = record
    lines = [
        f"| top-1 / agreement, % | dense | {' | '.join(METHODS.values())} |",
        "|---" * (len(METHODS) + 2) + "|",
    ]
    for (network, data), found in rows.items():
        cells = [f"{100 * found[m]['top1']:.1f} / {100 * found[m]['agreement']:.1f}" for m in METHODS]
        dense = f"{100 * found['magnitude']['dense_top1']:.1f}"
        lines.append(f"| {NAMES[network]}, {data} | {dense} | {' | '.join(cells)} |")
    return "\n".join(lines)


def learn() -> str:
    """What masks learned with the defaults are worth."""
    lines = ["| | dense | magnitude | learned | agreement | steps, time, hardware |", "|---|---|---|---|---|---|"]
    for record in json.loads((ROOT / "experiments/results/learn.json").read_text()):
        shares = [
            f"{100 * record[key]:.2f}" for key in ("dense_top1", "magnitude_top1", "learned_top1", "learned_agreement")
        ]
        how = f"{record['steps']} of batch {record['batch']}, {record['seconds'] / 60:.1f} min, {record['hardware']}"
        lines.append(f"| {NAMES[record['network']]}, {record['data']}, top-1 % | {' | '.join(shares)} | {how} |")
    return "\n".join(lines)


def learn_gpu() -> str:
    """One learning step on a GPU against its peers."""
    record = json.loads((ROOT / "benchmarks/results/learn_gpu.json").read_text())
    ms = record["median_ms"]
    lines = [
        f"On an {record['hardware']} a learning step of ResNet-50 (batch {record['batch']}, {record['size']} px, bf16) "
        f"takes {ms['halve']:.0f} ms, of",
        f"which sampling is {100 * record['sampling_share']:.0f} %. The same step with dense trainable weights takes "
        f"{ms['dense']:.0f} ms, and through unfold and",
        f"matrix product, as in the paper's code, {ms['unfold']:.0f} ms (`benchmarks/bench_learn.py`, torch "
        f"{record['versions']['torch']}, {record['date']}).",
    ]
    return "\n".join(lines)


TABLES = {
    name: (ROOT / "README.md", table)
    for name, table in [("one_shot", one_shot), ("learn", learn), ("learn_gpu", learn_gpu)]
}


def written(name: str) -> tuple[Path, str, str]:
    """The file that holds a table, its text now, and its text with the table as it should be."""
    path, table = TABLES[name]
    text = path.read_text()
    begin = f"<!-- {name}: begin (written by experiments/tables.py) -->\n"
    before, _, rest = text.partition(begin)
    _, end, after = rest.partition(f"<!-- {name}: end -->")
    if not end:
        raise SystemExit(f"{path} has no place for the table {name}")
    return path, text, f"{before}{begin}{table()}\n{end}{after}"


if __name__ == "__main__":
    for name in TABLES:
        path, old, new = written(name)
        path.write_text(new)
        print(f"{path.relative_to(ROOT)}: {name} {'unchanged' if old == new else 'written'}")

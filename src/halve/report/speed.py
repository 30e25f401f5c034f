"""How fast the network is at each batch size."""

from halve.report import figures as f
from halve.report.tables import amount, label, table
from halve.report.timings import Timings


def speed_table(timings: Timings) -> str:
    """Measured times, with the dense version that they are relative to."""
    largest = max(one.speedup for one in timings.networks)
    rows = [
        (
            "",
            [
                amount(str(one.batch), one.batch),
                label(one.baseline),
                amount(f.ms(one.dense_ms), one.dense_ms),
                amount(f.ms(one.ms), one.ms),
                amount(f"{one.speedup:.2f}x", one.speedup, largest, "sparse"),
            ],
        )
        for one in timings.networks
    ]
    return table("Speed", (">batch", "fastest dense", ">its ms", ">halve ms", ">speed-up"), rows)

"""The idea of 2:4 in one drawing, docs/figures/idea.svg."""

from drawing import drawing, lines, rect, text

WEIGHTS = (0.62, -0.08, 0.31, -0.45, 0.12, 0.55, -0.71, 0.05, -0.28, 0.33, 0.09, -0.66)
KEPT = (0, 3, 5, 6, 9, 11)  # mostly, not always, the largest: what matters is what the network computes with them
CELL = 47.0


def idea() -> str:
    """Weights in blocks of four, a mask that keeps two of each, and what hardware stores."""
    parts = [text(40, 46, "One row of a weight, in blocks of four input channels", "title")]
    parts += _row(66, range(len(WEIGHTS)))
    parts += [text(40, 160, "2:4: two of every four are kept, and their values do not change", "title")]
    parts += _row(180, KEPT)
    parts += [text(40, 274, "What sparse hardware stores and multiplies", "title")]
    for place, index in enumerate(KEPT):
        x, value = 40 + (CELL + 4) * place + 14 * (place // 2), WEIGHTS[index]
        parts += [
            rect(x, 294, CELL, CELL, "weight", f' fill-opacity="{_shade(value):.2f}"'),
            text(x + CELL / 2, 321, f"{value:.2f}", "middle code"),
            text(x + CELL / 2, 358, f"{index % 4}", "middle small"),
        ]
    right = 40 + (CELL + 4) * len(KEPT) + 42
    parts += [
        text(right, 321, "half of the values"),
        text(right, 358, "and two bits each: their place in the block", "small"),
    ]
    x = 720.0
    parts += [text(x, 86, "Half of the multiplications", "bold")]
    parts += lines(
        x, 112, ["A sparse tensor core reads the two", "values and picks the inputs that", "they belong to."]
    )
    parts += [text(x, 200, "Which two? That is learned", "bold")]
    parts += lines(
        x,
        226,
        [
            "Six choices per block. Gradient descent",
            "finds those with which the network",
            "computes what the dense one does.",
        ],
    )
    parts += [text(x, 314, "The checkpoint stays as it is", "bold")]
    parts += lines(x, 340, ["Choices are a small file beside it."])
    label = "A row of weights in blocks of four; two of each block are kept; hardware stores their values and positions"
    return drawing(1020, 390, label, parts)


def _row(y: float, kept: object) -> list[str]:
    parts = []
    for index, value in enumerate(WEIGHTS):
        x = 40 + (CELL + 4) * index + 14 * (index // 4)
        if index in kept:  # type: ignore[operator]
            parts.append(rect(x, y, CELL, CELL, "weight", f' fill-opacity="{_shade(value):.2f}"'))
            parts.append(text(x + CELL / 2, y + 27, f"{value:.2f}", "middle code"))
        else:
            parts.append(rect(x, y, CELL, CELL, "dropped"))
            parts.append(text(x + CELL / 2, y + 27, "0", "middle small"))
    return parts


def _shade(value: float) -> float:
    return 0.12 + 0.5 * abs(value)  # light enough for text on it

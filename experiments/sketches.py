"""Drawings for "How it works": learning, the engine, kernels, certificates; docs/figures/*.svg."""

from drawing import arrow, arrow_down, box, drawing, line, lines, rect, text

from halve.binomial import lower

CODES = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))  # of a 2:4 block


def learning() -> str:
    """One step of `halve.learn`."""
    chances = (0.06, 0.10, 0.47, 0.05, 0.20, 0.12)
    parts = [text(40, 44, "One step of learning", "title"), text(40, 84, "One block has six codes;", "bold")]
    parts.append(text(40, 104, "each has a learned score", "bold"))
    for i, (code, chance) in enumerate(zip(CODES, chances, strict=True)):
        y = 122 + 34 * i
        for place in range(4):
            kind = "weight" if place in code else "dropped"
            parts.append(rect(40 + 26 * place, y, 22, 22, kind))
        parts.append(rect(156, y + 3, 130 * chance / max(chances), 16, "halve" if chance == max(chances) else "dense"))
    parts += lines(40, 346, ["Noise, then the best one: a hard sample.", "The noise fades out during the run."])
    parts += arrow(304, 140, 50)
    words = ["in a private copy of your model;", "nothing else changes"]
    parts += box(362, 86, 250, "Frozen weights x mask", words, 84)
    parts += arrow_down(487, 174, 34)
    parts += box(362, 212, 250, "The masked network", ["outputs and features", "on a batch of images"], 84)
    parts += box(700, 212, 250, "The dense network", ["the teacher: your model itself,", "so no labels are needed"], 84)
    parts += arrow(616, 254, 30)
    parts += [line(696, 254, 658, 254, "arrow"), '<path class="head" d="M 648 254 l 11 -6 v 12 z"/>']
    parts += [text(656, 330, "difference of outputs and features: the loss", "middle bold")]
    parts.append('<path class="arrow" stroke-dasharray="6 4" d="M 656 342 v 48 H 330 V 254 h -22"/>')
    parts.append('<path class="head" d="M 296 254 l 11 -6 v 12 z"/>')
    parts += [text(493, 412, "its gradient moves the scores, and nothing else", "middle small")]
    label = "A step of learning: sample codes, run the masked network, compare it with the dense one, move the scores"
    return drawing(990, 436, label, parts)


def engine() -> str:
    """What `halve.compile` does."""
    steps = (
        ("1. Capture", ["torch.export: the", "network as a graph"]),
        ("2. Fold and fuse", ["BatchNorm, bias, sum,", "activation, pooling"]),
        ("3. Pack", ["kept values, and", "their positions"]),
        ("4. Plan", ["time every kernel of", "every layer; take", "the fastest"]),
        ("5. Compile the rest", ["Inductor, for what", "lies between"]),
        ("6. Record", ["a CUDA graph per", "batch size"]),
    )
    parts = [text(40, 44, "What compile does", "title")]
    for i, (title, words) in enumerate(steps):
        x = 40 + 192 * i
        parts += box(x, 70, 166, title, words, 116)
        if i + 1 < len(steps):
            parts += arrow(x + 168, 128, 22)
    note = ["A layer stays dense where a dense kernel is faster; whatever cannot be captured runs eagerly."]
    note += ["The plan says which, and why. Timings are cached, so that the next call is fast."]
    parts += lines(40, 226, note)
    return drawing(1206, 270, "compile: capture, fold and fuse, pack, plan, compile the rest, record", parts)


def kernels() -> str:
    """How a sparse tensor core multiplies a 2:4 row."""
    parts = [text(40, 44, "One row on a sparse tensor core", "title")]
    parts += [text(40, 82, "kept values", "bold"), text(40, 148, "positions", "bold"), text(40, 238, "inputs", "bold")]
    positions = (0, 3, 1, 2, 1, 3)
    for i, position in enumerate(positions):
        x = 172 + 84 * i + 10 * (i // 2)
        parts.append(rect(x, 62, 40, 30, "weight", ' fill-opacity="0.75"'))
        parts.append(text(x + 20, 149, f"{position}", "middle code"))
        block = 172 + 178 * (i // 2)
        target = block + 42 * position + 19
        parts.append(f'<path class="arrow" d="M {x + 20:g} 156 C {x + 20:g} 190 {target:g} 180 {target:g} 214"/>')
        parts.append(line(x + 20, 96, x + 20, 132))
    for block in range(3):
        for place in range(4):
            used = place in positions[2 * block : 2 * block + 2]
            parts.append(rect(172 + 178 * block + 42 * place, 218, 38, 30, "halve" if used else "dropped"))
    gpu = ["The positions select two of four inputs", "on the way to the multipliers: half as"]
    gpu += ["many products for the same sum."]
    cpu = ["The positions are part of the machine code:", "one multiply-add for each kept weight,"]
    cpu += ["with the right register in it."]
    x = 740.0
    parts += [
        text(x, 82, "On a GPU", "bold"),
        *lines(x, 106, gpu),
        text(x, 190, "On a CPU", "bold"),
        *lines(x, 214, cpu),
    ]
    note = "Input channels in blocks of four, contiguous in memory: channels are moved to make it so."
    parts.append(text(172, 282, note, "small"))
    label = "Kept values and their positions, which select the inputs that are multiplied"
    return drawing(1060, 306, label, parts)


def certificates() -> str:
    """The two kinds of certificates: counting images, and bounds for one image."""
    parts = [text(40, 44, "Counting: flips", "title"), text(520, 44, "Proving: one image, all inputs near it", "title")]
    flipped, images = {17, 43}, 60
    for i in range(images):
        x, y = 40 + 26 * (i % 15), 70 + 26 * (i // 15)
        parts.append(rect(x, y, 20, 20, "magnitude" if i in flipped else "halve", ' fill-opacity="0.8"'))
    words = [
        "Each square is an image. Yellow: the masked network",
        "predicts another class. The count gives an exact lower",
    ]
    parts += lines(40, 202, [*words, "bound for images like these:"])
    least, at = lower(images - len(flipped), images, 0.001), 40.0
    parts += [
        line(at, 300, at + 390, 300, "arrow"),
        text(at, 328, "0 %", "small"),
        text(430, 328, "100 %", "small end"),
    ]
    parts += [rect(at + 390 * least, 290, 390 * (1 - least), 20, "halve", ' fill-opacity="0.35"')]
    parts.append(text(430, 280, f"at least {100 * least:.0f} %, with 99.9 % confidence", "small end"))
    region = "M 560 250 C 600 130 760 90 860 150 S 900 290 780 300 S 540 320 560 250 z"
    parts.append(f'<path class="halve" fill-opacity="0.18" d="{region}"/>')
    parts.append(rect(672, 176, 88, 64, "weight", ' fill-opacity="0.25"'))
    parts.append('<circle class="weight" cx="716" cy="208" r="6"/>')
    parts += [text(716, 262, "all inputs within the radius", "small middle")]
    parts += [text(716, 158, "here the class is the same", "small middle")]
    words = ["Linear bounds through every layer show that the box stays on one"]
    parts += lines(520, 346, [*words, "side of the decision. The same works for updates of weights."])
    label = "Images that flip, counted, give an exact bound; a box around an image is proven to keep its class"
    return drawing(990, 392, label, parts)

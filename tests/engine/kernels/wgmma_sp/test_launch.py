"""Compile the kernel, and read its machine code."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from halve.engine.kernels.cuda import jit
from halve.engine.kernels.wgmma_sp.launch import Variant, machine_code, variant_of
from halve.engine.kernels.wgmma_sp.tiling import TILES, tiling
from halve.engine.operations import Convolution

pytestmark = pytest.mark.skipif(jit.unavailable() is not None, reason=str(jit.unavailable()))
VARIANTS = {
    "shared pixels": Variant(True, False, False, False, False, 1, 208, 1, 2, "relu"),
    "shared pixels, residual": Variant(True, False, True, False, False, 2, 128, 1, 2, "none"),
    "own pixels": Variant(True, True, False, True, True, 1, 232, 1, 1, "gelu"),
    "own pixels, streamed": Variant(True, False, True, True, False, 1, 248, 1, 1, "silu"),
    "in parts": Variant(True, False, False, False, False, 1, 256, 4, 2, "hardswish"),
    "a tile shared by blocks": Variant(True, False, True, False, False, 1, 104, 1, 1, "relu", split=4),
    "two blocks": Variant(True, False, True, True, False, 1, 96, 1, 1, "relu", light=True),
    "two blocks of a cluster": Variant(True, False, False, False, False, 1, 64, 1, 1, "relu", split=2, light=True),
    "with a shortcut": Variant(True, False, False, False, False, 1, 200, 1, 2, "relu", shortcut=True),
    "unrolled": Variant(True, False, False, False, False, 1, 216, 1, 1, "relu", unrolled=15),
    "unrolled, residual": Variant(True, False, True, False, False, 1, 224, 1, 1, "relu", unrolled=32),
    "unrolled, own pixels": Variant(True, False, False, True, True, 1, 208, 1, 1, "relu", unrolled=29),
    "unrolled, own pixels, residual": Variant(True, True, True, True, True, 1, 232, 1, 1, "relu", unrolled=57),
    "unrolled, own pixels, streamed": Variant(True, False, True, True, False, 1, 216, 1, 1, "silu", unrolled=15),
    "unrolled, two blocks a warpgroup": Variant(True, False, False, False, False, 2, 120, 1, 2, "relu", unrolled=15),
    "unrolled, a tile shared by blocks": Variant(
        True, False, True, False, False, 1, 112, 1, 1, "relu", split=4, unrolled=16
    ),
    "unrolled, two blocks": Variant(True, False, False, False, False, 1, 64, 1, 1, "relu", light=True, unrolled=8),
    "dense": Variant(False, False, False, False, False, 1, 216, 1, 2, "relu"),
}


@pytest.fixture(scope="module")
def disassembler():
    triton = pytest.importorskip("triton")
    found = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    path = str(found) if found.exists() else shutil.which("nvdisasm")
    if path is None:
        pytest.skip("needs nvdisasm")
    return path


@pytest.mark.parametrize("name", VARIANTS)
def test_metadata_registers_are_not_written_while_products_read_them(name, disassembler, tmp_path, monkeypatch):
    """`wgmma` reads metadata from registers while it runs, and no tool checks that they stay."""
    monkeypatch.setenv("HALVE_CACHE", str(tmp_path))
    file = tmp_path / "conv.cubin"
    file.write_bytes(machine_code(VARIANTS[name], "sm_90a"))
    listing = subprocess.run([disassembler, "-c", str(file)], capture_output=True, text=True, check=True).stdout
    program = Program(listing)
    products = [i for i, text in enumerate(program.text) if "HGMMA" in text]
    assert len(products) >= 4
    assert [program.clobbered(i) for i in products if "HGMMA.SP" in program.text[i]] == [None] * (
        len(products) if VARIANTS[name].sparse else 0
    )


class Program:
    """Instructions in order, and where each continues."""

    def __init__(self, listing):
        self.text, labels = [], {}
        for line in listing.splitlines():
            if match := re.match(r"\s*(\.L_\w+):", line):
                labels[match[1]] = len(self.text)
            elif match := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
                self.text.append(re.sub(r"\{|\}", "", match[1]).strip())
        self.next = [self._after(i, text, labels) for i, text in enumerate(self.text)]

    def _after(self, i, text, labels):
        following = [i + 1] if i + 1 < len(self.text) else []
        if match := re.search(r"\bBRA\S*\s.*?\((\.L_\w+)\)", text):
            return [labels[match[1]], *(following if text.startswith("@") else [])]
        if re.search(r"\bEXIT\b", text):
            return following if text.startswith("@") else []
        return following

    def clobbered(self, product):
        """An instruction that writes the product's metadata register before the product is known to be done."""
        register = re.findall(r"\bR\d+\b", self.text[product])[-1]
        seen, stack = set(), [(product, -1)]  # groups committed after that of the product
        while stack:
            i, later = stack.pop()
            if (i, later) in seen:
                continue
            seen.add((i, later))
            text = re.sub(r"^@\S+\s+", "", self.text[i])
            if i != product or later >= 0:
                waited = re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)", text)
                if waited and later >= 0 and int(waited[1], 16) <= later:
                    continue
                if register in written(text):
                    return text
            later = min(later + ("HGMMA" in text and "gsb0" in text), 8)
            stack += [(j, later) for j in self.next[i]]
        return None


def written(text):
    """The registers that an instruction writes, apart from products."""
    found = re.match(r"(\S+)\s+(?:U?P[T0-9], )?R(\d+)\b", text)
    if found is None or re.match(r"ST|HGMMA|SYNCS|R2UR|BAR|RED|UTMA", found[1]):
        return set()
    wide = re.search(r"\.(64|128|WIDE|[24]$)", found[1])
    count = {"64": 2, "128": 4, "WIDE": 2, "2": 2, "4": 4}[wide[1]] if wide else 2 if found[1] == "CS2R" else 1
    return {f"R{int(found[2]) + i}" for i in range(count)}


def test_the_check_finds_a_register_that_is_written_too_early():
    program = Program(
        "/*0000*/ HGMMA.SP.64x8x32.F32 R24, gdesc[UR4], R24, R5, 0x0, gsb0 ;\n"
        "/*0010*/ IADD3 R5, R5, 0x1, RZ ;\n"
        "/*0020*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n"
        "/*0030*/ EXIT ;\n"
    )
    assert program.clobbered(0) == "IADD3 R5, R5, 0x1, RZ"
    program.text[1] = "IADD3 R6, R5, 0x1, RZ"
    assert program.clobbered(0) is None
    program.text[1] = "CS2R R4, SRZ"  # writes R4 and R5
    assert program.clobbered(0) == "CS2R R4, SRZ"


@pytest.mark.parametrize(
    ("text", "registers"),
    [
        ("LDS R132, [R9]", "R132"),
        ("LDS.128 R8, [R3+0x10]", "R8 R9 R10 R11"),
        ("LDSM.16.MT88.4 R12, [R140]", "R12 R13 R14 R15"),
        ("IMAD.WIDE.U32 R6, R3, 0x4, R8", "R6 R7"),
        ("SHFL.IDX PT, R5, R5, RZ, 0x1f", "R5"),
        ("LOP3.LUT P1, RZ, R13, R14, RZ, 0xc0, !PT", ""),
        ("STS.64 [R2], R4", ""),
        ("R2UR UR4, R5", ""),
    ],
)
def test_the_registers_that_an_instruction_writes(text, registers):
    assert written(text) == set(registers.split())


def test_every_tile_compiles(tmp_path, monkeypatch):
    monkeypatch.setenv("HALVE_CACHE", str(tmp_path))
    convolution = Convolution(64, 512, (3, 3), padding=(1, 1), activation="relu")
    for tile in TILES.values():
        plan = tiling(convolution, (4, 14, 14), tile, sparse=True, residual=False, processors=132)
        variant = variant_of(plan, convolution, torch.float16, sparse=True, residual=False)
        assert b"conv" in machine_code(variant, "sm_90a")

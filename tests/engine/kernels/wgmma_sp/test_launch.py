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
                written = re.match(r"(\S+)\s+(?:PT, )?(R\d+)\b", text)
                if written and written[2] == register and not re.match(r"ST|HGMMA|SYNCS|R2UR|BAR|RED|UTMA", written[1]):
                    return text
            later = min(later + ("HGMMA" in text and "gsb0" in text), 8)
            stack += [(j, later) for j in self.next[i]]
        return None


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


def test_every_tile_compiles(tmp_path, monkeypatch):
    monkeypatch.setenv("HALVE_CACHE", str(tmp_path))
    convolution = Convolution(64, 512, (3, 3), padding=(1, 1), activation="relu")
    for tile in TILES.values():
        plan = tiling(convolution, (4, 14, 14), tile, sparse=True, residual=False, processors=132)
        variant = variant_of(plan, convolution, torch.float16, sparse=True, residual=False)
        assert b"conv" in machine_code(variant, "sm_90a")

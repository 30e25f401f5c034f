"""How our code computes with the instruction sets of this CPU."""

import torch

from halve.engine.kernels.cpu_sp.arithmetic import Arithmetic, BFloat16, Float32, Float32Avx2
from halve.machine import cpu_flags

AVX512, AVX2 = "avx512", "avx2"
ARITHMETICS: dict[str, dict[torch.dtype, Arithmetic]] = {  # by instruction set, the fastest first
    AVX512: {torch.float32: Float32(), torch.bfloat16: BFloat16()},
    AVX2: {torch.float32: Float32Avx2()},
}
DTYPES = tuple(ARITHMETICS[AVX512])


def arithmetic_for(dtype: torch.dtype, instructions: str) -> Arithmetic | None:
    """The arithmetic of a dtype with an instruction set; None if there is none, or this CPU cannot run it."""
    found = ARITHMETICS.get(instructions, {}).get(dtype)
    return found if found is not None and not _lacking(found) else None


def instructions_for(dtype: torch.dtype) -> str | None:
    """The best instruction set of this CPU for a dtype; None if it has none of them."""
    return next((name for name in ARITHMETICS if arithmetic_for(dtype, name) is not None), None)


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why our code cannot run on this device in this dtype; None if it can."""
    if device.type != "cpu":
        return f"our CPU kernels need a CPU, got {device.type}"
    if dtype not in DTYPES:
        return f"our CPU kernels need {' or '.join(map(str, DTYPES))}, got {dtype}"
    if instructions_for(dtype) is not None:
        return None
    lacking = {name: _lacking(known[dtype]) for name, known in ARITHMETICS.items() if dtype in known}
    needed = " or ".join("AVX-512" if name == AVX512 else "AVX2" for name in lacking)
    flags = ", ".join(flag for one in lacking.values() for flag in one)
    return f"our CPU kernels need {needed} in {dtype}: this CPU has no {flags}"


def _lacking(arithmetic: Arithmetic) -> list[str]:
    return [flag for flag in arithmetic.flags if flag not in cpu_flags()]

"""`wgmma`, the matrix instruction of Hopper GPUs: where it exists, and how it is written."""

import torch

from halve.engine.kernels.cuda import driver, jit

DTYPES = (torch.float16, torch.bfloat16)
_CAPABILITY = (9, 0)  # it exists on no other


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why kernels with `wgmma` cannot run on this device in this dtype; None if they can."""
    if (reason := driver.unavailable(device)) is not None:
        return reason
    if dtype not in DTYPES:
        return f"our sparse kernels need float16 or bfloat16, got {dtype}: pass dtype=torch.float16"
    if (reason := jit.unavailable()) is not None:
        return reason
    if torch.cuda.get_device_capability(device) != _CAPABILITY:
        return f"our wgmma kernels need compute capability 9.0, not that of {torch.cuda.get_device_name(device)}"
    return None


def multiply_source(pixels: int, sparse: bool, bf16: bool) -> str:
    """`multiply` in CUDA C++: one `wgmma` instruction for tiles of 64 output channels by `pixels` pixels."""
    kind, count = "bf16" if bf16 else "f16", pixels // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    if sparse:
        return f"""
template <int SELECTOR>
__device__ __forceinline__ void multiply(float (&d)[{count}], u64 a, u64 b, u32 meta, int add) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, %{count + 3}, 0;"
                 "wgmma.mma_async.sp.sync.aligned.m64n{pixels}k32.f32.{kind}.{kind} {{{registers}}}, "
                 "%{count}, %{count + 1}, %{count + 2}, %{count + 4}, p, 1, 1, 0, 0;}}"
                 : {operands} : "l"(a), "l"(b), "r"(meta), "r"(add), "n"(SELECTOR));
}}
"""
    return f"""
__device__ __forceinline__ void multiply(float (&d)[{count}], u64 a, u64 b, int add) {{
    asm volatile("{{.reg .pred p; setp.ne.b32 p, %{count + 2}, 0;"
                 "wgmma.mma_async.sync.aligned.m64n{pixels}k16.f32.{kind}.{kind} {{{registers}}}, "
                 "%{count}, %{count + 1}, p, 1, 1, 0, 0;}}"
                 : {operands} : "l"(a), "l"(b), "r"(add));
}}
"""

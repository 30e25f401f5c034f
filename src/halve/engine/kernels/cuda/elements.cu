// What every kernel shares: 16-bit elements (float16, or bfloat16 if BF16 is 1), and the activations of an epilogue.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Kernels in a recording are launched before the previous one is done (see driver.py): they may prepare, and must wait before
// they read or write what it may still use. Its results are read with coherent loads, as they are not constant while the
// kernel runs: no `__ldg`, no `const __restrict__`. Both do nothing in other launches, and on GPUs that cannot do it.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float to_float(u16 v) {
#if BF16
    return __uint_as_float((u32)v << 16);
#else
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
#endif
}

__device__ __forceinline__ u16 from_float(float f) {
    u16 v;
#if BF16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(f));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(f));
#endif
    return v;
}

// Two elements in one register, the first in the lower half.
__device__ __forceinline__ u32 two(float first, float second) {
    u32 v;
#if BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(second), "f"(first));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(second), "f"(first));
#endif
    return v;
}

// ACTIVATE selects one of these at compile time: inlining all of them for every output would overflow the instruction
// cache. Names match ACTIVATIONS in halve.engine.operations.
__device__ __forceinline__ float activate_none(float v) { return v; }
__device__ __forceinline__ float activate_relu(float v) {
    float larger;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(larger) : "f"(v));  // propagates NaN, like PyTorch
    return larger;
}
// max(x, 0) - |x| Phi(-|x|), with log2 Phi(-a) as a polynomial of a on [0, 8], to 1.3e-6 (minimax). Half as many instructions
// as a rational function of x^2, and a small part of those of `erff`: memory would wait for them.
__device__ __forceinline__ float activate_gelu(float v) {
    const float a = fminf(fabsf(v), 8.f);
    float tail = fmaf(-0.000397166965f, a, 0.0065834648f);
    tail = fmaf(tail, a, -0.050659433f);
    tail = fmaf(tail, a, -0.46116361f);
    tail = fmaf(tail, a, -1.15030468f);
    tail = fmaf(tail, a, -1.00009823f);
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(tail) : "f"(tail));
    return fmaf(-a, tail, activate_relu(v));  // which is NaN for NaN
}
__device__ __forceinline__ float activate_silu(float v) { return __fdividef(v, 1.f + __expf(-v)); }
__device__ __forceinline__ float activate_hardswish(float v) {
    const float gate = v + 3.f;  // NaN stays NaN in `v * ...`
    return v * (fminf(fmaxf(gate, 0.f), 6.f) * (1.f / 6.f));
}

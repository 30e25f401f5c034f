// What every kernel shares: 16-bit elements (float16, or bfloat16 if BF16 is 1), and the activations of an epilogue.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Kernels in a recording are launched before the previous one is done (see driver.py): they may prepare, and must wait before
// they read or write what it may still use. Both do nothing in other launches, and on GPUs that cannot do it.
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

// ACTIVATE selects one of these at compile time: inlining all of them for every output would overflow the instruction
// cache. Names match ACTIVATIONS in halve.engine.operations.
__device__ __forceinline__ float activate_none(float v) { return v; }
__device__ __forceinline__ float activate_relu(float v) { return v < 0.f ? 0.f : v; }  // propagates NaN, like PyTorch
// x Phi(x), with Phi(x) - 1/2 as x times a rational function of x^2 on [-5, 5], to 1e-7 (least squares): `erff` takes
// several times as many instructions, which the memory would have to wait for.
__device__ __forceinline__ float activate_gelu(float v) {
    const float x = fminf(fmaxf(v, -5.f), 5.f), u = x * x;
    float p = fmaf(-1.39715374e-08f, u, 4.35061223e-06f), q = fmaf(0.0001091123f, u, 0.0027506343f);
    p = fmaf(p, u, 0.000325682871f), q = fmaf(q, u, 0.0384043278f);
    p = fmaf(p, u, 0.0055191053f), q = fmaf(q, u, 0.297360572f);
    p = fmaf(p, u, 0.0521413786f), q = fmaf(q, u, 1.f);
    p = fmaf(p, u, 0.398941976f);
    return v < -5.f ? 0.f * v : v * fmaf(x, __fdividef(p, q), 0.5f);
}
__device__ __forceinline__ float activate_silu(float v) { return __fdividef(v, 1.f + __expf(-v)); }
__device__ __forceinline__ float activate_hardswish(float v) {
    const float gate = v + 3.f;  // NaN stays NaN in `v * ...`
    return v * (fminf(fmaxf(gate, 0.f), 6.f) * (1.f / 6.f));
}

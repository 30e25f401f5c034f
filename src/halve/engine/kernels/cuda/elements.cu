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
__device__ __forceinline__ float activate_relu(float v) {
    float larger;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(larger) : "f"(v));  // propagates NaN, like PyTorch
    return larger;
}
// x Phi(x), with Phi(x) - 1/2 as x times a rational function of x^2 on [-5.5, 5.5], to 2e-8 (least squares). `erff` takes
// several times as many instructions, and memory would wait for them.
__device__ __forceinline__ float activate_gelu(float v) {
    const float x = fminf(fmaxf(v, -5.5f), 5.5f), u = x * x;
    float p = fmaf(1.11756754e-10f, u, -2.20822268e-08f), q = fmaf(6.23264649e-05f, u, 0.00183064557f), inverse;
    p = fmaf(p, u, 3.24105386e-06f), q = fmaf(q, u, 0.0290915241f);
    p = fmaf(p, u, 0.000170374111f), q = fmaf(q, u, 0.256708341f);
    p = fmaf(p, u, 0.00450916728f), q = fmaf(q, u, 1.f);
    p = fmaf(p, u, 0.0359222668f);
    p = fmaf(p, u, 0.398942155f);
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(q));
    return v * fmaf(x * p, inverse, 0.5f);
}
__device__ __forceinline__ float activate_silu(float v) { return __fdividef(v, 1.f + __expf(-v)); }
__device__ __forceinline__ float activate_hardswish(float v) {
    const float gate = v + 3.f;  // NaN stays NaN in `v * ...`
    return v * (fminf(fmaxf(gate, 0.f), 6.f) * (1.f / 6.f));
}

// Max pooling of NHWC images. A thread computes eight channels of one output pixel.
//
// PyTorch's kernel also writes the index of each maximum, four times the bytes of the result in float16, which inference
// does not need. NaN propagates, like in PyTorch.
//
// Compile-time parameters: BF16 (0, 1), KERNEL_H and KERNEL_W, so that small windows are unrolled and their loads overlap.

struct Shape {
    int height, width, channels, out_height, out_width;
    int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
};

__device__ __forceinline__ u32 larger(u32 a, u32 b) {
    u32 c;
#if BF16
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
#else
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
#endif
    return c;
}

constexpr bool SMALL = KERNEL_H * KERNEL_W <= 16;

extern "C" __global__ void __launch_bounds__(128) max_pool(const uint4* x, uint4* out, Shape s) {
    constexpr u32 LEAST = BF16 ? 0xff80ff80u : 0xfc00fc00u;  // two times minus infinity
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int image = blockIdx.x / s.out_height, row = blockIdx.x % s.out_height;
    const int pieces = s.channels / 8, place = blockIdx.y * blockDim.x + threadIdx.x;
    if (place >= s.out_width * pieces) return;
    const int column = place / pieces, piece = place % pieces;
    const uint4* from = x + (size_t)image * s.height * s.width * pieces + piece;
    uint4 best = {LEAST, LEAST, LEAST, LEAST};
#pragma unroll(SMALL ? KERNEL_H : 1)
    for (int i = 0; i < KERNEL_H; i++) {
        const int h = row * s.stride_h - s.pad_h + i * s.dilation_h;
#pragma unroll(SMALL ? KERNEL_W : 1)
        for (int j = 0; j < KERNEL_W; j++) {
            const int w = column * s.stride_w - s.pad_w + j * s.dilation_w;
            uint4 v = {LEAST, LEAST, LEAST, LEAST};
            if (h >= 0 && h < s.height && w >= 0 && w < s.width) v = from[((size_t)h * s.width + w) * pieces];
            best = {larger(best.x, v.x), larger(best.y, v.y), larger(best.z, v.z), larger(best.w, v.w)};
        }
    }
    out[(size_t)blockIdx.x * s.out_width * pieces + place] = best;
}

// Convolution as one matrix product per tap, weights by pixels, with bias, residual and activation in the epilogue.
//
//   D[out channel, pixel] = sum over taps and channels of W[out channel, tap, channel] * X[pixel shifted by tap, channel]
//
// W comes packed in the instruction's order (see pack.py), 2:4 sparse or dense, and is read straight into registers.
// X is NHWC. A tile of 128 pixels by 64 channels of one tap is copied to shared memory at a time, three tiles in flight;
// rows of 128 bytes, their 16-byte pieces swizzled by the row, so that ldmatrix meets no bank twice. Pixels outside of the
// image and channels past the last are filled with zeros by the copy itself.
//
// Defined when compiled: SPARSE (0, 1), BF16 (0, 1), PIECE (channels that one copy moves: 8, or 4 where the channels are
// no multiple of 8), and the tile: a warp makes ROW_TILES x 16 output channels by PIXEL_TILES x 8 pixels, and a block has
// WARPS_M x WARPS_N x WARPS_K warps; the WARPS_K share one tile and take turns along K, for layers with few tiles.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int WARP_M = ROW_TILES * 16, WARP_N = PIXEL_TILES * 8;
constexpr int TILE_M = WARPS_M * WARP_M, TILE_N = WARPS_N * WARP_N, TILE_K = 64, STAGES = 3;
constexpr int THREADS = 32 * WARPS_M * WARPS_N * WARPS_K;
constexpr int STEP_BYTES = TILE_N * TILE_K * 2, STAGE_BYTES = WARPS_K * STEP_BYTES;
constexpr int COPIED_AT_ONCE = THREADS / 8;  // rows of 128 bytes
constexpr int PIXELS_OF_THREAD = TILE_N / COPIED_AT_ONCE;
constexpr int PARTS = SPARSE ? 1 : 2;  // pieces of eight values that a lane holds of 16 rows and 32 columns
static_assert(TILE_N % COPIED_AT_ONCE == 0, "each thread copies the same number of pixels");

struct Shape {
    int images, height, width, channels;      // of x
    int out_height, out_width, out_channels;  // of the result
    int kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    int row_tiles;                            // of 16 rows, in the packed weight
    int activation;                           // 0 none, 1 relu, 2 gelu, 3 silu, 4 hardswish
};

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

__device__ __forceinline__ float activate(float v, int kind) {
    switch (kind) {
        case 1: return v < 0.f ? 0.f : v;  // keeps NaN, as PyTorch does
        case 2: return 0.5f * v * (1.f + erff(v * 0.70710678f));
        case 3: return v / (1.f + __expf(-v));
        case 4: {
            float gate = v + 3.f;
            gate = gate < 0.f ? 0.f : gate > 6.f ? 6.f : gate;
            return v * gate / 6.f;
        }
        default: return v;
    }
}

template <int BYTES>
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool inside) {
    const int size = inside ? BYTES : 0;  // the rest is filled with zeros
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size));
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(size));
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));
}

#if BF16
#define KIND "bf16.bf16"
#else
#define KIND "f16.f16"
#endif

#if SPARSE
template <int SELECTOR>
__device__ __forceinline__ void multiply(float (&c)[4], const uint4& a, const u32 (&b)[4], u32 meta) {
    if constexpr (SELECTOR == 0)
        asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." KIND ".f32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, 0x0;"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(meta));
    else
        asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." KIND ".f32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, 0x1;"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(meta));
}
#else
__device__ __forceinline__ void multiply(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND ".f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
#endif

// What a lane multiplies with in one step of 64 columns.
struct Weights {
    uint4 values[2][ROW_TILES][PARTS];  // half of the step, row tile, part
    u32 meta[ROW_TILES];
};

__device__ __forceinline__ void load_weights(Weights& w, const uint4* values, const u32* meta, int tile, int tiles,
                                             int step, int steps, int lane) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
        const bool inside = tile + m < tiles && step < steps;
        const u64 at = (u64)(tile + m) * steps + step;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                w.values[half][m][part] =
                    inside ? __ldg(values + ((2 * at + half) * PARTS + part) * 32 + lane) : make_uint4(0, 0, 0, 0);
#if SPARSE
        w.meta[m] = inside ? __ldg(meta + at * 32 + lane) : 0x44444444u;
#endif
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) conv(const u16* __restrict__ x, const uint4* __restrict__ values,
                                                           const u32* __restrict__ meta, const float* __restrict__ bias,
                                                           const u16* __restrict__ residual, u16* __restrict__ out,
                                                           const Shape s) {
    extern __shared__ __align__(128) unsigned char shared[];
    const u32 base = (u32)__cvta_generic_to_shared(shared);
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int warp_k = warp % WARPS_K, warp_n = warp / WARPS_K % WARPS_N, warp_m = warp / WARPS_K / WARPS_N;
    const int pixels = s.images * s.out_height * s.out_width;
    const int first_pixel = blockIdx.x * TILE_N, first_row = blockIdx.y * TILE_M;
    const int channel_blocks = (s.channels + TILE_K - 1) / TILE_K;
    const int steps = s.kernel_h * s.kernel_w * channel_blocks;
    const int rounds = (steps + WARPS_K - 1) / WARPS_K;

    // This thread copies piece `piece` of pixels `row`, `row + COPIED_AT_ONCE`, ...: where each starts in its image.
    const int piece = thread % 8, row = thread / 8;
    int top[PIXELS_OF_THREAD], left[PIXELS_OF_THREAD], image[PIXELS_OF_THREAD];  // row, column, the image's first pixel
#pragma unroll
    for (int i = 0; i < PIXELS_OF_THREAD; ++i) {
        const int pixel = first_pixel + row + COPIED_AT_ONCE * i;
        const int across = pixel % s.out_width, rest = pixel / s.out_width;
        const int down = rest % s.out_height, n = rest / s.out_height;
        top[i] = pixel < pixels ? down * s.stride_h - s.pad_h : -(1 << 28);  // far outside: filled with zeros
        left[i] = across * s.stride_w - s.pad_w;
        image[i] = n * s.height * s.width;
    }

    auto copy = [&](int round) {
#pragma unroll
        for (int k = 0; k < WARPS_K; ++k) {
            const int step = round * WARPS_K + k;
            const int tap = step / channel_blocks, channel = (step % channel_blocks) * TILE_K + piece * 8;
            const int dy = tap / s.kernel_w * s.dilation_h, dx = tap % s.kernel_w * s.dilation_w;
            const u32 stage = base + round % STAGES * STAGE_BYTES + k * STEP_BYTES;
#pragma unroll
            for (int i = 0; i < PIXELS_OF_THREAD; ++i) {
                const int y = top[i] + dy, z = left[i] + dx, r = row + COPIED_AT_ONCE * i;
                const bool in_image =
                    (unsigned)y < (unsigned)s.height && (unsigned)z < (unsigned)s.width && step < steps;
                const u16* from = x + (long long)(image[i] + y * s.width + z) * s.channels + channel;
                const u32 to = stage + r * (TILE_K * 2) + ((piece ^ (r & 7)) * 16);
#pragma unroll
                for (int part = 0; part < 8 / PIECE; ++part) {
                    const bool inside = in_image && channel + part * PIECE < s.channels;
                    copy_async<PIECE * 2>(to + part * PIECE * 2, inside ? from + part * PIECE : x, inside);
                }
            }
        }
    };

    float sums[ROW_TILES][PIXEL_TILES][4] = {};
    const int tile = first_row / 16 + warp_m * ROW_TILES;
    Weights now, next;
    load_weights(now, values, meta, tile, s.row_tiles, warp_k, steps, lane);
#pragma unroll
    for (int round = 0; round < STAGES - 1; ++round) {
        if (round < rounds) copy(round);
        asm volatile("cp.async.commit_group;");
    }
    for (int round = 0; round < rounds; ++round) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
        __syncthreads();  // the tile is there for all, and all are done with the one that is written over next
        if (round + STAGES - 1 < rounds) copy(round + STAGES - 1);
        asm volatile("cp.async.commit_group;");
        load_weights(next, values, meta, tile, s.row_tiles, (round + 1) * WARPS_K + warp_k, steps, lane);
        const u32 stage = base + round % STAGES * STAGE_BYTES + warp_k * STEP_BYTES;
#pragma unroll
        for (int n = 0; n < PIXEL_TILES; ++n) {
            const int r = warp_n * WARP_N + n * 8 + lane % 8;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 b[4];  // 8 pixels by 32 channels
                load_matrices(b, stage + r * (TILE_K * 2) + (((half * 4 + lane / 8) ^ (r & 7)) * 16));
#pragma unroll
                for (int m = 0; m < ROW_TILES; ++m) {
#if SPARSE
                    if (half == 0) multiply<0>(sums[m][n], now.values[0][m][0], b, now.meta[m]);
                    else multiply<1>(sums[m][n], now.values[1][m][0], b, now.meta[m]);
#else
                    multiply(sums[m][n], now.values[half][m][0], b[0], b[1]);
                    multiply(sums[m][n], now.values[half][m][1], b[2], b[3]);
#endif
                }
            }
        }
        now = next;
    }

    // Through shared memory, so that the channels of one pixel are written together, and the warps along K are added up
    // in a fixed order.
    asm volatile("cp.async.wait_group 0;");
    __syncthreads();
    float* tile_out = reinterpret_cast<float*>(shared);  // [warp along K][pixel][PITCH]
    constexpr int PITCH = TILE_M + 4, SLICE = TILE_N * PITCH;
    const int g = lane / 4, q = lane % 4;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int n = 0; n < PIXEL_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int channel = warp_m * WARP_M + m * 16 + g + (i / 2) * 8;
                const int pixel = warp_n * WARP_N + n * 8 + 2 * q + i % 2;
                tile_out[warp_k * SLICE + pixel * PITCH + channel] = sums[m][n][i];
            }
    __syncthreads();
    constexpr int GROUPS = TILE_M / 8;  // eight channels of one pixel at a time
    for (int at_once = thread; at_once < TILE_N * GROUPS; at_once += THREADS) {
        const int p = at_once / GROUPS, channel = at_once % GROUPS * 8;
        const int pixel = first_pixel + p, first = first_row + channel;
        if (pixel >= pixels || first >= s.out_channels) continue;
        const u64 at = (u64)pixel * s.out_channels + first;
        const bool whole = first + 8 <= s.out_channels && s.out_channels % 8 == 0;
        union { uint4 vector; u16 each[8]; } sum, add;
        add.vector = make_uint4(0, 0, 0, 0);
        if (residual && whole) add.vector = *reinterpret_cast<const uint4*>(residual + at);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (first + i >= s.out_channels) break;
            float v = tile_out[p * PITCH + channel + i];
#pragma unroll
            for (int k = 1; k < WARPS_K; ++k) v += tile_out[k * SLICE + p * PITCH + channel + i];
            if (bias) v += __ldg(bias + first + i);
            if (residual) v += to_float(whole ? add.each[i] : residual[at + i]);
            sum.each[i] = from_float(activate(v, s.activation));
            if (!whole) out[at + i] = sum.each[i];
        }
        if (whole) *reinterpret_cast<uint4*>(out + at) = sum.vector;
    }
}

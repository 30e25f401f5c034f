// The first layer of ResNets and their kin: a 7x7 convolution of stride 2 from three channels to 64, ReLU and 3x3 max pooling
// of stride 2, in one kernel. Apart, the result of the convolution takes most of the time: four times as large as what is
// left of it, it is written and read again.
//
// Images are NHWC, or planes as users have them (PLANAR), which saves a copy of all images. In shared memory pixels have four channels, the last zero, so that two pixels take 16 bytes and windows of
// neighbouring results begin 16 bytes apart. That is how wgmma reads rows of a matrix without swizzle: the pixels of an input
// row are the matrix of all windows in it, overlapping. A row of the kernel is 8 pixels by 4 channels, two steps of 16; the
// last pixel has zero weights.
//
// Each warpgroup goes down a strip of an image: it computes a row of the convolution, takes the maximum along the row in
// registers, and the maximum with the two rows before. Meanwhile it loads the next two rows of the input. Results behind ReLU
// are never negative, so zero stands for what lies outside of the image.
//
// Compile-time parameters: BF16 (0, 1), PLANAR (0, 1), PIXELS (the width of the convolution, a multiple of 16). launch.py generates
// `multiply` for PIXELS, in the place of MULTIPLY.

struct alignas(64) TensorMap { u64 opaque[16]; };

struct Shape {
    int height, out_height;              // of the input; of the convolution
    int pooled_height, strip_rows;       // of the result; of a strip of it
    int strips_per_image, strips;
};

//MULTIPLY

constexpr int GROUPS = 4, WIDTH = 2 * PIXELS, PARTS_OF_ROW = WIDTH / 4;  // a thread loads four pixels
constexpr int ROW_BYTES = (2 * PIXELS + 6) * 8, PAIRS = 5, RING_BYTES = PAIRS * 2 * ROW_BYTES;
constexpr int WEIGHT_BYTES = 14 * 2048, OUT_BYTES = PIXELS / 2 * 128, COLUMNS = PIXELS / 8;
constexpr int OUT_AT = (WEIGHT_BYTES + 1023) / 1024 * 1024, RINGS_AT = OUT_AT + GROUPS * ((OUT_BYTES + 1023) / 1024 * 1024);
static_assert(2 * PARTS_OF_ROW <= 128, "a warpgroup loads two rows at once");
static_assert(ROW_BYTES % 16 == 0, "rows are aligned");

__device__ __forceinline__ u64 matrix_at(u32 address, u32 along_k, u32 along_rows) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)(along_k >> 4) << 16 | (u64)(along_rows >> 4) << 32;
}

__device__ __forceinline__ float larger(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ __forceinline__ u32 larger_of_two(u32 a, u32 b) {
    u32 c;
#if BF16
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
#else
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
#endif
    return c;
}

// Four pixels of three channels: one after the other, or each channel of all.
struct Loaded {
    uint2 part[3];
};

extern "C" __global__ void __launch_bounds__(128 * GROUPS, 1)
stem(const u16* x, const __grid_constant__ TensorMap output, const uint4* __restrict__ packed,
     const float* __restrict__ bias, const Shape s) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 base = (u32)__cvta_generic_to_shared(shared);
    const int thread = threadIdx.x, group = thread / 128, t = thread % 128, warp = t / 32, lane = t % 32, quad = lane & 3;
    let_next_kernel_start();
    for (int i = thread; i < WEIGHT_BYTES / 16; i += 128 * GROUPS) reinterpret_cast<uint4*>(shared)[i] = __ldg(packed + i);
    for (int i = thread * 16; i < GROUPS * RING_BYTES; i += 128 * GROUPS * 16)  // margins left and right stay zero
        *reinterpret_cast<uint4*>(shared + RINGS_AT + i) = make_uint4(0, 0, 0, 0);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    wait_for_previous_kernel();

    unsigned char* ring = shared + RINGS_AT + group * RING_BYTES;
    const u32 ring_at = base + RINGS_AT + group * RING_BYTES, out_at = base + OUT_AT + group * ((OUT_BYTES + 1023) / 1024 * 1024);
    const float shift[2] = {bias[warp * 16 + lane / 4], bias[warp * 16 + lane / 4 + 8]};
    const int half = t / PARTS_OF_ROW, part = t - half * PARTS_OF_ROW;  // of a pair of rows; threads past the second are idle
    // Where this lane stores matrices of 8 pixels by 8 channels: column c of the registers is pixel 4 (c % 2) + c / 2.
    const int pixel = 4 * (lane & 1) + (lane >> 1 & 3) + (lane >> 4 & 1) * 8, piece = warp * 2 + (lane >> 3 & 1);
    const u32 lane_offset = pixel * 128 + ((piece ^ (pixel & 7)) << 4);

    for (int strip = blockIdx.x + gridDim.x * group; strip < s.strips; strip += gridDim.x * GROUPS) {
        const int image = strip / s.strips_per_image, first_pooled = (strip - image * s.strips_per_image) * s.strip_rows;
        const int pooled = min(s.strip_rows, s.pooled_height - first_pooled), rows = 2 * pooled + 1;
        const int first_row = 2 * first_pooled - 1;  // of the convolution
        const u16* from = x + (size_t)image * s.height * WIDTH * 3;
        // Pair j holds input rows 2 (first_row + j) - 4 and the next. Row i of the convolution reads pairs i to i + 3.
        auto load = [&](int pair) {
            Loaded loaded = {};
            const int row = 2 * (first_row + pair) - 4 + half;
            if (half < 2 && row >= 0 && row < s.height) {
#pragma unroll
                for (int i = 0; i < 3; ++i) {
                    const size_t at = PLANAR ? ((size_t)i * s.height + row) * WIDTH + part * 4
                                             : ((size_t)row * WIDTH + part * 4) * 3 + i * 4;
                    loaded.part[i] = *reinterpret_cast<const uint2*>(from + at);
                }
            }
            return loaded;
        };
        auto store = [&](const Loaded& v, int slot) {
            if (half >= 2) return;
            const u32 a = v.part[0].x, b = v.part[0].y, c = v.part[1].x, d = v.part[1].y, e = v.part[2].x, f = v.part[2].y;
            uint2* to = reinterpret_cast<uint2*>(ring + (slot * 2 + half) * ROW_BYTES) + 3 + part * 4;
#if PLANAR
            to[0] = make_uint2((a & 0xFFFF) | c << 16, e & 0xFFFF);
            to[1] = make_uint2(a >> 16 | (c & 0xFFFF0000), e >> 16);
            to[2] = make_uint2((b & 0xFFFF) | d << 16, f & 0xFFFF);
            to[3] = make_uint2(b >> 16 | (d & 0xFFFF0000), f >> 16);
#else
            to[0] = make_uint2(a, b & 0xFFFF);
            to[1] = make_uint2(b >> 16 | c << 16, c >> 16);
            to[2] = make_uint2(d, e & 0xFFFF);
            to[3] = make_uint2(e >> 16 | f << 16, f >> 16);
#endif
        };
        asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");  // no warp still reads rows of the previous strip
        for (int pair = 0; pair < 4; ++pair) store(load(pair), pair);
        Loaded next = load(4);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");

        u32 best[COLUMNS / 2][2];  // of the rows so far: two columns of 8 pixels, two halves of the channels
        int slot = 0;              // of pair i
        for (int i = 0; i < rows; ++i) {
            const bool inside = first_row + i >= 0 && first_row + i < s.out_height;
            float sums[PIXELS / 2];
            if (inside) {
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int k = 0; k < 14; ++k) {  // kernel row k / 2
                    const int at = slot + (k / 2 + 1) / 2, of = at < PAIRS ? at : at - PAIRS;
                    const u32 row = ring_at + (of * 2 + (k / 2 + 1) % 2) * ROW_BYTES + k % 2 * 32;
                    multiply(sums, matrix_at(base + k * 2048, 128, 256), matrix_at(row, 16, 128), k > 0);
                }
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            }
            store(next, slot == 0 ? PAIRS - 1 : slot - 1);  // pair i + 4, where pair i - 1 was
            next = load(i + 5);
            u32 row_best[COLUMNS / 2][2] = {};
            if (inside) {
                asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float result[COLUMNS];
#pragma unroll
                    for (int j = 0; j < COLUMNS; ++j) {
                        const float even = sums[4 * j + 2 * h], odd = sums[4 * j + 2 * h + 1];
                        // The pixel to the left: the odd one of the lane before, or of its column before.
                        const float given = quad == 3 && j > 0 ? sums[4 * (j > 0 ? j - 1 : 0) + 2 * h + 1] : odd;
                        const float left = __shfl_sync(0xFFFFFFFF, given, (lane & ~3) | ((quad + 3) & 3));
                        const float both = larger(even, odd);
                        result[j] = activate_relu((j == 0 && quad == 0 ? both : larger(both, left)) + shift[h]);
                    }
#pragma unroll
                    for (int j = 0; j < COLUMNS; j += 2)
                        row_best[j / 2][h] = two(result[j], result[j + 1]);
                }
            }
            const bool ends = i > 0 && i % 2 == 0;  // the last of the three rows of a result
            if (ends && t == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");  // the next rows are there, the buffer is free
#pragma unroll
            for (int j = 0; j < COLUMNS / 2; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    best[j][h] = i == 0 ? row_best[j][h] : larger_of_two(best[j][h], row_best[j][h]);
            if (ends) {
#pragma unroll
                for (int j = 0; j < COLUMNS / 2; j += 2) {
                    const u32 to = out_at + j * 1024;
                    if (j + 1 < COLUMNS / 2)
                        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                                     ::"r"(to + lane_offset), "r"(best[j][0]), "r"(best[j][1]), "r"(best[j + 1 < COLUMNS / 2 ? j + 1 : j][0]),
                                       "r"(best[j + 1 < COLUMNS / 2 ? j + 1 : j][1]) : "memory");
                    else
                        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                                     ::"r"(to + (lane_offset & 1023)), "r"(best[j][0]), "r"(best[j][1]) : "memory");
                }
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
                if (t == 0) {
                    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %2, %3, %4}], [%1];"
                                 ::"l"(&output), "r"(out_at), "r"(0), "r"(first_pooled + i / 2 - 1), "r"(image) : "memory");
                    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
                }
#pragma unroll
                for (int j = 0; j < COLUMNS / 2; ++j) best[j][0] = row_best[j][0], best[j][1] = row_best[j][1];
            }
            slot = slot + 1 == PAIRS ? 0 : slot + 1;
        }
    }
    if (t == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

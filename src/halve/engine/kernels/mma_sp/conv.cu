// Convolution as one matrix product per tap, weights by pixels, with bias, residual and activation in the epilogue.
//
//   D[out channel, pixel] = sum over taps and channels of W[out channel, tap, channel] * X[pixel shifted by tap, channel]
//
// W is packed in the register layout of the instruction (see packing.py), 2:4 or dense, and loaded directly into registers.
// X is NHWC. Tiles of TILE_N pixels by 64 channels of one tap are copied to shared memory asynchronously, in three stages.
// A row has 128 bytes; its 16-byte pieces are swizzled by the row index, so that ldmatrix has no bank conflicts. The copy
// fills pixels outside of the image and channels past the last with zeros.
//
// Compile-time parameters: SPARSE (0, 1), BF16 (0, 1), PIECE (channels per copy: 8, or 4 if the channels are not divisible
// by 8), ACTIVATE (one of the functions below), and the tile: a warp computes ROW_TILES x 16 output channels by
// PIXEL_TILES x 8 pixels, and a block has WARPS_M x WARPS_N x WARPS_K warps. The warps with the same index along K form a
// team, which takes every WARPS_K-th step, does its own copies and synchronizes only with itself (split-K within a block,
// for layers with few tiles).

constexpr int WARP_M = ROW_TILES * 16, WARP_N = PIXEL_TILES * 8;
constexpr int TILE_M = WARPS_M * WARP_M, TILE_N = WARPS_N * WARP_N, TILE_K = 64, STAGES = 3;
constexpr int TEAM = 32 * WARPS_M * WARPS_N, THREADS = TEAM * WARPS_K;
constexpr int STAGE_BYTES = TILE_N * TILE_K * 2;
constexpr int COPIED_AT_ONCE = TEAM / 8;  // rows of 128 bytes that a team copies at once
constexpr int PIXELS_OF_THREAD = TILE_N / COPIED_AT_ONCE;
constexpr int PARTS = SPARSE ? 1 : 2;  // groups of eight values per lane, for 16 rows and 32 columns
static_assert(TILE_N % COPIED_AT_ONCE == 0, "each thread copies the same number of pixels");

struct Shape {
    int images, height, width, channels;      // of x
    int out_height, out_width, out_channels;  // of the result
    int kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    int row_tiles;  // of 16 rows, in the packed weight
};

template <int BYTES>
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool inside) {
    const int size = inside ? BYTES : 0;  // the rest is filled with zeros
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
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
        asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." KIND ".f32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, 0x0;"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(meta));
    else
        asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." KIND ".f32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, 0x1;"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(meta));
}
#else
__device__ __forceinline__ void multiply(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." KIND ".f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
#endif

// Barrier for the threads of a team.
__device__ __forceinline__ void wait_for_team(int team) {
    if constexpr (WARPS_K == 1) __syncthreads();
    else if constexpr (TEAM == 32) __syncwarp();
    else asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(TEAM) : "memory");
}

// The weights of one lane for one step of 64 columns.
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

extern "C" __global__ void __launch_bounds__(THREADS) conv(const u16* x, const uint4* __restrict__ values,
                                                           const u32* __restrict__ meta, const float* __restrict__ bias,
                                                           const u16* residual, u16* out,
                                                           const Shape s) {
    extern __shared__ __align__(128) unsigned char shared[];
    const u32 base = (u32)__cvta_generic_to_shared(shared);
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int warp_n = warp % WARPS_N, warp_m = warp / WARPS_N % WARPS_M, team = warp / WARPS_N / WARPS_M;
    const int pixels = s.images * s.out_height * s.out_width;
    const int first_pixel = blockIdx.x * TILE_N, first_row = blockIdx.y * TILE_M;
    const int channel_blocks = (s.channels + TILE_K - 1) / TILE_K;
    const int steps = s.kernel_h * s.kernel_w * channel_blocks;

    // This thread copies piece `piece` of pixels `row`, `row + COPIED_AT_ONCE`, ... Compute the address of each.
    const int piece = thread % 8, row = thread % TEAM / 8;
    int top[PIXELS_OF_THREAD], left[PIXELS_OF_THREAD];
    const u16* start[PIXELS_OF_THREAD];
#pragma unroll
    for (int i = 0; i < PIXELS_OF_THREAD; ++i) {
        const int pixel = first_pixel + row + COPIED_AT_ONCE * i;
        const int across = pixel % s.out_width, rest = pixel / s.out_width;
        const int down = rest % s.out_height, n = rest / s.out_height;
        top[i] = down * s.stride_h - s.pad_h, left[i] = across * s.stride_w - s.pad_w;
        start[i] = x + ((long long)(n * s.height + top[i]) * s.width + left[i]) * s.channels + piece * 8;
        if (pixel >= pixels) top[i] = -(1 << 28);  // far outside: filled with zeros
    }

    // The next step to copy: kernel row, kernel column and block of channels.
    int copied = team, at_block = team, at_dy = 0, at_dx = 0;
    auto settle = [&] {
        while (at_block >= channel_blocks) {
            at_block -= channel_blocks;
            if (++at_dx == s.kernel_w) at_dx = 0, ++at_dy;
        }
    };
    settle();
    auto copy = [&](int stage) {
        if (copied < steps) {
            const int dy = at_dy * s.dilation_h, dx = at_dx * s.dilation_w, channel = at_block * TILE_K;
            const long long shift = (long long)(dy * s.width + dx) * s.channels + channel;
            const u32 to = base + (team * STAGES + stage) * STAGE_BYTES + row * (TILE_K * 2);
#pragma unroll
            for (int i = 0; i < PIXELS_OF_THREAD; ++i) {
                const bool in_image =
                    (unsigned)(top[i] + dy) < (unsigned)s.height && (unsigned)(left[i] + dx) < (unsigned)s.width;
                const int r = row + COPIED_AT_ONCE * i;
                const u32 place = to + COPIED_AT_ONCE * i * (TILE_K * 2) + ((piece ^ (r & 7)) * 16);
#pragma unroll
                for (int part = 0; part < 8 / PIECE; ++part) {
                    const bool inside = in_image && channel + piece * 8 + part * PIECE < s.channels;
                    const u16* from = start[i] + shift + part * PIECE;
                    copy_async<PIECE * 2>(place + part * PIECE * 2, inside ? from : x, inside);
                }
            }
            copied += WARPS_K, at_block += WARPS_K;
            settle();
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };

    float sums[ROW_TILES][PIXEL_TILES][4] = {};
    const int tile = first_row / 16 + warp_m * ROW_TILES;
    Weights now, next;
    let_next_kernel_start();
    load_weights(now, values, meta, tile, s.row_tiles, team, steps, lane);
    wait_for_previous_kernel();
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) copy(stage);
    int stage = 0;
    for (int step = team; step < steps; step += WARPS_K) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        wait_for_team(team);  // this tile has arrived, and no thread still reads the one that is overwritten next
        copy(stage == 0 ? STAGES - 1 : stage - 1);
        load_weights(next, values, meta, tile, s.row_tiles, step + WARPS_K, steps, lane);
        const u32 from = base + (team * STAGES + stage) * STAGE_BYTES + (warp_n * WARP_N + lane % 8) * (TILE_K * 2);
        const u32 low = ((lane / 8) ^ (lane % 8)) * 16, high = ((4 + lane / 8) ^ (lane % 8)) * 16;
        u32 b[2][2][4];  // 8 pixels by 32 channels each, prefetched by one
        load_matrices(b[0][0], from + low), load_matrices(b[0][1], from + high);
#pragma unroll
        for (int n = 0; n < PIXEL_TILES; ++n) {
            if (n + 1 < PIXEL_TILES) {
                load_matrices(b[(n + 1) % 2][0], from + (n + 1) * 8 * (TILE_K * 2) + low);
                load_matrices(b[(n + 1) % 2][1], from + (n + 1) * 8 * (TILE_K * 2) + high);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int m = 0; m < ROW_TILES; ++m) {
                    const u32(&matrix)[4] = b[n % 2][half];
#if SPARSE
                    if (half == 0) multiply<0>(sums[m][n], now.values[0][m][0], matrix, now.meta[m]);
                    else multiply<1>(sums[m][n], now.values[1][m][0], matrix, now.meta[m]);
#else
                    multiply(sums[m][n], now.values[half][m][0], matrix[0], matrix[1]);
                    multiply(sums[m][n], now.values[half][m][1], matrix[2], matrix[3]);
#endif
                }
        }
        now = next;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    // Go through shared memory: channels of a pixel are written together, and teams are summed in a fixed order.
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    float* tile_out = reinterpret_cast<float*>(shared);  // [team][pixel][PITCH]
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
                tile_out[team * SLICE + pixel * PITCH + channel] = sums[m][n][i];
            }

    // Prefetch bias and residual before the barrier. A thread has the same eight channels in every turn.
    constexpr int GROUPS = TILE_M / 8, TURNS = (TILE_N * GROUPS + THREADS - 1) / THREADS;
    static_assert(THREADS % GROUPS == 0, "a thread has the same channels in every turn");
    union Eight { uint4 vector; u16 each[8]; };
    const int channel = thread % GROUPS * 8, first = first_row + channel;
    const bool whole = s.out_channels % 8 == 0;
    float shift[8] = {};
    Eight add[TURNS];
    if (bias) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (first + i < s.out_channels) shift[i] = __ldg(bias + first + i);
    }
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int p = thread / GROUPS + turn * (THREADS / GROUPS), pixel = first_pixel + p;
        add[turn].vector = make_uint4(0, 0, 0, 0);
        if (residual && whole && p < TILE_N && pixel < pixels && first < s.out_channels)
            add[turn].vector = *reinterpret_cast<const uint4*>(residual + (u64)pixel * s.out_channels + first);
    }
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int p = thread / GROUPS + turn * (THREADS / GROUPS), pixel = first_pixel + p;
        if (p >= TILE_N || pixel >= pixels || first >= s.out_channels) continue;
        float v[8] = {};
#pragma unroll
        for (int k = 0; k < WARPS_K; ++k)
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                const float4 four = *reinterpret_cast<const float4*>(tile_out + k * SLICE + p * PITCH + channel + i);
                v[i] += four.x, v[i + 1] += four.y, v[i + 2] += four.z, v[i + 3] += four.w;
            }
        const u64 at = (u64)pixel * s.out_channels + first;
        Eight sum;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const bool inside = whole || first + i < s.out_channels;
            v[i] += shift[i];
            if (residual && inside) v[i] += to_float(whole ? add[turn].each[i] : residual[at + i]);
            sum.each[i] = from_float(ACTIVATE(v[i]));
            if (inside && !whole) out[at + i] = sum.each[i];
        }
        if (whole) *reinterpret_cast<uint4*>(out + at) = sum.vector;
    }
}

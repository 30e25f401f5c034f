// Depthwise convolution of NHWC images: one KERNEL x KERNEL filter per channel, with bias, scale, residual and activation.
//
// A 7x7 window takes 49 multiplications per value, so what counts is that nearly all instructions are multiplications. A
// thread computes VECTOR channels of COLUMNS neighbouring pixels and goes down the image. It keeps its filters in registers in
// single precision, and the sums of all results that the current input row contributes to. Each input is loaded and converted
// once per thread, and its register is filled with the next row at once, a whole row of arithmetic before that is needed.
// Neighbouring threads have neighbouring channels, so that loads are coalesced. Columns that several threads read come from the
// L1 cache.
//
// Compile-time parameters: BF16 (0, 1), CHANNELS, KERNEL, STRIDE, VECTOR (1, 2, 4, 8), COLUMNS, BLOCKS (per multiprocessor), SCALED and
// RESIDUAL (0, 1), ACTIVATE.

struct Shape {
    int height, width, out_height, out_width, pad_h, pad_w;
    int lanes;           // threads of a block that share pixels
    int strip_rows;      // results of a strip, from the top to the bottom
    int row_strips, column_strips, strips;  // of an image; of all images
};

constexpr int THREADS = 128, VECTORS = CHANNELS / VECTOR;
constexpr int OPEN = (KERNEL + STRIDE - 1) / STRIDE;  // rows of results that an input row contributes to
constexpr int INPUTS = (COLUMNS - 1) * STRIDE + KERNEL;  // columns of the input

struct alignas(2 * VECTOR) Vector { u16 element[VECTOR]; };

#if VECTOR == 1
typedef u16 Raw;
#elif VECTOR == 2
typedef u32 Raw;
#elif VECTOR == 4
typedef uint2 Raw;
#else
typedef uint4 Raw;
#endif
union Pixel {
    Raw raw;
    Vector vector;
    __device__ Pixel() {}
};

__device__ __forceinline__ Pixel load(const Raw* at) {  // not __ldg: the previous kernel may still write when this one starts
    Pixel p;
    p.raw = *at;
    return p;
}

__device__ __forceinline__ Pixel zero() {
    Pixel p;
    p.raw = Raw();
    return p;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
depthwise(const Raw* x, const Raw* weight, const float* bias, const float* scale, const Raw* residual, Raw* out, const Shape s) {
    const int row_of_block = threadIdx.x / s.lanes, rows_of_block = THREADS / s.lanes;
    const int channel = blockIdx.x * s.lanes + threadIdx.x - row_of_block * s.lanes;  // in vectors
    const bool idle = row_of_block >= rows_of_block || channel >= VECTORS;
    let_next_kernel_start();
    float filter[KERNEL][KERNEL][VECTOR], shift[VECTOR], factor[VECTOR];
    if (!idle) {
#pragma unroll
        for (int i = 0; i < KERNEL * KERNEL; ++i) {
            const Pixel p = load(weight + (size_t)i * VECTORS + channel);
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) filter[i / KERNEL][i % KERNEL][v] = to_float(p.vector.element[v]);
        }
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            shift[v] = bias ? __ldg(bias + channel * VECTOR + v) : 0.f;
            if (SCALED) factor[v] = __ldg(scale + channel * VECTOR + v);
        }
    }
    wait_for_previous_kernel();
    if (idle) return;

    for (int strip = blockIdx.y * rows_of_block + row_of_block; strip < s.strips; strip += gridDim.y * rows_of_block) {
        const int above = strip / s.column_strips, image = above / s.row_strips;
        const int first_column = (strip - above * s.column_strips) * COLUMNS;
        const int first_row = (above - image * s.row_strips) * s.strip_rows;
        const int rows = min(s.strip_rows, s.out_height - first_row);
        const int top = first_row * STRIDE - s.pad_h, left = first_column * STRIDE - s.pad_w;  // of the input
        const Raw* from = x + ((long long)(image * s.height + top) * s.width + left) * VECTORS + channel;
        u32 inside = 0;  // a bit for each column in the image
#pragma unroll
        for (int column = 0; column < INPUTS; ++column)
            inside |= (u32)((unsigned)(left + column) < (unsigned)s.width) << column;
        const size_t to = (((size_t)image * s.out_height + first_row) * s.out_width + first_column) * VECTORS + channel;

        // Step t reads STRIDE rows from row top + t * STRIDE on, and completes result t - OPEN + 1. Steps above and below the
        // image have nothing to add.
        const int begin = max(0, min(-top / STRIDE, OPEN - 1));
        const int end = min(rows + OPEN - 1, (s.height - top + STRIDE - 1) / STRIDE);
        Pixel pixels[STRIDE][INPUTS];
        auto columns_of = [&](int t, int i) {  // that are in the image
            return t < end && (unsigned)(top + t * STRIDE + i) < (unsigned)s.height ? inside : 0u;
        };
        auto load_pixel = [&](const Raw* row, u32 columns, int column) {
            return columns >> column & 1 ? load(row + column * VECTORS) : zero();
        };
        float sums[OPEN][COLUMNS][VECTOR];  // [j]: of result t - j
#pragma unroll
        for (int j = 0; j < OPEN; ++j)
#pragma unroll
            for (int w = 0; w < COLUMNS; ++w)
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) sums[j][w][v] = shift[v];

        auto finish_row = [&](int row) {  // stores the oldest sums and makes room for the next
            if (row >= 0) {
                const size_t start = to + (size_t)row * s.out_width * VECTORS;
#pragma unroll
                for (int w = 0; w < COLUMNS; ++w) {
                    if (first_column + w >= s.out_width) break;
                    const size_t at = start + w * VECTORS;
                    Pixel result, added;
                    if (RESIDUAL) added = load(residual + at);
#pragma unroll
                    for (int v = 0; v < VECTOR; ++v) {
                        float y = sums[OPEN - 1][w][v];
                        if (SCALED) y *= factor[v];
                        if (RESIDUAL) y += to_float(added.vector.element[v]);
                        result.vector.element[v] = from_float(ACTIVATE(y));
                    }
                    out[at] = result.raw;
                }
            }
#pragma unroll
            for (int j = OPEN - 1; j >= 0; --j)
#pragma unroll
                for (int w = 0; w < COLUMNS; ++w)
#pragma unroll
                    for (int v = 0; v < VECTOR; ++v) sums[j][w][v] = j > 0 ? sums[j > 0 ? j - 1 : 0][w][v] : shift[v];
        };

        int t = begin;
        const size_t pitch = (size_t)s.width * VECTORS;
        from += t * STRIDE * pitch;
#pragma unroll
        for (int i = 0; i < STRIDE; ++i, from += pitch) {
            const u32 columns = columns_of(t, i);
#pragma unroll
            for (int column = 0; column < INPUTS; ++column) pixels[i][column] = load_pixel(from, columns, column);
        }
#pragma unroll 1
        for (; t < end; ++t) {
#pragma unroll
            for (int i = 0; i < STRIDE; ++i, from += pitch) {
                const u32 columns = columns_of(t + 1, i);
#pragma unroll
                for (int column = 0; column < INPUTS; ++column) {
                    float value[VECTOR];
#pragma unroll
                    for (int v = 0; v < VECTOR; ++v) value[v] = to_float(pixels[i][column].vector.element[v]);
                    pixels[i][column] = load_pixel(from, columns, column);
#pragma unroll
                    for (int w = 0; w < COLUMNS; ++w) {
                        const int k = column - w * STRIDE;
                        if (k < 0 || k >= KERNEL) continue;
#pragma unroll
                        for (int j = OPEN - 1; j >= 0; --j) {
                            if (j * STRIDE + i >= KERNEL) continue;
#pragma unroll
                            for (int v = 0; v < VECTOR; ++v)
                                sums[j][w][v] = fmaf(value[v], filter[j * STRIDE + i < KERNEL ? j * STRIDE + i : 0][k >= 0 && k < KERNEL ? k : 0][v], sums[j][w][v]);
                        }
                    }
                }
            }
            finish_row(t - OPEN + 1);
        }
#pragma unroll 1
        for (; t < rows + OPEN - 1; ++t) finish_row(t - OPEN + 1);
    }
}

// Convolution on Hopper's tensor cores (wgmma, compute capability 9.0), with bias, scale, residual and activation in the epilogue.
//
//   D[out channel, pixel] = sum over taps and channels of W[out channel, tap, channel] * X[pixel shifted by tap, channel]
//
// A tile of D has 64 * BLOCKS output channels per warpgroup and PIXELS pixels. Pixels of a tile are whole rows of one image
// or whole images, with margins of zeros, so that a tap is a shift: the copy engine (TMA) loads a box of pixels with its
// margins once for every 64 channels, and each tap multiplies the same box from another start. Rows of several images take
// turns: the first of each, then the second of each, so that only the box has margins above and below, not each image. Right
// margins are not stored: past the end of a row comes the left margin of the next, which is zero too. Results at margins are
// computed and then dropped when the tile is stored, since they lie outside of the image. Convolutions of stride 2 load up to
// four boxes, of the even and odd rows and columns. 1x1 convolutions see all pixels of the batch as one row.
//
// Three warpgroups: the first starts copies, the other two multiply. They either share the pixels and split the output
// channels (OWN == 0), or each has its own tiles (OWN == 1), with the weights in shared memory for good where they fit
// (RESIDENT == 1). The second starts some steps later, so that the epilogue of one overlaps with the products of the other.
// Blocks are persistent: each takes every gridDim.x-th tile.
//
// Layers with few tiles: a cluster of SPLIT blocks shares a tile, and each block sums over a part of the channels. Then each
// gets the sums of the others for a part of the pixels, through distributed shared memory, and finishes these.
//
// HALVES: the two warpgroups share a tile, and each sums over half of the channels, from separate buffers. Then each gets the
// sums of the other for half of the pixels, through shared memory, and finishes these. Layers with few tiles and many channels
// wait for one step after the other: this takes half as many.
//
// LIGHT: two blocks fit on a multiprocessor, so that in a recording a block of the next layer can load its weights before this
// layer is done. That is what layers with few tiles wait for.
//
// SHORTCUT: a 1x1 convolution of a second input is added, as in the blocks of ResNets that change the resolution. Its
// channels follow those of the first input in the sum.
//
// NEXT: the 1x1 convolution that reads the result is computed as well, from the result in shared memory, which saves reading
// it again. Each warpgroup has all channels of its pixels for that. Memory is the limit of such layers, so weights are dense:
// with metadata there would be too few registers.
//
// Weights come in blocks of 64 output channels by 64 channels of one tap (see packing.py), and a step multiplies one. The
// metadata of 2:4 blocks is read from registers while products are in flight, which the assembler does not know: `keep` holds
// them until the products are done.
//
// AHEAD: the residual of a tile follows its last box into the same ring of buffers while products run, and the result takes
// its place. Otherwise it is loaded into the last box, once no product reads that any more.
//
// UNROLLED: the taps of a 3x3 window in one box are known to the compiler, and so are their shifts. Weights of the next step
// are waited for, and their metadata loaded, while the products of a step run.
//
// Compile-time parameters: SPARSE, BF16, RESIDUAL, AHEAD, SHORTCUT, OWN, HALVES, RESIDENT, LIGHT (0, 1), SPLIT
// (1, 2, 4, 8), BLOCKS, PIXELS (a multiple of 8), PARTS (into which the pixels of a tile are split for storing), STAGES (buffers for these parts per
// warpgroup), ACTIVATE, NEXT (blocks of 64 output channels of the next convolution), ACTIVATE_NEXT, UNROLLED (0, or pixels of
// a box from one row of the window to the next). launch.py generates `multiply` for PIXELS, in the place of MULTIPLY.

struct alignas(64) TensorMap { u64 opaque[16]; };

constexpr int MAX_TAPS = 49;

struct Shape {
    int chunks, taps, planes;            // of 64 input channels; of the kernel; boxes per chunk
    int row_tiles, pixel_tiles, rows;    // tiles along output channels and pixels; output channels
    int flat;                            // 1x1: pixels of the batch are one row
    int tile_rows, tile_images;          // output rows of a tile, in one image; or images of a tile, if there are several
    int tiles_per_image;
    int stride, pad_h, pad_w, pitch;     // pitch: pixels of a row of the box
    int box_pixels, slot_bytes;          // pixels in a box; bytes of its buffer
    int stage_bytes, stored_bytes;       // of a buffer for storing; of what is stored at once
    int pixel_slots, weight_slots;       // buffers for boxes and for blocks of weights
    int staging, weights, barriers;      // offsets in shared memory
    int lag;                             // steps by which the second warpgroup starts later
    int shortcut_chunks, shortcut_stride, shortcut_bytes;  // of 64 channels of the second input; its stride; bytes of a box
    int exchange;                        // offset in shared memory of what other blocks, or the other warpgroup, have summed
    int next_weights, next_staging;      // offsets in shared memory of the weights and results of the next convolution
    int out_height, out_width, images;   // of the result
    u64 begins;                          // bit t: tap t is the first of its box
    u16 shifts[MAX_TAPS];                // of each tap, in pixels
};

constexpr int BLOCK_BYTES = SPARSE ? 4608 : 8192;  // 2 x 2048 bytes of values and 512 of metadata, or 4 x 2048 of values
constexpr int SLOT_OF_WEIGHTS = BLOCKS * BLOCK_BYTES;
constexpr int SHARERS = OWN ? 1 : 2;  // warpgroups that share a box
constexpr bool OWN_TILES = OWN && !HALVES;
constexpr int SUMMERS = SPLIT * (HALVES ? 2 : 1);  // warpgroups that split the channels of a tile
constexpr int TILE_CHANNELS = 64 * BLOCKS * SHARERS;
constexpr int PART_PIXELS = PIXELS / PARTS;
constexpr bool IN_PLACE = OWN_TILES && BLOCKS == 1 && PARTS == 1;  // store from the last box: no product reads it any more
constexpr int GROUPS = PIXELS / 8, EACH = (GROUPS + SUMMERS - 1) / SUMMERS;  // of 8 pixels: in a tile, and finished by each
static_assert(SPLIT == 1 || (!OWN && BLOCKS == 1), "blocks of a cluster split small tiles");
static_assert(!HALVES || (SPLIT == 1 && OWN && !RESIDENT && BLOCKS == 1 && PARTS == 1), "halves have their own buffers");
static_assert(!AHEAD || (RESIDUAL && IN_PLACE), "other tiles have separate buffers for the residual");
static_assert(!SHORTCUT || !RESIDUAL, "the shortcut is the residual");
static_assert(!UNROLLED || !SHORTCUT, "all steps are taps");
static_assert(!RESIDENT || OWN, "resident weights are shared by warpgroups with their own tiles");
static_assert(!NEXT || (!SPARSE && RESIDENT && BLOCKS > 1 && PARTS == 1), "a warpgroup has all channels of its pixels");
static_assert(IN_PLACE || !(RESIDUAL || NEXT || SPLIT > 1) || STAGES == BLOCKS * PARTS, "a tile is in shared memory at once");

__device__ __forceinline__ void init_barrier(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier, int count = 1) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 phase) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra over;\nbra again;\nover:\n}" ::"r"(barrier), "r"(phase) : "memory");
}
__device__ __forceinline__ void load_box(u32 to, const TensorMap& map, u32 barrier, int c, int x, int y, int n) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];"
                 ::"r"(to), "l"(&map), "r"(barrier), "r"(c), "r"(x), "r"(n), "r"(y) : "memory");
}
__device__ __forceinline__ void store_box(const TensorMap& map, u32 from, int c, int x, int y, int n) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                 ::"l"(&map), "r"(from), "r"(c), "r"(x), "r"(n), "r"(y) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void load_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
template <int N>
__device__ __forceinline__ void wait_for_stores() {  // until at most N stores still read shared memory
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
template <int N>
__device__ __forceinline__ void wait_for_products() {  // until at most N groups of products are in flight
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void wait_for_warpgroup(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}
__device__ __forceinline__ void wait_for_both_warpgroups() {
    asm volatile("bar.sync 3, 256;" ::: "memory");
}

__device__ __forceinline__ void wait_for_cluster() {  // and for what its threads have written to shared memory
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 in_block(u32 address, int rank) {  // the same place in another block of the cluster
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Matrix descriptors. Weights: core matrices of 8 rows x 16 bytes without swizzle, 128 bytes apart along K and 256 along
// rows. Pixels: rows of 128 bytes with the 128-byte swizzle, which depends on the address, so any row can be the first.
// Addresses are in units of 16 bytes.
__device__ __forceinline__ u64 weights_at(u32 address) {
    return (u64)(address + (8 << 16)) | (u64)16 << 32;
}
__device__ __forceinline__ u64 pixels_at(u32 address) {
    return (u64)(address + (1 << 16)) | (u64)64 << 32 | (u64)1 << 62;
}

//MULTIPLY
// Uses the metadata of a product that is done. The assembler would otherwise reuse the registers while it is in flight.
// Words of ones are no metadata: the two indices of a block differ.
__device__ __forceinline__ void keep(const u32 (&metadata)[BLOCKS]) {
#if SPARSE
#pragma unroll
    for (int m = 0; m < BLOCKS; ++m)
        asm volatile("{.reg .pred p; setp.eq.u32 p, %0, 0xFFFFFFFF; @p trap;}" ::"r"(metadata[m]) : "memory");
#endif
}

// Finishes two 8x8 matrices of sums, or one, and stores them at `to`, where the residual is if there is one.
template <bool OF_NEXT = false>
__device__ __forceinline__ void finish(const float* sums, bool pair, u32 to, u32 lane_offset, const float (&factor)[2],
                                       const float (&shift)[2]) {
    const u32 at = to + (pair ? lane_offset : lane_offset & 1023);
    constexpr bool ADDED = RESIDUAL && !OF_NEXT;
    u32 added[4] = {}, result[4];
    if (ADDED) {
        if (pair)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(added[0]), "=r"(added[1]), "=r"(added[2]), "=r"(added[3]) : "r"(at) : "memory");
        else
            asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                         : "=r"(added[0]), "=r"(added[1]) : "r"(at) : "memory");
    }
#pragma unroll
    for (int i = 0; i < (pair ? 4 : 2); ++i) {
        float low = fmaf(sums[i * 2], factor[i % 2], shift[i % 2]), high = fmaf(sums[i * 2 + 1], factor[i % 2], shift[i % 2]);
        if (ADDED) low += to_float((u16)added[i]), high += to_float((u16)(added[i] >> 16));
        result[i] = OF_NEXT ? two(ACTIVATE_NEXT(low), ACTIVATE_NEXT(high)) : two(ACTIVATE(low), ACTIVATE(high));
    }
    if (pair)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                     ::"r"(at), "r"(result[0]), "r"(result[1]), "r"(result[2]), "r"(result[3]) : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(result[0]), "r"(result[1]) : "memory");
}

// A buffer of a ring, and the phase of its barriers.
struct Ring {
    int slot = 0;
    u32 phase = 0;
    __device__ __forceinline__ void advance(int slots) {
        if (++slot == slots) slot = 0, phase ^= 1;
    }
};

// The first pixel of a tile of the result.
struct Place {
    int x, y, n;
    __device__ __forceinline__ Place(int tile, const Shape& s) {
        if (s.flat) x = tile * PIXELS, y = 0, n = 0;
        else if (s.tile_images > 1) x = 0, y = 0, n = tile * s.tile_images;
        else x = 0, n = tile / s.tiles_per_image, y = (tile - n * s.tiles_per_image) * s.tile_rows;
    }
};

extern "C" __global__ void __launch_bounds__(384, LIGHT ? 2 : 1)
conv(const __grid_constant__ TensorMap input, const __grid_constant__ TensorMap output,
     const __grid_constant__ TensorMap second, const unsigned char* __restrict__ packed, const float* __restrict__ bias,
     const float* __restrict__ scale, u16* __restrict__ result, const __grid_constant__ TensorMap next_output,
     const unsigned char* __restrict__ next_packed, const float* __restrict__ next_bias, const __grid_constant__ Shape s) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 base = (u32)__cvta_generic_to_shared(shared);
    const u32 matrices = (base & 0x3FFFF) / 16;  // for descriptors: in a cluster, the upper bits say which block it is
    // The compiler knows that all threads of a warp get the same value, and computes what follows from it once per warp.
    const int thread = threadIdx.x, group = __shfl_sync(0xFFFFFFFF, thread / 128, 0);
    const int pixel_rings = OWN ? 2 : 1, weight_rings = RESIDENT ? 1 : 2;
    const int all_weight_slots = weight_rings * s.weight_slots, all_pixel_slots = pixel_rings * s.pixel_slots;
    const u32 weights_full = base + s.barriers, weights_free = weights_full + 8 * all_weight_slots;
    const u32 pixels_full = weights_free + 8 * all_weight_slots, pixels_free = pixels_full + 8 * all_pixel_slots;
    const u32 residual_full = pixels_free + 8 * all_pixel_slots, next_full = residual_full + 16;
    if (thread == 0) {
        for (int i = 0; i < all_weight_slots; ++i) init_barrier(weights_full + 8 * i, 1), init_barrier(weights_free + 8 * i, 4);
        for (int i = 0; i < all_pixel_slots; ++i)
            init_barrier(pixels_full + 8 * i, 1), init_barrier(pixels_free + 8 * i, 4 * SHARERS);
        init_barrier(residual_full, 1), init_barrier(residual_full + 8, 1), init_barrier(next_full, 1);
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    // What lies behind a box is read as the margin of its last row. Copies never write there.
    for (int slot = 0; slot < all_pixel_slots; ++slot)
        for (int at = s.box_pixels * 128 + thread * 16; at < s.slot_bytes; at += 384 * 16)
            *reinterpret_cast<uint4*>(shared + slot * s.slot_bytes + at) = make_uint4(0, 0, 0, 0);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (SPLIT > 1) wait_for_cluster();
    else __syncthreads();
    let_next_kernel_start();

    // Tiles of this block: first, first + stride, ... below total. Blocks with resident weights keep their row tile.
    const int blocks = RESIDENT ? gridDim.x / s.row_tiles : gridDim.x / SPLIT;
    const int block = RESIDENT ? blockIdx.x / s.row_tiles : blockIdx.x / SPLIT, own_row = RESIDENT ? blockIdx.x % s.row_tiles : 0;
    const int rows_in_turn = RESIDENT ? 1 : s.row_tiles;
    const int total = s.pixel_tiles * rows_in_turn;
    const int every = OWN_TILES ? 2 * blocks : blocks;
    // Chunks of this block or half, of the input and then of the shortcut; and steps, of which one chunk has `taps` or one.
    const int rank = HALVES ? __shfl_sync(0xFFFFFFFF, group ? group - 1 : thread / 32 % 2, 0) : blockIdx.x % SPLIT;
    const int all_chunks = s.chunks + (SHORTCUT ? s.shortcut_chunks : 0);
    const int first_chunk = rank * all_chunks / SUMMERS, last_chunk = (rank + 1) * all_chunks / SUMMERS;
    const int first_step = min(first_chunk, s.chunks) * s.taps + max(first_chunk - s.chunks, 0);
    const int main_steps = max(min(last_chunk, s.chunks) - first_chunk, 0) * s.taps;
    const int steps = main_steps + min(last_chunk - first_chunk, max(last_chunk - s.chunks, 0));

    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LIGHT ? 32 : 40));
        const int warp = thread / 32;
        if (thread % 32) return;
        // Output channels past the last block are not stored: any weights will do for them.
        const int last_row = (s.rows + 63) / 64 - 1, row_steps = s.chunks * s.taps + (SHORTCUT ? s.shortcut_chunks : 0);
        auto load_weights = [&](int slot, int row, int step) {
            expect(weights_full + 8 * slot, SLOT_OF_WEIGHTS);
            for (int m = 0; m < BLOCKS; ++m)
                load_bytes(base + s.weights + slot * SLOT_OF_WEIGHTS + m * BLOCK_BYTES,
                           packed + ((size_t)min(row + m, last_row) * row_steps + first_step + step) * BLOCK_BYTES, BLOCK_BYTES,
                           weights_full + 8 * slot);
        };
        if (warp < pixel_rings) {  // copies pixels
            wait_for_previous_kernel();
            const int first_slot = warp * s.pixel_slots;
            Ring ring;
            for (int tile = OWN_TILES ? block + warp * blocks : block; tile < total; tile += every) {
                const Place place(tile / rows_in_turn, s);
                const int x = place.x * s.stride - s.pad_w, y = place.y * s.stride - s.pad_h;
                for (int chunk = first_chunk; chunk < last_chunk; ++chunk)
                    for (int plane = 0; plane < (SHORTCUT && chunk >= s.chunks ? 1 : s.planes); ++plane) {
                        const int slot = first_slot + ring.slot, across = s.planes == 4 ? plane & 1 : 0;
                        const u32 full = pixels_full + 8 * slot;
                        wait(pixels_free + 8 * slot, ring.phase ^ 1);
                        if (SHORTCUT && chunk >= s.chunks) {
                            expect(full, s.shortcut_bytes);
                            load_box(base + slot * s.slot_bytes, second, full, (chunk - s.chunks) * 64,
                                     place.x * s.shortcut_stride, place.y * s.shortcut_stride, place.n);
                        } else {
                            expect(full, s.box_pixels * 128);
                            load_box(base + slot * s.slot_bytes, input, full, chunk * 64, x + across,
                                     y + (s.planes == 4 ? plane >> 1 : 0), place.n);
                        }
                        ring.advance(s.pixel_slots);
                    }
                if (AHEAD) {
                    const int slot = first_slot + ring.slot;
                    wait(pixels_free + 8 * slot, ring.phase ^ 1);
                    expect(pixels_full + 8 * slot, s.stored_bytes);
                    load_box(base + slot * s.slot_bytes, second, pixels_full + 8 * slot,
                             (RESIDENT ? own_row : tile % s.row_tiles) * TILE_CHANNELS, place.x, place.y, place.n);
                    ring.advance(s.pixel_slots);
                }
            }
        } else if (RESIDENT && warp == 2) {  // copies the weights once
            for (int step = 0; step < steps; ++step) load_weights(step, own_row * BLOCKS, step);
            if (NEXT) {
                expect(next_full, NEXT * BLOCKS * BLOCK_BYTES);
                for (int i = 0; i < NEXT * BLOCKS; ++i)
                    load_bytes(base + s.next_weights + i * BLOCK_BYTES, next_packed + i * BLOCK_BYTES, BLOCK_BYTES, next_full);
            }
        } else if (!RESIDENT && warp >= 2) {  // copies the weights of one warpgroup
            const int consumer = warp - 2, first_slot = consumer * s.weight_slots;
            Ring ring;
            for (int tile = OWN_TILES ? block + consumer * blocks : block; tile < total; tile += every) {
                const int row = (tile % s.row_tiles * SHARERS + (OWN ? 0 : consumer)) * BLOCKS;
                for (int step = 0; step < steps; ++step) {
                    wait(weights_free + 8 * (first_slot + ring.slot), ring.phase ^ 1);
                    load_weights(first_slot + ring.slot, row, step);
                    ring.advance(s.weight_slots);
                }
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(LIGHT ? 104 : 232));
    const int consumer = group - 1, t = thread % 128, warp = t / 32, lane = t % 32;
    const int first_pixel_slot = OWN ? consumer * s.pixel_slots : 0;
    const int first_weight_slot = RESIDENT ? 0 : consumer * s.weight_slots;
    const int storing = HALVES ? 0 : consumer;  // the warpgroup that stores what this one finishes
    const u32 staging = base + s.staging + storing * STAGES * s.stage_bytes, own_residual = residual_full + 8 * storing;
    // Where this lane stores 8x8 matrices of results: rows are pixels, 16-byte pieces of them are swizzled.
    const u32 lane_offset = (lane & 7) * 128 + (((warp * 2 + (lane >> 3 & 1)) ^ (lane & 7)) << 4) + (lane >> 4 & 1) * 1024;
    const int first_tile = OWN_TILES ? block + consumer * blocks : block;
    if (first_tile >= total) return;

    float sums[BLOCKS][PIXELS / 2];
    Ring pixels, weights;
    int stage = 0, held_slot = -1;
    int lag = SUMMERS == 1 && consumer == 0 ? s.lag : 0;  // of the second warpgroup, in the first tile
    u32 residual_phase = 0;
#if NEXT
    const u32 next_staging = base + s.next_staging + consumer * NEXT * s.stage_bytes;
    float next_shift[NEXT][2];
#pragma unroll
    for (int m = 0; m < NEXT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            next_shift[m][half] = next_bias ? __ldg(next_bias + m * 64 + warp * 16 + lane / 4 + half * 8) : 0.f;
#endif
    if (SUMMERS == 1 && consumer == 1) wait_for_both_warpgroups();
    if (RESIDUAL && !AHEAD && t == 0) wait_for_previous_kernel();

    for (int tile = first_tile; tile < total; tile += every) {
        const Place place(tile / rows_in_turn, s);
        const int row_tile = RESIDENT ? own_row : tile % s.row_tiles;
        const int first_row = row_tile * TILE_CHANNELS + (OWN ? 0 : consumer) * 64 * BLOCKS;
        float factor[BLOCKS][2], shift[BLOCKS][2];
#pragma unroll
        for (int m = 0; m < BLOCKS; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = first_row + m * 64 + warp * 16 + lane / 4 + half * 8;
                factor[m][half] = scale && row < s.rows ? __ldg(scale + row) : 1.f;
                shift[m][half] = bias && row < s.rows ? __ldg(bias + row) * factor[m][half] : 0.f;
            }
        if (RESIDUAL && !IN_PLACE && t == 0 && storing == consumer) {
            wait_for_stores<0>();
            expect(own_residual, BLOCKS * PARTS * s.stored_bytes);
#pragma unroll
            for (int m = 0; m < BLOCKS; ++m)
#pragma unroll
                for (int part = 0; part < PARTS; ++part)
                    load_box(staging + (m * PARTS + part) * s.stage_bytes, second, own_residual, first_row + m * 64,
                             place.x + part * PART_PIXELS, place.y, place.n);
        }

        int slot = 0, slot_before = 0;
        auto take_box = [&] {  // and keeps it until the next one is multiplied
            slot_before = slot, slot = first_pixel_slot + pixels.slot;
            wait(pixels_full + 8 * slot, pixels.phase);
            pixels.advance(s.pixel_slots);
        };
        auto take_weights = [&](u32 (&metadata)[BLOCKS]) {  // returns where they are
            const int at = first_weight_slot + weights.slot;
            wait(weights_full + 8 * at, RESIDENT ? 0 : weights.phase);
            weights.advance(s.weight_slots);
#if SPARSE
#pragma unroll
            for (int m = 0; m < BLOCKS; ++m)
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(metadata[m])
                             : "r"(base + s.weights + at * SLOT_OF_WEIGHTS + m * BLOCK_BYTES + 4096 + t * 4));
#endif
            return at;
        };
        auto start = [&](int weights_at_slot, int shift_of_tap, const u32 (&metadata)[BLOCKS], bool add) {
            const u32 values = matrices + s.weights / 16 + weights_at_slot * (SLOT_OF_WEIGHTS / 16);
            const u32 box = matrices + slot * (s.slot_bytes / 16) + shift_of_tap * 8;
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int m = 0; m < BLOCKS; ++m) {
                const u32 block = values + m * (BLOCK_BYTES / 16);
#if SPARSE
                multiply<0>(sums[m], weights_at(block), pixels_at(box), metadata[m], add);
                multiply<1>(sums[m], weights_at(block + 128), pixels_at(box + 4), metadata[m], 1);
#else
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    multiply(sums[m], weights_at(block + 128 * k), pixels_at(box + 2 * k), k > 0 || add);
#endif
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        };
        auto finish_step = [&](const u32 (&metadata)[BLOCKS], bool first, int weights_before, bool box_before) {
            wait_for_products<1>();  // those of the step before are done with their buffers
            keep(metadata);
            if (SPARSE && !RESIDENT) __syncwarp();  // all lanes have read metadata from the buffer that the first one frees
            if (lane == 0 && !first) {
                if (!RESIDENT) arrive(weights_free + 8 * weights_before);
                if (box_before) arrive(pixels_free + 8 * slot_before);
            }
            if (IN_PLACE && first && held_slot >= 0 && t == 0) {  // the previous tile has been stored
                wait_for_stores<0>();
                arrive(pixels_free + 8 * held_slot, 4);
            }
        };
        int last = 0;  // where the weights of the last step are
#if UNROLLED
        // The metadata of a step is in one of three sets: the step before may still read its own while the next is loaded.
        u32 metadata[3][BLOCKS] = {};
        take_box();
        int now = take_weights(metadata[0]);
        for (int chunk = first_chunk; chunk < last_chunk; ++chunk)
#pragma unroll
            for (int tap = 0; tap < 9; ++tap) {
                const bool first = tap == 0 && chunk == first_chunk;
                start(now, tap / 3 * UNROLLED + tap % 3, metadata[tap % 3], !first);
                int next = 0;
                if (tap < 8) next = take_weights(metadata[(tap + 1) % 3]);
                else if (chunk + 1 < last_chunk) next = take_weights(metadata[0]), take_box();
                finish_step(metadata[(tap + 2) % 3], first, last, tap == 0);
                last = now, now = next;
                if (tap == 3 && lag) {
                    asm volatile("bar.arrive 3, 256;" ::: "memory");
                    lag = 0;
                }
            }
        wait_for_products<0>();
        keep(metadata[2]);
#else
        int tap = 0, step = 0;
        auto take = [&](u32 (&metadata)[BLOCKS], const u32 (&metadata_before)[BLOCKS]) {
            const bool added = SHORTCUT && step >= main_steps, begins = added || s.begins >> tap & 1;
            if (begins) take_box();
            const int now = take_weights(metadata);
            start(now, added ? 0 : s.shifts[tap], metadata, step > 0);
            finish_step(metadata_before, step == 0, last, begins);
            last = now, ++step;
            if (++tap == s.taps) tap = 0;
            if (step == lag) asm volatile("bar.arrive 3, 256;" ::: "memory");
        };
        u32 even[BLOCKS] = {}, odd[BLOCKS] = {};
        for (int pair = 0; pair < steps / 2; ++pair) take(even, odd), take(odd, even);
        if (steps % 2) take(even, odd);
        wait_for_products<0>();
        keep(even), keep(odd);
#endif
        if (SPARSE && !RESIDENT) __syncwarp();
        if (lane == 0) {
            if (!RESIDENT) arrive(weights_free + 8 * last);
            if (!IN_PLACE || AHEAD) arrive(pixels_free + 8 * slot);
        }
        lag = 0;

#if SPLIT > 1
        float own[EACH * 4];
#pragma unroll
        for (int to = 0; to < SPLIT; ++to) {
            constexpr int VALUES = EACH * 4;
            if (to == rank) {
#pragma unroll
                for (int i = 0; i < VALUES; ++i) own[i] = to * VALUES + i < GROUPS * 4 ? sums[0][to * VALUES + i] : 0.f;
                continue;
            }
            const int from = rank < to ? rank : rank - 1;  // among the blocks that send to `to`
            const u32 there = in_block(base + s.exchange + ((from * 2 + consumer) * EACH * 128 + t) * 16, to);
#pragma unroll
            for (int g = 0; g < EACH; ++g)
                if (to * EACH + g < GROUPS) {
                    const int i = (to * EACH + g) * 4;
                    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(there + g * 2048), "f"(sums[0][i]),
                                 "f"(sums[0][i + 1]), "f"(sums[0][i + 2]), "f"(sums[0][i + 3]) : "memory");
                }
        }
        wait_for_cluster();
#pragma unroll
        for (int from = 0; from < SPLIT - 1; ++from)
#pragma unroll
            for (int g = 0; g < EACH; ++g) {
                const float4 more = *reinterpret_cast<const float4*>(
                    shared + s.exchange + (((from * 2 + consumer) * EACH + g) * 128 + t) * 16);
                own[g * 4] += more.x, own[g * 4 + 1] += more.y, own[g * 4 + 2] += more.z, own[g * 4 + 3] += more.w;
            }
        if (RESIDUAL) wait(own_residual, residual_phase), residual_phase ^= 1;
#pragma unroll
        for (int j = 0; j < EACH; j += 2)
            finish(own + j * 4, j + 1 < EACH, staging + (rank * EACH + j) * 1024, lane_offset, factor[0], shift[0]);
        wait_for_warpgroup(consumer);
        // Rows of 64 channels of a pixel, 16 bytes per thread.
        for (int p = rank * EACH * 8 + t / 8; p < (rank + 1) * EACH * 8; p += 16) {
            const int channel = first_row + t % 8 * 8;
            const uint4 values = *reinterpret_cast<const uint4*>(
                shared + (staging - base) + p * 128 + ((t % 8 ^ (p & 7)) << 4));
            if (p >= PIXELS || channel >= s.rows) continue;
            size_t pixel;
            if (s.flat) {
                pixel = place.x + p;
                if (pixel >= (size_t)s.images * s.out_height * s.out_width) continue;
            } else {
                const int line = p / s.pitch, x = p - line * s.pitch, row = line / s.tile_images;
                const int n = place.n + line - row * s.tile_images, y = place.y + row;
                if (x >= s.out_width || row >= s.tile_rows || y >= s.out_height || n >= s.images) continue;
                pixel = ((size_t)n * s.out_height + y) * s.out_width + x;
            }
            *reinterpret_cast<uint4*>(result + pixel * s.rows + channel) = values;
        }
        continue;
#endif
#if HALVES
        float own[EACH * 4];
#pragma unroll
        for (int to = 0; to < 2; ++to)
#pragma unroll
            for (int g = 0; g < EACH; ++g) {
                if (to * EACH + g >= GROUPS) continue;
                const float* four = sums[0] + (to * EACH + g) * 4;
                if (to == consumer) own[g * 4] = four[0], own[g * 4 + 1] = four[1], own[g * 4 + 2] = four[2], own[g * 4 + 3] = four[3];
                else
                    *reinterpret_cast<float4*>(shared + s.exchange + ((to * EACH + g) * 128 + t) * 16) =
                        make_float4(four[0], four[1], four[2], four[3]);
            }
        if (t == 0 && consumer == 0) wait_for_stores<0>();  // of the previous tile
        wait_for_both_warpgroups();
#pragma unroll
        for (int g = 0; g < EACH; ++g) {
            if (EACH * 2 > GROUPS && consumer * EACH + g >= GROUPS) continue;
            const float4 more = *reinterpret_cast<const float4*>(shared + s.exchange + ((consumer * EACH + g) * 128 + t) * 16);
            own[g * 4] += more.x, own[g * 4 + 1] += more.y, own[g * 4 + 2] += more.z, own[g * 4 + 3] += more.w;
        }
        if (RESIDUAL) wait(own_residual, residual_phase), residual_phase ^= 1;
#pragma unroll
        for (int j = 0; j < EACH; j += 2)
            finish(own + j * 4, j + 1 < EACH, staging + (consumer * EACH + j) * 1024, lane_offset, factor[0], shift[0]);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        wait_for_both_warpgroups();
        if (t == 0 && consumer == 0) store_box(output, staging, first_row, place.x, place.y, place.n);
        continue;
#endif
        if (AHEAD) take_box();
        held_slot = slot;
        if (RESIDUAL && IN_PLACE && !AHEAD) {
            wait_for_warpgroup(consumer);
            if (t == 0) {
                expect(own_residual, s.stored_bytes);
                load_box(base + slot * s.slot_bytes, second, own_residual, first_row, place.x, place.y, place.n);
            }
        }
        if (RESIDUAL && !AHEAD) wait(own_residual, residual_phase), residual_phase ^= 1;
#pragma unroll
        for (int m = 0; m < BLOCKS; ++m)
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                u32 to;
                if (IN_PLACE) to = base + slot * s.slot_bytes;
                else if (RESIDUAL) to = staging + (m * PARTS + part) * s.stage_bytes;
                else {
                    to = staging + stage * s.stage_bytes;
                    if (++stage == STAGES) stage = 0;
                    if (t == 0) wait_for_stores<STAGES - 1>();
                }
                if (!RESIDUAL) wait_for_warpgroup(consumer);
                constexpr int MATRICES = PART_PIXELS / 8;  // 8 pixels by 16 output channels per warp
#pragma unroll
                for (int j = 0; j < MATRICES; j += 2) {
                    finish(sums[m] + (part * MATRICES + j) * 4, j + 1 < MATRICES, to + j * 1024, lane_offset, factor[m], shift[m]);
                }
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                wait_for_warpgroup(consumer);
                if (t == 0) store_box(output, to, first_row + m * 64, place.x + part * PART_PIXELS, place.y, place.n);
            }
#if NEXT
        // Slab k of the result has 64 of its channels, as the tensor core reads pixels. Stores only read it, too.
        wait(next_full, 0);
        float next_sums[NEXT][PIXELS / 2];
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k)
#pragma unroll
            for (int m = 0; m < NEXT; ++m) {
                const u32 block = matrices + (s.next_weights + (m * BLOCKS + k) * BLOCK_BYTES) / 16;
                const u32 slab = matrices + (staging - base + k * s.stage_bytes) / 16;
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    multiply(next_sums[m], weights_at(block + 128 * i), pixels_at(slab + 2 * i), k + i > 0);
            }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        wait_for_products<0>();
        const float one[2] = {1.f, 1.f};
#pragma unroll
        for (int m = 0; m < NEXT; ++m) {
            constexpr int MATRICES = PIXELS / 8;
            const u32 to = next_staging + m * s.stage_bytes;
#pragma unroll
            for (int j = 0; j < MATRICES; j += 2)
                finish<true>(next_sums[m] + j * 4, j + 1 < MATRICES, to + j * 1024, lane_offset, one, next_shift[m]);
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            wait_for_warpgroup(consumer);
            if (t == 0) store_box(next_output, to, m * 64, place.x, place.y, place.n);
        }
#endif
    }
    if (t == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// A tile of the bits of the Rademacher matrix, as the int8 operand of a product.
//
// Outputs   bits (n_columns, 128 * n_counters), int8: 0 or 1; the entry of the matrix is 1 - 2 * bit.
//           Rows are those of n_counters counters from first_counter on (128 rows each), columns those
//           from first_column on.
// Grid      (ceil(n_columns * n_counters / threads)). Shared memory: 16 bytes per thread.
// Exactness bit for bit the matrix that trakdask/projection/philox.py defines.

#include "philox.cuh"

// Bits 0 to 3 to the lowest bits of four bytes: no two of the sixteen products meet.
__device__ __forceinline__ u32 spread(u32 bits) { return (bits & 0xfu) * 0x00204081u & 0x01010101u; }

extern "C" __global__ void rademacher_bits(u64 first_counter, int n_counters, u32 first_column, int n_columns,
                                           u64 seed, u32 checkpoint, uint4* bits) {
    extern __shared__ u32 words[];
    const i64 n = (i64)n_columns * n_counters, first = (i64)blockIdx.x * blockDim.x;
    const i64 counter = first + threadIdx.x;
    if (counter < n) {
        const u64 index = first_counter + (u64)(counter % n_counters);
        const u32 column = first_column + (u32)(counter / n_counters);
        const Words drawn = philox(index, column, checkpoint, 0, seed);
        for (int i = 0; i < 4; ++i) words[4 * threadIdx.x + i] = drawn.word[i];
    }
    __syncthreads();
    // 128 bytes per counter, written 16 at a time by neighbouring threads.
    for (u32 piece = threadIdx.x; piece < 8 * blockDim.x; piece += blockDim.x) {
        if (first + piece / 8 >= n) return;
        const u32 half = words[piece / 2] >> (16 * (piece % 2));
        bits[8 * first + piece] = make_uint4(spread(half), spread(half >> 4), spread(half >> 8), spread(half >> 12));
    }
}

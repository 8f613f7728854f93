// A tile of the matrix of normal numbers, as the int8 operand of a product.
//
// Inputs    table (256): entry of each byte, at an address divisible by 16.
// Outputs   entries (n_columns, 16 * n_counters), int8. Rows are those of n_counters counters from
//           first_counter on (16 rows each), columns those from first_column on.
// Grid      (ceil(n_columns * n_counters / threads)). Shared memory: 256 bytes.
// Exactness bit for bit the entries of trakdask/projection/gaussian.py.

#include "philox.cuh"

__device__ __forceinline__ u32 looked_up(const unsigned char* table, u32 bytes) {
    return (u32)table[bytes & 0xff] | (u32)table[bytes >> 8 & 0xff] << 8 | (u32)table[bytes >> 16 & 0xff] << 16 |
           (u32)table[bytes >> 24] << 24;
}

extern "C" __global__ void gaussian_entries(const unsigned char* table, u64 first_counter, int n_counters,
                                            u32 first_column, int n_columns, u64 seed, u32 checkpoint,
                                            uint4* entries) {
    extern __shared__ unsigned char local[];
    for (u32 i = threadIdx.x; i < 256; i += blockDim.x) local[i] = table[i];
    __syncthreads();
    const i64 counter = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (counter >= (i64)n_columns * n_counters) return;
    const u64 index = first_counter + (u64)(counter % n_counters);
    const u32 column = first_column + (u32)(counter / n_counters);
    const Words drawn = philox(index, column, checkpoint, 5, seed);
    entries[counter] = make_uint4(looked_up(local, drawn.word[0]), looked_up(local, drawn.word[1]),
                                  looked_up(local, drawn.word[2]), looked_up(local, drawn.word[3]));
}

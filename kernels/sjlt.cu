// Sums of rounded gradients by bucket: the sparse Johnson-Lindenstrauss transform.
//
// Inputs    gradients (n_samples, n_blocks * n_rows), `stride` elements from sample to sample; float32,
//           float16 or bfloat16, at any address. first_row is the row of the first element.
// Outputs   sums (n_blocks, n_samples, n_columns), int32 or int64: of the columns from first_column on.
//           steps (n_blocks, n_samples): the value of one unit; NaN for a sample that is not finite.
// Grid      (ceil(n_samples / group), n_blocks): one block of threads adds up `group` samples (at most 4) of
//           one row block, so that words are drawn once for all of them. Threads: a power of two, at most
//           512; shared memory: 4 bytes per thread, or group * n_columns sums if that is more.
// Exactness bit for bit what trakdask/projection/sjlt.py gives: integers may be added in any order. A sum is
//           at most 2**14 * 16384 * sparsity, which int32 holds for a sparsity below 8.

#include "philox.cuh"
#include "fixed_point.cuh"

const int FRACTION_BITS = 14;
const int MOST_SAMPLES = 4;

__device__ __forceinline__ void add(int* sum, int value) { atomicAdd(sum, value); }
__device__ __forceinline__ void add(i64* sum, i64 value) { atomicAdd((u64*)sum, (u64)value); }

template <class Element, class Sum>
__device__ void sjlt(const Element* gradients, i64 stride, int n_rows, int n_samples, int group, u64 first_row,
                     u64 seed, u32 checkpoint, int sparsity, u32 proj_dim, u32 first_column, u32 n_columns,
                     Sum* sums, double* steps) {
    extern __shared__ u64 shared[];
    Sum* const tile = (Sum*)shared;
    const int first_sample = blockIdx.x * group, n = min(group, n_samples - first_sample);
    const Element* const values = gradients + first_sample * stride + (i64)blockIdx.y * n_rows;
    const i64 line = (i64)blockIdx.y * n_samples + first_sample;

    Scale scales[MOST_SAMPLES];
#pragma unroll
    for (int s = 0; s < MOST_SAMPLES; ++s) {
        if (s >= n) break;
        scales[s] = scale_of(largest_magnitude(values + s * stride, n_rows, (u32*)shared), FRACTION_BITS);
        if (threadIdx.x == 0) steps[line + s] = scales[s].step;
    }
    for (u32 i = threadIdx.x; i < n * n_columns; i += blockDim.x) tile[i] = 0;
    __syncthreads();
    for (int row = threadIdx.x; row < n_rows; row += blockDim.x) {
        int rows[MOST_SAMPLES];
#pragma unroll
        for (int s = 0; s < MOST_SAMPLES; ++s) {
            if (s < n) rows[s] = rounded(to_float(values[s * stride + row]), scales[s]);
        }
        const u64 index = first_row + (u64)blockIdx.y * (u64)n_rows + (u64)row;
        for (int j = 0; j < sparsity; j += 4) {
            const Words drawn = philox(index, j / 4, checkpoint, 1, seed);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (j + i >= sparsity) break;
                const u32 word = drawn.word[i], bucket = __umulhi(word, proj_dim) - first_column;
                if (bucket >= n_columns) continue;  // also what wraps around below first_column
#pragma unroll
                for (int s = 0; s < MOST_SAMPLES; ++s) {
                    if (s < n) add(tile + s * n_columns + bucket, (Sum)(word & 1 ? -rows[s] : rows[s]));
                }
            }
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < n * n_columns; i += blockDim.x) sums[line * n_columns + i] = tile[i];
}

#define SJLT(NAME, ELEMENT, SUM)                                                                                \
    extern "C" __global__ void __launch_bounds__(512, 2)                                                        \
    NAME(const ELEMENT* gradients, i64 stride, int n_rows, int n_samples, int group, u64 first_row, u64 seed,   \
         u32 checkpoint, int sparsity, u32 proj_dim, u32 first_column, u32 n_columns, SUM* sums,                \
         double* steps) {                                                                                       \
        sjlt<ELEMENT, SUM>(gradients, stride, n_rows, n_samples, group, first_row, seed, checkpoint, sparsity,  \
                           proj_dim, first_column, n_columns, sums, steps);                                     \
    }

SJLT(sjlt_float32_int32, float, int)
SJLT(sjlt_float32_int64, float, i64)
SJLT(sjlt_float16_int32, Half, int)
SJLT(sjlt_float16_int64, Half, i64)
SJLT(sjlt_bfloat16_int32, BFloat16, int)
SJLT(sjlt_bfloat16_int64, BFloat16, i64)

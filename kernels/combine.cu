// Exact sums of row blocks to features: one float64 addition per block, in the order of the blocks.
//
// Inputs    sums (n_blocks, lines, pitch), int32 or int64: line d * n_samples + s holds digit d of sample s;
//           totals (n_blocks, n_samples), or null; steps (n_blocks, n_samples).
// Outputs   out (n_samples, n_columns), `out_stride` elements from sample to sample: grows, block by block,
//           by step * value, where value is the sum of digit * 256**d, or total - 2 * that where there are
//           totals (sums over set bits, each of which stands for -1).
// Grid      (n_samples, ceil(n_columns / threads)).
// Exactness values are below 2**53 and steps powers of two, so the additions are the only roundings: the same
//           as on a CPU.

#include "philox.cuh"

template <class Sum>
__device__ void combine(const Sum* sums, const i64* totals, const double* steps, int n_blocks, int n_samples,
                        int n_digits, int lines, int pitch, int n_columns, double* out, i64 out_stride) {
    const int sample = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= n_columns) return;
    double running = out[sample * out_stride + column];
    for (int block = 0; block < n_blocks; ++block) {
        i64 value = 0;
        for (int d = n_digits - 1; d >= 0; --d) {
            value = value * 256 + sums[((i64)block * lines + d * n_samples + sample) * pitch + column];
        }
        const i64 at = (i64)block * n_samples + sample;
        if (totals) value = totals[at] - 2 * value;
        running += (double)value * steps[at];
    }
    out[sample * out_stride + column] = running;
}

#define COMBINE(NAME, SUM)                                                                                      \
    extern "C" __global__ void NAME(const SUM* sums, const i64* totals, const double* steps, int n_blocks,      \
                                    int n_samples, int n_digits, int lines, int pitch, int n_columns,           \
                                    double* out, i64 out_stride) {                                              \
        combine<SUM>(sums, totals, steps, n_blocks, n_samples, n_digits, lines, pitch, n_columns, out,          \
                     out_stride);                                                                               \
    }

COMBINE(combine_int32, int)
COMBINE(combine_int64, i64)

// Gradients to digits: the int8 operand of the dense products.
//
// Inputs    gradients (n_samples, n_blocks * n_rows), `stride` elements from sample to sample; float32,
//           float16 or bfloat16, at any address.
// Outputs   digits (n_blocks, lines, depth): line d * n_samples + s holds digit d of sample s, least
//           significant first; a value is the sum of digit * 256**d. Rows from n_rows to depth, and the
//           lines after n_digits * n_samples, are zeros.
//           totals (n_blocks, n_samples): sums of the values.
//           steps (n_blocks, n_samples): the value of one unit; NaN for a sample that is not finite.
// Grid      (lines - (n_digits - 1) * n_samples, n_blocks): one block of threads per sample, then one
//           per line of zeros. Threads: a power of two; shared memory: 8 bytes per thread.
// Exactness bit for bit what quantize of trakdask/projection/fixed_point.py gives.

#include "philox.cuh"
#include "fixed_point.cuh"

template <class Element, int N_DIGITS>
__device__ void quantize(const Element* gradients, i64 stride, int n_rows, int n_samples, int fraction_bits,
                         int lines, int depth, u32* digits, i64* totals, double* steps) {
    extern __shared__ u64 shared[];
    const int sample = blockIdx.x, words = depth / 4;
    u32* const block = digits + (i64)blockIdx.y * lines * words;
    if (sample >= n_samples) {
        u32* const line = block + (i64)(sample + (N_DIGITS - 1) * n_samples) * words;
        for (int word = threadIdx.x; word < words; word += blockDim.x) line[word] = 0;
        return;
    }
    const Element* const values = gradients + sample * stride + (i64)blockIdx.y * n_rows;
    const Scale scale = scale_of(largest_magnitude(values, n_rows, (u32*)shared), fraction_bits);
    i64 total = 0;
    for (int word = threadIdx.x; word < words; word += blockDim.x) {
        u32 packed[N_DIGITS] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = 4 * word + i;
            int rest = row < n_rows ? rounded(to_float(values[row]), scale) : 0;
            if (N_DIGITS == 1) rest = min(max(rest, -127), 127);
            total += rest;
#pragma unroll
            for (int d = 0; d < N_DIGITS; ++d) {
                const int digit = (signed char)rest;
                packed[d] |= (u32)(digit & 0xff) << (8 * i);
                rest = (rest - digit) >> 8;
            }
        }
#pragma unroll
        for (int d = 0; d < N_DIGITS; ++d) block[(i64)(d * n_samples + sample) * words + word] = packed[d];
    }
    total = combined(total, (i64*)shared, [](i64 a, i64 b) { return a + b; });
    if (threadIdx.x == 0) {
        totals[(i64)blockIdx.y * n_samples + sample] = total;
        steps[(i64)blockIdx.y * n_samples + sample] = scale.step;
    }
}

#define QUANTIZE(NAME, ELEMENT, N_DIGITS)                                                                       \
    extern "C" __global__ void NAME(const ELEMENT* gradients, i64 stride, int n_rows, int n_samples,            \
                                    int fraction_bits, int lines, int depth, u32* digits, i64* totals,          \
                                    double* steps) {                                                            \
        quantize<ELEMENT, N_DIGITS>(gradients, stride, n_rows, n_samples, fraction_bits, lines, depth, digits,  \
                                    totals, steps);                                                             \
    }

QUANTIZE(quantize_float32_1, float, 1)
QUANTIZE(quantize_float32_2, float, 2)
QUANTIZE(quantize_float32_3, float, 3)
QUANTIZE(quantize_float16_1, Half, 1)
QUANTIZE(quantize_float16_2, Half, 2)
QUANTIZE(quantize_float16_3, Half, 3)
QUANTIZE(quantize_bfloat16_1, BFloat16, 1)
QUANTIZE(quantize_bfloat16_2, BFloat16, 2)
QUANTIZE(quantize_bfloat16_3, BFloat16, 3)

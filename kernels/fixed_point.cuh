// Block fixed point: gradients as integers times a power of two per (sample, row block).
//
// Inputs    float32, float16 or bfloat16 values; a block of threads works on one sample of one row block.
// Exactness bit for bit what trakdask/projection/fixed_point.py gives. Factors are powers of two, so each
//           value is rounded once, half to even; compiled without contraction and without flushing to zero.

struct Half {
    unsigned short bits;
};
struct BFloat16 {
    unsigned short bits;
};

__device__ __forceinline__ float to_float(float value) { return value; }

__device__ __forceinline__ float to_float(BFloat16 value) { return __uint_as_float((u32)value.bits << 16); }

__device__ __forceinline__ float to_float(Half value) {
    const u32 sign = (u32)(value.bits & 0x8000u) << 16, rest = (u32)(value.bits & 0x7fffu) << 13;
    // As a float32 the exponent is 112 too small; for subnormals, too, the product is exact.
    const float finite = __uint_as_float(rest) * 0x1p112f;
    const u32 magnitude = rest < 0x7c00u << 13 ? __float_as_uint(finite) : rest | 0x7f800000u;
    return __uint_as_float(magnitude | sign);
}

// Combine a value of every thread, for every thread; `scratch` has room for one value per thread, and
// the number of threads is a power of two.
template <class T, class Combine>
__device__ T combined(T value, T* scratch, Combine combine) {
    scratch[threadIdx.x] = value;
    __syncthreads();
    for (u32 half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) scratch[threadIdx.x] = combine(scratch[threadIdx.x], scratch[threadIdx.x + half]);
        __syncthreads();
    }
    value = scratch[0];
    __syncthreads();
    return value;
}

// The largest magnitude, as the bits of a float32: those are in the order of the magnitudes, NaN last.
template <class Element>
__device__ u32 largest_magnitude(const Element* values, int n_rows, u32* scratch) {
    u32 largest = 0;
    for (int row = threadIdx.x; row < n_rows; row += blockDim.x) {
        largest = max(largest, __float_as_uint(to_float(values[row])) & 0x7fffffffu);
    }
    return combined(largest, scratch, [](u32 a, u32 b) { return max(a, b); });
}

struct Scale {
    float lift, factor;  // both before rounding: one alone could be above the float32 range
    double step;         // the value of one unit after it; NaN for a sample that is not finite
};

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float((u32)(exponent + 127) << 23); }

__device__ __forceinline__ Scale scale_of(u32 largest, int fraction_bits) {
    const bool finite = largest < 0x7f800000u;
    const float lift = 0 < largest && largest < 0x0d800000u ? 0x1p100f : 1.0f;  // below 2**-100
    const u32 lifted = __float_as_uint(__uint_as_float(largest) * lift);
    const int exponent = !finite ? 1 : lifted == 0 ? 0 : (int)(lifted >> 23) - 126;
    const float factor = power_of_two(fraction_bits - exponent);
    const double step = 1.0 / ((double)lift * (double)factor);
    return {lift, factor, finite ? step : __longlong_as_double(0x7ff8000000000000ll)};
}

__device__ __forceinline__ int rounded(float value, const Scale& scale) {
    // Samples that are not finite have a step of NaN: whatever they round to is lost in it.
    return __float2int_rn(value * scale.lift * scale.factor);
}

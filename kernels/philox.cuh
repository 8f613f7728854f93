// Philox4x32-10: random words from counters, without state.
//
// Inputs    the address of a counter, as trakdask/projection/philox.py defines it.
// Exactness bit for bit what that module defines.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct Words {
    u32 word[4];
};

__device__ __forceinline__ Words philox(u64 index, u32 column, u32 checkpoint, u32 stream, u64 seed) {
    u32 c0 = (u32)index, c1 = column, c2 = checkpoint, c3 = (u32)(index >> 32) | stream << 16;
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 p0 = (u64)c0 * 0xD2511F53u, p1 = (u64)c2 * 0xCD9E8D57u;
        c0 = (u32)(p1 >> 32) ^ c1 ^ k0;
        c2 = (u32)(p0 >> 32) ^ c3 ^ k1;
        c1 = (u32)p1;
        c3 = (u32)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// CUDA as host C++: enough of it to run the kernels of kernels/ on a CPU, thread by thread.
//
// Threads of a block are fibers that run one after the other, each up to the next barrier; with the
// order reversed, whatever depends on the order of threads between two barriers comes out otherwise.
// Shared memory starts as rubbish. A barrier that not all threads of a block reach is an error.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __syncthreads() emulated::barrier(__LINE__)

using std::max;
using std::min;

struct Index {
    unsigned x, y, z;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class To, class From>
static To reread(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}
static float __uint_as_float(unsigned bits) { return reread<float>(bits); }
static unsigned __float_as_uint(float value) { return reread<unsigned>(value); }
static double __longlong_as_double(long long bits) { return reread<double>(bits); }
static int __float2int_rn(float value) { return std::isfinite(value) ? (int)std::nearbyint(value) : 12345; }
static unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
template <class T>
static T atomicAdd(T* at, T value) {
    const T before = *at;
    *at = (T)((unsigned long long)before + (unsigned long long)value);
    return before;
}

namespace emulated {

alignas(16) static unsigned char shared[1 << 16];
static const char* error = nullptr;

struct Fiber {
    ucontext_t context;
    jmp_buf place;
    int line;  // of the barrier it waits at; 0 before it starts, -1 when it is done
    std::vector<char> stack;
};
static std::vector<Fiber> fibers;
static Fiber* running;
static ucontext_t scheduler;
static jmp_buf back;
static void (*body)(void*);
static void* body_argument;

static void barrier(int line) {
    running->line = line;
    if (!_setjmp(running->place)) _longjmp(back, 1);
}

static void start() {
    body(body_argument);
    running->line = -1;
    _longjmp(back, 1);
}

static void resume(Fiber& fiber) {
    running = &fiber;
    if (_setjmp(back)) return;
    if (fiber.line) _longjmp(fiber.place, 1);
    getcontext(&fiber.context);
    fiber.stack.resize(1 << 15);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, start, 0);
    setcontext(&fiber.context);
}

static void run_block(bool reversed) {
    memset(shared, 0xa5, sizeof shared);
    fibers.resize(blockDim.x);
    for (Fiber& fiber : fibers) fiber.line = 0;
    do {
        for (unsigned i = 0; i < blockDim.x; ++i) {
            threadIdx = {reversed ? blockDim.x - 1 - i : i, 0, 0};
            resume(fibers[threadIdx.x]);
        }
        for (const Fiber& fiber : fibers) {
            if (fiber.line != fibers[0].line) error = "threads of a block wait at different barriers";
        }
    } while (fibers[0].line != -1 && !error);
}

template <std::size_t... I, class... P>
static void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
    kernel(*(P*)arguments[I]...);
}

template <class... P>
static const char* launch(void (*kernel)(P...), const unsigned* dims, bool reversed, void** arguments,
                          const unsigned* sizes, unsigned n) {
    const std::size_t expected[] = {sizeof(P)...};
    if (n != sizeof...(P)) return "another number of arguments";
    for (unsigned i = 0; i < n; ++i) {
        if (sizes[i] != expected[i]) return "an argument of another size";
    }
    auto here = [&] { call(kernel, arguments, std::index_sequence_for<P...>{}); };
    body_argument = &here;
    body = [](void* f) { (*(decltype(here)*)f)(); };
    error = nullptr;
    gridDim = {dims[0], dims[1], 1};
    blockDim = {dims[2], 1, 1};
    for (unsigned y = 0; y < dims[1] && !error; ++y) {
        for (unsigned x = 0; x < dims[0] && !error; ++x) {
            blockIdx = {x, y, 0};
            run_block(reversed);
        }
    }
    return error;
}

}  // namespace emulated

#define EMULATED(KERNEL)                                                                                     \
    extern "C" const char* launch_##KERNEL(const unsigned* dims, bool reversed, void** arguments,            \
                                           const unsigned* sizes, unsigned n) {                              \
        return emulated::launch(KERNEL, dims, reversed, arguments, sizes, n);                                \
    }

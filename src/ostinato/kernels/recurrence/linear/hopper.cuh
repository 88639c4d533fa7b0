// Instructions of Hopper GPUs: copies by TMA, products of a warpgroup.

__device__ inline int block_of_cluster() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ inline void wait(const Barrier& barrier, unsigned phase) {
    unsigned done = 0;
    for (unsigned polls = 0; !done; ++polls) {
        done = try_wait(shared_address(&barrier), phase);
        if (polls == MOST_POLLS) __trap();
    }
}
__device__ inline void arrive(const Barrier& barrier, int block) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n\t"
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }"
                 ::"r"(shared_address(&barrier)), "r"(block) : "memory");
}
// TMA copy to this block, or multicast to the same address in every block of the cluster.
template <bool TO_ALL>
__device__ inline void copy(
    void* to, const TensorMap& map, const Barrier& barrier, int c0, int c1, int c2, int c3
) {
    if constexpr (TO_ALL)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                     "[%0], [%1, {%4, %5, %6, %7}], [%2], %3;"
                     ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(&barrier)),
                     "h"((unsigned short)((1 << CLUSTER) - 1)), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
    else start_copy(shared_address(to), &map, c0, c1, c2, c3, shared_address(&barrier));
}

// The wgmma descriptor of a matrix with rows of 128 bytes, swizzled in groups of eight.
__device__ inline unsigned long long describe(const Scalar* matrix) {
    constexpr unsigned long long SWIZZLE_128 = 1ull << 62, GROUP = 1024 >> 4;
    return SWIZZLE_128 | GROUP << 32 | 1ull << 16 | (shared_address(matrix) & 0x3ffff) >> 4;
}

#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define MULTIPLY(COLUMNS, TYPE, D, A, B, ADD, OPERANDS...)                                                    \
    asm volatile("{ .reg .pred add; setp.ne.b32 add, " ADD ", 0;\n\t"                                         \
                 "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE " {" D "}, " A ", " B ", " \
                 "add, 1, 1, 0, 0; }" : OPERANDS : "l"(a), "l"(b), "r"(add))
#define FIRST_64                                                                             \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                 \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "       \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "       \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FIRST_128                                                                                    \
    FIRST_64 ", "                                                                                    \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "    \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MULTIPLY_128(TYPE) \
    MULTIPLY("128", TYPE, FIRST_64, "%64", "%65", "%66", SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48))
#define MULTIPLY_256(TYPE)                                                                                      \
    MULTIPLY("256", TYPE, FIRST_128, "%128", "%129", "%130", SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48), \
             SIXTEEN(64), SIXTEEN(80), SIXTEEN(96), SIXTEEN(112))

// d = a b', or d += a b' if `add`: 64 rows of `a`, and as many of `b` as d has columns.
__device__ inline void multiply(float (&d)[64], unsigned long long a, unsigned long long b, int add) {
    if constexpr (BFLOAT16) MULTIPLY_128("bf16");
    else MULTIPLY_128("f16");
}
__device__ inline void multiply(float (&d)[128], unsigned long long a, unsigned long long b, int add) {
    if constexpr (BFLOAT16) MULTIPLY_256("bf16");
    else MULTIPLY_256("f16");
}

// Products of a 16-row tile of weights with the state of 8 sequences, on tensor cores, accumulated in float32.
//
// A tile has 32 bytes of columns: 16 columns, or 8 in float32.

__device__ inline void mma(float (&d)[4], const uint4& a, unsigned b0, unsigned b1, Half) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

__device__ inline void mma(float (&d)[4], const uint4& a, unsigned b0, unsigned b1, BFloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

__device__ inline void mma_tf32(float (&d)[4], const uint4& a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// Splits an EXACT float32 number into two tf32 numbers, which hold all of its bits but the last.
__device__ inline void split(unsigned x, unsigned& head, unsigned& tail) {
    asm volatile("" : "+r"(x));  // split at every step: hoisted, split weights would take three times the registers
    head = (x + 0x1000u) & 0xffffe000u;
    tail = __float_as_uint(__uint_as_float(x) - __uint_as_float(head));  // NaN if x is not finite
}

__device__ inline void mma(float (&d)[4], const uint4& a, unsigned b0, unsigned b1, float) {
    if (!EXACT) return mma_tf32(d, a, b0, b1);  // operands were rounded when they were packed or published
    uint4 a_head, a_tail;
    unsigned b0_head, b0_tail, b1_head, b1_tail;
    split(a.x, a_head.x, a_tail.x);
    split(a.y, a_head.y, a_tail.y);
    split(a.z, a_head.z, a_tail.z);
    split(a.w, a_head.w, a_tail.w);
    split(b0, b0_head, b0_tail);
    split(b1, b1_head, b1_tail);
    float sum[4] = {};  // tensor cores truncate sums, so the long accumulation is by FP32 additions, which round
    mma_tf32(sum, a_tail, b0_head, b1_head);
    mma_tf32(sum, a_head, b0_tail, b1_tail);
    mma_tf32(sum, a_head, b0_head, b1_head);
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] += sum[i];
}

// EXACT float32 with one sequence uses FMA instructions, since tensor cores would need three tf32 products.  Lanes of
// the same columns then hold the same state, and each accumulates its columns' share of two rows in d[0] and d[2].
constexpr bool BY_FMA = EXACT && COLUMNS == 1;

__device__ inline void multiply(float (&d)[4], const uint4& a, Word b) {
    if constexpr (!BY_FMA) return mma(d, a, low(b), high(b), Scalar());
    const float first = __uint_as_float(low(b)), second = __uint_as_float(high(b));
    d[0] = fmaf(__uint_as_float(a.x), first, fmaf(__uint_as_float(a.z), second, d[0]));
    d[2] = fmaf(__uint_as_float(a.y), first, fmaf(__uint_as_float(a.w), second, d[2]));
}

// Reduces a row's sum over the four lanes that hold shares of it, if FMA instructions have computed it.
__device__ inline float over_lanes(float sum) {
    if (!BY_FMA) return sum;
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
}

// A predicated store to shared memory.
__device__ inline void store_if(bool wanted, float* address, float x) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.shared.f32 [%1], %2; }"
                 :: "r"(unsigned(wanted)), "r"(unsigned(__cvta_generic_to_shared(address))), "f"(x) : "memory");
}

struct Span {};  // which threads have partial sums of a row; here all rows have the same number

// Adds up the PARTS partial sums of adjacent rows, pairwise.
template <int PARTS> __device__ inline Adjacent<float> add(const float* sums, int pitch) {
    if constexpr (PARTS == 1) return Adjacent<float>::load(sums);
    else return add<PARTS / 2>(sums, pitch) + add<PARTS - PARTS / 2>(sums + PARTS / 2 * pitch, pitch);
}

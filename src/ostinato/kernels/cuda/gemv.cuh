// A small matrix-vector product: a warp's dot products of a few rows of a matrix with the vectors of BATCH sequences.
// The lanes of the warp split the columns.

constexpr int AT_ONCE = BATCH > 2 ? 2 : 8;  // packs of a row whose loads are in flight together

// Adds to sum[g][b] this lane's part of the dot product of the row at `first + g * stride` with the vector of sequence
// b.  Rows and vectors have `packs` packs.  With fewer sequences than BATCH, the last one stands in for those missing.
template <int ROWS>
__device__ inline void add_products(
    Compute (&sum)[ROWS][BATCH], const Pack* first, size_t stride, const Pack* x, int packs, int sequences = BATCH
) {
    for (int start = threadIdx.x % 32; start < packs; start += 32 * AT_ONCE) {
        Pack weights[AT_ONCE][ROWS], inputs[AT_ONCE][BATCH];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int i = start + 32 * k;
#pragma unroll
            for (int g = 0; g < ROWS; ++g) weights[k][g] = i < packs ? first[g * stride + i] : 0;
#pragma unroll
            for (int b = 0; b < BATCH; ++b) inputs[k][b] = i < packs ? x[size_t(min(b, sequences - 1)) * packs + i] : 0;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            Compute weight[ROWS][VEC];
#pragma unroll
            for (int g = 0; g < ROWS; ++g) unpack(weights[k][g], weight[g]);
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                Compute input[VEC];
                unpack(inputs[k][b], input);
#pragma unroll
                for (int g = 0; g < ROWS; ++g)
#pragma unroll
                    for (int v = 0; v < VEC; ++v) sum[g][b] = fma(weight[g][v], input[v], sum[g][b]);
            }
        }
    }
}

// Reduces the sums over all lanes, and adds the total of sequence b to `whole` in lane b.
template <int ROWS>
__device__ inline void reduce(const Compute (&sum)[ROWS][BATCH], Compute (&whole)[ROWS]) {
#pragma unroll
    for (int g = 0; g < ROWS; ++g)
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            Compute all = sum[g][b];
#pragma unroll
            for (int far = 16; far > 0; far /= 2) all += __shfl_xor_sync(~0u, all, far);
            if (threadIdx.x % 32 == b) whole[g] += all;
        }
}

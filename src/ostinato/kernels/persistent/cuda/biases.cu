// The gradients of both biases: the sums of rows of partial sums.  A block sums 32 columns, each warp every eighth row.
//
// The first `shift` columns are of the recurrent product only, a GRU's n, which comes last in the biases; the last as
// many of the input's only.

constexpr int WARPS = 8;

struct Arguments {
    const float* rows;  // (count, width)
    Scalar *of_ih, *of_hh;
    int count, width, shift;
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) biases(const __grid_constant__ Arguments p) {
    __shared__ float sums[WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
    float sum = 0;
    for (int row = warp; column < p.width && row < p.count; row += WARPS)
        sum += p.rows[(long long)row * p.width + column];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp || column >= p.width) return;
#pragma unroll
    for (int k = 1; k < WARPS; ++k) sum += sums[k][lane];
    const int size = p.width - p.shift;
    if (column >= p.shift) p.of_ih[column - p.shift] = Scalar(sum);
    if (column < size) p.of_hh[column < p.shift ? column + size - p.shift : column - p.shift] = Scalar(sum);
}

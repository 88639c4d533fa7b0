// Sums over the rows of a matrix: a block of WARPS warps sums 32 columns.
//
// Each warp adds every WARPS-th row, then the first warp adds the partial sums of all.  The order is fixed.

// The sum of this lane's column, if it exists, valid in the block's first warp; rows are `pitch` elements apart.
__device__ inline float sum_of_rows(const float* column, int pitch, int rows, bool exists) {
    __shared__ float sums[WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum = 0;
    for (int row = warp; exists && row < rows; row += WARPS) sum += column[(long long)row * pitch];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0) return 0;
#pragma unroll
    for (int k = 1; k < WARPS; ++k) sum += sums[k][lane];
    return sum;
}

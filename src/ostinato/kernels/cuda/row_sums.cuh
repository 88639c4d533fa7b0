// The sum of rows, of 32 columns by a block of WARPS warps.
//
// Each warp adds every WARPS-th row, then the first adds up what all have, always in the same order.

// Of a lane's column, `pitch` apart in each row, if it exists; in the block's first warp.
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

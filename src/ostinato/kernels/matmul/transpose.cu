// Transposes a float32 matrix: y[c][r] = x[r][c], or 0 for the rows that are zeroed.  A block transposes a tile of ROWS
// by COLUMNS through shared memory, so that both loads and stores are coalesced.

constexpr int WARPS = 8;

struct Arguments {
    const float* x;               // (rows, columns)
    const unsigned char* zeroed;  // (rows), or null
    float* y;                     // (columns, rows)
    long long rows, columns;
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) transpose(const __grid_constant__ Arguments p) {
    __shared__ float tile[COLUMNS][ROWS + 1];  // padded against bank conflicts
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long across = (p.columns + COLUMNS - 1) / COLUMNS;
    const long long row = blockIdx.x / across * ROWS, column = blockIdx.x % across * COLUMNS;
    float numbers[ROWS / WARPS];
#pragma unroll
    for (int k = 0; k < ROWS / WARPS; ++k) {
        const long long r = row + warp + k * WARPS, c = column + lane;
        if (r < p.rows && c < p.columns) numbers[k] = p.x[r * p.columns + c];
    }
#pragma unroll
    for (int k = 0; k < ROWS / WARPS; ++k) {
        const long long r = row + warp + k * WARPS;
        tile[lane][warp + k * WARPS] = p.zeroed && r < p.rows && p.zeroed[r] ? 0.0f : numbers[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < COLUMNS / WARPS; ++k)
#pragma unroll
        for (int j = 0; j < ROWS; j += 32) {
            const long long r = row + lane + j, c = column + warp + k * WARPS;
            if (r < p.rows && c < p.columns) p.y[c * p.rows + r] = tile[warp + k * WARPS][lane + j];
        }
}

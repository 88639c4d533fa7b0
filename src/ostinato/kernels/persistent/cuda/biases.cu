// The gradients of both biases, which are sums over rows of partial sums; a block takes 32 columns.
//
// The first `shift` columns belong to the recurrent bias only, and the last `shift` to the input's only: those of a
// GRU's candidate n, which comes last in both biases.

struct Arguments {
    const float* rows;  // (count, width)
    Scalar *grad_ih, *grad_hh;
    int count, width, shift;
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) biases(const __grid_constant__ Arguments p) {
    const int column = blockIdx.x * 32 + threadIdx.x % 32;
    const float sum = sum_of_rows(p.rows + column, p.width, p.count, column < p.width);
    if (threadIdx.x >= 32 || column >= p.width) return;
    const int size = p.width - p.shift;
    if (column >= p.shift) p.grad_ih[column - p.shift] = Scalar(sum);
    if (column < size) p.grad_hh[column < p.shift ? column + size - p.shift : column - p.shift] = Scalar(sum);
}

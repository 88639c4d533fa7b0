// The part of the recurrent matrix that a block multiplies.
//
// Forward, row g * UNITS + u of a block's part of the recurrent matrix is gate g of its unit u, and its columns are
// the units of the previous state.  Backward, the rows are the units of the block's cluster and the columns a slice of
// the gates of all units: the matrix transposed.

// An element of a block's part of the matrix; zero out of bounds.
__device__ inline Scalar weight_at(const Parameters &p, int block, int row, int column) {
    int gate = row / UNITS, unit = block * UNITS + row % UNITS, other = column;
    if (BACKWARD) {
        const int k = block % CLUSTER * SLICE + column;
        gate = k / PITCH, unit = k % PITCH, other = block / CLUSTER * ROWS + row;
    }
    const bool exists = row < ROWS && column < SLICE && gate < GATES && unit < HIDDEN && other < HIDDEN;
    return exists ? p.weight[size_t(gate * HIDDEN + unit) * HIDDEN + other] : Scalar(0.0f);
}

// A weight of a pruned matrix, by its position in `index`.
__device__ inline unsigned indexed_weight(const Parameters &p, size_t i) {
    const int index = p.index[i];
    return index ? shown(widen(p.weight[index - 1])) : 0;
}

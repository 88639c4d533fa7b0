// The part of the recurrent matrix that a block multiplies.
//
// In the forward pass, row g * UNITS + u of a block's part is gate g of its unit u, and the columns are the units of
// the previous state.  In the backward pass the matrix is transposed: the rows are the units of the block's cluster,
// and the columns a slice of the gates of all units or, with SCATTERS, the gates of the block's own units.
//
// Where a weight does not exist, another is loaded in its place, without a branch, so that the loads of a thread are in
// flight together.

// An element of a block's part of the matrix; zero out of bounds.
__device__ inline Scalar weight_at(const Parameters& p, int block, int row, int column) {
    int gate = row / UNITS, unit = block * UNITS + row % UNITS, other = column;
    if (BACKWARD) {
        const int k = block % CLUSTER * SLICE + column;
        gate = k / PITCH, unit = k % PITCH, other = block / CLUSTER * ROWS + row;
        if (SCATTERS) gate = column / UNITS, unit = block * UNITS + column % UNITS;
    }
    const bool exists = row < ROWS && column < SLICE && gate < GATES && unit < HIDDEN && other < HIDDEN;
    // In 32 bits: with offsets in 64 bits that may be zero, CUDA 13.0 made code that sometimes loaded other addresses.
    static_assert(size_t(GATES) * HIDDEN * HIDDEN <= ~0u);
    const Scalar weight = p.weight[exists ? unsigned(gate * HIDDEN + unit) * HIDDEN + other : 0];
    return exists ? weight : Scalar(0.0f);
}

// A weight of a pruned matrix, given its 1-based index; zero for padding, whose index is 0.
__device__ inline unsigned indexed_weight(const Parameters& p, int index) {
    const unsigned weight = operand_bits(widen(p.weight[max(index - 1, 0)]));
    return index ? weight : 0;
}

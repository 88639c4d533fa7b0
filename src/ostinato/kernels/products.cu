// Several small products of matrices in one launch: out = a @ b + bias, where a @ b may be the sum of two products,
// or, without a, the sum of b's rows.
//
// A block computes a tile of one of them.  Its warps share the summed dimension, each every WARPS-th slab of it, and
// their parts are added up at the end, always in the same order.  On tensor cores numbers of 16 bits are tf32 exactly.

constexpr int SLAB = 16, STRIDE = WARPS * SLAB;  // places of the summed dimension: of a slab, and to a warp's next one
constexpr int VECTOR = 4, VECTORS = SLAB / VECTOR;  // numbers that a lane loads together, and how often of a slab
static_assert(TILE == 32, "a warp's lanes divide the slabs of such tiles");

struct Factor {
    long long begin;  // its first element
    int tensor;       // which one, or -1
    int across;       // elements from a row of a, or a column of b, to the next
    int along;        // elements along the summed dimension
    int padding;
};

struct Product {
    Factor a[2], b[2];
    long long begin;  // the element of out where it begins
    int summed[2], out, bias, rows, columns, tiles;
    int padding;
};

struct Arguments {
    char* tensors[TENSORS];
    Product products[PRODUCTS];
};

// A slab in shared memory: SLAB places of the summed dimension of TILE rows, or columns.  Those of a place are swapped
// so that neither stores nor loads, along either dimension, meet in a bank.
struct Slab {
    float numbers[SLAB * TILE];

    __device__ float& at(int place, int row) { return numbers[place * TILE + (row ^ 8 * ((place ^ place >> 2) & 3))]; }
    __device__ float4& vector(int place, int row) { return reinterpret_cast<float4&>(at(place, row)); }
};

// A warp's slabs of a factor, one after the other: how a lane loads its vectors of the next one, and stores them.
class Slabs {
    const Scalar* from;       // its first vector
    long long step, skip;     // elements to its other vectors, and to its first one of the slab after
    int size, row;            // how many rows, or columns, there are, and which is its first vector's
    int summed, place;        // the same of the summed dimension
    bool along;               // whether neighbours in memory are so along the summed dimension
    bool aligned, within;     // whether vectors are, and whether all rows of the slab exist
    // As they are in memory: conversions would wait for it.
    unsigned words[VECTORS][VECTOR * sizeof(Scalar) / sizeof(unsigned)];

    __device__ int row_of(int i) const { return row + (along ? i * (32 / VECTORS) : 0); }
    __device__ int place_of(int i) const { return place + (along ? 0 : i * VECTORS); }

  public:
    // From a row, or column, on, of `size`; from place `k` on, of `summed`.
    __device__ Slabs(const Arguments& p, const Factor& factor, int begin, int size, int k, int summed)
        : size(size), summed(summed), along(factor.along == 1) {
        const int lane = threadIdx.x % 32;
        row = begin + (along ? lane / VECTORS : lane % (TILE / VECTOR) * VECTOR);
        place = k + (along ? lane % VECTORS * VECTOR : lane / (TILE / VECTOR));
        step = along ? (32 / VECTORS) * (long long)factor.across : VECTORS * (long long)factor.along;
        skip = STRIDE * (long long)factor.along;
        from = reinterpret_cast<const Scalar*>(p.tensors[factor.tensor]) + factor.begin;
        const int pitch = along ? factor.across : factor.along, extent = along ? summed : size;
        aligned = ((pitch | extent) % VECTOR | (long long)from % (VECTOR * sizeof(Scalar))) == 0;
        within = begin + TILE <= size;
        from += (long long)row * factor.across + (long long)place * factor.along;
    }

    __device__ void load(int k) {
        const bool whole = aligned && within && k + SLAB <= summed;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (whole) load_vector(i);
            else load_numbers(i);
        }
        from += skip;
        place += STRIDE;
    }

    __device__ void store(Slab& slab) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            float x[VECTOR];
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) x[j] = number(i, j);
            if (along) {
#pragma unroll
                for (int j = 0; j < VECTOR; ++j)
                    slab.at(lane % VECTORS * VECTOR + j, lane / VECTORS + i * (32 / VECTORS)) = x[j];
            } else {
                const int column = lane % (TILE / VECTOR) * VECTOR;
                slab.vector(lane / (TILE / VECTOR) + i * VECTORS, column) = make_float4(x[0], x[1], x[2], x[3]);
            }
        }
    }

  private:
    __device__ void load_vector(int i) {
        const Scalar* at = from + i * step;
        if constexpr (NARROW_SCALAR) {
            const uint2 found = *reinterpret_cast<const uint2*>(at);
            words[i][0] = found.x, words[i][1] = found.y;
        } else {
            const uint4 found = *reinterpret_cast<const uint4*>(at);
            words[i][0] = found.x, words[i][1] = found.y, words[i][2] = found.z, words[i][3] = found.w;
        }
    }

    // One by one, zeros beyond the ends.
    __device__ void load_numbers(int i) {
        const Scalar* at = from + i * step;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            const int r = row_of(i) + (along ? 0 : j), k = place_of(i) + (along ? j : 0);
            const bool inside = r < size && k < summed;
            if constexpr (NARROW_SCALAR) {
                const unsigned bits = inside ? reinterpret_cast<const unsigned short*>(at)[j] : 0;
                words[i][j / 2] = j % 2 ? words[i][j / 2] | bits << 16 : bits;
            } else {
                words[i][j] = inside ? reinterpret_cast<const unsigned*>(at)[j] : 0;
            }
        }
    }

    __device__ float number(int i, int j) const {
        if constexpr (NARROW_SCALAR) {
            float pair[2];
            unpack(words[i][j / 2], pair);
            return pair[j % 2];
        }
        if (!TENSOR_CORES) return __uint_as_float(words[i][j]);
        unsigned rounded;
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(words[i][j])));
        return __uint_as_float(rounded);
    }
};

// A lane's part of a tile's sums.
struct OfOrdinaryCores {
    static constexpr int ROWS = 8, COLUMNS = 4;
    float sum[ROWS][COLUMNS] = {};

    __device__ static int row() { return threadIdx.x % 32 / (TILE / COLUMNS) * ROWS; }
    __device__ static int column() { return threadIdx.x % (TILE / COLUMNS) * COLUMNS; }

    __device__ void add(Slab& a, Slab& b) {
#pragma unroll
        for (int k = 0; k < SLAB; ++k) {
            const float4 upper = a.vector(k, row()), lower = a.vector(k, row() + 4), right = b.vector(k, column());
            const float of_a[ROWS] = {upper.x, upper.y, upper.z, upper.w, lower.x, lower.y, lower.z, lower.w};
            const float of_b[COLUMNS] = {right.x, right.y, right.z, right.w};
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) sum[i][j] = fmaf(of_a[i], of_b[j], sum[i][j]);
        }
    }

    __device__ void store(float* tile) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            *reinterpret_cast<float4*>(tile + (row() + i) * TILE + column()) =
                make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    }
};

struct OfTensorCores {
    static constexpr int ROWS = TILE / 16, COLUMNS = TILE / 8;  // in units of the instruction
    float sum[ROWS][COLUMNS][4] = {};

    __device__ static int group() { return threadIdx.x % 32 / 4; }
    __device__ static int member() { return threadIdx.x % 4; }

    __device__ void add(Slab& a, Slab& b) {
#pragma unroll
        for (int k = 0; k < SLAB; k += 8) {
            float of_a[ROWS][4], of_b[COLUMNS][2];
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) of_a[i][j] = a.at(k + member() + j / 2 * 4, 16 * i + group() + j % 2 * 8);
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j) of_b[i][j] = b.at(k + member() + j * 4, 8 * i + group());
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) multiply(sum[i][j], of_a[i], of_b[j]);
        }
    }

    __device__ static void multiply(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
              "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
    }

    __device__ void store(float* tile) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                for (int k = 0; k < 4; k += 2)
                    *reinterpret_cast<float2*>(tile + (16 * i + group() + 4 * k) * TILE + 8 * j + 2 * member()) =
                        make_float2(sum[i][j][k], sum[i][j][k + 1]);
    }
};

template <bool> struct SumsOf { using type = OfOrdinaryCores; };
template <> struct SumsOf<true> { using type = OfTensorCores; };

// The sums of rows of float32, of a tile's columns: each warp adds every WARPS-th row.
__device__ inline void add_rows(const Arguments& p, const Product& q, int column) {
    __shared__ float sums[WARPS][TILE];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = column + lane;
    const Factor& factor = q.b[0];
    const float* rows = reinterpret_cast<const float*>(p.tensors[factor.tensor]) + factor.begin;
    float sum = 0;
    for (int row = warp; c < q.columns && row < q.summed[0]; row += WARPS)
        sum += rows[(long long)row * factor.along + c];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp || c >= q.columns) return;
#pragma unroll
    for (int w = 1; w < WARPS; ++w) sum += sums[w][lane];
    reinterpret_cast<Scalar*>(p.tensors[q.out])[q.begin + c] = Scalar(sum);
}

// Writes the sum of all warps' parts of a tile, to which the bias is added.
__device__ inline void write(
    const Arguments& p, const Product& q, int row, int column, const float (&parts)[WARPS][TILE * TILE]
) {
    const int lane = threadIdx.x % 32, columns = q.columns, rows = min(q.rows - row, TILE);
    if (column + lane >= columns) return;
    const Scalar* bias = reinterpret_cast<const Scalar*>(p.tensors[max(q.bias, 0)]) + column + lane;
    const float added = q.bias < 0 ? 0.0f : widen(*bias);
    Scalar* out = reinterpret_cast<Scalar*>(p.tensors[q.out]) + q.begin + (long long)row * columns + column + lane;
    for (int r = threadIdx.x / 32; r < rows; r += WARPS) {
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += parts[warp][r * TILE + lane];
        out[(long long)r * columns] = Scalar(sum + added);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) products(const __grid_constant__ Arguments p) {
    __shared__ __align__(16) Slab slabs[WARPS][2];
    static_assert(sizeof(slabs[0]) == TILE * TILE * sizeof(float), "a warp's part of a tile lies where its slabs were");
    const int warp = threadIdx.x / 32;
    int tile = blockIdx.x, which = 0;
    while (tile >= p.products[which].tiles) tile -= p.products[which++].tiles;
    const Product& q = p.products[which];
    const int across = (q.columns + TILE - 1) / TILE;
    const int row = tile / across * TILE, column = tile % across * TILE;
    if (q.a[0].tensor < 0) return add_rows(p, q, column);

    auto& [a, b] = slabs[warp];
    SumsOf<TENSOR_CORES>::type sums;
    for (int pair = 0; pair < 2; ++pair) {
        const int begin = warp * SLAB, summed = q.summed[pair];
        if (begin >= summed) continue;
        Slabs of_a(p, q.a[pair], row, q.rows, begin, summed), of_b(p, q.b[pair], column, q.columns, begin, summed);
        for (int k = begin; k < summed + STRIDE; k += STRIDE) {
            if (k > begin) {
                __syncwarp();
                of_a.store(a);
                of_b.store(b);
                __syncwarp();
            }
            if (k < summed) {  // loaded while the slab before is multiplied
                of_a.load(k);
                of_b.load(k);
            }
            if (k > begin) sums.add(a, b);
        }
    }
    __syncwarp();
    sums.store(reinterpret_cast<float*>(slabs[warp]));
    __syncthreads();
    write(p, q, row, column, reinterpret_cast<const float (&)[WARPS][TILE * TILE]>(slabs));
}

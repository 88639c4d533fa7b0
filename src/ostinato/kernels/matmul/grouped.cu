// Grouped GEMM: several small matrix products in one launch.  A product is out = a @ b + bias, where a @ b may be the
// sum of two such products, or, without a, the sum of b's rows.
//
// A warp computes a tile of a product, alone or together with all warps of its block or of its cluster.  These split
// the summed dimension (split-K), taking slabs of it in turn, and add up their partial sums at the end in a fixed
// order.  Tensor cores multiply 16-bit numbers as tf32, which represents them exactly.

constexpr int VECTOR = 4, VECTORS = SLAB / VECTOR;  // elements of a vector load; a lane's vectors of a slab
static_assert(TILE == 32, "a warp's lanes divide the slabs of such tiles");

struct Factor {
    long long begin;  // the offset of its first element
    int tensor;       // the tensor's index, or -1
    int across;       // the stride of a's rows, or of b's columns
    int along;        // the stride of the summed dimension
    int padding;
};

struct Product {
    Factor a[2], b[2];
    long long begin;  // the offset of its first element in out
    int summed[2], out, bias, rows, columns;
    int blocks, sharers;  // how many blocks it has, and warps that share a tile: 1, or all of a block, or of a cluster
};

struct Arguments {
    char* tensors[TENSORS];
    Product products[PRODUCTS];
};

// A slab in shared memory: SLAB places (positions along the summed dimension) of TILE rows of a, or columns of b, which
// are called rows below, too.  Groups of eight rows are swizzled, so that neither stores nor loads along either
// dimension have bank conflicts.
struct Slab {
    float numbers[SLAB * TILE];

    __device__ float4& vector(int place, int row) {
        return reinterpret_cast<float4&>(numbers[place * TILE + (row ^ 8 * ((place ^ place >> 2) & 3))]);
    }
};

// The offsets in a slab of the single elements that a lane accesses.  The first is at row lane / 4 and place `places *
// (lane % 4)`; the others are a multiple of eight rows and a number of places further, and that number has no bit in
// common with the first's place.  So each offset is one of four plus a constant, which the compiler does not find by
// itself.
struct Offsets {
    int of[4];

    __device__ explicit Offsets(int places) {
        const int lane = threadIdx.x % 32, quarter = lane % 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) of[i] = quarter * places * TILE + lane / 4 + 8 * (quarter ^ i);
    }

    __device__ int at(int further, int rows) const {
        return of[((further ^ further >> 2) & 3) ^ rows / 8] + further * TILE;
    }
};

// An iterator over a warp's slabs of a factor: a lane loads its vectors of the next slab into registers, then stores
// them to shared memory.
class Slabs {
    const Scalar* from;       // this lane's first vector of the next slab
    long long step, skip;     // elements to its other vectors of the slab, and to its first one of the slab after it
    int stride;               // places from a slab to the one after it
    int size, row;            // the number of rows, and the row of this lane's first vector
    int summed, place;        // the size of the summed dimension, and the place of this lane's first vector
    bool along;               // whether the summed dimension is the contiguous one
    bool aligned;             // whether vectors are aligned; then either all elements of a vector exist or none
    // The loaded bits as they are in memory: converting them at once would wait for the loads.
    unsigned words[VECTORS][VECTOR * sizeof(Scalar) / sizeof(unsigned)];

  public:
    // Begins at row `begin` of `size` and place `k` of `summed`; slabs are `stride` places apart.
    __device__ Slabs(const Arguments& p, const Factor& factor, int begin, int size, int k, int summed, int stride)
        : stride(stride), size(size), summed(summed), along(factor.along == 1) {
        const int lane = threadIdx.x % 32;
        row = begin + (along ? lane / VECTORS : lane % (TILE / VECTOR) * VECTOR);
        place = k + (along ? lane % VECTORS * VECTOR : lane / (TILE / VECTOR));
        step = along ? (32 / VECTORS) * (long long)factor.across : VECTORS * (long long)factor.along;
        skip = stride * (long long)factor.along;
        from = reinterpret_cast<const Scalar*>(p.tensors[factor.tensor]) + factor.begin;
        const int pitch = along ? factor.across : factor.along, extent = along ? summed : size;
        aligned = ((pitch | extent) % VECTOR | (long long)from % (VECTOR * sizeof(Scalar))) == 0;
        from += (long long)row * factor.across + (long long)place * factor.along;
    }

    __device__ void load() {
        if (aligned) {
            // This lane's vectors differ in one dimension only; a vector exists if it is within the bounds of both.
            const int first = along ? row : place, end = along ? size : summed, apart = along ? 32 / VECTORS : VECTORS;
            const bool within = along ? place < summed : row < size;
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) load_vector(i, within && first + i * apart < end);
        } else {
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) load_numbers(i);
        }
        from += skip;
        place += stride;
    }

    __device__ void store(Slab& slab, const Offsets& offsets) const {
        const int lane = threadIdx.x % 32;
        if (along) {
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) slab.numbers[offsets.at(j, i * (32 / VECTORS))] = number(i, j);
        } else {
            const int column = lane % (TILE / VECTOR) * VECTOR;
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
                slab.vector(lane / (TILE / VECTOR) + i * VECTORS, column) =
                    make_float4(number(i, 0), number(i, 1), number(i, 2), number(i, 3));
        }
    }

  private:
    // Loads a vector, or zeros if it is outside.
    __device__ void load_vector(int i, bool inside) {
        const Scalar* at = from + i * step;
        if constexpr (NARROW_SCALAR) {
            const uint2 found = inside ? *reinterpret_cast<const uint2*>(at) : uint2{};
            words[i][0] = found.x, words[i][1] = found.y;
        } else {
            const uint4 found = inside ? *reinterpret_cast<const uint4*>(at) : uint4{};
            words[i][0] = found.x, words[i][1] = found.y, words[i][2] = found.z, words[i][3] = found.w;
        }
    }

    // Loads the elements of a vector one by one.
    __device__ void load_numbers(int i) {
        const Scalar* at = from + i * step;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            const int r = row + (along ? i * (32 / VECTORS) : j), k = place + (along ? j : i * VECTORS);
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

// A lane's part of the sums of a tile, computed by fused multiply-adds, or by tensor cores.
struct FmaSums {
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

struct MmaSums {
    static constexpr int ROWS = TILE / 16, COLUMNS = TILE / 8;  // in units of the instruction
    float sum[ROWS][COLUMNS][4] = {};
    const Offsets offsets{1};

    __device__ void add(const Slab& a, const Slab& b) {
#pragma unroll
        for (int k = 0; k < SLAB; k += 8) {
            float of_a[ROWS][4], of_b[COLUMNS][2];
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) of_a[i][j] = a.numbers[offsets.at(k + j / 2 * 4, 16 * i + j % 2 * 8)];
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j) of_b[i][j] = b.numbers[offsets.at(k + j * 4, 8 * i)];
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
        tile += threadIdx.x % 32 / 4 * TILE + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                for (int k = 0; k < 4; k += 2)
                    *reinterpret_cast<float2*>(tile + (16 * i + 4 * k) * TILE + 8 * j) =
                        make_float2(sum[i][j][k], sum[i][j][k + 1]);
    }
};

template <bool> struct SumsOf { using type = FmaSums; };
template <> struct SumsOf<true> { using type = MmaSums; };

// Sums the float32 rows of b for the columns of a tile.
__device__ inline void add_rows(const Arguments& p, const Product& q, int column) {
    const Factor& factor = q.b[0];
    const int c = column + threadIdx.x % 32;
    const float* rows = reinterpret_cast<const float*>(p.tensors[factor.tensor]) + factor.begin;
    const float sum = sum_of_rows(rows + c, factor.along, q.summed[0], c < q.columns);
    if (threadIdx.x < 32 && c < q.columns) reinterpret_cast<Scalar*>(p.tensors[q.out])[q.begin + c] = Scalar(sum);
}

// A lane's column of a tile of the result, to which it writes sums with the bias added.
class Column {
    Scalar* first;
    float bias = 0;
    int rows, pitch;
    bool exists;

  public:
    __device__ Column(const Arguments& p, const Product& q, int row, int column)
        : rows(q.rows - row), pitch(q.columns) {
        column += threadIdx.x % 32;
        exists = column < q.columns;
        first = reinterpret_cast<Scalar*>(p.tensors[q.out]) + q.begin + (long long)row * pitch + column;
        if (exists && q.bias >= 0) bias = widen(reinterpret_cast<const Scalar*>(p.tensors[q.bias])[column]);
    }

    __device__ void write(int row, float sum) const {
        if (exists && row < rows) first[(long long)row * pitch] = Scalar(sum + bias);
    }
};

#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)

// Reads from the shared memory of another block of the cluster, where this block has `own`.
__device__ inline float of_block(int rank, const float& own) {
    float number;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(number) : "r"(shared_address(&own, rank)) : "memory");
    return number;
}
#else
#define IN_CLUSTERS
#endif

// The warps' partial sums of their tiles, in the shared memory of their slabs.
using Parts = float[WARPS][TILE * TILE];

// Adds up the partial sums of the warps that share a tile, a block's or a cluster's, and writes the result.
__device__ inline void write_shared(const Column& out, Parts& parts, bool clustered) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    for (int row = warp; row < TILE; row += WARPS) {
        float sum = 0;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) sum += parts[other][row * TILE + lane];
        if (clustered) parts[0][row * TILE + lane] = sum;
        else out.write(row, sum);
    }
#if CLUSTER > 1
    if (!clustered) return;
    sync_cluster();
    constexpr int ROWS = TILE / CLUSTER;  // of each block
    for (int row = blockIdx.x % CLUSTER * ROWS + warp, i = warp; i < ROWS; row += WARPS, i += WARPS) {
        float sum = 0;
#pragma unroll
        for (int rank = 0; rank < CLUSTER; ++rank) sum += of_block(rank, parts[0][row * TILE + lane]);
        out.write(row, sum);
    }
    sync_cluster();  // a block must not exit while others read its shared memory
#endif
}

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(32 * WARPS, BLOCKS)
products(const __grid_constant__ Arguments p) {
    __shared__ __align__(16) Slab slabs[WARPS][2];
    static_assert(sizeof(slabs) == sizeof(Parts), "a warp's part of a tile lies where its slabs were");
    const int warp = threadIdx.x / 32;
    int block = blockIdx.x, which = 0;
    while (block >= p.products[which].blocks) block -= p.products[which++].blocks;
    const Product& q = p.products[which];
    const int across = (q.columns + TILE - 1) / TILE, sharers = q.sharers;
    const int number = block * WARPS + warp, tile = number / sharers, stride = sharers * SLAB;
    const int row = tile / across * TILE, column = tile % across * TILE;
    if (row >= q.rows) return;
    if (q.a[0].tensor < 0) return add_rows(p, q, column);

    auto& [a, b] = slabs[warp];
    SumsOf<TENSOR_CORES>::type sums;
    const Offsets of_vectors(VECTOR);
    for (int pair = 0; pair < 2; ++pair) {
        const int begin = number % sharers * SLAB, summed = q.summed[pair];
        if (begin >= summed) continue;
        Slabs of_a(p, q.a[pair], row, q.rows, begin, summed, stride);
        Slabs of_b(p, q.b[pair], column, q.columns, begin, summed, stride);
        for (int k = begin; k < summed + stride; k += stride) {
            if (k > begin) {
                __syncwarp();
                of_a.store(a, of_vectors);
                of_b.store(b, of_vectors);
                __syncwarp();
            }
            if (k < summed) {  // these loads overlap the multiplication of the slab before
                of_a.load();
                of_b.load();
            }
            if (k > begin) sums.add(a, b);
        }
    }
    __syncwarp();
    Parts& parts = reinterpret_cast<Parts&>(slabs);
    sums.store(parts[warp]);
    const Column out(p, q, row, column);
    if (sharers > 1) return write_shared(out, parts, sharers > WARPS);
    __syncwarp();
    for (int r = 0; r < TILE; ++r) out.write(r, parts[warp][r * TILE + threadIdx.x % 32]);
}

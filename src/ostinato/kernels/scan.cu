// One scan kernel for every operation in elements.cuh.
//
// A block owns GROUP neighbouring channels of one sequence and cuts its time into tiles.  In a tile every thread
// takes ROWS consecutive steps of VEC channels; LANES lanes of a warp lie along the channels, so SEGMENTS = 32 / LANES
// pieces of time share a warp, and WARPS warps lie along time:
//
//     tile = WARPS x SEGMENTS x ROWS steps,   GROUP = LANES * VEC channels
//
// A thread composes its own steps into one, these compositions meet through shuffles (within a warp) and shared
// memory (between warps), and each thread then takes its steps again from the state they begin in.  Where the state
// comes from when a tile begins is the only difference between the two ways to cover time:
//
//   streaming (LOOK_BACK 0)  the block takes the tiles of its channels in order and keeps the state.  Best when there
//                            are channels enough to fill the chip: nothing is exchanged between blocks.
//   look-back (LOOK_BACK 1)  each block takes one tile and finds the state from what the blocks before it have
//                            published (single-pass scan with decoupled look-back, Merrill & Garland 2016).
//
// Look-back cannot deadlock, in whatever order blocks are scheduled: a block draws its tile from a counter, so when
// it holds tile k, every tile below k is held by a block that already runs; tile k waits only on tiles below k of
// the same channels; and the lowest tile not yet finished waits on none.  It gives the same bits every time: however
// far back it has to look, the state goes forward through the same chain of multiply-adds.
//
// Steps are numbered in the order they are scanned.  Those outside the sequence (ragged ends, shorter packed
// sequences) read as inputs that leave the state alone.

enum { DENSE, CU_SEQLENS, OFFSETS };

constexpr int SEGMENTS = 32 / LANES;
constexpr int THREADS = 32 * WARPS;
constexpr int GROUP = LANES * VEC;
constexpr int STRIP = SEGMENTS * ROWS;  // steps of a warp in a tile
constexpr int TILE = WARPS * STRIP;
constexpr int WINDOW = 64;  // tiles a look-back can cover at once

using Element = ELEMENT;
using Ring = Element::Ring;
using Step = Element::Step;
constexpr bool BACKWARD = Element::BACKWARD;
constexpr int PLAIN = Element::PLAIN, PREVIOUS = PLAIN, GRAD = PLAIN + 1;
constexpr int INPUTS = PLAIN + (BACKWARD ? 2 : 0), OUTPUTS = Element::OUTPUTS;

using Index = long long;

struct Tensor {
    Scalar* data;  // null: all zero
    Index batch, time, direction;  // strides; channels are neighbours
};

struct Parameters {
    Tensor input[5];   // the element's plain inputs, then h, read one step earlier in time, and grad
    Tensor output[3];
    const Scalar* initial;  // the state before the first step scanned, (directions * batch, channels), or null
    Scalar* final;          // the state after the last one, or null
    const Scalar* h0;       // backward: the state before the first step in time, or null
    const BIAS* bias;       // (directions * PLAIN * channels), or null
    Compute* grad_bias;     // one row for each block of a channel group, or null
    const int* bounds;      // cu_seqlens or offsets
    int* status;            // look-back: a counter, then what is known of each tile
    Compute* aggregate;     // look-back: a, then b, of each tile, GROUP channels each
    Compute* inclusive;     // look-back: the state after each tile
    int batch, steps, channels, sequences, directions, reverse;
};

struct alignas(sizeof(Compute) * VEC) Channels { Compute value[VEC]; };

// The composition of consecutive steps.
struct Composition {
    Channels a, b;
    bool reset;  // a packed sequence begins within: the state before does not matter

    __device__ static Composition none() {
        Composition c;
        c.reset = false;
#pragma unroll
        for (int v = 0; v < VEC; ++v) c.a.value[v] = Ring::one(), c.b.value[v] = Ring::zero();
        return c;
    }
    __device__ void carry(Channels& state) const {
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            const Compute carried = Ring::times_plus(a.value[v], state.value[v], b.value[v]);
            state.value[v] = PACKING == CU_SEQLENS && reset ? b.value[v] : carried;
        }
    }
    __device__ Composition after(const Composition& first) const {
        if (PACKING == CU_SEQLENS && reset) return *this;
        Composition both = first;
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            both.a.value[v] = Ring::times(a.value[v], first.a.value[v]);
            both.b.value[v] = Ring::times_plus(a.value[v], first.b.value[v], b.value[v]);
        }
        return both;
    }
    __device__ Composition from_lane_below(int lanes) const {
        Composition other;
        other.reset = PACKING == CU_SEQLENS && __shfl_up_sync(~0u, int(reset), lanes);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            other.a.value[v] = __shfl_up_sync(~0u, a.value[v], lanes);
            other.b.value[v] = __shfl_up_sync(~0u, b.value[v], lanes);
        }
        return other;
    }
};

// Where a thread works: which channels of which sequence, and in which direction time is scanned.
struct Place {
    const Parameters& p;
    int batch, direction, group, warp, lane, segment, channel;
    bool inside;      // this lane's channels exist
    bool descending;  // the scan goes from the last step in time to the first

    __device__ Place(const Parameters& p, int chain) : p(p) {
        const int groups = (p.channels + GROUP - 1) / GROUP;
        group = chain % groups;
        batch = chain / groups % p.batch;
        direction = chain / groups / p.batch;
        warp = threadIdx.x / 32, lane = threadIdx.x % 32, segment = lane / LANES;
        channel = group * GROUP + lane % LANES * VEC;
        inside = channel < p.channels;
        descending = (p.reverse != (direction == 1)) != BACKWARD;
    }
    __device__ int time(int i) const { return descending ? p.steps - 1 - i : i; }
    __device__ bool exists(int i) const {
        if (PACKING != OFFSETS) return i < p.steps;
        if (i >= p.steps) return false;
        const int t = time(i);
        return p.bounds[t] + batch < p.bounds[t + 1];
    }
    __device__ Scalar* sequence(const Tensor& x) const { return x.data + batch * x.batch + direction * x.direction; }
    __device__ Index state(int n) const {
        return Index(PACKING == CU_SEQLENS ? n : direction * p.batch + batch) * p.channels + channel;
    }
};

// This thread's rows of a tensor, from its first step in a tile on.
struct Rows {
    Scalar* first;
    Index stride;

    __device__ Rows(const Place& at, const Tensor& x, int i) {
        first = at.sequence(x) + at.channel;
        stride = x.time;
        if (PACKING == OFFSETS) return;
        first += at.time(i) * x.time;
        if (at.descending) stride = -stride;
    }
    __device__ Pack* operator()(const Place& at, int i, int u) const {
        return reinterpret_cast<Pack*>(first + (PACKING == OFFSETS ? at.p.bounds[at.time(i + u)] : u) * stride);
    }
};

// Narrow sequences lie in memory step after step without a gap.  A warp then moves its strip as one piece, whole
// lines at a time, and turns it in shared memory, where a skewed index keeps the lanes in different banks.
struct Strip {
    static constexpr int SIZE = 32 * ROWS;
    Scalar element[SIZE + SIZE / 32];

    static __device__ int skewed(int i) { return i + i / 32; }
    // Element `index + j` of the sequence is element j of the strip that begins at scanned step `i`.
    static __device__ Index start(const Place& at, int i) {
        return Index(at.descending ? at.p.steps - i - STRIP : i) * at.p.channels;
    }
    static __device__ int place(const Place& at, int u) {
        const int row = at.segment * ROWS + u;
        return skewed((at.descending ? STRIP - 1 - row : row) * at.p.channels + at.channel);
    }
    __device__ void load(const Place& at, const Tensor& x, int i) {
        const Scalar* const from = at.sequence(x);
        const Index index = start(at, i), end = Index(at.p.steps) * at.p.channels;
        __syncwarp();
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            const int j = at.lane + 32 * k;
            if (j < STRIP * at.p.channels && index + j >= 0 && index + j < end) element[skewed(j)] = from[index + j];
        }
        __syncwarp();
    }
    __device__ void store(const Place& at, const Tensor& x, int i) const {
        Scalar* const to = at.sequence(x);
        const Index index = start(at, i), end = Index(at.p.steps) * at.p.channels;
        __syncwarp();
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            const int j = at.lane + 32 * k;
            if (j < STRIP * at.p.channels && index + j >= 0 && index + j < end) to[index + j] = element[skewed(j)];
        }
        __syncwarp();
    }
};

struct Shared {
    static constexpr int BUFFERS = LOOK_BACK ? 1 : 2;  // streaming, one tile's may still be read when the next begins
    Channels a[BUFFERS][WARPS][LANES], b[BUFFERS][WARPS][LANES];
    int reset[BUFFERS][WARPS];
    int ticket, depth;
    Strip strip[STAGED ? WARPS : 1];
};

// The packed sequence that a step belongs to, followed from step to step.
struct Sequence {
    int n = 0;

    __device__ Sequence(const Place& at, int i) {
        if (PACKING != CU_SEQLENS) return;
        const int t = at.time(i);
        int high = at.p.sequences - 1;  // the last sequence that begins at or before t holds it
        while (n < high) {
            const int middle = (n + high + 1) / 2;
            if (at.p.bounds[middle] <= t) n = middle;
            else high = middle - 1;
        }
    }
    __device__ void follow(const Place& at, int i) {
        if (PACKING != CU_SEQLENS) return;
        const int t = at.time(i);
        if (at.descending) while (n > 0 && t < at.p.bounds[n]) --n;
        else while (n + 1 < at.p.sequences && t >= at.p.bounds[n + 1]) ++n;
    }
    // Whether the scan begins, or ends, a packed sequence at step i.
    __device__ bool begins(const Place& at, int i) const { return PACKING == CU_SEQLENS && meets(at, i, at.descending); }
    __device__ bool ends(const Place& at, int i) const { return PACKING == CU_SEQLENS && meets(at, i, !at.descending); }
    __device__ bool meets(const Place& at, int i, bool end) const {
        return at.time(i) == (end ? at.p.bounds[n + 1] - 1 : at.p.bounds[n]);
    }
};

__device__ inline Pack filled(Compute x) {
    Compute all[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) all[v] = x;
    return pack(all);
}

__device__ inline Pack load_pack(const Scalar* from) { return *reinterpret_cast<const Pack*>(from); }

__device__ inline void load_state(const Place& at, const Scalar* from, int n, Channels& state) {
    unpack(from && at.inside ? load_pack(from + at.state(n)) : filled(Ring::zero()), state.value);
}

__device__ inline void store_state(const Place& at, Scalar* to, int n, const Channels& state) {
    if (to && at.inside) *reinterpret_cast<Pack*>(to + at.state(n)) = pack(state.value);
}

// What a thread reads of a tile, still as it lies in memory.
struct Loaded {
    Pack x[ROWS][INPUTS];

    __device__ void fetch(const Place& at, Shared& shared, int i) {
        const Parameters& p = at.p;
#pragma unroll
        for (int k = 0; k < INPUTS; ++k) {
            const Pack neutral = filled(k < PLAIN ? Element::neutral(k) : 0);
            const int ahead = BACKWARD && k == PREVIOUS;  // backward, the step before in time is scanned after
            const bool present = at.inside && p.input[k].data;
            Strip& strip = shared.strip[STAGED ? at.warp : 0];
            if (STAGED && p.input[k].data) strip.load(at, p.input[k], i - at.segment * ROWS + ahead);
            const Rows rows(at, p.input[k], i + ahead);
#pragma unroll
            for (int u = 0; u < ROWS; ++u) {
                x[u][k] = neutral;
                if (present && at.exists(i + u + ahead))
                    x[u][k] = STAGED ? load_pack(&strip.element[Strip::place(at, u)]) : *rows(at, i + ahead, u);
            }
        }
        if constexpr (BACKWARD) {
            Sequence sequence(at, i);
#pragma unroll
            for (int u = 0; u < ROWS; ++u) {
                if (!at.inside || !at.exists(i + u)) continue;
                sequence.follow(at, i + u);
                if (at.exists(i + u + 1) && !sequence.ends(at, i + u)) continue;
                x[u][PREVIOUS] = p.h0 ? load_pack(p.h0 + at.state(sequence.n)) : filled(Element::absent_state());
            }
        }
    }
};

// The steps of one thread in a tile.
struct Steps {
    Step step[ROWS][VEC];

    __device__ void read(const Loaded& loaded, const Compute (&bias)[PLAIN][VEC]) {
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            Compute x[INPUTS][VEC];
#pragma unroll
            for (int k = 0; k < INPUTS; ++k) unpack(loaded.x[u][k], x[k]);
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                Compute plain[PLAIN];
#pragma unroll
                for (int k = 0; k < PLAIN; ++k) plain[k] = Element::BIASED ? x[k][v] + bias[k][v] : x[k][v];
                step[u][v] = Element::read(plain, x[BACKWARD ? PREVIOUS : 0][v], x[BACKWARD ? GRAD : 0][v]);
            }
        }
    }

    __device__ Composition compose(const Place& at, int i) const {
        Composition whole = Composition::none();
        Sequence sequence(at, i);
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (PACKING == CU_SEQLENS && at.exists(i + u)) {
                sequence.follow(at, i + u);
                if (sequence.begins(at, i + u)) {
                    load_state(at, at.p.initial, sequence.n, whole.b);
                    whole.reset = true;
                }
            }
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                Compute &a = whole.a.value[v], &b = whole.b.value[v];
                const Step& next = step[u][v];
                a = u == 0 ? next.a : Ring::times(next.a, a);
                b = u == 0 && PACKING != CU_SEQLENS ? next.offset() : Ring::times_plus(next.a, b, next.offset());
            }
        }
        return whole;
    }

    // Take the steps from `state`, writing the results; `sums` gathers the bias gradient.
    __device__ void apply(const Place& at, Shared& shared, int i, Channels& state, Compute (&sums)[OUTPUTS][VEC]) const {
        const Parameters& p = at.p;
        Sequence sequence(at, i);
        Pack results[ROWS][OUTPUTS];
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            const bool packed = PACKING == CU_SEQLENS && at.exists(i + u);
            if (packed) {
                sequence.follow(at, i + u);
                if (sequence.begins(at, i + u)) load_state(at, p.initial, sequence.n, state);
            }
            Compute out[OUTPUTS][VEC];
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                Compute result[OUTPUTS];
                state.value[v] = step[u][v].apply(state.value[v], result);
#pragma unroll
                for (int k = 0; k < OUTPUTS; ++k) {
                    out[k][v] = result[k];
                    if (BACKWARD && Element::BIASED) sums[k][v] += result[k];
                }
            }
            if (packed && sequence.ends(at, i + u)) store_state(at, p.final, sequence.n, state);
#pragma unroll
            for (int k = 0; k < OUTPUTS; ++k) results[u][k] = pack(out[k]);
        }
#pragma unroll
        for (int k = 0; k < OUTPUTS; ++k) {
            Strip& strip = shared.strip[STAGED ? at.warp : 0];
            const Rows rows(at, p.output[k], i);
#pragma unroll
            for (int u = 0; u < ROWS; ++u)
                if (at.inside && at.exists(i + u))
                    *(STAGED ? reinterpret_cast<Pack*>(&strip.element[Strip::place(at, u)]) : rows(at, i, u)) = results[u][k];
            if (STAGED) strip.store(at, p.output[k], i - at.segment * ROWS);
        }
    }
};

// What blocks tell each other of a tile.
enum { NOTHING, AGGREGATE, INCLUSIVE };

// Publish this tile and turn `state` into the state it begins in.  All threads of the block take part.
__device__ inline void look_back(
    const Place& at, Shared& shared, const Composition& tile, int chain, int chunk, int chunks, Channels& state
) {
    __shared__ Channels window_a[WINDOW][LANES], window_b[WINDOW][LANES];
    const int slot = at.lane % LANES;
    const Index first = Index(chain) * chunks;
    volatile int* const status = at.p.status + 1 + first;
    Channels* const aggregates = reinterpret_cast<Channels*>(at.p.aggregate) + first * 2 * LANES;
    Channels* const inclusives = reinterpret_cast<Channels*>(at.p.inclusive) + first * LANES;

    const auto publish = [&](int what) {  // after this warp has written it
        __threadfence();
        __syncwarp();
        if (at.lane == 0) status[chunk] = what;
    };
    const auto publish_inclusive = [&](Channels after) {
        tile.carry(after);
        if (at.lane < LANES) inclusives[chunk * LANES + slot] = after;
        publish(INCLUSIVE);
    };
    if (chunk == 0) {  // `state` is the initial one
        if (at.warp == 0) publish_inclusive(state);
        return;
    }
    if (at.warp == 0) {
        if (tile.reset) {
            publish_inclusive(state);  // whatever came before
        } else {
            if (at.lane < LANES) {
                aggregates[2 * chunk * LANES + slot] = tile.a;
                aggregates[(2 * chunk + 1) * LANES + slot] = tile.b;
            }
            publish(AGGREGATE);
        }
        // The nearest tile whose state is known, with every tile between it and this one at least aggregated.
        int depth = 0;
        while (true) {
            const int other = chunk - 1 - depth - at.lane;
            const int seen = other >= 0 ? status[other] : NOTHING;
            const unsigned known = __ballot_sync(~0u, seen == INCLUSIVE);
            const unsigned missing = __ballot_sync(~0u, seen == NOTHING);
            if (known && !(missing & ((known & -known) - 1))) {
                depth += __ffs(known) - 1;
                break;
            }
            // What is aggregated stays so: look further back, or again from the start for something nearer.
            depth = !known && !missing && depth + 64 <= WINDOW ? depth + 32 : 0;
        }
        __threadfence();
        if (at.lane == 0) shared.depth = depth;
    }
    __syncthreads();
    const int depth = shared.depth;
    for (int i = threadIdx.x; i < depth * LANES; i += THREADS) {
        const Channels* const aggregate = aggregates + 2 * (chunk - 1 - i / LANES) * LANES + i % LANES;
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            window_a[i / LANES][i % LANES].value[v] = __ldcg(&aggregate->value[v]);
            window_b[i / LANES][i % LANES].value[v] = __ldcg(&aggregate[LANES].value[v]);
        }
    }
#pragma unroll
    for (int v = 0; v < VEC; ++v)
        state.value[v] = __ldcg(&inclusives[(chunk - 1 - depth) * LANES + slot].value[v]);
    __syncthreads();
    for (int back = depth - 1; back >= 0; --back)
#pragma unroll
        for (int v = 0; v < VEC; ++v)
            state.value[v] =
                Ring::times_plus(window_a[back][slot].value[v], state.value[v], window_b[back][slot].value[v]);
    if (at.warp == 0 && !tile.reset) publish_inclusive(state);
}

// Add up the bias gradient over the block's segments, then warps, in order, into a row of its own.
__device__ inline void store_bias_gradient(const Place& at, int chunk, Compute (&sums)[OUTPUTS][VEC]) {
    __shared__ Compute partial[WARPS][OUTPUTS][GROUP];
#pragma unroll
    for (int k = 0; k < OUTPUTS; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
#pragma unroll
            for (int lanes = LANES; lanes < 32; lanes *= 2) sums[k][v] += __shfl_down_sync(~0u, sums[k][v], lanes);
            if (at.segment == 0) partial[at.warp][k][at.lane * VEC + v] = sums[k][v];
        }
    __syncthreads();
    const Parameters& p = at.p;
    const Index row = LOOK_BACK ? Index(chunk) * p.batch + at.batch : at.batch;
    for (int i = threadIdx.x; i < OUTPUTS * GROUP; i += THREADS) {
        const int k = i / GROUP, channel = at.group * GROUP + i % GROUP;
        if (channel >= p.channels) continue;
        Compute sum = 0;
        for (int warp = 0; warp < WARPS; ++warp) sum += partial[warp][k][i % GROUP];
        p.grad_bias[((row * p.directions + at.direction) * OUTPUTS + k) * p.channels + channel] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) scan(const __grid_constant__ Parameters p) {
    __shared__ Shared shared;
    const int chunks = (p.steps + TILE - 1) / TILE;
    int chain = blockIdx.x, chunk = 0, last = chunks - 1;
    if constexpr (LOOK_BACK) {
        const int chains = (p.channels + GROUP - 1) / GROUP * p.batch * p.directions;
        if (threadIdx.x == 0) shared.ticket = atomicAdd(p.status, 1);
        __syncthreads();
        chain = shared.ticket % chains, chunk = last = shared.ticket / chains;
    }
    const Place at(p, chain);
    const int slot = at.lane % LANES;

    Compute bias[PLAIN][VEC] = {}, sums[OUTPUTS][VEC] = {};
    if (Element::BIASED && p.bias && at.inside)
#pragma unroll
        for (int k = 0; k < PLAIN; ++k)
#pragma unroll
            for (int v = 0; v < VEC; ++v)
                bias[k][v] = widen(p.bias[(at.direction * PLAIN + k) * p.channels + at.channel + v]);

    Channels state;
    load_state(at, PACKING == CU_SEQLENS ? nullptr : p.initial, 0, state);

    int i = chunk * TILE + at.warp * STRIP + at.segment * ROWS;
    Loaded loaded;
    loaded.fetch(at, shared, i);
    for (int buffer = 0;; i += TILE, buffer ^= 1) {
        Steps steps;
        steps.read(loaded, bias);
        const bool more = !LOOK_BACK && chunk < last;
        if (more) loaded.fetch(at, shared, i + TILE);

        // `whole`: this warp's steps up to and with this segment; `before`: those of its earlier segments.
        Composition whole = steps.compose(at, i), before = Composition::none();
        if constexpr (SEGMENTS > 1) {
#pragma unroll
            for (int lanes = LANES; lanes < 32; lanes *= 2) {
                const Composition other = whole.from_lane_below(lanes);
                if (at.lane >= lanes) whole = whole.after(other);
            }
            const Composition other = whole.from_lane_below(LANES);
            if (at.segment > 0) before = other;
        }
        if (at.segment == SEGMENTS - 1) {
            shared.a[buffer][at.warp][slot] = whole.a;
            shared.b[buffer][at.warp][slot] = whole.b;
            if (PACKING == CU_SEQLENS) shared.reset[buffer][at.warp] = whole.reset;
        }
        __syncthreads();
        const auto of_warp = [&](int warp) -> Composition {
            return {shared.a[buffer][warp][slot], shared.b[buffer][warp][slot],
                    PACKING == CU_SEQLENS && shared.reset[buffer][warp]};
        };
        if constexpr (LOOK_BACK) {
            Composition tile = of_warp(0);
#pragma unroll
            for (int warp = 1; warp < WARPS; ++warp) tile = of_warp(warp).after(tile);
            look_back(at, shared, tile, chain, chunk, chunks, state);
        }
        Channels mine;  // the state that this thread's steps begin in; `state` goes on to the tile's end
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            if (warp == at.warp) mine = state;
            of_warp(warp).carry(state);
        }
        if (SEGMENTS > 1) before.carry(mine);
        steps.apply(at, shared, i, mine, sums);
        if (!more) break;
        ++chunk;
    }
    if (PACKING != CU_SEQLENS && chunk == chunks - 1 && at.warp == 0 && at.segment == 0)
        store_state(at, p.final, 0, state);
    if constexpr (BACKWARD && Element::BIASED)
        if (p.grad_bias) store_bias_gradient(at, chunk, sums);
}

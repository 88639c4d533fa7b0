// A non-linear recurrence: each thread runs one channel of one sequence, or one chunk of its time, step by step.
//
// A step is the Cell, generated from the trace of a function: `forward` computes the next states, `jacobian` their
// derivatives with respect to the previous ones, `backward` the gradients of the previous states, of the step's inputs
// and of the channel's parameters.  Only inputs and states are saved for backward.
//
// With enough channels to fill the GPU there is one chunk, the whole sequence.  Otherwise a channel's chunks run in
// parallel, each from a guess of its initial state (multiple shooting; Bock & Plitt 1984).  Each also computes the
// derivative of its last state with respect to its first (COMPOSE), and `link` improves all guesses by a Newton
// iteration, which is a linear recurrence over the chunks.  A channel has converged when no guess changes by more than
// rounding, and later passes skip it; one that has not after some passes is run as one chunk.
//
// Backward is linear, so one COMPOSE pass and one that stores are exact, unless a derivative overflows.  The gradient
// that leaves a chunk is the sum over its steps of their gradients, each times the derivative of the step's state with
// respect to that before the chunk.  So the COMPOSE pass runs forward in time, and stops where that derivative has
// VANISHED: most recurrences forget soon, and most of a chunk is not read.
//
// A warp's channels are adjacent, so loads are coalesced, and those of the next AHEAD steps are in flight while it
// computes the current ones: with few warps nothing else hides their latency.  With many warps instructions are the
// limit: tensors of a kind have the same strides and share offsets, whole groups of steps run without checks, and the
// first pass, whose states are only a guess, stores none.
//
// Steps are numbered in the forward's order; the backward pass that stores numbers steps, and all backward passes
// chunks, from the last one.

using Index = long long;
using Offset = OFFSET;  // of an element within its tensor: int, or Index for large tensors
constexpr int STATES = Cell::STATES, SEQUENCES = Cell::SEQUENCES, PARAMETERS = Cell::PARAMETERS;
constexpr int THREADS = 32;  // per block; RESIDENT blocks per multiprocessor
constexpr bool BACK = BACKWARD && !COMPOSE, GATHER = BACKWARD && COMPOSE;
constexpr Compute VANISHED = sizeof(Compute) == 4 ? 1e-10 : 1e-20;  // far below rounding errors
constexpr int JOINTS = 8;  // boundaries between chunks whose loads are in flight at once
constexpr int FLUSH = 64;  // steps over which parameter gradients are summed in Compute, before float64

template <int N> struct Tensors {  // (batch, time, channels) with the same strides, that of channels 1
    Scalar* data[N];  // null: all zero, or not needed
    Index batch, time;
};

struct Arguments {
    Tensors<SEQUENCES> x;
    Tensors<STATES> h;  // forward, null if not stored in this pass
    Tensors<BACKWARD ? STATES : 1> grad_h;
    Tensors<BACKWARD ? SEQUENCES : 1> grad_x;
    const Scalar* first[STATES];  // states before the first step, (sequences, channels), or null
    Scalar* last[STATES];         // forward: those after the last
    const Scalar* grad_last[BACKWARD ? STATES : 1];
    Scalar* grad_first[BACKWARD ? STATES : 1];  // or null
    const Compute* parameter[PARAMETERS ? PARAMETERS : 1];
    Compute* grad_parameters;  // (sequences, PARAMETERS, channels)
    const int* bounds;         // cu_seqlens, or null
    const unsigned char* resets;  // with RESETS, a byte for each step of each sequence
    Index resets_batch, resets_time;
    const Compute* start;   // states before each chunk but the first, (sequences, chunks, STATES, channels), or null: 0
    Compute* end;           // COMPOSE: last states of all chunks
    Compute* slope;         // COMPOSE: their derivatives, (sequences, chunks, STATES, STATES, channels)
    unsigned char* done;    // (sequences, channels), or null: run all
    int sequences, steps, channels, reverse, chunks, chunk;
    int chosen;  // run the channels whose `done` has this value
};

// The steps of one sequence.
struct Sequence {
    int batch, first, count, step;  // first: in scan order

    __device__ Sequence(const Arguments& p, int n) : batch(n), first(0), count(p.steps), step(p.reverse ? -1 : 1) {
        if (p.bounds) batch = 0, first = p.bounds[n], count = p.bounds[n + 1] - first;
        if (p.reverse) first += count - 1;
    }
};

// Offsets of a channel's steps, common to tensors with the same strides.
struct Row {
    Offset first, step;

    template <int N>
    __device__ Row(const Tensors<N>& x, const Sequence& sequence, int channel)
        : first(sequence.batch * x.batch + sequence.first * x.time + channel), step(sequence.step * x.time) {}
    __device__ Offset at(int i) const { return first + i * step; }
};

using Marks = PackType<AHEAD == 4 ? 4 : 2>::type;  // the bytes of AHEAD steps

// All bits of x, or none.  A predicate would be made as soon as a step's byte is loaded, for which all then waits.
__device__ inline float masked(float x, unsigned bits) { return __uint_as_float(__float_as_uint(x) & bits); }
__device__ inline double masked(double x, unsigned bits) {
    return __longlong_as_double(__double_as_longlong(x) & int(bits));
}

// The operands loaded for one step.
struct Inputs {
    Scalar x[SEQUENCES], before[BACKWARD ? STATES : 1], grad[BACKWARD ? STATES : 1];
};
// Those of AHEAD steps, and their bytes of the mask: RESETS 1, each for itself; 2: adjacent and aligned, all in one
// load.
struct Group {
    Inputs step[AHEAD];
    unsigned resets[RESETS == 2 ? 1 : AHEAD];

    // No bits if the state before a step is zero, else all.
    __device__ unsigned kept(int u) const {
        if (RESETS == 0) return ~0u;
        if (RESETS == 1) return int(resets[u]) - 1 >> 31;
        return __byte_perm(__vcmpeq4(resets[0], 0), 0, 0x1111 * (BACK ? AHEAD - 1 - u : u));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) steps(const __grid_constant__ Arguments p) {
    const int groups = (p.channels + THREADS - 1) / THREADS;
    const int channel = blockIdx.x % groups * THREADS + threadIdx.x, task = blockIdx.x / groups;
    const int n = task / p.chunks, chunk = task % p.chunks;
    if (channel >= p.channels) return;
    const Sequence sequence(p, n);
    const Index at = Index(n) * p.channels + channel;
    int from = chunk * p.chunk, to = min(sequence.count, from + p.chunk);
    if ((from >= sequence.count && chunk > 0) || (p.done && p.done[at] != p.chosen)) return;
    if constexpr (GATHER) {
        const int begin = sequence.count - to;
        to = sequence.count - from, from = begin;
    }
    const auto of_chunk = [&](int count, int k) { return (Index(task) * count + k) * p.channels + channel; };

    Compute parameter[PARAMETERS + 1];
    Scalar first[STATES];
#pragma unroll
    for (int k = 0; k < PARAMETERS; ++k) parameter[k] = p.parameter[k][channel];
#pragma unroll
    for (int k = 0; k < STATES; ++k) first[k] = p.first[k] ? p.first[k][at] : Scalar(0.0f);

    // The states, or the gradients of the previous step's states; and the derivatives by the chunk's initial states.
    Compute state[STATES], slope[STATES][STATES];
#pragma unroll
    for (int k = 0; k < STATES; ++k) {
        if (chunk > 0) state[k] = p.start ? p.start[of_chunk(STATES, k)] : Compute(0);
        else if constexpr (BACKWARD) state[k] = p.grad_last[k] ? widen(p.grad_last[k][at]) : Compute(0);
        else state[k] = widen(first[k]);
#pragma unroll
        for (int j = 0; j < STATES; ++j) slope[k][j] = j == k;
    }
    const Row x_row(p.x, sequence, channel), h_row(p.h, sequence, channel);
    const Row grad_row(p.grad_h, sequence, channel), result_row(p.grad_x, sequence, channel);
    const unsigned char* const resets = p.resets + sequence.batch * p.resets_batch + sequence.first * p.resets_time;

    // Gradients of the parameters: of the latest steps, and of all earlier ones in float64.
    Compute partial[PARAMETERS + 1] = {};
    __shared__ double sums[PARAMETERS + 1][THREADS];
#pragma unroll
    for (int k = 0; k < PARAMETERS; ++k) sums[k][threadIdx.x] = 0;
    const auto flush = [&] {
#pragma unroll
        for (int k = 0; k < PARAMETERS; ++k) sums[k][threadIdx.x] += partial[k], partial[k] = 0;
    };

    Compute gathered[STATES] = {};  // the gradient that leaves the chunk
    const auto gather = [&](Compute grad, int k) {  // grad: of state k after the last step
#pragma unroll
        for (int c = 0; c < STATES; ++c)
            if (slope[k][c] != 0) gathered[c] += slope[k][c] * grad;  // not 0 * infinity
    };
    const auto vanished = [&] {
        bool all = true;
#pragma unroll
        for (int k = 0; k < STATES; ++k)
#pragma unroll
            for (int c = 0; c < STATES; ++c) all &= slope[k][c] < VANISHED && slope[k][c] > -VANISHED;  // NaN has not
        return all;
    };

    // j counts steps in the order of this pass.
    const auto fetch = [&](Inputs& input, int j) {
        const int i = BACK ? sequence.count - 1 - j : j;
#pragma unroll
        for (int k = 0; k < SEQUENCES; ++k) input.x[k] = p.x.data[k][x_row.at(i)];
        if constexpr (BACKWARD) {
#pragma unroll
            for (int k = 0; k < STATES; ++k) {
                input.before[k] = first[k];
                if (i > 0) input.before[k] = p.h.data[k][h_row.at(i - 1)];
                if (p.grad_h.data[k]) input.grad[k] = p.grad_h.data[k][grad_row.at(i)];
            }
        }
    };
    const auto take = [&](const Inputs& input, unsigned kept, int j) {
        Compute x[SEQUENCES], before[STATES];
#pragma unroll
        for (int k = 0; k < SEQUENCES; ++k) x[k] = widen(input.x[k]);
#pragma unroll
        for (int k = 0; k < STATES; ++k) before[k] = masked(BACKWARD ? widen(input.before[k]) : state[k], kept);
        if constexpr (COMPOSE) {
            Compute jacobian[STATES * STATES], product[STATES][STATES];
            Cell::jacobian(before, x, parameter, jacobian);
#pragma unroll
            for (int k = 0; k < STATES; ++k)
#pragma unroll
                for (int c = 0; c < STATES; ++c) {
                    product[k][c] = 0;
#pragma unroll
                    for (int i = 0; i < STATES; ++i) product[k][c] += jacobian[k * STATES + i] * slope[i][c];
                }
#pragma unroll
            for (int k = 0; k < STATES; ++k)
#pragma unroll
                for (int c = 0; c < STATES; ++c) slope[k][c] = masked(product[k][c], kept);
        }
        if constexpr (BACK) {
            Compute grad[STATES], grad_x[SEQUENCES], grad_parameter[PARAMETERS + 1];
#pragma unroll
            for (int k = 0; k < STATES; ++k)
                grad[k] = p.grad_h.data[k] ? state[k] + widen(input.grad[k]) : state[k];
            Cell::backward(before, x, parameter, grad, state, grad_x, grad_parameter);
#pragma unroll
            for (int k = 0; k < STATES; ++k) state[k] = masked(state[k], kept);
#pragma unroll
            for (int k = 0; k < SEQUENCES; ++k)
                __stcs(p.grad_x.data[k] + result_row.at(sequence.count - 1 - j), Scalar(grad_x[k]));  // read much later
#pragma unroll
            for (int k = 0; k < PARAMETERS; ++k) partial[k] += grad_parameter[k];
        } else if constexpr (GATHER) {
#pragma unroll
            for (int k = 0; k < STATES; ++k)
                if (p.grad_h.data[k]) gather(widen(input.grad[k]), k);
        } else {
            Cell::forward(before, x, parameter, state);
#pragma unroll
            for (int k = 0; k < STATES; ++k)
                if (p.h.data[k]) p.h.data[k][h_row.at(j)] = Scalar(state[k]);
        }
    };

    const auto reset_of = [&](int j) -> const unsigned char& {
        return resets[(BACK ? sequence.count - 1 - j : j) * (sequence.step * p.resets_time)];
    };
    Group even, odd;
    const auto fetch_all = [&](Group& group, int begin) {
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            fetch(group.step[u], begin + u);
            if (RESETS == 1) group.resets[u] = reset_of(begin + u);
        }
        if constexpr (RESETS == 2)
            group.resets[0] = *reinterpret_cast<const Marks*>(&reset_of(BACK ? begin + AHEAD - 1 : begin));
    };
    const auto take_all = [&](const Group& group, int begin) {
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) take(group.step[u], group.kept(u), begin + u);
    };
    const int whole = from + (to - from) / (2 * AHEAD) * (2 * AHEAD);
    if (from < whole) fetch_all(even, from);
    for (int begin = from; begin < whole && !(GATHER && vanished()); begin += 2 * AHEAD) {
        fetch_all(odd, begin + AHEAD);
        take_all(even, begin);
        // In vain at the end, as a branch would part what is in flight.
        fetch_all(even, min(begin + 2 * AHEAD, whole - AHEAD));
        take_all(odd, begin + AHEAD);
        if ((begin - from) % FLUSH == 0) flush();
    }
#pragma unroll 1
    for (int j = whole; j < to && !(GATHER && vanished()); ++j) {
        fetch(even.step[0], j);
        take(even.step[0], RESETS ? int(reset_of(j)) - 1 >> 31 : ~0u, j);
    }
    flush();

    const bool last = to == sequence.count;
    if constexpr (COMPOSE) {
        const bool forgotten = GATHER && vanished();
#pragma unroll
        for (int k = 0; k < STATES; ++k) {
            if (GATHER && !forgotten) gather(state[k], k);
#pragma unroll
            for (int j = 0; j < STATES; ++j) {
                const Compute of_end = forgotten ? Compute(0) : GATHER ? slope[j][k] : slope[k][j];
                p.slope[of_chunk(STATES * STATES, k * STATES + j)] = of_end;
            }
        }
#pragma unroll
        for (int k = 0; k < STATES; ++k) p.end[of_chunk(STATES, k)] = GATHER ? gathered[k] : state[k];
    }
    if constexpr (!BACKWARD) {
#pragma unroll
        for (int k = 0; k < STATES; ++k)
            if (last) p.last[k][at] = Scalar(state[k]);
    } else if constexpr (!COMPOSE) {
#pragma unroll
        for (int k = 0; k < STATES; ++k)
            if (last && p.grad_first[k]) p.grad_first[k][at] = Scalar(state[k]);
#pragma unroll
        for (int k = 0; k < PARAMETERS; ++k) p.grad_parameters[of_chunk(PARAMETERS, k)] = Compute(sums[k][threadIdx.x]);
    }
}

struct Links {
    Compute* start;  // as in Arguments
    const Compute *end, *slope;
    unsigned char* done;
    const int* bounds;
    Compute tolerance;  // of a change, relative to max(|state|, 1); infinite where one link is exact, below 0 if
                        // no channel can have converged yet
    int sequences, steps, channels, chunks, chunk;
};

// A thread corrects the initial states of one channel's chunks, in order.
extern "C" __global__ void __launch_bounds__(THREADS) link(const __grid_constant__ Links p) {
    const int groups = (p.channels + THREADS - 1) / THREADS;
    const int n = blockIdx.x / groups, channel = blockIdx.x % groups * THREADS + threadIdx.x;
    if (channel >= p.channels) return;
    const Index at = Index(n) * p.channels + channel;
    if (p.done[at]) return;
    const int count = p.bounds ? p.bounds[n + 1] - p.bounds[n] : p.steps;
    const int joints = (count + p.chunk - 1) / p.chunk - 1;

    struct Joint { Compute end[STATES], slope[STATES * STATES], start[STATES]; } later[JOINTS], joint[JOINTS];
    const auto fetch = [&](int begin) {
#pragma unroll
        for (int u = 0; u < JOINTS; ++u) {
            const Index k = Index(n) * p.chunks + begin + u;
            if (begin + u >= joints) continue;
#pragma unroll
            for (int i = 0; i < STATES; ++i) {
                later[u].end[i] = p.end[(k * STATES + i) * p.channels + channel];
                later[u].start[i] = p.start[((k + 1) * STATES + i) * p.channels + channel];
            }
#pragma unroll
            for (int i = 0; i < STATES * STATES; ++i)
                later[u].slope[i] = p.slope[(k * STATES * STATES + i) * p.channels + channel];
        }
    };
    Compute change[STATES] = {};
    bool met = true;
    fetch(0);
    for (int begin = 0; begin < joints; begin += JOINTS) {
#pragma unroll
        for (int u = 0; u < JOINTS; ++u) joint[u] = later[u];
        fetch(begin + JOINTS);
#pragma unroll
        for (int u = 0; u < JOINTS; ++u) {
            if (begin + u >= joints) continue;
            Compute next[STATES];
#pragma unroll
            for (int i = 0; i < STATES; ++i) {
                next[i] = joint[u].end[i];
#pragma unroll
                for (int j = 0; j < STATES; ++j)
                    if (change[j] != 0) next[i] += joint[u].slope[i * STATES + j] * change[j];  // not 0 * infinity
            }
#pragma unroll
            for (int i = 0; i < STATES; ++i) {
                change[i] = next[i] - joint[u].start[i];
                const Compute size = next[i] < 0 ? -next[i] : next[i], by = change[i] < 0 ? -change[i] : change[i];
                met &= by <= p.tolerance * (size > 1 ? size : 1) && size < infinity();  // NaN is not
                p.start[((Index(n) * p.chunks + begin + u + 1) * STATES + i) * p.channels + channel] = next[i];
            }
        }
    }
    if (met && p.tolerance >= 0) p.done[at] = 1;
}

// The steps of one thread in a tile: read, composed, and taken from the state they begin in.

// Before which of a thread's steps the state is reset.  The lanes of a segment have the same steps: each loads some, long
// before their use, as a load waits behind the copies, and they tell each other.
struct Resets {
    static constexpr int TILES = CHAINED || LANES < ROWS ? 1 : LANES / ROWS;  // loaded at once
    static constexpr int WORDS = RESETS ? (TILES * ROWS + LANES - 1) / LANES : 1;
    unsigned word[WORDS] = {};

    __device__ void load(const Place& at, int chunk) {
        if (!RESETS) return;
#pragma unroll
        for (int k = 0; k < WORDS; ++k) {
            const int v = k * LANES + at.lane % LANES, i = at.first(chunk + v / ROWS) + v % ROWS;
            word[k] = 0;
            if (v >= TILES * ROWS || !at.exists(i)) continue;
            const Index row = PACKING == OFFSETS ? at.p.bounds[at.time(i)] : at.time(i);
            const Index sequence = at.batch * at.p.resets_batch + at.direction * at.p.resets_direction;
            word[k] = at.p.resets[sequence + row * at.p.resets_time];
        }
    }
    __device__ void share() {
        if (!RESETS) return;
#pragma unroll
        for (int k = 0; k < WORDS; ++k)
            word[k] = __ballot_sync(~0u, word[k]) >> threadIdx.x % 32 / LANES * LANES;
    }
    __device__ Resets of(int chunk) const {
        Resets tile = *this;
        if (TILES > 1) tile.word[0] >>= chunk % TILES * ROWS;
        return tile;
    }
    __device__ bool operator[](int u) const { return RESETS && word[u / LANES] >> u % LANES & 1; }
};

using OfChannels = Element::Channel[VEC];  // what the parameters make of a thread's channels
using Sums = Compute[OF_CHANNEL][VEC];     // of the gradients of the parameters

// The steps of one thread in a tile.  Chained blocks keep two tiles' for long, as they are in memory if little need be
// computed of them: 16-bit ones take half of the registers so.
struct Steps {
    static constexpr bool RAW = CHAINED && Element::RAW;
    Step step[RAW ? 1 : ROWS][VEC];
    Bits raw[RAW ? ROWS : 1][INPUTS];
    Resets resets;
    unsigned begins, ends;  // CU_SEQLENS: bits of the steps with which sequences do
    bool bounded;           // whether any does with a step of the warp

    static __device__ void make(const Bits (&bits)[INPUTS], const OfChannels& of_channels, Step (&row)[VEC]) {
        Compute x[INPUTS][VEC];
#pragma unroll
        for (int k = 0; k < INPUTS; ++k) unpack(bits[k], x[k]);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            Compute plain[PLAIN];
#pragma unroll
            for (int k = 0; k < PLAIN; ++k) plain[k] = x[k][v];
            row[v] = Element::read(plain, of_channels[v], x[BACKWARD ? PREVIOUS : 0][v], x[BACKWARD ? GRAD : 0][v]);
        }
    }
    __device__ void get(int u, Step (&row)[VEC]) const {
        if constexpr (RAW) {
            const OfChannels nothing = {};
            make(raw[u], nothing, row);
        } else {
#pragma unroll
            for (int v = 0; v < VEC; ++v) row[v] = step[u][v];
        }
    }

    // The sequence that begins, or ends, with the thread's step u, or -1.
    template <bool CHECKED>
    __device__ int beginning(const Place& at, const Shared& shared, int buffer, int u) const {
        return CHECKED && PACKING == CU_SEQLENS && begins >> u & 1 ? shared.begins[buffer].sequence[at.first(0) + u] : -1;
    }
    template <bool CHECKED>
    __device__ int ending(const Place& at, const Shared& shared, int buffer, int u) const {
        return CHECKED && PACKING == CU_SEQLENS && ends >> u & 1 ? shared.ends[buffer].sequence[at.first(0) + u] : -1;
    }
    __device__ void look_for_bounds(const Place& at, const Shared& shared, int buffer) {
        bounded = false;
        if (PACKING != CU_SEQLENS) return;
        constexpr unsigned OWN = ROWS < 32 ? (1u << ROWS % 32) - 1 : ~0u;
        begins = shared.begins[buffer].of(at.first(0)) & OWN, ends = shared.ends[buffer].of(at.first(0)) & OWN;
        bounded = __any_sync(~0u, begins | ends);
    }

    template <bool CHECKED>
    static __device__ void fetch(const Place& at, const Memory& memory, Strip (&strips)[INPUTS], int chunk) {
#pragma unroll
        for (int k = 0; k < INPUTS; ++k)  // backward, the step before in time is the one scanned after
            if (at.p.has_input(k))
                strips[k].fetch<CHECKED>(at, at.p.input(k), memory.input[k], chunk, BACKWARD && k == PREVIOUS);
    }

    template <bool CHECKED>
    __device__ void read(
        const Place& at, const Shared& shared, int stage, int buffer, int chunk, const OfChannels& of_channels
    ) {
        const Parameters& p = at.p;
        const Strip (&strips)[INPUTS] = shared.input[stage][at.warp];
        const int i = at.first(chunk);
        int shift[INPUTS];
#pragma unroll
        for (int k = 0; k < INPUTS; ++k) shift[k] = Strip::shift(at, p.input(k), chunk, BACKWARD && k == PREVIOUS);
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            Bits bits[INPUTS];
#pragma unroll
            for (int k = 0; k < INPUTS; ++k)
                bits[k] = p.has_input(k) ? strips[k].element[Strip::place(at, u, shift[k])] : filled(0);
            const bool exists = !CHECKED || (at.inside && at.exists(i + u));
            if (CHECKED && exists && BACKWARD) {
                const int n = ending<CHECKED>(at, shared, buffer, u);
                if (!at.exists(i + u + 1) || n >= 0)
                    bits[INPUTS - 2] = p.h0 && at.inside ? load_pack(p.h0 + at.state(n)) : filled(Element::absent_state());
            }
            if (BACKWARD && resets[u]) bits[INPUTS - 2] = filled(Element::absent_state());
            if constexpr (RAW) {  // a step that does not exist leaves the state alone
#pragma unroll
                for (int k = 0; k < INPUTS; ++k)
                    raw[u][k] = exists ? bits[k] : filled(k == 0 ? Ring::one() : Ring::zero());
            } else {
                make(bits, of_channels, step[u]);
#pragma unroll
                for (int v = 0; v < VEC; ++v)
                    if (!exists) step[u][v] = Step::none();
            }
        }
    }

    __device__ Composition compose(const Place& at, const Shared& shared, int buffer) const {
        Composition whole = Composition::none();
        int from = 0;
        if (PACKING == CU_SEQLENS && begins) {  // what is before the last sequence that begins does not matter
            from = 31 - __clz(begins);
            load_state(at, at.p.initial, beginning<true>(at, shared, buffer, from), whole.b);
            whole.reset = true;
        }
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (u < from) continue;
            if (!BACKWARD && resets[u]) whole.forget();
            Step row[VEC];
            get(u, row);
#pragma unroll
            for (int v = 0; v < VEC; ++v) whole.append(v, row[v]);
            if (BACKWARD && resets[u]) whole.forget();
        }
        whole.settle();
        return whole;
    }

    // Take the steps from `state`, writing the results; `sums` gathers the gradients of the parameters.
    template <bool CHECKED>
    __device__ void apply(
        const Place& at, const Memory& memory, Shared& shared, int buffer, int chunk, Channels& state, Sums& sums
    ) const {
        const Parameters& p = at.p;
        const int i = at.first(chunk);
        Bits results[ROWS][OUTPUTS];
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (const int n = beginning<CHECKED>(at, shared, buffer, u); n >= 0) load_state(at, p.initial, n, state);
            Compute out[OUTPUTS][VEC];
            Step row[VEC];
            get(u, row);
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                Compute result[FACTORS];
                if (!BACKWARD && resets[u]) state.value[v] = Ring::zero();
                state.value[v] = row[v].apply(state.value[v], result);
                if (BACKWARD && resets[u]) state.value[v] = Ring::zero();
#pragma unroll
                for (int k = 0; k < OUTPUTS; ++k) out[k][v] = result[Element::output_factor(k)];
#pragma unroll
                for (int k = 0; k < (SUMS ? PARAMETERS : 0); ++k) sums[k][v] += result[Element::parameter_factor(k)];
            }
            if (const int n = ending<CHECKED>(at, shared, buffer, u); n >= 0) store_state(at, p.final, n, state);
#pragma unroll
            for (int k = 0; k < OUTPUTS; ++k) results[u][k] = pack(out[k]);
        }
#pragma unroll
        for (int k = 0; k < OUTPUTS; ++k) {
            Strip& strip = shared.output[NARROW ? at.warp : 0];
            const int shift = Strip::shift(at, p.output(k), chunk, 0);
#pragma unroll
            for (int u = 0; u < ROWS; ++u)
                if (at.inside && (!CHECKED || at.exists(i + u))) {
                    if constexpr (NARROW) strip.element[Strip::place(at, u, shift)] = results[u][k];
                    else *memory.output[k](at, chunk, u) = results[u][k];
                }
            if constexpr (NARROW) strip.store<CHECKED>(at, p.output(k), chunk);
        }
    }
};

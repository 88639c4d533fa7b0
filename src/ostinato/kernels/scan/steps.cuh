// The steps of one thread in a tile: read, reduced to a composition, and replayed from their initial state.

// The steps before which the state is reset.  A warp's lanes load the mask of its steps long before use, since loads
// queue behind the copies, and make bits of it: of few steps a lane loads single bytes, of many an aligned piece of 16.
struct Resets {
    static constexpr bool FEW = STRIP <= 64;
    static constexpr int TILES = STRIP <= 32 && !CHAINED ? 32 / STRIP : 1;  // loaded at once
    static_assert(!RESETS || STRIP + 15 <= 16 * 32);
    unsigned word[STRIP <= 32 ? 1 : FEW ? 2 : 4] = {};  // bytes; after share(), bits

    __device__ void load(const Place& at, int chunk) {
        if constexpr (RESETS && FEW) {
            const int i = (chunk + at.lane / STRIP) * TILE + at.warp * STRIP + at.lane % STRIP;
            word[0] = at.lane < TILES * STRIP && at.exists(i) ? byte(at, at.time(i)) : 0;
            if constexpr (STRIP > 32) word[1] = at.lane < STRIP - 32 && at.exists(i + 32) ? byte(at, at.time(i + 32)) : 0;
        } else if constexpr (RESETS) {
            const int t = start(at, chunk) - shift(at, chunk) + 16 * at.lane, steps = at.p.steps;
            const bool wide = PACKING != OFFSETS && at.p.resets_time == 1;
            if (wide && t >= 0 && t + 16 <= steps) {
                const uint4 piece = *reinterpret_cast<const uint4*>(mask(at) + t);
                word[0] = piece.x, word[1] = piece.y, word[2] = piece.z, word[3] = piece.w;
                return;
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                word[k] = 0;
#pragma unroll 1
                for (int j = 0; j < 4; ++j) {
                    const int i = at.time(t + 4 * k + j);
                    if (i >= 0 && at.exists(i)) word[k] |= byte(at, t + 4 * k + j) << 8 * j;
                }
            }
        }
    }
    __device__ void share() {
        if constexpr (RESETS && FEW) {
            word[0] = __ballot_sync(~0u, word[0]);
            if constexpr (STRIP > 32) word[1] = __ballot_sync(~0u, word[1]);
        } else if constexpr (RESETS) {
            unsigned bits[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const unsigned nonzero = ((word[k] & 0x7f7f7f7f) + 0x7f7f7f7f | word[k]) >> 7 & 0x01010101;
                bits[k] = __dp4a(nonzero, k % 2 ? 0x80402010u : 0x08040201u, k % 2 ? bits[k - 1] : 0u);
            }
            word[0] = bits[1] | bits[3] << 8;
        }
    }
    // A bit for each of a thread's steps.
    __device__ unsigned of(const Place& at, int chunk) const {
        if constexpr (!RESETS) return 0;
        else if constexpr (STRIP <= 32) return word[0] >> chunk % TILES * STRIP + at.segment * ROWS & OF_ROWS;
        else if constexpr (FEW) {
            const auto bits = static_cast<unsigned long long>(word[1]) << 32 | word[0];
            return unsigned(bits >> at.segment * ROWS) & OF_ROWS;
        } else {
            const int first = shift(at, chunk) + (at.descending ? STRIP - (at.segment + 1) * ROWS : at.segment * ROWS);
            const auto from = [&](int lane) { return __shfl_sync(~0u, word[0], lane); };
            const unsigned low = from(first / 16) | from(first / 16 + 1) << 16;
            const unsigned bits = ROWS > 17 ? __funnelshift_r(low, from(first / 16 + 2), first % 16) : low >> first % 16;
            return (at.descending ? __brev(bits) >> 32 - ROWS : bits) & OF_ROWS;
        }
    }

  private:
    static __device__ const unsigned char* mask(const Place& at) {
        return at.p.resets + at.batch * at.p.resets_batch + at.direction * at.p.resets_direction;
    }
    static __device__ unsigned byte(const Place& at, int t) {
        return mask(at)[(PACKING == OFFSETS ? at.p.bounds[t] : t) * at.p.resets_time];
    }
    // The first of the warp's steps in time, and its offset in an aligned piece.
    static __device__ int start(const Place& at, int chunk) {
        const int i = chunk * TILE + at.warp * STRIP;
        return at.descending ? at.p.steps - i - STRIP : i;
    }
    static __device__ int shift(const Place& at, int chunk) {
        return int(reinterpret_cast<unsigned long long>(mask(at)) + start(at, chunk)) & (at.p.resets_time == 1 ? 15 : 0);
    }
};

using OfChannels = Element::Channel[VEC];  // computed from the parameters of a thread's channels
using Sums = Compute[OF_CHANNEL][VEC];     // of the gradients of the parameters

// The steps of one thread in a tile.  Chained blocks hold two tiles' in registers; if `read` is cheap they are kept as
// loaded (RAW), which halves the registers of 16-bit types.
struct Steps {
    static constexpr bool RAW = CHAINED && Element::RAW;
    Step step[RAW ? 1 : ROWS][VEC];
    Bits raw[RAW ? ROWS : 1][INPUTS];
    unsigned resets;        // bits of the steps before which, in the forward's order, the state is reset
    unsigned begins, ends;  // CU_SEQLENS: bits of the first and last steps of sequences
    bool bounded;           // whether the warp's steps have any, of a short strip also whether any is reset

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

    // A short strip seldom has a reset: the warp then takes a path without tests for them.
    static constexpr bool SELDOM_RESET = RESETS && STRIP <= 32;
    template <bool CHECKED = true> __device__ bool is_reset(int u) const {
        return RESETS && (CHECKED || !SELDOM_RESET) && resets >> u & 1;
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
        bounded = SELDOM_RESET && __any_sync(~0u, resets);
        if (PACKING != CU_SEQLENS) return;
        begins = shared.begins[buffer].of(at.first(0)) & OF_ROWS, ends = shared.ends[buffer].of(at.first(0)) & OF_ROWS;
        bounded |= __any_sync(~0u, begins | ends) != 0;
    }

    template <bool CHECKED>
    static __device__ void fetch(const Place& at, const Memory& memory, Strip (&strips)[INPUTS], int chunk) {
#pragma unroll
        for (int k = 0; k < INPUTS; ++k)  // backward, h[t-1] belongs to the next step in scan order
            if (at.p.has_input(k))
                strips[k].fetch<CHECKED>(at, at.p.input(k), memory.input[k], chunk, BACKWARD && k == PREVIOUS);
    }

    // Backward: write h0 as h[t-1] of a sequence's first step in time, and the zero state as that of a reset step.
    __device__ void put_states_before(
        const Place& at, const Shared& shared, int buffer, int chunk, Strip& strip, int shift
    ) const {
        const Parameters& p = at.p;
        const unsigned last = p.steps - 1 - at.first(chunk);
        const unsigned first = PACKING == CU_SEQLENS ? ends : last < ROWS ? 1u << last : 0;  // in time
        for (unsigned left = at.inside ? first | resets : 0; left; left &= left - 1) {
            const int u = __ffs(left) - 1;
            const int n = PACKING == CU_SEQLENS && !is_reset(u) ? shared.ends[buffer].sequence[at.first(0) + u] : 0;
            strip.element[Strip::place(at, u, shift)] =
                p.h0 && !is_reset(u) ? load_pack(p.h0 + at.state(n)) : filled(Element::absent_state());
        }
    }

    // Steps that do not exist come first only with OFFSETS, and act as the identity; elsewhere they come last, where
    // what is read does not matter.
    __device__ void read(const Place& at, Shared& shared, int stage, int buffer, int chunk, const OfChannels& of_channels) {
        constexpr bool CHECKED = PACKING == OFFSETS;
        const Parameters& p = at.p;
        Strip (&strips)[INPUTS] = shared.input[stage][at.warp];
        const int i = at.first(chunk);
        int shift[INPUTS];
#pragma unroll
        for (int k = 0; k < INPUTS; ++k) shift[k] = Strip::shift(at, p.input(k), chunk, BACKWARD && k == PREVIOUS);
        if constexpr (BACKWARD && !CHECKED)
            put_states_before(at, shared, buffer, chunk, strips[PREVIOUS], shift[PREVIOUS]);
        if (NARROW && BACKWARD) __syncwarp();  // a lane without a channel reads another lane's elements
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            Bits bits[INPUTS];
#pragma unroll
            for (int k = 0; k < INPUTS; ++k)
                bits[k] = p.has_input(k) ? strips[k].element[Strip::place(at, u, shift[k])] : filled(0);
            const bool exists = !CHECKED || (at.inside && at.exists(i + u));
            if (CHECKED && BACKWARD && exists && (is_reset(u) || !at.exists(i + u + 1)))
                bits[PREVIOUS] = p.h0 && !is_reset(u) ? load_pack(p.h0 + at.state(0)) : filled(Element::absent_state());
            if constexpr (RAW) {
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
        const auto append_from = [&](int from) {
#pragma unroll
            for (int u = 0; u < ROWS; ++u) {
                if (u < from) continue;
                Step row[VEC];
                get(u, row);
#pragma unroll
                for (int v = 0; v < VEC; ++v) whole.append(v, row[v]);
            }
            whole.settle();
            return whole;
        };
        if (SELDOM_RESET && !bounded) return append_from(0);
        int from = 0;  // steps before the last sequence start or reset do not matter
        if (PACKING == CU_SEQLENS && begins) {
            from = 31 - __clz(begins);
            load_state(at, at.p.initial, beginning<true>(at, shared, buffer, from), whole.b);
            whole.reset = true;
        }
        if (const int after = 32 - __clz(resets); RESETS && after > from) {
            from = after - !BACKWARD;
            whole.forget();
        }
        return append_from(from);
    }

    // Replay the steps from `state` and write the results; `sums` accumulates the gradients of the parameters.
    template <bool CHECKED>
    __device__ void apply(
        const Place& at, const Memory& memory, Shared& shared, int buffer, int chunk, Channels& state, Sums& sums
    ) const {
        const Parameters& p = at.p;
        const int i = at.first(chunk);
        Bits results[ROWS][OUTPUTS];
        Channels last;  // the state after the last step that exists
        bool any = false;
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (const int n = beginning<CHECKED>(at, shared, buffer, u); n >= 0) load_state(at, p.initial, n, state);
            const bool exists = !CHECKED || at.exists(i + u);
            Compute out[OUTPUTS][VEC];
            Step row[VEC];
            get(u, row);
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                Compute result[FACTORS];
                if (!BACKWARD && is_reset<CHECKED>(u)) state.value[v] = Ring::zero();
                state.value[v] = row[v].apply(state.value[v], result);
                if (BACKWARD && is_reset<CHECKED>(u)) state.value[v] = Ring::zero();
#pragma unroll
                for (int k = 0; k < OUTPUTS; ++k) out[k][v] = result[Element::output_factor(k)];
#pragma unroll
                for (int k = 0; k < (SUMS ? PARAMETERS : 0); ++k) sums[k][v] += exists ? result[Element::parameter_factor(k)] : 0;
            }
            if (CHECKED && exists) last = state, any = true;
            if (const int n = ending<CHECKED>(at, shared, buffer, u); n >= 0) store_state(at, p.final, n, state);
#pragma unroll
            for (int k = 0; k < OUTPUTS; ++k) results[u][k] = pack(out[k]);
        }
        if (CHECKED && PACKING != CU_SEQLENS && any && !at.exists(i + ROWS)) store_state(at, p.final, 0, last);
#pragma unroll
        for (int k = 0; k < OUTPUTS; ++k) {
            Strip& strip = shared.output[NARROW ? at.warp : 0];
            const int shift = Strip::shift(at, p.output(k), chunk, 0);
            const Rows& rows = memory.output[k];
            char* const tile = rows.tile(chunk);
#pragma unroll
            for (int u = 0; u < ROWS; ++u)
                if (at.inside && (!CHECKED || at.exists(i + u))) {
                    if constexpr (NARROW) strip.element[Strip::place(at, u, shift)] = results[u][k];
                    else *rows.row(at, chunk, tile, u) = results[u][k];
                }
            if constexpr (NARROW) strip.store<CHECKED>(at, p.output(k), chunk);
        }
    }
};

// The steps of one thread in a tile: they are read, reduced to a composition, and replayed from their initial state.

using OfChannels = Element::Channel[VEC];  // what Element::prepare computes from the parameters of a thread's channels
using Sums = Compute[OF_CHANNEL][VEC];     // partial sums of the parameters' gradients

__device__ inline void copy(const Sums& from, Sums& to) {
#pragma unroll
    for (int k = 0; k < OF_CHANNEL; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v) to[k][v] = from[k][v];
}

// Makes one step of a thread's channels from its inputs.
__device__ inline void make_row(const Bits (&bits)[INPUTS], const OfChannels& of_channels, Step (&row)[VEC]) {
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

// The steps of one thread in a tile.  Chained blocks hold those of two tiles in registers.  If `read` is cheap, steps
// are kept as they were loaded (AS_LOADED), which halves the registers for 16-bit types.
struct Steps {
    static constexpr bool AS_LOADED = (CHAINED || CLUSTER > 1) && Element::RAW;
    static_assert(!STAYS || Element::RAW);
    Step step[AS_LOADED ? 1 : ROWS][VEC];
    // Two 16-bit inputs share a register where a thread has more inputs than registers.
    static constexpr bool MANY = NARROW && !LOOKS_BACK && ROWS * INPUTS > 40;
    static constexpr int IN_WORD = AS_LOADED && MANY && sizeof(Pack) == 2 ? 2 : 1;
    Bits raw[AS_LOADED && !STAYS ? ROWS : 1][(INPUTS + IN_WORD - 1) / IN_WORD];
    unsigned kept[KEPT_ROWS ? KEPT_ROWS : 1];  // both inputs of a row
    int shift[INPUTS];      // of the strips
    unsigned resets;        // bits of the steps before which, in the order of the forward pass, the state is reset
    unsigned begins, ends;  // CU_SEQLENS: bits of the first and last steps of sequences
    bool lost = false;      // ZEROES: whether the steps must be scanned again
    // Whether a sequence begins or ends in the warp's steps; with SELDOM_RESET, unless FOLDED, also if one is reset.
    bool bounded;

    __device__ void keep(int u, const Bits (&bits)[INPUTS]) {
#pragma unroll
        for (int k = 0; k < INPUTS; ++k)
            if (k % IN_WORD) raw[u][k / IN_WORD] = __byte_perm(bits[k - 1], bits[k], 0x5410);
            else raw[u][k / IN_WORD] = bits[k];
    }
    // STAYS: the input whose place in shared memory an output takes.
    static __device__ constexpr int replaced(int output) { return output < PLAIN ? output : GRAD; }
    __device__ void get(const Place& at, const Shared& shared, int u, Step (&row)[VEC]) const {
        const OfChannels nothing = {};
        if constexpr (STAYS) {
            Bits bits[INPUTS];
#pragma unroll
            for (int k = 0; k < INPUTS; ++k)
                if (u < KEPT_ROWS) bits[k] = kept[u] >> 16 * k & 0xffff;
                else bits[k] = at.p.has_input(k) ? shared.input[0][at.warp][k].element[Strip::place(at, u, shift[k])]
                                                 : filled(0);
            make_row(bits, nothing, row);
        } else if constexpr (AS_LOADED) {
            Bits bits[INPUTS];
#pragma unroll
            for (int k = 0; k < INPUTS; ++k) bits[k] = raw[u][k / IN_WORD] >> 16 * (k % IN_WORD);
            make_row(bits, nothing, row);
        } else {
#pragma unroll
            for (int v = 0; v < VEC; ++v) row[v] = step[u][v];
        }
    }

    // A short strip seldom has a reset: without one, the warp takes a path without tests, unless registers are too few
    // for two paths.  Packed sequences have two paths already, for the ends of sequences, and use them for resets only
    // if FOLDED.
    static constexpr bool TWO_PATHS = LOOKS_BACK ? !(AS_LOADED && BACKWARD && NARROW_SCALAR) : !CHAINED;
    static constexpr bool TESTS = RESETS && !ZEROES;
    static constexpr bool FOLDS_PACKED = LOOKS_BACK && Element::RAW && NARROW_SCALAR;
    static constexpr bool SELDOM_RESET = TESTS && STRIP <= 32 && (PACKING == CU_SEQLENS ? FOLDS_PACKED : TWO_PATHS);
    // With look-back, the steps of a generated operation, or of packed sequences in 16 bits, get a coefficient of zero
    // where they are reset: that forgets every finite state, and a warp takes the path with tests only if a state is
    // not finite.
    static constexpr bool FOLDED = SELDOM_RESET && LOOKS_BACK && (PACKING == CU_SEQLENS || !Element::RAW);
    template <bool TESTED = true> __device__ bool is_reset(int u) const { return TESTS && TESTED && resets >> u & 1; }
    // Whether a coefficient of zero has not reset this state, or may not have.
    __device__ bool remembers(const Channels& state) const {
        bool finite = true;
#pragma unroll
        for (int v = 0; v < VEC; ++v) finite &= absolute(state.value[v]) < infinity();
        return resets && !finite;
    }
    // The sequence that begins, or ends, with the thread's step u, or -1.
    template <bool CHECKED>
    __device__ int beginning(const Place& at, const Shared& shared, int buffer, int u) const {
        return CHECKED && PACKING == CU_SEQLENS && begins >> u & 1 ? shared.begins[buffer].sequence[at.first(0) + u]
                                                                   : -1;
    }
    template <bool CHECKED>
    __device__ int ending(const Place& at, const Shared& shared, int buffer, int u) const {
        return CHECKED && PACKING == CU_SEQLENS && ends >> u & 1 ? shared.ends[buffer].sequence[at.first(0) + u] : -1;
    }
    __device__ void look_for_bounds(const Place& at, const Shared& shared, int buffer) {
        bounded = SELDOM_RESET && !FOLDED && __any_sync(~0u, resets);
        if (PACKING != CU_SEQLENS) return;
        begins = shared.begins[buffer].of(at.first(0)) & OF_ROWS, ends = shared.ends[buffer].of(at.first(0)) & OF_ROWS;
        bounded |= __any_sync(~0u, begins | ends) != 0;
    }

    // Whether the zero state before a step with a reset is written to shared memory, rather than selected at every
    // step.  A warp of many segments would write several, one after the other.
    static constexpr bool PUTS_RESETS = RESETS && (STAYS || SELDOM_RESET || LANES >= (ZEROES ? 32 : 4));

    // Backward, for some rows: write h0 as the h[t-1] of a sequence's first step in time, and the zero state as the
    // h[t-1] of a step with a reset, unless `read` selects it.
    __device__ void put_states_before(
        const Place& at, const Shared& shared, int buffer, int chunk, Strip& strip, int shift, unsigned rows = OF_ROWS
    ) const {
        const Parameters& p = at.p;
        const unsigned last = p.steps - 1 - at.first(chunk);
        const unsigned first = PACKING == CU_SEQLENS ? ends : last < ROWS ? 1u << last : 0;  // in time
        for (unsigned left = at.inside ? (first | (PUTS_RESETS ? resets : 0)) & rows : 0; left; left &= left - 1) {
            const int u = __ffs(left) - 1;
            const int n = PACKING == CU_SEQLENS && !is_reset(u) ? shared.ends[buffer].sequence[at.first(0) + u] : 0;
            const bool reset = resets >> u & PUTS_RESETS;
            strip.put(
                Strip::place(at, u, shift, PREVIOUS),
                p.h0 && !reset ? load_pack(at, p.h0 + at.state(n)) : filled(Element::absent_state())
            );
            if (MAPPED) fence_async_proxy();
        }
    }

    // ZEROES: whether a coefficient of zero met a state that was not finite, which made that state and all later ones
    // NaN.  Tests the product of coefficients, too: otherwise it would be computed after the states, apart from them.
    __device__ bool is_lost(const Place& at, const Channels& state, const Channels& product) const {
        bool numbers = true;
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            const Compute x = state.value[v], y = product.value[v];
            numbers &= x < y || x >= y || !at.has(v);
        }
        return ZEROES && resets && at.inside && (lost || !numbers);
    }
    // If so, a thread clears all steps before its last reset, and composes again; `rescan` computes its results.
    __device__ void forget() {
        const int kept = 32 - __clz(resets) - !BACKWARD;
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (u >= kept) continue;
            Bits nothing[INPUTS];
#pragma unroll
            for (int k = 0; k < INPUTS; ++k) nothing[k] = filled(Ring::zero());
            keep(u, nothing);
        }
        lost = true;
    }
    // Read the steps of a tile.  Only with OFFSETS may steps that do not exist come first, where they must act as the
    // identity; otherwise they come last, where what is read does not matter.
    __device__ void read(
        const Place& at, const Memory& memory, Shared& shared, int stage, int buffer, int chunk,
        const OfChannels& of_channels
    ) {
        constexpr bool CHECKED = PACKING == OFFSETS;
        const Parameters& p = at.p;
        Strip (&strips)[INPUTS] = shared.input[stage][at.warp];
        const int i = at.first(chunk);
#pragma unroll
        for (int k = 0; k < INPUTS; ++k) {
            const int ahead = BACKWARD && k == PREVIOUS;
            shift[k] = Strip::shift(at, p.input(k), memory.input[k], chunk, ahead);
        }
        if (STAYS) return;
        if constexpr (BACKWARD && !CHECKED)
            put_states_before(at, shared, buffer, chunk, strips[PREVIOUS], shift[PREVIOUS]);
        if (NARROW && BACKWARD) sync_abreast();  // a lane without a channel reads another lane's elements
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            Bits bits[INPUTS];
#pragma unroll
            for (int k = 0; k < INPUTS; ++k)
                bits[k] = p.has_input(k) ? strips[k].get(Strip::place(at, u, shift[k], k)) : filled(0);
            const bool exists = !CHECKED || (at.inside && at.exists(i + u));
            if (CHECKED && BACKWARD && exists && (is_reset(u) || !at.exists(i + u + 1)))
                bits[PREVIOUS] =
                    p.h0 && !is_reset(u) ? load_pack(at, p.h0 + at.state(0)) : filled(Element::absent_state());
            if (RESETS && BACKWARD && !PUTS_RESETS && resets >> u & 1)
                bits[PREVIOUS] = filled(Element::absent_state());
            if (ZEROES && resets >> u & 1) bits[0] = filled(Ring::zero());
            if constexpr (AS_LOADED && !STAYS) {
#pragma unroll
                for (int k = 0; k < INPUTS; ++k)
                    bits[k] = exists ? bits[k] : filled(k == 0 ? Ring::one() : Ring::zero());
                keep(u, bits);
            } else if constexpr (!AS_LOADED) {
                make_row(bits, of_channels, step[u]);
#pragma unroll
                for (int v = 0; v < VEC; ++v)
                    if (!exists) step[u][v] = Step::none();
            }
        }
        if constexpr (FOLDED) {
            if (!__any_sync(~0u, resets)) return;
#pragma unroll
            for (int u = 0; u < ROWS; ++u)
                if constexpr (AS_LOADED) {
                    if (is_reset(u)) raw[u][0] = filled(Ring::zero());
                } else {
#pragma unroll
                    for (int v = 0; v < VEC; ++v)
                        if (is_reset(u)) step[u][v].a = Ring::zero();
                }
        }
    }

    // Append the steps of part N and later ones to `whole`, beginning with step `from`; with STAYS, as they arrive.  If
    // TESTED, a step with a reset loses the state before it.
    template <bool TESTED, int N = 0>
    __device__ Composition append(const Place& at, Shared& shared, int chunk, int from, Composition whole) {
        if constexpr (STAYS) {
            wait_for_copies<PARTS - 1 - N>();
            sync_abreast();
            constexpr unsigned OF_PART = (OF_ROWS >> ROWS - PART) << N * PART;
            if constexpr (BACKWARD)
                put_states_before(at, shared, 0, chunk, shared.input[0][at.warp][PREVIOUS], shift[PREVIOUS], OF_PART);
        }
        if (!STAYS || at.inside)  // other lanes would read elements that these write
#pragma unroll
            for (int u = N * PART; u < (N + 1) * PART; ++u) {
                if (u < KEPT_ROWS) {
                    kept[u] = 0;
#pragma unroll
                    for (int k = 0; k < INPUTS; ++k)
                        kept[u] |= unsigned(shared.input[0][at.warp][k].element[Strip::place(at, u, shift[k])])
                                   << 16 * k;
                }
                if ((STAYS || PACKING == CU_SEQLENS) && u < from) continue;
                Step row[VEC];
                get(at, shared, u, row);
#pragma unroll
                for (int v = 0; v < VEC; ++v) {
                    if (!BACKWARD && is_reset<TESTED && !STAYS>(u)) whole.b.value[v] = Ring::zero();
                    whole.append(v, row[v]);
                    if (BACKWARD && is_reset<TESTED && !STAYS>(u)) whole.b.value[v] = Ring::zero();
                }
            }
        if constexpr (N + 1 < PARTS) return append<TESTED, N + 1>(at, shared, chunk, from, whole);
        whole.settle();
        return whole;
    }

    __device__ Composition compose(const Place& at, Shared& shared, int buffer, int chunk) {
        Composition whole = Composition::none();
        int from = 0;  // steps before the last start of a sequence, or with STAYS before the last reset, do not matter
        if (PACKING == CU_SEQLENS && begins) {
            from = 31 - __clz(begins);
            load_state(at, at.p.initial, beginning<true>(at, shared, buffer, from), whole.b);
            whole.reset = true;
        }
        if (FOLDED) {
            Composition folded = append<false>(at, shared, chunk, from, whole);
            folded.reset |= resets != 0;
            if (!remembers(folded.b)) return folded;
        } else if constexpr (ZEROES) {
#pragma unroll 1
            for (bool again = false;; again = true) {
                whole = append<false>(at, shared, chunk, 0, Composition::none());
                whole.reset = resets;
                if (again || !is_lost(at, whole.b, whole.a)) return whole;
                forget();
            }
        } else if (SELDOM_RESET ? !bounded : STAYS && !resets) {
            return append<false>(at, shared, chunk, 0, whole);
        }
        if (RESETS && resets) {
            whole.reset = true;  // `a` does not matter then
            if (STAYS) from = 32 - __clz(resets) - !BACKWARD;
        }
        return append<true>(at, shared, chunk, from, whole);
    }

    // Replay the steps from `state` and write the results; `sums` accumulates the gradients of the parameters.  Returns
    // false, having done nothing, if that must be CHECKED.
    template <bool CHECKED>
    __device__ bool apply(
        const Place& at, const Memory& memory, Shared& shared, int buffer, int chunk, int part, Channels& state,
        Sums& sums
    ) const {
        const Parameters& p = at.p;
        const int i = at.first(chunk);
        Bits results[STAYS ? 1 : ROWS][OUTPUTS];
        Channels last;  // the state after the last step that exists
        const Channels before = state;
        Sums sums_before;
        copy(sums, sums_before);
        bool any = false;
#pragma unroll
        for (int row_of_part = 0; row_of_part < PART; ++row_of_part) {
            if (STAYS && !at.inside) break;
            const int u = part * PART + row_of_part;
            if (const int n = beginning<CHECKED>(at, shared, buffer, u); n >= 0) load_state(at, p.initial, n, state);
            const bool exists = !CHECKED || at.exists(i + u);
            Compute out[OUTPUTS][VEC];
            Step row[VEC];
            get(at, shared, u, row);
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                Compute result[FACTORS];
                if (!BACKWARD && is_reset<CHECKED || !SELDOM_RESET>(u)) state.value[v] = Ring::zero();
                state.value[v] = row[v].apply(state.value[v], result);
                if (BACKWARD && is_reset<CHECKED || !SELDOM_RESET>(u)) state.value[v] = Ring::zero();
#pragma unroll
                for (int k = 0; k < OUTPUTS; ++k) out[k][v] = result[Element::output_factor(k)];
#pragma unroll
                for (int k = 0; k < (SUMS ? PARAMETERS : 0); ++k)
                    sums[k][v] += exists ? result[Element::parameter_factor(k)] : 0;
            }
            if (CHECKED && exists) last = state, any = true;
            if (const int n = ending<CHECKED>(at, shared, buffer, u); n >= 0) store_state(at, p.final, n, state);
#pragma unroll
            for (int k = 0; k < OUTPUTS; ++k) {
                if constexpr (STAYS) {
                    Strip& strip = shared.input[0][at.warp][replaced(k)];
                    if (exists) strip.element[Strip::place(at, u, shift[replaced(k)])] = pack(out[k]);
                } else {
                    results[u][k] = pack(out[k]);
                }
            }
        }
        if (FOLDED && !CHECKED && __any_sync(~0u, remembers(state))) {
            state = before;
            copy(sums_before, sums);
            return false;
        }
        const int end = i + (part + 1) * PART;
        if (PACKING != CU_SEQLENS && !JOINED && (CHECKED ? any && !at.exists(end) : end == p.steps))
            store_state(at, p.final, 0, CHECKED ? last : state);
#pragma unroll
        for (int k = 0; k < OUTPUTS; ++k) {
            if constexpr (STAYS) {
                const int j = replaced(k);
                shared.input[0][at.warp][j].store<CHECKED>(at, p.output(k), memory.output[k], chunk, part, shift[j]);
                continue;
            }
            Strip& strip = shared.output[NARROW ? at.warp : 0];
            const Rows& rows = memory.output[k];
            const int shift = Strip::shift(at, p.output(k), rows, chunk, 0);
            char* const tile = rows.tile(chunk);
#pragma unroll
            for (int u = 0; u < ROWS; ++u)
                if (at.inside && (NARROW || !CHECKED || at.exists(i + u))) {  // Strip::store itself stores what exists
                    if constexpr (NARROW) strip.element[Strip::place(at, u, shift)] = results[u][k];
                    else store_pack(at, rows.row(at, chunk, tile, u), results[u][k]);
                }
            if constexpr (JOINED && !BACKWARD) {  // last states are read back, as registers cannot be indexed
                for (unsigned left = at.inside ? sequence_starts(at, chunk, 1) : 0; left; left &= left - 1) {
                    const int u = __ffs(left) - 1;
                    const Pack last = Pack(strip.get(Strip::place(at, u, shift)));
                    store_pack(at, p.final + at.state(at.time(i + u) / p.period), last);
                }
            }
            if constexpr (NARROW) strip.store<CHECKED>(at, p.output(k), rows, chunk, part, shift);
        }
        return true;
    }
};

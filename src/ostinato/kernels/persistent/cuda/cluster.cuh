// Reduction over the blocks of a cluster, through distributed shared memory (split-K).
//
// Each block multiplies one slice of the gates' gradients with the rows of all units of the cluster.  The partial sum
// of a row goes to the mailbox of the block that owns the row, in a 64-bit word that carries the number of the step as
// its flag, so no word is ever cleared.  Mailboxes are double-buffered by the step's parity.  Overwriting a slot two
// steps later is safe: by then the writer has read values computed from the slot's content.
//
// If the cluster is a whole group (DISTRIBUTED), a block's slice is what it has computed itself, and only the sums are
// exchanged; see scatter.cuh.  Otherwise the slice comes from all blocks of the group, and a block does not send the
// sums of its own units.

struct Mailbox {
    static constexpr int SHARE = UNITS * COLUMNS;  // words from each sender, in each of two buffers
    static constexpr int SENDERS = DISTRIBUTED ? CLUSTER : CLUSTER - 1;
    static constexpr int WORDS = 2 * SENDERS * SHARE;

    Word* slots;
    int rank;

    __device__ Mailbox(int block, uint4* shared)
        : slots(reinterpret_cast<Word*>(shared) + own_turn() * WORDS), rank(block % CLUSTER) {
        if constexpr (SENDERS > 0) {
            for (int i = own_thread(); i < WORDS; i += OWNERS) slots[i] = 0;
            sync_if_clustered();
        }
    }

    // The address at even steps, in a peer's mailbox, of this block's sum of an item; with DISTRIBUTED the peer may be
    // the block itself.
    __device__ size_t address(int peer, int item) const {
        const int from = DISTRIBUTED ? rank : (rank - peer + CLUSTER) % CLUSTER - 1;
        size_t remote;
        asm("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(slots + from * SHARE + item), "r"(unsigned(peer)));
        return remote;
    }

    // Stores adjacent sums, if `wanted`, to an address from address().
    __device__ static void send(bool wanted, size_t address, const Adjacent<float>& sum, int step) {
        Word word[ADJACENT];
#pragma unroll
        for (int j = 0; j < ADJACENT; ++j) word[j] = Word(unsigned(step + 1)) << 32 | __float_as_uint(sum.x[j]);
        const size_t slot = address + step % 2 * unsigned(SENDERS * SHARE * sizeof(Word));
        if (ADJACENT == 2)
            asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.relaxed.cluster.v2.b64 [%1], {%2, %3}; }"
                         :: "r"(unsigned(wanted)), "l"(slot), "l"(word[0]), "l"(word[ADJACENT - 1]) : "memory");
        else
            asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.relaxed.cluster.b64 [%1], %2; }"
                         :: "r"(unsigned(wanted)), "l"(slot), "l"(word[0]) : "memory");
    }

    // Loads adjacent words again unless they carry the step's flag, and returns whether they did not.
    __device__ static bool poll(Word* word, unsigned address, unsigned flag) {
        const bool wanted = high(word[0]) != flag || high(word[ADJACENT - 1]) != flag;
        if (ADJACENT == 2)
            asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0;"
                         " @p ld.relaxed.cluster.shared::cta.v2.b64 {%0, %1}, [%3]; }"
                         : "+l"(word[0]), "+l"(word[ADJACENT - 1]) : "r"(unsigned(wanted)), "r"(address) : "memory");
        else
            asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; @p ld.relaxed.cluster.shared::cta.b64 %0, [%2]; }"
                         : "+l"(word[0]) : "r"(unsigned(wanted)), "r"(address) : "memory");
        return wanted;
    }

    // Adds the sums that others have sent for this thread's items; garbage if the wait times out.
    __device__ void add(Adjacent<float> (&sum)[ITEMS / ADJACENT], const Block& own, int step, Timeout& timeout) const {
        if (SENDERS == 0) return;
        constexpr int LOADS = ITEMS / ADJACENT;
        const unsigned flag = step + 1;
        unsigned mine[LOADS];  // addresses in shared memory
        Word words[LOADS][SENDERS + 1][ADJACENT];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            mine[i] = __cvta_generic_to_shared(slots + step % 2 * SENDERS * SHARE + own.item(i * ADJACENT));
            asm volatile("" : "+r"(mine[i]));  // else the compiler would compute each word's address at every poll
#pragma unroll
            for (int from = 0; from < SENDERS; ++from) {
#pragma unroll
                for (Word& word : words[i][from]) word = own.owned(i * ADJACENT) ? 0 : Word(flag) << 32;
            }
        }
        timeout.restart();
        bool waiting;
        do {
            waiting = false;
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
#pragma unroll
                for (int from = 0; from < SENDERS; ++from)
                    waiting |= poll(words[i][from], mine[i] + from * unsigned(SHARE * sizeof(Word)), flag);
            }
        } while (waiting && timeout.may_poll());
        __syncwarp();
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            Adjacent<float> x[SENDERS + 1] = {};
#pragma unroll
            for (int from = 0; from < SENDERS; ++from) {
#pragma unroll
                for (int j = 0; j < ADJACENT; ++j) x[from].x[j] = __uint_as_float(low(words[i][from][j]));
            }
#pragma unroll
            for (int apart = 1; apart < SENDERS; apart *= 2) {
#pragma unroll
                for (int k = 0; k + apart < SENDERS; k += 2 * apart) x[k] = x[k] + x[k + apart];
            }
            sum[i] = sum[i] + x[0];
        }
    }
};

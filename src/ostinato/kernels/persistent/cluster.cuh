// Reduction over the blocks of a cluster, through distributed shared memory (split-K).
//
// Each block multiplies one slice of the exchanged vector with the rows of all units of the cluster.  The partial sum
// of a row that another block owns goes to that block's mailbox in one 64-bit word with the step's number as its flag.
// Mailboxes are double-buffered by the step's parity.  Overwriting a slot two steps later is safe: by then the writer
// has read values computed from the slot's content.

struct Cluster {
    static constexpr int SHARE = UNITS * COLUMNS, MAIL = 2 * (CLUSTER - 1) * SHARE;  // words
    static constexpr int SENDS = ((CLUSTER - 1) * SHARE + THREADS * ADJACENT - 1) / (THREADS * ADJACENT);

    Word *mailbox;
    int rank;
    Span spans[SENDS + 1] = {};  // no array is empty

    __device__ Cluster(const Parameters &p, const Product &product, int block, uint4 *shared)
        : mailbox(reinterpret_cast<Word *>(shared)), rank(block % CLUSTER) {
        if constexpr (CLUSTER > 1) {
            for (int i = threadIdx.x; i < MAIL; i += THREADS) mailbox[i] = 0;
#pragma unroll
            for (int i = 0; i < SENDS; ++i)
                if (sends(i)) spans[i] = product.span(p, block, row(i));
            meet();
        }
    }

    __device__ static int number(int i) { return (i * THREADS + threadIdx.x) * ADJACENT; }
    __device__ static bool sends(int i) { return number(i) < (CLUSTER - 1) * SHARE; }
    __device__ int peer(int i) const { return (rank + 1 + number(i) / SHARE) % CLUSTER; }
    __device__ int row(int i) const { return peer(i) * UNITS + number(i) % SHARE % UNITS; }

    __device__ void send(const Product &product, const float *sums, int sequences, int step) {
        Few<float> sum[SENDS + 1];
#pragma unroll
        for (int i = 0; i < SENDS; ++i) sum[i] = product.sum(sums, spans[i], row(i), number(i) % SHARE / UNITS);
#pragma unroll
        for (int i = 0; i < SENDS; ++i) {
            const int item = number(i) % SHARE, sequence = item / UNITS;
            if (!sends(i) || sequence >= sequences) continue;
            const int from = CLUSTER - 2 - number(i) / SHARE;  // distance from the peer to this block, less one
            const Word *slot = mailbox + (step % 2 * (CLUSTER - 1) + from) * SHARE + item;
            unsigned address;
            asm("mapa.shared::cluster.u32 %0, %1, %2;"
                : "=r"(address) : "r"(unsigned(__cvta_generic_to_shared(slot))), "r"(unsigned(peer(i))));
            Word word[ADJACENT];
#pragma unroll
            for (int j = 0; j < ADJACENT; ++j) word[j] = Word(unsigned(step + 1)) << 32 | __float_as_uint(sum[i].x[j]);
            if (ADJACENT == 2)
                asm volatile("st.relaxed.cluster.shared::cluster.v2.b64 [%0], {%1, %2};"
                             :: "r"(address), "l"(word[0]), "l"(word[ADJACENT - 1]) : "memory");
            else
                asm volatile("st.relaxed.cluster.shared::cluster.b64 [%0], %1;"
                             :: "r"(address), "l"(word[0]) : "memory");
        }
    }

    // The sums of the other blocks' partial sums of adjacent items; garbage if the wait timed out.
    __device__ Few<float> receive(int item, int step, Patience &patience) const {
        Few<float> total = {};
#pragma unroll
        for (int from = 0; from < CLUSTER - 1; ++from) {
            const Word *slot = mailbox + (step % 2 * (CLUSTER - 1) + from) * SHARE + item;
            const unsigned address = __cvta_generic_to_shared(slot);
            Word word[ADJACENT];
            const auto lacks = [&](int j) { return high(word[j]) != unsigned(step + 1); };
            patience.renew();
            do {
                if (ADJACENT == 2)
                    asm volatile("ld.relaxed.cluster.shared::cta.v2.b64 {%0, %1}, [%2];"
                                 : "=l"(word[0]), "=l"(word[ADJACENT - 1]) : "r"(address) : "memory");
                else
                    asm volatile("ld.relaxed.cluster.shared::cta.b64 %0, [%1];"
                                 : "=l"(word[0]) : "r"(address) : "memory");
            } while ((lacks(0) || lacks(ADJACENT - 1)) && patience.lasts());
#pragma unroll
            for (int j = 0; j < ADJACENT; ++j) total.x[j] += __uint_as_float(low(word[j]));
        }
        return total;
    }
};

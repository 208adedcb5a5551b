/* Many slots in one call: read or copied and proved, sealed and written, while they are in the core's cache.
 *
 * Owns: XXH3-64 (seed 0, default secret) of inputs of more than 240 bytes, and preadv and pwritev with it. Must not
 * know: the format of a header (it is told by a template, and where the numbers stand that differ from slot to slot),
 * Python, or what an error is good for. It allocates nothing, keeps nothing, and any thread may call it.
 *
 * Written from the specification of the algorithm, "xxHash fast digest algorithm", version 0.2.0 (XXH3,
 * doc/xxhash_spec.md of the project xxHash); numbers and steps have its names. `xkv_store.native` proves it against
 * python-xxhash whenever it loads it.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "written for little-endian machines; without this library Python does the same"
#endif

#define STRIPE_BYTES 64
#define STRIPES_PER_BLOCK 16
#define BLOCK_BYTES (STRIPE_BYTES * STRIPES_PER_BLOCK)
#define LANES 8
#define SECRET_BYTES 192
#define SECRET_STEP 8            /* from one stripe of a block to the next */
#define SECRET_OF_SCRAMBLE (SECRET_BYTES - STRIPE_BYTES)
#define SECRET_OF_LAST_STRIPE (SECRET_OF_SCRAMBLE - 7)
#define SECRET_OF_MERGE 11
#define INPUT_BYTES_MIN 241      /* shorter inputs have other ways, which are Python's to go */

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87u
#define PRIME64_2 0xC2B2AE3D27D4EB4Fu
#define PRIME64_3 0x165667B19E3779F9u
#define PRIME64_4 0x85EBCA77C2B2AE63u
#define PRIME64_5 0x27D4EB2F165667C5u
#define PRIME_MX1 0x165667919E3779F9u

#define EXPORTED __attribute__((visibility("default")))

#ifndef XKV_SOURCE
#define XKV_SOURCE "unknown"
#endif
EXPORTED const char xkv_source[] = "xkv source " XKV_SOURCE; /* by which native/build.py knows what it was made from */

static const uint8_t secret[SECRET_BYTES] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static const uint64_t first_lanes[LANES] = {
    PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1,
};

static inline uint64_t read64(const void *from) {
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* --- one stripe, one block: as the specification writes them, and for wider registers ----------------------------- */

static inline void accumulate(uint64_t *lanes, const uint8_t *stripe, const uint8_t *key) {
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t input = read64(stripe + 8 * lane), keyed = input ^ read64(key + 8 * lane);
        lanes[lane ^ 1] += input;
        lanes[lane] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
    }
}

#if !defined(__x86_64__)

static void blocks_plain(uint64_t *lanes, const uint8_t *input, size_t blocks) {
    for (; blocks; blocks--, input += BLOCK_BYTES) {
        for (int stripe = 0; stripe < STRIPES_PER_BLOCK; stripe++)
            accumulate(lanes, input + STRIPE_BYTES * stripe, secret + SECRET_STEP * stripe);
        for (int lane = 0; lane < LANES; lane++) {
            uint64_t value = lanes[lane];
            lanes[lane] = (value ^ value >> 47 ^ read64(secret + SECRET_OF_SCRAMBLE + 8 * lane)) * PRIME32_1;
        }
    }
}

#define add_blocks blocks_plain

#else

/* The same for registers of 16, 32 and 64 bytes. A product of two low halves is one instruction; the scramble's, of 64
 * bits by 32, is two of them. Unrolled, or with prefetches, it was slower. */
#define BLOCKS(NAME, TARGET, REGISTER, LOAD, STORE, XOR, MUL, ADD, SHIFT_RIGHT, SHIFT_LEFT, SWAP, SET)                 \
    __attribute__((target(TARGET))) static void NAME(uint64_t *lanes, const uint8_t *input, size_t blocks) {           \
        enum { REGISTERS = STRIPE_BYTES / sizeof(REGISTER) };                                                          \
        const REGISTER prime = SET((int)PRIME32_1);                                                                    \
        REGISTER sums[REGISTERS];                                                                                      \
        for (int part = 0; part < REGISTERS; part++)                                                                   \
            sums[part] = LOAD((const void *)((const REGISTER *)lanes + part));                                         \
        for (; blocks; blocks--, input += BLOCK_BYTES) {                                                               \
            for (int stripe = 0; stripe < STRIPES_PER_BLOCK; stripe++) {                                               \
                const uint8_t *at = input + STRIPE_BYTES * stripe, *key = secret + SECRET_STEP * stripe;               \
                for (int part = 0; part < REGISTERS; part++) {                                                         \
                    REGISTER data = LOAD((const void *)(at + sizeof(REGISTER) * part));                                \
                    REGISTER keyed = XOR(data, LOAD((const void *)(key + sizeof(REGISTER) * part)));                   \
                    REGISTER product = MUL(keyed, SHIFT_RIGHT(keyed, 32));                                             \
                    sums[part] = ADD(sums[part], ADD(SWAP(data, 0x4E), product));                                      \
                }                                                                                                      \
            }                                                                                                          \
            for (int part = 0; part < REGISTERS; part++) {                                                             \
                const uint8_t *key = secret + SECRET_OF_SCRAMBLE + sizeof(REGISTER) * part;                            \
                REGISTER value = XOR(sums[part], SHIFT_RIGHT(sums[part], 47));                                         \
                value = XOR(value, LOAD((const void *)key));                                                           \
                REGISTER high = SHIFT_LEFT(MUL(SHIFT_RIGHT(value, 32), prime), 32);                                    \
                sums[part] = ADD(MUL(value, prime), high);                                                             \
            }                                                                                                          \
        }                                                                                                              \
        for (int part = 0; part < REGISTERS; part++)                                                                   \
            STORE((void *)((REGISTER *)lanes + part), sums[part]);                                                     \
    }

BLOCKS(blocks_sse2, "sse2", __m128i, _mm_loadu_si128, _mm_storeu_si128, _mm_xor_si128, _mm_mul_epu32, _mm_add_epi64,
       _mm_srli_epi64, _mm_slli_epi64, _mm_shuffle_epi32, _mm_set1_epi32)
BLOCKS(blocks_avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_xor_si256, _mm256_mul_epu32,
       _mm256_add_epi64, _mm256_srli_epi64, _mm256_slli_epi64, _mm256_shuffle_epi32, _mm256_set1_epi32)
BLOCKS(blocks_avx512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_storeu_si512, _mm512_xor_si512, _mm512_mul_epu32,
       _mm512_add_epi64, _mm512_srli_epi64, _mm512_slli_epi64, _mm512_shuffle_epi32, _mm512_set1_epi32)

static void add_blocks(uint64_t *lanes, const uint8_t *input, size_t blocks) {
    if (__builtin_cpu_supports("avx512f"))
        blocks_avx512(lanes, input, blocks);
    else if (__builtin_cpu_supports("avx2"))
        blocks_avx2(lanes, input, blocks);
    else
        blocks_sse2(lanes, input, blocks);
}

#endif

/* --- a whole input, in as many parts as it comes ------------------------------------------------------------------ */

static inline uint64_t folded(uint64_t one, uint64_t other) {
    unsigned __int128 product = (unsigned __int128)one * other;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* How many whole blocks are summed before the end: the last 1 to 1,024 bytes are the end's. */
static inline size_t whole_blocks(size_t bytes) { return (bytes - 1) / BLOCK_BYTES; }

/* What is left after the whole blocks, and the sum. */
static uint64_t ended(uint64_t *lanes, const uint8_t *input, size_t bytes) {
    size_t done = whole_blocks(bytes) * BLOCK_BYTES, stripes = (bytes - 1 - done) / STRIPE_BYTES;
    for (size_t stripe = 0; stripe < stripes; stripe++)
        accumulate(lanes, input + done + STRIPE_BYTES * stripe, secret + SECRET_STEP * stripe);
    accumulate(lanes, input + bytes - STRIPE_BYTES, secret + SECRET_OF_LAST_STRIPE);
    uint64_t sum = bytes * PRIME64_1;
    for (int pair = 0; pair < LANES; pair += 2) {
        const uint8_t *key = secret + SECRET_OF_MERGE + 8 * pair;
        sum += folded(lanes[pair] ^ read64(key), lanes[pair + 1] ^ read64(key + 8));
    }
    sum = (sum ^ sum >> 37) * PRIME_MX1;
    return sum ^ sum >> 32;
}

static uint64_t checksum(const uint8_t *input, size_t bytes) {
    uint64_t lanes[LANES];
    memcpy(lanes, first_lanes, sizeof lanes);
    add_blocks(lanes, input, whole_blocks(bytes));
    return ended(lanes, input, bytes);
}

/* A sum that is made as its input comes. */
struct coming {
    uint64_t lanes[LANES];
    size_t blocks;
};

static void begin(struct coming *sum) {
    memcpy(sum->lanes, first_lanes, sizeof sum->lanes);
    sum->blocks = 0;
}

/* So many bytes of the input, of `bytes` in all, have come. */
static void go_on(struct coming *sum, const uint8_t *input, size_t bytes, size_t come) {
    size_t blocks = come / BLOCK_BYTES;
    if (blocks > whole_blocks(bytes))
        blocks = whole_blocks(bytes);
    add_blocks(sum->lanes, input + sum->blocks * BLOCK_BYTES, blocks - sum->blocks);
    sum->blocks = blocks;
}

/* The checksums of `count` inputs, each behind the first `skip` bytes of a buffer; 0 for one of less than 241 bytes. */
EXPORTED void xkv_checksums(size_t count, uint64_t skip, const uint64_t *addresses, const uint64_t *bytes,
                            uint64_t *sums) {
    for (size_t number = 0; number < count; number++) {
        const uint8_t *input = (const uint8_t *)(uintptr_t)(addresses[number] + skip);
        sums[number] = bytes[number] < INPUT_BYTES_MIN ? 0 : checksum(input, bytes[number]);
    }
}

/* --- headers ------------------------------------------------------------------------------------------------------ */

#define HEADER_BYTES_MAX 4096

/* Where in a header what stands, as Python says it. All else is the same in a template and in each slot. */
struct form {
    uint64_t bytes;            /* of a header; the last 8 are the checksum of all before */
    uint64_t fragment_at;      /* 4 bytes */
    uint64_t payload_bytes_at; /* 4 bytes */
    uint64_t payload_sum_at;   /* 8 bytes */
    uint64_t place_at, place_bytes; /* what may be another in a sound slot than in the template */
};

/* Headers of one call's slots. `step`: from one slot's template to the next one's; 0: one for all, which count on. */
struct headers {
    const struct form *form;
    const uint8_t *templates;
    uint64_t step;
};

static inline const uint8_t *template_of(const struct headers *headers, size_t number) {
    return headers->templates + headers->step * number;
}

/* The header of slot `number`, all but its own checksum. */
static void make(uint8_t *made, const struct headers *headers, size_t number, uint64_t payload_bytes, uint64_t sum) {
    const struct form *form = headers->form;
    uint32_t fragment, length = (uint32_t)payload_bytes;
    memcpy(made, template_of(headers, number), form->bytes);
    memcpy(&fragment, made + form->fragment_at, sizeof fragment);
    fragment += headers->step ? 0 : (uint32_t)number;
    memcpy(made + form->fragment_at, &fragment, sizeof fragment);
    memcpy(made + form->payload_bytes_at, &length, sizeof length);
    memcpy(made + form->payload_sum_at, &sum, sizeof sum);
}

static void sum_header(uint8_t *made, const struct form *form) {
    uint64_t sum = checksum(made, form->bytes - sizeof sum);
    memcpy(made + form->bytes - sizeof sum, &sum, sizeof sum);
}

/* Whether a slot says what it must, and nothing else; of a payload that is too short here, never. */
static int is_proved(const uint8_t *slot, const struct headers *headers, size_t number, uint64_t payload_bytes,
                     uint64_t sum) {
    const struct form *form = headers->form;
    uint8_t made[HEADER_BYTES_MAX];
    if (payload_bytes < INPUT_BYTES_MIN)
        return 0;
    make(made, headers, number, payload_bytes, sum);
    memcpy(made + form->place_at, slot + form->place_at, form->place_bytes);
    sum_header(made, form);
    return memcmp(made, slot, form->bytes) == 0;
}

/* Write a slot's header, and zeros behind its payload. */
static void seal(uint8_t *slot, const struct headers *headers, size_t number, uint64_t bytes, uint64_t payload_bytes,
                 uint64_t sum) {
    const struct form *form = headers->form;
    uint8_t made[HEADER_BYTES_MAX];
    memset(slot + form->bytes + payload_bytes, 0, bytes - form->bytes - payload_bytes);
    make(made, headers, number, payload_bytes, sum);
    sum_header(made, form);
    memcpy(slot, made, form->bytes);
}

/* --- copying ------------------------------------------------------------------------------------------------------ */

#define COPIED_BYTES ((size_t)64 << 10) /* at a time: summed while the core's own cache has them */

/* Copy a buffer and sum the payload behind its first `skip` bytes where it is then, while the core's own cache has it;
 * 0 for one of less than 241 bytes.
 */
static uint64_t copied(uint8_t *into, const uint8_t *from, size_t bytes, size_t skip, size_t payload_bytes) {
    int is_summed = payload_bytes >= INPUT_BYTES_MIN;
    struct coming sum;
    begin(&sum);
    for (size_t done = 0; done < bytes;) {
        size_t take = bytes - done < COPIED_BYTES ? bytes - done : COPIED_BYTES;
        memcpy(into + done, from + done, take);
        done += take;
        if (is_summed && done > skip)
            go_on(&sum, into + skip, payload_bytes, done - skip);
    }
    return is_summed ? ended(sum.lanes, into + skip, payload_bytes) : 0;
}

/* Copy `count` buffers, and sum each one's payload (`payload_bytes` of it, behind the first `skip`) where it is now; one
 * of less than 241 bytes gets 0. With a form: how many of them, from the first on, are proved where they are now.
 */
EXPORTED int64_t xkv_copy(uint64_t skip, size_t count, const uint64_t *from, const uint64_t *to, const uint64_t *bytes,
                          const uint64_t *payload_bytes, uint64_t *sums, const struct form *form,
                          const uint8_t *templates, uint64_t template_step) {
    const struct headers headers = {form, templates, template_step};
    int64_t proved = 0;
    for (size_t number = 0; number < count; number++) {
        const uint8_t *source = (const uint8_t *)(uintptr_t)from[number];
        uint8_t *into = (uint8_t *)(uintptr_t)to[number];
        size_t length = payload_bytes[number];
        sums[number] = copied(into, source, bytes[number], skip, length);
        if (form && proved == (int64_t)number)
            proved += is_proved(into, &headers, number, length, sums[number]);
    }
    return proved;
}

/* --- reading and writing ------------------------------------------------------------------------------------------ */

#define BUFFERS_MAX 1024         /* that the kernel takes in one call (UIO_MAXIOV) */
#define CUT_SHORT 0xFFFF         /* no errno: a call moved less than it was asked for */

/* `count` buffers lie one behind the other at `offset` of a file, and at most `step_bytes` of them are moved at once.
 * `address`: where that place of the file is mapped, to be copied from or to; 0: by the kernel.
 */
struct part {
    uint64_t fd, offset, count, step_bytes, address;
};

#define STAT_BLOCK_BYTES 512     /* of st_blocks, stat(3type) */

/* Whether a mapped part is there: to touch what is behind the end of a file that was cut, or in a hole of one on a full
 * tmpfs, would end the process. Where the hole is, nobody says: the kernel copies then, whatever it is.
 */
static int is_there(const struct part *part, const uint64_t *bytes) {
    struct stat found;
    uint64_t whole = 0;
    for (size_t number = 0; number < part->count; number++)
        whole += bytes[number];
    return part->address && fstat((int)part->fd, &found) == 0 && (uint64_t)found.st_size >= part->offset + whole &&
           (uint64_t)found.st_blocks * STAT_BLOCK_BYTES >= (uint64_t)found.st_size;
}

/* What ended everything: an errno or CUT_SHORT, and the number of the part in which it was. */
static int64_t failed(size_t part, int code) { return -((int64_t)part << 16 | code); }

/* One call's part of buffers that lie one behind the other in a file. */
struct step {
    struct iovec buffers[BUFFERS_MAX];
    int used;
    size_t bytes;
    size_t next, next_done; /* behind it: the buffer that the next one begins in, and where */
};

/* At most `bytes_max` from byte `done` of buffer `first` on. */
static void gather(struct step *step, size_t first, size_t done, size_t bytes_max, size_t count,
                   const uint64_t *addresses, const uint64_t *bytes) {
    step->used = 0;
    step->bytes = 0;
    while (first < count && step->used < BUFFERS_MAX && step->bytes < bytes_max) {
        size_t take = bytes[first] - done;
        if (take > bytes_max - step->bytes)
            take = bytes_max - step->bytes;
        step->buffers[step->used++] = (struct iovec){(void *)(uintptr_t)(addresses[first] + done), take};
        step->bytes += take;
        done += take;
        if (done == bytes[first]) {
            first++;
            done = 0;
        }
    }
    step->next = first;
    step->next_done = done;
}

/* Read buffers, part by part, each part's first behind the last one's last; sum each one's payload (`payload_bytes` of it,
 * behind the header) as soon as it has come, and prove its header by that.
 *
 * How many of them, from the first on, are proved: what differs, or has a payload of less than 241 bytes, is not, nor
 * is anything behind it. Or what has `failed`.
 */
EXPORTED int64_t xkv_read(size_t parts, const struct part *part, const struct form *form, const uint8_t *templates,
                          uint64_t template_step, const uint64_t *addresses, const uint64_t *bytes,
                          const uint64_t *payload_bytes) {
    const struct headers headers = {form, templates, template_step};
    struct step step;
    struct coming sum;
    size_t first = 0, first_done = 0; /* the buffer that is being read, and how much of it has come */
    int64_t proved = 0;
    for (size_t number = 0; number < parts; number++, part++) {
        uint64_t offset = part->offset;
        size_t end = first + part->count;
        if (is_there(part, bytes + first)) {
            const uint8_t *from = (const uint8_t *)(uintptr_t)part->address;
            for (; first < end; from += bytes[first++]) {
                uint8_t *slot = (uint8_t *)(uintptr_t)addresses[first];
                uint64_t found = copied(slot, from, bytes[first], form->bytes, payload_bytes[first]);
                if (proved == (int64_t)first)
                    proved += is_proved(slot, &headers, first, payload_bytes[first], found);
            }
            continue;
        }
        for (; first < end; offset += step.bytes) {
            gather(&step, first, first_done, part->step_bytes, end, addresses, bytes);
            ssize_t moved = preadv((int)part->fd, step.buffers, step.used, (off_t)offset);
            if (moved < 0 || (size_t)moved != step.bytes)
                return failed(number, moved < 0 ? errno : CUT_SHORT);
            for (; first < step.next || (first == step.next && first_done < step.next_done); first++, first_done = 0) {
                const uint8_t *slot = (const uint8_t *)(uintptr_t)addresses[first];
                size_t length = payload_bytes[first], come = first < step.next ? bytes[first] : step.next_done;
                int is_summed = length >= INPUT_BYTES_MIN && proved == (int64_t)first;
                if (first_done == 0)
                    begin(&sum);
                if (is_summed && come > form->bytes)
                    go_on(&sum, slot + form->bytes, length, come - form->bytes);
                if (first == step.next) {
                    first_done = step.next_done;
                    break;
                }
                if (is_summed)
                    proved += is_proved(slot, &headers, first, length, ended(sum.lanes, slot + form->bytes, length));
            }
        }
    }
    return proved;
}

/* Seal buffers and write them, part by part, each part's first behind the last one's last.
 *
 * `sums`: of their payloads, where they are known; else of those alone that have less than 241 bytes. 0, or what has
 * `failed`.
 */
EXPORTED int64_t xkv_write(size_t parts, const struct part *part, const struct form *form, const uint8_t *templates,
                           uint64_t template_step, const uint64_t *addresses, const uint64_t *bytes,
                           const uint64_t *payload_bytes, const uint64_t *sums, int are_known) {
    const struct headers headers = {form, templates, template_step};
    struct step step;
    size_t first = 0, first_done = 0, sealed = 0;
    for (size_t number = 0; number < parts; number++, part++) {
        uint64_t offset = part->offset;
        size_t end = first + part->count;
        if (is_there(part, bytes + first)) {
            uint8_t *into = (uint8_t *)(uintptr_t)part->address;
            for (; first < end; into += bytes[first++]) {
                uint8_t *slot = (uint8_t *)(uintptr_t)addresses[first];
                size_t length = payload_bytes[first], payload_at = form->bytes;
                uint64_t found = copied(into + payload_at, slot + payload_at, length, 0, length);
                int is_known = are_known || length < INPUT_BYTES_MIN;
                seal(slot, &headers, first, bytes[first], length, is_known ? sums[first] : found);
                memcpy(into, slot, payload_at);
                memset(into + payload_at + length, 0, bytes[first] - payload_at - length);
            }
            sealed = first;
            continue;
        }
        for (; first < end; offset += step.bytes) {
            gather(&step, first, first_done, part->step_bytes, end, addresses, bytes);
            for (; sealed < step.next || (sealed == step.next && step.next_done); sealed++) {
                uint8_t *slot = (uint8_t *)(uintptr_t)addresses[sealed];
                uint64_t length = payload_bytes[sealed];
                int is_known = are_known || length < INPUT_BYTES_MIN;
                uint64_t sum = is_known ? sums[sealed] : checksum(slot + form->bytes, length);
                seal(slot, &headers, sealed, bytes[sealed], length, sum);
            }
            ssize_t moved = pwritev((int)part->fd, step.buffers, step.used, (off_t)offset);
            if (moved < 0 || (size_t)moved != step.bytes)
                return failed(number, moved < 0 ? errno : CUT_SHORT);
            first = step.next;
            first_done = step.next_done;
        }
    }
    return 0;
}

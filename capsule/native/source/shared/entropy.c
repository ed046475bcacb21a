#include "entropy.h"

#include <string.h>

static uint32_t rotate_right(uint32_t word, int by) { return word >> by | word << (32 - by); }

static uint32_t load32(const uint8_t *bytes) {
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 |
           (uint32_t)bytes[3] << 24;
}

static void store32(uint8_t *bytes, uint32_t word) {
    for (int i = 0; i < 4; i++) bytes[i] = (uint8_t)(word >> 8 * i);
}

/* ---- BLAKE2s-256, RFC 7693 ---- */

/* The initialization vector, which is that of SHA-256 (section 2.6). */
static const uint32_t blake2s_start[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

/* SIGMA: the order of the message's words in each round (section 2.7). */
static const uint8_t blake2s_order[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static void blake2s_mix(uint32_t v[16], size_t a, size_t b, size_t c, size_t d, uint32_t x,
                        uint32_t y) {
    v[a] += v[b] + x;
    v[d] = rotate_right(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = rotate_right(v[b] ^ v[c], 12);
    v[a] += v[b] + y;
    v[d] = rotate_right(v[d] ^ v[a], 8);
    v[c] += v[d];
    v[b] = rotate_right(v[b] ^ v[c], 7);
}

static void blake2s_compress(struct capsule_blake2s *hash, bool last) {
    uint32_t m[16], v[16];
    for (size_t i = 0; i < 16; i++) m[i] = load32(hash->block + 4 * i);
    for (int i = 0; i < 8; i++) {
        v[i] = hash->state[i];
        v[i + 8] = blake2s_start[i];
    }
    v[12] ^= (uint32_t)hash->length;
    v[13] ^= (uint32_t)(hash->length >> 32);
    if (last) v[14] = ~v[14];
    for (int round = 0; round < 10; round++) {
        const uint8_t *s = blake2s_order[round];
        for (size_t i = 0; i < 4; i++) /* columns */
            blake2s_mix(v, i, i + 4, i + 8, i + 12, m[s[2 * i]], m[s[2 * i + 1]]);
        for (size_t i = 0; i < 4; i++) /* diagonals */
            blake2s_mix(v, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[s[8 + 2 * i]],
                        m[s[9 + 2 * i]]);
    }
    for (int i = 0; i < 8; i++) hash->state[i] ^= v[i] ^ v[i + 8];
}

void capsule_blake2s_begin(struct capsule_blake2s *hash, const uint8_t *key) {
    memset(hash, 0, sizeof *hash);
    memcpy(hash->state, blake2s_start, sizeof hash->state);
    /* The parameter block (section 2.5): fanout and depth are 1, and the digest is as long as a
     * key. */
    hash->state[0] ^= 0x01010000 ^ CAPSULE_KEY_SIZE;
    if (key) {
        hash->state[0] ^= CAPSULE_KEY_SIZE << 8;
        memcpy(hash->block, key, CAPSULE_KEY_SIZE);
        hash->filled = sizeof hash->block; /* the key, padded with zeros, is the first block */
    }
}

void capsule_blake2s_add(struct capsule_blake2s *hash, const void *data, size_t size) {
    const uint8_t *from = data;
    while (size > 0) {
        if (hash->filled == sizeof hash->block) { /* only now: the last block ends differently */
            hash->length += hash->filled;
            blake2s_compress(hash, false);
            hash->filled = 0;
        }
        size_t part = sizeof hash->block - hash->filled;
        if (part > size) part = size;
        memcpy(hash->block + hash->filled, from, part);
        hash->filled += part;
        from += part;
        size -= part;
    }
}

void capsule_blake2s_end(struct capsule_blake2s *hash, uint8_t digest[CAPSULE_KEY_SIZE]) {
    memset(hash->block + hash->filled, 0, sizeof hash->block - hash->filled);
    hash->length += hash->filled;
    blake2s_compress(hash, true);
    for (size_t i = 0; i < 8; i++) store32(digest + 4 * i, hash->state[i]);
}

/* ---- ChaCha20, RFC 8439 section 2.3 ---- */

/* A row of the state; the four quarter rounds of a round work on its elements side by side. */
typedef uint32_t row __attribute__((vector_size(16)));

static row rotate_row(row words, int by) { return words << by | words >> (32 - by); }

static void chacha20_quarters(row x[4]) {
    x[0] += x[1];
    x[3] = rotate_row(x[3] ^ x[0], 16);
    x[2] += x[3];
    x[1] = rotate_row(x[1] ^ x[2], 12);
    x[0] += x[1];
    x[3] = rotate_row(x[3] ^ x[0], 8);
    x[2] += x[3];
    x[1] = rotate_row(x[1] ^ x[2], 7);
}

static void chacha20_block(const uint32_t key[8], uint64_t counter, uint8_t out[64]) {
    const row start[4] = {
        {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574}, /* "expand 32-byte k" */
        {key[0], key[1], key[2], key[3]},
        {key[4], key[5], key[6], key[7]},
        {(uint32_t)counter, (uint32_t)(counter >> 32), 0, 0},
    };
    row x[4] = {start[0], start[1], start[2], start[3]};
    for (int round = 0; round < 10; round++) {
        chacha20_quarters(x); /* columns; then diagonals, by turning the rows */
        x[1] = __builtin_shufflevector(x[1], x[1], 1, 2, 3, 0);
        x[2] = __builtin_shufflevector(x[2], x[2], 2, 3, 0, 1);
        x[3] = __builtin_shufflevector(x[3], x[3], 3, 0, 1, 2);
        chacha20_quarters(x);
        x[1] = __builtin_shufflevector(x[1], x[1], 3, 0, 1, 2);
        x[2] = __builtin_shufflevector(x[2], x[2], 2, 3, 0, 1);
        x[3] = __builtin_shufflevector(x[3], x[3], 1, 2, 3, 0);
    }
    for (size_t i = 0; i < 16; i++) store32(out + 4 * i, x[i / 4][i % 4] + start[i / 4][i % 4]);
}

/* ---- streams ---- */

static void stream_begin(struct capsule_stream *stream, struct capsule_blake2s *hash) {
    uint8_t key[CAPSULE_KEY_SIZE];
    capsule_blake2s_end(hash, key);
    for (size_t i = 0; i < 8; i++) stream->key[i] = load32(key + 4 * i);
    stream->position = 0;
}

void capsule_stream_open(struct capsule_stream *stream, const uint8_t root[CAPSULE_KEY_SIZE],
                         const char *process, const char *thread, const char *label) {
    struct capsule_blake2s hash;
    capsule_blake2s_begin(&hash, root);
    capsule_blake2s_add(&hash, process, strlen(process) + 1);
    capsule_blake2s_add(&hash, thread, strlen(thread) + 1);
    capsule_blake2s_add(&hash, label, strlen(label));
    stream_begin(stream, &hash);
}

void capsule_stream_read(struct capsule_stream *stream, void *out, size_t size) {
    uint8_t *to = out;
    while (size > 0) {
        size_t within = stream->position % CAPSULE_BLOCK_SIZE;
        size_t part = CAPSULE_BLOCK_SIZE - within;
        if (part > size) part = size;
        if (within == 0)
            chacha20_block(stream->key, stream->position / CAPSULE_BLOCK_SIZE, stream->block);
        memcpy(to, stream->block + within, part);
        stream->position += part;
        to += part;
        size -= part;
    }
}

size_t capsule_kept_size(size_t size) {
    return size < CAPSULE_KEPT_SIZE ? size : CAPSULE_KEPT_SIZE;
}

void capsule_expand(void *out, size_t size, const uint8_t *kept) {
    struct capsule_stream stream;
    struct capsule_blake2s hash;
    if (size <= CAPSULE_KEPT_SIZE) {
        memcpy(out, kept, size);
        return;
    }
    capsule_blake2s_begin(&hash, kept);
    capsule_blake2s_add(&hash, CAPSULE_EXPANSION, strlen(CAPSULE_EXPANSION));
    stream_begin(&stream, &hash);
    capsule_stream_read(&stream, out, size);
}

static int hexadecimal(char digit) {
    if (digit >= '0' && digit <= '9') return digit - '0';
    if (digit >= 'a' && digit <= 'f') return digit - 'a' + 10;
    return -1;
}

bool capsule_key_parse(uint8_t key[CAPSULE_KEY_SIZE], const char *text) {
    if (strlen(text) != (size_t)2 * CAPSULE_KEY_SIZE) return false;
    for (size_t i = 0; i < CAPSULE_KEY_SIZE; i++) {
        int high = hexadecimal(text[2 * i]), low = hexadecimal(text[2 * i + 1]);
        if (high < 0 || low < 0) return false;
        key[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

/* ---- paths ---- */

/* Room for two whole paths, a number and the marks between them. */
struct text {
    size_t length;
    char content[2 * CAPSULE_PATH_SIZE + 16];
};

static void append(struct text *text, const char *part) {
    size_t size = strlen(part);
    memcpy(text->content + text->length, part, size);
    text->length += size;
}

static void append_number(struct text *text, uint32_t number) {
    char digits[11];
    char *first = digits + sizeof digits - 1;
    *first = '\0';
    do *--first = (char)('0' + number % 10);
    while (number /= 10);
    append(text, first);
}

static void finish(char out[CAPSULE_PATH_SIZE], const struct text *text) {
    if (text->length < CAPSULE_PATH_SIZE) {
        memcpy(out, text->content, text->length);
        out[text->length] = '\0';
        return;
    }
    struct capsule_blake2s hash;
    uint8_t digest[CAPSULE_KEY_SIZE];
    capsule_blake2s_begin(&hash, NULL);
    capsule_blake2s_add(&hash, text->content, text->length);
    capsule_blake2s_end(&hash, digest);
    *out++ = '#';
    for (size_t i = 0; i < CAPSULE_KEY_SIZE; i++) {
        *out++ = "0123456789abcdef"[digest[i] >> 4];
        *out++ = "0123456789abcdef"[digest[i] & 15];
    }
    *out = '\0';
}

void capsule_path_child(char out[CAPSULE_PATH_SIZE], const char *parent, const char *thread,
                        uint32_t n) {
    struct text text = {0};
    append(&text, parent);
    append(&text, ".");
    if (strcmp(thread, CAPSULE_ROOT_PATH) != 0) {
        append(&text, thread);
        append(&text, ":");
    }
    append_number(&text, n);
    finish(out, &text);
}

/* Join three parts. */
static void join(char out[CAPSULE_PATH_SIZE], const char *one, const char *two, const char *three) {
    struct text text = {0};
    append(&text, one);
    append(&text, two);
    append(&text, three);
    finish(out, &text);
}

void capsule_path_exec(char out[CAPSULE_PATH_SIZE], const char *path) { join(out, path, "x", ""); }

void capsule_path_unnumbered(char out[CAPSULE_PATH_SIZE], const char *path) {
    join(out, path, "?", "");
}

void capsule_path_stream(char out[CAPSULE_PATH_SIZE], const char *thread, const char *label) {
    join(out, thread, "@", label);
}

static void join_number(char out[CAPSULE_PATH_SIZE], const char *parent, const char *mark,
                        uint32_t n) {
    struct text text = {0};
    append(&text, parent);
    append(&text, mark);
    append_number(&text, n);
    finish(out, &text);
}

void capsule_path_thread(char out[CAPSULE_PATH_SIZE], const char *parent, uint32_t n) {
    join_number(out, parent, "-", n);
}

void capsule_path_work(char out[CAPSULE_PATH_SIZE], const char *parent, uint32_t n) {
    join_number(out, parent, "~", n);
}

/* Derived randomness: the definitions that the interposer and the launcher share.
 *
 * A stream is named by the process, the thread and a label. Its key is
 *     BLAKE2s-256(key = root key, data = process path || 00 || thread path || 00 || label)
 * (RFC 7693) and its bytes are the ChaCha20 key stream under that key (RFC 8439 section 2.3, with a
 * 64-bit block counter from zero and a zero nonce).
 *
 * If a recorded call requests more than CAPSULE_KEPT_SIZE bytes, only that many bytes of the kernel
 * are kept, and the call gets the key stream under BLAKE2s-256(key = kept bytes, data =
 * CAPSULE_EXPANSION). The only functions that are called here are memcpy, memset, strlen and
 * strcmp. See docs/random-profiles.md.
 */
#ifndef CAPSULE_ENTROPY_H
#define CAPSULE_ENTROPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The source of a run's randomness; --entropy and CAPSULE_ENTROPY have the names. */
enum mode { MODE_SYSTEM, MODE_VIRTUAL, MODE_RECORD, MODE_REPLAY };

#define CAPSULE_KEY_SIZE 32
#define CAPSULE_BLOCK_SIZE 64
#define CAPSULE_KEPT_SIZE CAPSULE_KEY_SIZE
#define CAPSULE_EXPANSION "capsule/entropy/expansion/v1"
#define CAPSULE_PATH_SIZE 192 /* with the final zero */

#define CAPSULE_ROOT_PATH "0" /* of the first process, and of the main thread of each */

/* Fourth argument (the kernel reads three) of the interposer's own getrandom system calls, by which
 * a system call filter can tell them from a program's: "CAPSULE", little-endian. */
#define CAPSULE_OWN_CALL UINT64_C(0x00454c5553504143)

/* The exit status of a run whose random profile did not fit, and the signal with which a process
 * requests that the launcher (whose process id is in CAPSULE_LAUNCHER_PID) ends the run with it.
 * The signal has no name, because programs send the signals with names to their process group,
 * which may include the launcher. */
#define CAPSULE_MISMATCH_STATUS 86
#define CAPSULE_MISMATCH_SIGNAL 42

/* The numbers of the run's first process and of the user's program that this process starts, if the
 * launcher has its own process id namespace; and the signal with which the first process requests
 * the second number. The launcher sends the signal back when this number is the next one.
 * capsule/entropy/launch.py contains the same numbers. */
#define CAPSULE_FIRST_PROCESS 500
#define CAPSULE_PROGRAM_PROCESS 1000
#define CAPSULE_NUMBERS_SIGNAL 40 /* real-time, and not used by any C library */

/* The signal with which the interposer of the run's first process reports that the loader has
 * mapped every library. The launcher sends it back when it has checked them. */
#define CAPSULE_LOADED_SIGNAL 41

/* Variables with which libraries that would use RDRAND or RDSEED treat the processor as one without
 * these instructions. Bit 62 of OpenSSL's first word is RDRAND, and bit 18 of its second word is
 * RDSEED (OPENSSL_ia32cap(3)). */
#define CAPSULE_PROCESSOR_MASKS                                                                    \
    {"OPENSSL_ia32cap=~0x4000000000000000:~0x40000", "QT_NO_CPU_FEATURE=rdrand", "SYSTEMD_RDRAND=0"}

struct capsule_stream {
    uint32_t key[8];
    uint64_t position;                 /* of the next byte */
    uint8_t block[CAPSULE_BLOCK_SIZE]; /* the block that `position` is in, unless at its start */
};

struct capsule_blake2s {
    uint32_t state[8];
    uint64_t length;
    size_t filled;
    uint8_t block[64];
};

/* BLAKE2s-256 (RFC 7693); `key` may be NULL, otherwise it has CAPSULE_KEY_SIZE bytes. */
void capsule_blake2s_begin(struct capsule_blake2s *hash, const uint8_t *key);
void capsule_blake2s_add(struct capsule_blake2s *hash, const void *data, size_t size);
void capsule_blake2s_end(struct capsule_blake2s *hash, uint8_t digest[CAPSULE_KEY_SIZE]);

void capsule_stream_open(struct capsule_stream *stream, const uint8_t root[CAPSULE_KEY_SIZE],
                         const char *process, const char *thread, const char *label);
void capsule_stream_read(struct capsule_stream *stream, void *out, size_t size);

/* The number of bytes that are kept of a recorded call for `size` bytes. */
size_t capsule_kept_size(size_t size);

/* The bytes that a call gets, computed from the capsule_kept_size(size) bytes that were kept. */
void capsule_expand(void *out, size_t size, const uint8_t *kept);

/* Read 64 hexadecimal digits; false when `text` is anything else. */
bool capsule_key_parse(uint8_t key[CAPSULE_KEY_SIZE], const char *text);

/* Paths. `out` may be the path from which it is made. A path that would not fit is replaced by '#'
 * and the hexadecimal BLAKE2s-256 of the whole path.
 *   child:  "<parent>.<n>", or "<parent>.<thread>:<n>" when another thread than the main one forks
 *   exec:   "<path>x"
 *   thread: "<parent>-<n>"
 *   work:   "<parent>~<n>", a piece of work of a thread's that any thread may do (scopes.c)
 *   unnumbered: "<path>?", of what was started by other means
 *   stream: "<thread>@<label>", of the supervisor's streams
 * n counts from one, in the forking, creating or submitting thread. */
void capsule_path_child(char out[CAPSULE_PATH_SIZE], const char *parent, const char *thread,
                        uint32_t n);
void capsule_path_exec(char out[CAPSULE_PATH_SIZE], const char *path);
void capsule_path_thread(char out[CAPSULE_PATH_SIZE], const char *parent, uint32_t n);
void capsule_path_work(char out[CAPSULE_PATH_SIZE], const char *parent, uint32_t n);
void capsule_path_unnumbered(char out[CAPSULE_PATH_SIZE], const char *path);
void capsule_path_stream(char out[CAPSULE_PATH_SIZE], const char *thread, const char *label);

#endif

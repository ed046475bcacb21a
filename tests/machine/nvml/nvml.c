/* A stand-in for libnvidia-ml.so.1 that plays the machine of a file.
 *
 * The signatures are those of the NVML API reference. The file, which NVML_MACHINE names, has lines
 * of "KEY=VALUE": "driver", "cuda", "devices", and for device 0 keys such as "0.name"; those of its
 * MIG device in slot 1 begin with "0.1.". What the file lacks is not supported. A value of "!N" is
 * the NVML error N. With "0.lost_after=N" device 0 is lost after N queries, and "0.empty_slot=!N"
 * is the error for a slot of it without a MIG device, if not "not found".
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SUCCESS,
    UNINITIALIZED,
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE,
    DRIVER_NOT_LOADED = 9,
    GPU_IS_LOST = 15,
    UNKNOWN = 999
};
enum { LINES = 512, WIDTH = 160, DEVICES = 16, SLOTS = 8 };

typedef struct {
    int device, slot;
} *device_t; /* slot -1: the whole GPU */
typedef struct {
    unsigned int multiprocessors, others[7];
    unsigned long long memory;
} attributes_t;
typedef struct {
    unsigned long long total, free, used;
} memory_t;

static char lines[LINES][WIDTH];
static int number, users, queries[DEVICES];

static const char *find(const char *key) {
    size_t length = strlen(key);
    for (int line = 0; line < number; line++)
        if (!strncmp(lines[line], key, length) && lines[line][length] == '=')
            return lines[line] + length + 1;
    return NULL;
}

/* Find the value of a machine's key; return an NVML error where there is none. */
static int value(const char *key, const char **found) {
    if (!users) return UNINITIALIZED;
    if (!(*found = find(key))) return NOT_SUPPORTED;
    return **found == '!' ? atoi(*found + 1) : SUCCESS;
}

/* Find the value of a device's field. */
static int field(device_t device, const char *name, const char **found) {
    char key[WIDTH];
    if (!device) return INVALID_ARGUMENT;
    snprintf(key, sizeof key, "%d.lost_after", device->device);
    const char *lost = find(key);
    if (lost && queries[device->device]++ >= atoi(lost)) return GPU_IS_LOST;
    if (device->slot < 0) snprintf(key, sizeof key, "%d.%s", device->device, name);
    else snprintf(key, sizeof key, "%d.%d.%s", device->device, device->slot, name);
    return value(key, found);
}

static int text(device_t device, const char *name, char *out, unsigned int length) {
    const char *found;
    int error = field(device, name, &found);
    if (error) return error;
    if (strlen(found) >= length) return INSUFFICIENT_SIZE;
    strcpy(out, found);
    return SUCCESS;
}

static int numbers(device_t device, const char *name, int count, unsigned long long *out) {
    const char *found;
    int error = field(device, name, &found);
    if (error) return error;
    for (char *end = (char *)found; count--; out++, end += *end == ',')
        *out = strtoull(end, &end, 10);
    return SUCCESS;
}

static int one(device_t device, const char *name, unsigned int *out) {
    unsigned long long found;
    int error = numbers(device, name, 1, &found);
    if (!error) *out = (unsigned int)found;
    return error;
}

static int pair(device_t device, const char *name, unsigned int *first, unsigned int *second) {
    unsigned long long found[2];
    int error = numbers(device, name, 2, found);
    if (!error) *first = (unsigned int)found[0], *second = (unsigned int)found[1];
    return error;
}

static device_t handle(int device, int slot) {
    device_t made = malloc(sizeof *made);
    made->device = device, made->slot = slot;
    return made;
}

int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    const char *path = getenv("NVML_MACHINE");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return DRIVER_NOT_LOADED;
    for (number = 0; number < LINES && fgets(lines[number], WIDTH, file); number++)
        lines[number][strcspn(lines[number], "\n")] = 0;
    fclose(file);
    const char *broken = find("init");
    if (broken) return atoi(broken + 1);
    users++;
    return SUCCESS;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) { return users ? (users--, SUCCESS) : UNINITIALIZED; }

const char *nvmlErrorString(int error) { return error ? "an error of the stand-in" : "success"; }

int nvmlSystemGetDriverVersion(char *out, unsigned int length) {
    const char *found;
    int error = value("driver", &found);
    if (error) return error;
    if (strlen(found) >= length) return INSUFFICIENT_SIZE;
    strcpy(out, found);
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *out) {
    const char *found;
    int error = value("cuda", &found);
    if (!error) *out = atoi(found);
    return error;
}

int nvmlDeviceGetCount_v2(unsigned int *out) {
    const char *found;
    int error = value("devices", &found);
    if (!error) *out = (unsigned int)atoi(found);
    return error;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, device_t *out) {
    char key[WIDTH];
    unsigned int count;
    int error = nvmlDeviceGetCount_v2(&count);
    if (error || index >= count || index >= DEVICES) return error ? error : INVALID_ARGUMENT;
    snprintf(key, sizeof key, "%u.handle", index);
    const char *broken = find(key);
    if (broken) return atoi(broken + 1);
    *out = handle((int)index, -1);
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(device_t device, unsigned int *out) {
    return one(device, "mig_slots", out);
}

int nvmlDeviceGetMigDeviceHandleByIndex(device_t device, unsigned int index, device_t *out) {
    char key[WIDTH];
    if (!device || index >= SLOTS) return INVALID_ARGUMENT;
    snprintf(key, sizeof key, "%d.%u.name", device->device, index);
    if (!find(key)) {
        snprintf(key, sizeof key, "%d.empty_slot", device->device);
        const char *error = find(key);
        return error ? atoi(error + 1) : NOT_FOUND;
    }
    *out = handle(device->device, (int)index);
    return SUCCESS;
}

int nvmlDeviceGetName(device_t device, char *out, unsigned int length) {
    return text(device, "name", out, length);
}
int nvmlDeviceGetUUID(device_t device, char *out, unsigned int length) {
    return text(device, "uuid", out, length);
}
int nvmlDeviceGetBoardPartNumber(device_t device, char *out, unsigned int length) {
    return text(device, "part_number", out, length);
}
int nvmlDeviceGetVbiosVersion(device_t device, char *out, unsigned int length) {
    return text(device, "vbios", out, length);
}
int nvmlDeviceGetInforomImageVersion(device_t device, char *out, unsigned int length) {
    return text(device, "inforom", out, length);
}
int nvmlDeviceGetGspFirmwareVersion(device_t device, char *out) {
    return text(device, "gsp_firmware", out, 80);
}

int nvmlDeviceGetArchitecture(device_t device, unsigned int *out) {
    return one(device, "architecture", out);
}
int nvmlDeviceGetNumGpuCores(device_t device, unsigned int *out) {
    return one(device, "cuda_cores", out);
}
int nvmlDeviceGetMemoryBusWidth(device_t device, unsigned int *out) {
    return one(device, "memory_bus_bits", out);
}
int nvmlDeviceGetEnforcedPowerLimit(device_t device, unsigned int *out) {
    return one(device, "power_limit_milliwatts", out);
}

int nvmlDeviceGetCudaComputeCapability(device_t device, int *major, int *minor) {
    return pair(device, "compute_capability", (unsigned int *)major, (unsigned int *)minor);
}
int nvmlDeviceGetMigMode(device_t device, unsigned int *current, unsigned int *pending) {
    return pair(device, "mig_mode", current, pending);
}
int nvmlDeviceGetEccMode(device_t device, unsigned int *current, unsigned int *pending) {
    return pair(device, "ecc_mode", current, pending);
}
int nvmlDeviceGetMaxClockInfo(device_t device, unsigned int type, unsigned int *out) {
    return one(device, type == 2 ? "max_memory_clock_mhz" : "max_sm_clock_mhz", out);
}

int nvmlDeviceGetMemoryInfo(device_t device, memory_t *out) {
    memset(out, 0, sizeof *out);
    return numbers(device, "memory_bytes", 1, &out->total);
}

int nvmlDeviceGetAttributes_v2(device_t device, attributes_t *out) {
    memset(out, 0, sizeof *out);
    return one(device, "sm_count", &out->multiprocessors);
}

int nvmlDeviceGetTotalEccErrors(device_t device, unsigned int type, unsigned int counter,
                                unsigned long long *out) {
    /* uncorrected, over the lifetime */
    return type == 1 && counter == 1 ? numbers(device, "uncorrected_errors", 1, out)
                                     : NOT_SUPPORTED;
}

int nvmlDeviceGetRemappedRows(device_t device, unsigned int *correctable,
                              unsigned int *uncorrectable, unsigned int *pending,
                              unsigned int *failed) {
    unsigned long long found[4];
    int error = numbers(device, "remapped_rows", 4, found);
    if (error) return error;
    *correctable = (unsigned int)found[0], *uncorrectable = (unsigned int)found[1];
    *pending = (unsigned int)found[2], *failed = (unsigned int)found[3];
    return SUCCESS;
}

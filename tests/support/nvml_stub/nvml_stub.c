/* A stand-in for libnvidia-ml.so.1 that answers from a script.
 *
 * GPUQ_NVML_SCRIPT names a text file of "key value" lines, read again at every call. A key that is missing is
 * "Not Supported" for a figure and success for a call. Values that begin with '!' are NVML return codes.
 *
 *   init !9                       nvmlInit fails: driver not loaded
 *   count 2
 *   0.handle !15                  no handle for GPU 0: it is lost
 *   0.uuid GPU-...                likewise 0.name, and 0.mig.1.uuid for the slice at place 1
 *   0.memory 25769803776 1073741824      total and free, in bytes
 *   0.bar1 268435456
 *   0.addressing 2
 *   0.utilization 37
 *   0.compute 4242:1048576:none 79:none:1   pid:bytes:gpu instance, also 0.graphics, 0.mps
 *   0.mig_mode 1
 *   0.mig_max 7
 *   0.mig.1.instance 5
 *   0.memory.hang /path/fifo      the call first reads that FIFO to its end
 *
 * Without a script every nvmlInit fails, so that no test meets the stub by accident.
 * The layouts and codes are those of NVIDIA's public API.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, NOT_LOADED = 9 };
enum { VALUE_SIZE = 4096, GPU = 1 << 8 };

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned long long total, free, used; } bar1_t;
typedef struct { unsigned int version, value; } addressing_t;
typedef struct { unsigned int gpu, memory; } utilization_t;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance; } process_t;

/* Whether the script has `key`; its value goes to `value`. */
static int look_up(const char *key, char *value) {
    const char *path = getenv("GPUQ_NVML_SCRIPT");
    FILE *script = path ? fopen(path, "r") : NULL;
    char line[VALUE_SIZE];
    size_t length = strlen(key);
    int found = 0;
    if (!script) return 0;
    while (!found && fgets(line, sizeof line, script)) {
        if (strncmp(line, key, length) == 0 && line[length] == ' ') {
            line[strcspn(line, "\n")] = 0;
            strcpy(value, line + length + 1);
            found = 1;
        }
    }
    fclose(script);
    return found;
}

static void maybe_hang(const char *key) {
    char hang_key[256], fifo[VALUE_SIZE], byte;
    snprintf(hang_key, sizeof hang_key, "%s.hang", key);
    if (look_up(hang_key, fifo)) {
        FILE *gate = fopen(fifo, "r");
        if (gate) {
            while (fread(&byte, 1, 1, gate) == 1) {}
            fclose(gate);
        }
    }
}

/* Hangs if told to, then gives the value of `key`, or its return code, or `missing`. */
static int ask(const char *key, char *value, int missing) {
    maybe_hang(key);
    if (!look_up(key, value)) return missing;
    return value[0] == '!' ? atoi(value + 1) : OK;
}

/* A handle is GPU * (index + 1) for a GPU, plus place + 1 for a slice of it. */
static void name_of(void *handle, const char *what, char *key, size_t size) {
    unsigned int number = (unsigned int)(uintptr_t)handle, index = number / GPU - 1, place = number % GPU;
    if (place) snprintf(key, size, "%u.mig.%u.%s", index, place - 1, what);
    else snprintf(key, size, "%u.%s", index, what);
}

static int ask_of(void *handle, const char *what, char *value, int missing) {
    char key[256];
    name_of(handle, what, key, sizeof key);
    return ask(key, value, missing);
}

static int text_of(void *handle, const char *what, char *out, unsigned int size) {
    char value[VALUE_SIZE];
    int status = ask_of(handle, what, value, NOT_SUPPORTED);
    if (status == OK) snprintf(out, size, "%s", value);
    return status;
}

static int number_of(void *handle, const char *what, unsigned int *out) {
    char value[VALUE_SIZE];
    int status = ask_of(handle, what, value, NOT_SUPPORTED);
    if (status == OK) *out = (unsigned int)strtoul(value, NULL, 10);
    return status;
}

int nvmlInitWithFlags(unsigned int flags) {
    char value[VALUE_SIZE];
    (void)flags;
    return getenv("GPUQ_NVML_SCRIPT") ? ask("init", value, OK) : NOT_LOADED;
}

int nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(int status) {
    (void)status;
    return "an error of the stub";
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    char value[VALUE_SIZE];
    int status = ask("count", value, NOT_SUPPORTED);
    if (status == OK) *count = (unsigned int)strtoul(value, NULL, 10);
    return status;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle) {
    char value[VALUE_SIZE];
    unsigned int count = 0;
    int status = nvmlDeviceGetCount_v2(&count);
    if (status != OK) return status;
    if (index >= count) return INVALID;
    *handle = (void *)(uintptr_t)(GPU * (index + 1));
    return ask_of(*handle, "handle", value, OK);
}

int nvmlDeviceGetUUID(void *device, char *out, unsigned int size) { return text_of(device, "uuid", out, size); }
int nvmlDeviceGetName(void *device, char *out, unsigned int size) { return text_of(device, "name", out, size); }

int nvmlDeviceGetMemoryInfo(void *device, memory_t *out) {
    char value[VALUE_SIZE];
    int status = ask_of(device, "memory", value, NOT_SUPPORTED);
    if (status != OK) return status;
    sscanf(value, "%llu %llu", &out->total, &out->free);
    out->used = out->total - out->free;
    return OK;
}

int nvmlDeviceGetUtilizationRates(void *device, utilization_t *out) {
    out->memory = 0;
    return number_of(device, "utilization", &out->gpu);
}

int nvmlDeviceGetBAR1MemoryInfo(void *device, bar1_t *out) {
    char value[VALUE_SIZE];
    int status = ask_of(device, "bar1", value, NOT_SUPPORTED);
    if (status == OK) out->total = out->free = strtoull(value, NULL, 10);
    return status;
}

int nvmlDeviceGetAddressingMode(void *device, addressing_t *out) { return number_of(device, "addressing", &out->value); }

int nvmlDeviceGetMigMode(void *device, unsigned int *current, unsigned int *pending) {
    int status = number_of(device, "mig_mode", current);
    *pending = *current;
    return status;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned int *count) { return number_of(device, "mig_max", count); }
int nvmlDeviceGetGpuInstanceId(void *device, unsigned int *id) { return number_of(device, "instance", id); }

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned int place, void **handle) {
    char value[VALUE_SIZE];
    *handle = (char *)device + place + 1;
    return ask_of(*handle, "uuid", value, NOT_FOUND) == OK ? OK : NOT_FOUND;
}

static int processes_of(void *device, const char *what, unsigned int *count, process_t *out) {
    char value[VALUE_SIZE], *rest, *row;
    unsigned int room = *count, found = 0;
    int status = ask_of(device, what, value, OK);
    if (status != OK) return status;
    *count = 0;
    for (row = strtok_r(value, " ", &rest); row && *row; row = strtok_r(NULL, " ", &rest)) {
        char used[64] = "none", instance[64] = "none";
        unsigned int pid = 0;
        if (sscanf(row, "%u:%63[^:]:%63s", &pid, used, instance) < 1) continue;
        if (found < room && out) {
            out[found].pid = pid;
            out[found].used = strcmp(used, "none") ? strtoull(used, NULL, 10) : (unsigned long long)-1;
            out[found].gpu_instance = strcmp(instance, "none") ? (unsigned int)strtoul(instance, NULL, 10) : (unsigned int)-1;
            out[found].compute_instance = (unsigned int)-1;
        }
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : OK;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned int *n, process_t *out) { return processes_of(d, "compute", n, out); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *d, unsigned int *n, process_t *out) { return processes_of(d, "graphics", n, out); }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *d, unsigned int *n, process_t *out) { return processes_of(d, "mps", n, out); }
#endif
int nvmlDeviceGetComputeRunningProcesses_v2(void *d, unsigned int *n, process_t *out) { return processes_of(d, "compute", n, out); }
int nvmlDeviceGetGraphicsRunningProcesses_v2(void *d, unsigned int *n, process_t *out) { return processes_of(d, "graphics", n, out); }

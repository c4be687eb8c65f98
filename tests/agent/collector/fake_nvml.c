/* A libnvidia-ml.so.1 with known answers, built by gcc within the test; pynvml loads it by ctypes
 * as it loads NVIDIA's. Structures as in nvml.h. Two GPUs: 0 is a Hopper that tells everything,
 * 1 is an older one without power, ECC, GPM and NVLink. Set FAKE_NVML_LOST=1 and GPU 1 is lost. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned int uint;
typedef unsigned long long ull;
typedef struct { int index; } Device;
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, TOO_SMALL = 7, NO_DRIVER = 9, TIMEOUT = 10, LOST = 15 };

static Device devices[2] = {{0}, {1}};
static int waits = 0, registered = 0, samples = 0;

static int is_lost(Device *device) { return device->index == 1 && getenv("FAKE_NVML_LOST"); }
#define TOLD(device) do { if (is_lost(device)) return LOST; } while (0)
#define HOPPER(device) do { TOLD(device); if ((device)->index) return NOT_SUPPORTED; } while (0)

int nvmlInitWithFlags(uint flags) { return getenv("FAKE_NVML_NO_DRIVER") ? NO_DRIVER : OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int error) {
    return error == NO_DRIVER ? "Driver Not Loaded" : error == LOST ? "GPU is lost" : "Some Error";
}
int nvmlSystemGetDriverVersion(char *text, uint size) { snprintf(text, size, "570.86.15"); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12080; return OK; }
int nvmlDeviceGetCount_v2(uint *count) { *count = 2; return OK; }
int nvmlDeviceGetHandleByIndex_v2(uint index, Device **device) { *device = &devices[index]; return OK; }
int nvmlDeviceGetIndex(Device *device, uint *index) { *index = device->index; return OK; }
int nvmlDeviceGetName(Device *device, char *text, uint size) {
    snprintf(text, size, device->index ? "NVIDIA V100" : "NVIDIA H100 80GB HBM3");
    return OK;
}
int nvmlDeviceGetUUID(Device *device, char *text, uint size) {
    snprintf(text, size, "GPU-%d", device->index);
    return OK;
}
typedef struct { char legacy[16]; uint domain, bus, device, id, sub; char bus_id[32]; } Pci;
int nvmlDeviceGetPciInfo_v3(Device *device, Pci *pci) {
    memset(pci, 0, sizeof *pci);
    snprintf(pci->bus_id, 32, "00000000:%dB:00.0", device->index + 1);
    return OK;
}

typedef struct { ull total, free, used; } Memory;
int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    TOLD(device);
    *memory = (Memory){80, 75, 5};
    return OK;
}
typedef struct { uint gpu, memory; } Utilization;
int nvmlDeviceGetUtilizationRates(Device *device, Utilization *used) {
    TOLD(device);
    *used = (Utilization){50, 25};
    return OK;
}
int nvmlDeviceGetPowerUsage(Device *device, uint *power) { HOPPER(device); *power = 350500; return OK; }
int nvmlDeviceGetEnforcedPowerLimit(Device *device, uint *limit) { HOPPER(device); *limit = 700000; return OK; }
int nvmlDeviceGetTotalEnergyConsumption(Device *device, ull *energy) { HOPPER(device); *energy = 123456; return OK; }
int nvmlDeviceGetClockInfo(Device *device, uint type, uint *clock) {
    TOLD(device);
    *clock = type == 1 ? 1755 : 2619; /* 1: SM, 2: memory */
    return OK;
}
int nvmlDeviceGetMaxClockInfo(Device *device, uint type, uint *clock) {
    TOLD(device);
    *clock = type == 1 ? 1980 : 2700;
    return OK;
}
int nvmlDeviceGetTemperature(Device *device, uint sensor, uint *celsius) { TOLD(device); *celsius = 61; return OK; }
int nvmlDeviceGetPerformanceState(Device *device, uint *state) { TOLD(device); *state = 0; return OK; }
/* only the older name: a driver before 535 */
int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, ull *reasons) { TOLD(device); *reasons = 0x44; return OK; }

typedef struct {
    uint id, scope;
    long long timestamp, latency;
    int type, status;
    union { double d; uint u; unsigned long ul; ull ull_; long long ll; int i; } value;
} Field;
int nvmlDeviceGetFieldValues(Device *device, int count, Field *fields) {
    TOLD(device);
    for (int i = 0; i < count; i++) {
        Field *field = &fields[i];
        field->status = device->index ? NOT_SUPPORTED : OK;
        field->type = 3;
        switch (field->id) {
        case 82: field->type = 1; field->value.u = 72; break;               /* memory temperature */
        case 91: field->type = 1; field->value.u = 2; break;                /* number of links */
        case 138: field->value.ull_ = 1000 + field->scope; break;           /* KiB sent */
        case 139: field->value.ull_ = 2000 + field->scope; break;
        case 161: field->value.ull_ = 7; break;                             /* replays */
        case 164: field->type = 1; field->value.u = 26562; break;           /* Mbit/s */
        case 197: field->value.ull_ = 11; break;                            /* PCIe bytes */
        case 198: field->value.ull_ = 22; break;
        default: field->status = NOT_SUPPORTED;
        }
    }
    return OK;
}

int nvmlDeviceGetTotalEccErrors(Device *device, uint type, uint counter, ull *count) {
    HOPPER(device);
    *count = 1 + type + 10 * counter; /* corrected 0, uncorrected 1; volatile 0, aggregate 1 */
    return OK;
}
int nvmlDeviceGetRemappedRows(Device *device, uint *corrected, uint *uncorrected, uint *pending, uint *failed) {
    HOPPER(device);
    *corrected = 3, *uncorrected = 1, *pending = 1, *failed = 0;
    return OK;
}
int nvmlDeviceGetRetiredPages(Device *device, uint cause, uint *count, ull *pages) {
    if (!device->index) return NOT_SUPPORTED;
    TOLD(device);
    uint found = cause ? 1 : 2; /* 0: single bit, 1: double bit */
    int fits = pages && *count >= found;
    if (fits) memset(pages, 0, found * sizeof *pages);
    *count = found;
    return fits ? OK : TOO_SMALL;
}
int nvmlDeviceGetRetiredPagesPendingStatus(Device *device, uint *pending) { TOLD(device); *pending = 0; return OK; }
int nvmlDeviceGetPcieReplayCounter(Device *device, uint *count) { TOLD(device); *count = 4; return OK; }
int nvmlDeviceGetCurrPcieLinkGeneration(Device *device, uint *value) { TOLD(device); *value = 4; return OK; }
int nvmlDeviceGetMaxPcieLinkGeneration(Device *device, uint *value) { TOLD(device); *value = 5; return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(Device *device, uint *value) { TOLD(device); *value = 8; return OK; }
int nvmlDeviceGetMaxPcieLinkWidth(Device *device, uint *value) { TOLD(device); *value = 16; return OK; }

int nvmlDeviceGetNvLinkState(Device *device, uint link, uint *up) {
    HOPPER(device);
    if (link > 1) return INVALID;
    *up = link == 0;
    return OK;
}
int nvmlDeviceGetNvLinkErrorCounter(Device *device, uint link, uint counter, ull *count) {
    HOPPER(device);
    *count = 100 + counter; /* replay 0, recovery 1, CRC flit 2 */
    return OK;
}

typedef struct {
    uint version;
    unsigned char cluster[16];
    int status;
    uint clique, state, health;
} Fabric;
int nvmlDeviceGetGpuFabricInfoV(Device *device, Fabric *fabric) {
    if (getenv("FAKE_NVML_CRASHES")) abort();
    HOPPER(device);
    fabric->status = 0, fabric->state = 3, fabric->health = 5;
    return OK;
}

typedef struct { uint pid; ull memory; uint instance, compute; } Process;
int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, uint *count, Process *processes) {
    TOLD(device);
    uint found = device->index ? 0 : 2;
    if (!found) { *count = 0; return OK; }
    if (!processes || *count < found) { *count = found; return TOO_SMALL; }
    processes[0] = (Process){(uint)atoi(getenv("FAKE_NVML_PID")), 4096, 0, 0};
    processes[1] = (Process){1, 8192, 0, 0};
    *count = found;
    return OK;
}

typedef struct { Device *device; ull type, data; uint instance, compute; } Event;
int nvmlDeviceGetSupportedEventTypes(Device *device, ull *types) { TOLD(device); *types = 0x1f; return OK; }
int nvmlEventSetCreate(void **set) { *set = &waits; return OK; }
int nvmlEventSetFree(void *set) { return OK; }
int nvmlDeviceRegisterEvents(Device *device, ull types, void *set) {
    registered += types == 0xa; /* exactly Xid and uncorrectable ECC */
    return OK;
}
int nvmlEventSetWait_v2(void *set, Event *event, uint timeout) {
    if (timeout || !registered) return INVALID; /* never wait */
    waits++;
    if (waits == 1) *event = (Event){&devices[1], 8, 79, 0, 0};
    else if (waits == 2) *event = (Event){&devices[0], 2, 0, 0, 0};
    else return TIMEOUT;
    return OK;
}

typedef struct { uint version, supported; } Support;
int nvmlGpmQueryDeviceSupport(Device *device, Support *support) {
    TOLD(device);
    support->supported = device->index == 0;
    return OK;
}
int nvmlGpmSampleAlloc(int **sample) { *sample = calloc(1, sizeof **sample); return OK; }
int nvmlGpmSampleFree(int *sample) { free(sample); return OK; }
int nvmlGpmSampleGet(Device *device, int *sample) { TOLD(device); *sample = ++samples; return OK; }
typedef struct { uint id; int status; double value; const char *names[3]; } Metric;
typedef struct { uint version, count; int *older, *newer; Metric metrics[]; } Metrics;
int nvmlGpmMetricsGet(Metrics *question) {
    if (question->version != 1 || *question->newer != *question->older + 1) return INVALID;
    for (uint i = 0; i < question->count; i++) {
        question->metrics[i].status = question->metrics[i].id == 13 ? NOT_SUPPORTED : OK; /* fp16 */
        question->metrics[i].value = question->metrics[i].id * 1.0;
    }
    return OK;
}

/* A stand-in for NVIDIA's libnvidia-ml.so.1 of a machine with three GPUs, with the signatures and status codes of nvml.h.
   The second one tells no temperature and no utilisation, as a GPU that is cut into MIG instances does. */
#include <string.h>

typedef struct { int index; unsigned percent, celsius; unsigned long long total, used; } gpu;
static gpu gpus[3] = {
    {0, 35, 41, 150754820096ULL, 75377410048ULL},
    {1, 0, 0, 150754820096ULL, 15075482009ULL},
    {2, 97, 68, 150754820096ULL, 30150964019ULL},
};
static const char *uuids[3] = {"GPU-a", "GPU-b", "GPU-c"};
enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
const char *nvmlErrorString(int code) { return "an error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu **device) {
    if (index >= 3) return NOT_FOUND;
    *device = &gpus[index];
    return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, gpu **device) {
    for (int i = 0; i < 3; i++)
        if (!strcmp(uuid, uuids[i])) { *device = &gpus[i]; return SUCCESS; }
    return NOT_FOUND;
}
int nvmlDeviceGetIndex(gpu *device, unsigned *index) { *index = device->index; return SUCCESS; }
int nvmlDeviceGetUtilizationRates(gpu *device, unsigned *rates) {
    if (device->index == 1) return NOT_SUPPORTED;
    rates[0] = device->percent;
    rates[1] = 5;
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(gpu *device, unsigned long long *memory) {
    memory[0] = device->total;
    memory[1] = device->total - device->used;
    memory[2] = device->used;
    return SUCCESS;
}
int nvmlDeviceGetTemperature(gpu *device, unsigned sensor, unsigned *celsius) {
    if (sensor != 0 || device->index == 1) return NOT_SUPPORTED;
    *celsius = device->celsius;
    return SUCCESS;
}

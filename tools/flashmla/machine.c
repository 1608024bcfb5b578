/* SPDX-License-Identifier: MIT */
#include "machine.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

const char *machine_device_name(fmla_device device, char name[16])
{
    if (device.device_type == FMLA_DEVICE_CPU)
        snprintf(name, 16, "cpu");
    else
        snprintf(name, 16, "cuda:%d", device.id);
    return name;
}

fmla_device_info machine_describe(fmla_device device)
{
    fmla_device_info described = FMLA_INIT(fmla_device_info);
    if (fmla_device_describe(device, &described) != FMLA_OK) described.reason = fmla_last_error();
    return described;
}

/* The name is among the first lines. Read without stdio, whose buffer is an allocation that may fail. */
/* Reads the first processor's lines, without stdio, which allocates. */
void machine_cpu_name(char *name, size_t size)
{
    char text[1024];
    const int file = open("/proc/cpuinfo", O_RDONLY | O_CLOEXEC);
    const ssize_t length = file < 0 ? 0 : read(file, text, sizeof text - 1);
    if (file >= 0) close(file);
    text[length > 0 ? length : 0] = '\0', *name = '\0';
    const char *const model = strstr(text, "model name"), *const colon = model ? strchr(model, ':') : NULL;
    if (colon) snprintf(name, size, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
}

json_t *machine_gpu_json(int32_t id)
{
    char name[16];
    const fmla_device device = {FMLA_DEVICE_CUDA, id};
    const fmla_device_info g = machine_describe(device);
    return json_pack("{s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:s}", "device",
                     machine_device_name(device, name), "name", g.name, "reason", g.reason,
                     "compute_capability", g.compute_capability, "sms", g.workers, "shared_bytes",
                     g.shared_bytes, "driver", g.driver, "driver_needed", g.driver_needed, "built_with",
                     g.built_with, "ptx", g.ptx, "built_for", g.built_for);
}

json_t *machine_json(fmla_device device)
{
    char cpu[128];
    if (device.device_type == FMLA_DEVICE_CUDA) return machine_gpu_json(device.id);
    machine_cpu_name(cpu, sizeof cpu);
    return json_pack("{s:s, s:s, s:i}", "device", "cpu", "name", cpu, "threads", (int)fmla_num_threads());
}

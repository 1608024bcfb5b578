/* SPDX-License-Identifier: MIT */
#include "call_file.h"

#include "policy.h"

#include "elements.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum operation call_file_operation(const struct safetensors_file *file)
{
    const char *named = safetensors_metadata(file, "operation");
    if (named && operation_named(named) != OPERATIONS) return operation_named(named);
    for (int op = OPERATIONS - 1; op > 0;
         op--) { /* sparse before dense: an unknown file is reported as dense */
        const struct policy *policy = &policies[op];
        if (policy->has && safetensors_find(file, policy->has) &&
            !(policy->lacks && safetensors_find(file, policy->lacks)))
            return (enum operation)op;
    }
    return OP_DENSE_DECODE;
}

static bool missing(const struct safetensors_file *file, const char *path, const char *name,
                    struct reason *reason)
{
    char has[400] = "";
    for (size_t i = 0; i < safetensors_count(file); i++) {
        const size_t used = strlen(has);
        snprintf(has + used, sizeof has - used, "%s%s", i ? ", " : "", safetensors_at(file, i)->name);
    }
    return reason_set(reason, "%s: has no tensor \"%s\"; it has %s", path, name, *has ? has : "none");
}

static bool read_tensor(struct call *call, int index, const struct safetensors_file *file, const char *path,
                        struct reason *reason)
{
    const struct member *member = call_member(call->op, index);
    const struct safetensors_tensor *found = safetensors_find(file, member->name);
    if (!found) return member->allowed & ALLOW_NULL || missing(file, path, member->name, reason);
    const bool flat = member->allowed & OR_FLAT && found->ndim != member->rank;
    const int rank = form_of(member, flat).rank;
    if (found->ndim != rank)
        return reason_set(reason, "%s: tensor \"%s\": has %d dimensions, must have %d", path, member->name,
                          (int)found->ndim, rank);
    /* On a CPU the library would refuse misaligned data; for a GPU it sees only the copy, while the
     * command reads this data. */
    const uintptr_t bytes = found->type->dtype.bits / 8;
    if (found->begin < found->end && (uintptr_t)found->data % bytes)
        return reason_set(reason, "%s: tensor \"%s\": does not begin at a multiple of %d bytes", path,
                          member->name, (int)bytes);
    /* The command itself reads lengths, before the library checks them. */
    if (rank == 1 && (member->allowed & (ALLOW_I32 | ALLOW_I64)) == ALLOW_I32 &&
        !dtype_is(found->type->dtype, FMLA_TYPE_INT, 32))
        return reason_set(reason, "%s: tensor \"%s\": dtype is %s, must be I32", path, member->name,
                          found->type->name);
    call_set(call, index, found->type->dtype, rank, found->shape,
             (void *)found->data); /* an input, only read */
    return true;
}

/* Reads the options that are one of two words. */
static bool read_words(struct call *call, const struct safetensors_file *file, const char *path,
                       struct reason *reason)
{
    static const struct {
        const char *option, *words[2];
        int32_t values[2];
    } rows[] = {
        {"products", {"bf16", "fp8"}, {FMLA_PRODUCTS_BF16, FMLA_PRODUCTS_FP8}},
        {"causal", {"true", "false"}, {1, 0}},
        {"rope_pairs", {"interleaved", "halves"}, {FMLA_ROPE_INTERLEAVED, FMLA_ROPE_HALVES}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *said = safetensors_metadata(file, rows[i].option);
        int32_t *to = call_option(call, rows[i].option);
        if (!said || !to) continue;
        const bool second = !strcmp(said, rows[i].words[1]);
        *to = rows[i].values[second];
        if (!second && strcmp(said, rows[i].words[0]) != 0)
            return reason_set(reason, "%s: __metadata__: %s is '%s', must be %s or %s", path, rows[i].option,
                              said, rows[i].words[0], rows[i].words[1]);
    }
    return true;
}

static bool read_numbers(struct call *call, const struct safetensors_file *file, const char *path,
                         struct reason *reason)
{
    for (const struct member *member = descriptors[call->op].members; member->name; member++) {
        const char *number = member->kind == MEMBER_REAL ? safetensors_metadata(file, member->name) : NULL;
        char *end;
        if (!number) continue;
        float *to = call_option(call, member->name);
        *to = (float)strtod(number, &end);
        if (end != number && !*end && isfinite(*to) && *to != 0.0f) continue;
        return reason_set(reason,
                          "%s: __metadata__: %s is '%s', must be a finite number that is not 0 in fp32", path,
                          member->name, number);
    }
    return true;
}

/* `note`: a key of the metadata, and the option that it sets. */
static bool read_format(struct call *call, const struct safetensors_file *file, const char *note,
                        const char *path, struct reason *reason)
{
    const char *name = safetensors_metadata(file, note);
    int32_t *to = call_option(call, note);
    if (!name || !to) return true;
    const int32_t last = last_format(call->op);
    char formats[160] = "";
    for (int32_t i = FMLA_KV_BF16; i <= last; i++) {
        if (!takes_format(call->op, i)) continue;
        const size_t used = strlen(formats);
        if (!strcmp(name, format_name(i))) *to = i;
        snprintf(formats + used, sizeof formats - used, "%s%s",
                 !used      ? ""
                 : i < last ? ", "
                            : " or ",
                 format_name(i));
    }
    return *to || reason_set(reason, "%s: __metadata__: %s is '%s', must be %s", path, note, name, formats);
}

bool call_file_read(struct call *call, const struct safetensors_file *file, const char *path,
                    struct reason *reason)
{
    const struct member *member;
    call_begin(call, call_file_operation(file));
    for (int i = 0; (member = call_member(call->op, i)); i++) {
        if (member->allowed & IS_OUTPUT || call_of_plan(member)) continue;
        if (!read_tensor(call, i, file, path, reason)) return false;
    }
    call_set_longest(call);
    return read_words(call, file, path, reason) && read_format(call, file, "kv_format", path, reason) &&
           read_format(call, file, "extra_kv_format", path, reason) && read_numbers(call, file, path, reason);
}

size_t call_file_declare(const struct call *call, const char *const *names,
                         struct safetensors_declaration tensors[CALL_FILE_NAMES])
{
    size_t count = 0;
    for (; *names; names++) {
        const fmla_tensor *tensor = call_tensor(call, *names);
        if (!tensor) continue;
        tensors[count] = (struct safetensors_declaration){*names, tensor->dtype, tensor->ndim, {0}};
        memcpy(tensors[count++].shape, tensor->shape, (size_t)tensor->ndim * sizeof *tensor->shape);
    }
    return count;
}

bool call_file_write(const struct call *call, const struct safetensors_declaration *tensors, size_t count,
                     struct safetensors_writer *writer, struct reason *reason)
{
    for (size_t i = 0; i < count; i++) {
        const fmla_tensor *tensor = call_tensor(call, tensors[i].name);
        if (!safetensors_write(writer, tensor->data, call_bytes(tensor), reason)) return false;
    }
    return true;
}

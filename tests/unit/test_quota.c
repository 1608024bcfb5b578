/* SPDX-License-Identifier: MIT
 *
 * Tests the default number of threads: the CPU quota of control groups, in trees of files as containers and
 * service managers make them, and in a real group where one can be made; and what fmla_device_describe says
 * of OMP_NUM_THREADS.
 */
#define _GNU_SOURCE /* sched_getaffinity */
#include "check.h"

#include "flashmla/flashmla.h"
#include "quota.h"

#include <errno.h>
#include <ftw.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- Trees ------------------------------------------------------------------------------------- */

static char root[] = "/tmp/flashmla-quota.XXXXXX";

static void put(const char *path, const char *text)
{
    char name[512];
    snprintf(name, sizeof name, "%s%s", root, path);
    for (char *at = name + strlen(root) + 1; (at = strchr(at, '/')); *at++ = '/') {
        *at = 0;
        if (mkdir(name, 0700) && errno != EEXIST) abort();
    }
    FILE *file = fopen(name, "w");
    if (!file || fputs(text, file) < 0 || fclose(file)) abort();
}

static int remove_one(const char *path, const struct stat *found, int kind, struct FTW *where)
{
    (void)found, (void)kind, (void)where;
    return remove(path);
}

static void start_over(void)
{
    nftw(root, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    if (mkdir(root, 0700)) abort();
}

#define MOUNTED_V2                                                                                           \
    "22 1 8:1 / / rw - ext4 /dev/a rw\n30 22 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n"

static void test_v2(void)
{
    start_over();
    CHECK_EQ(quota_processors(root), 0); /* no files at all */
    put("/proc/self/cgroup", "0::/\n");
    CHECK_EQ(quota_processors(root), 0); /* no mount */
    put("/proc/self/mountinfo", MOUNTED_V2);
    CHECK_EQ(quota_processors(root), 0); /* no cpu.max: the machine's own root group */
    put("/sys/fs/cgroup/cpu.max", "max 100000\n");
    CHECK_EQ(quota_processors(root), 0);
    put("/sys/fs/cgroup/cpu.max", "200000 100000\n"); /* docker run --cpus=2 */
    CHECK_EQ(quota_processors(root), 2);
    put("/sys/fs/cgroup/cpu.max", "150000 100000\n");
    CHECK_EQ(quota_processors(root), 2); /* rounded up */
    put("/sys/fs/cgroup/cpu.max", "1000 100000");
    CHECK_EQ(quota_processors(root), 1); /* no newline */
    put("/sys/fs/cgroup/cpu.max", "9999999999999 1\n");
    CHECK_EQ(quota_processors(root), 0); /* more than any machine has */
    put("/sys/fs/cgroup/cpu.max", "nonsense\n");
    CHECK_EQ(quota_processors(root), 0);

    /* The least of the group's own quota and of those above it. */
    put("/proc/self/cgroup", "1:name=systemd:/else\n0::/user.slice/app.service\n");
    put("/sys/fs/cgroup/cpu.max", "max 100000\n");
    put("/sys/fs/cgroup/user.slice/cpu.max", "300000 100000\n");
    put("/sys/fs/cgroup/user.slice/app.service/cpu.max", "800000 100000\n");
    CHECK_EQ(quota_processors(root), 3);
    put("/sys/fs/cgroup/user.slice/app.service/cpu.max", "50000 25000\n");
    CHECK_EQ(quota_processors(root), 2);
    put("/sys/fs/cgroup/user.slice/app.service/cpu.max", "max 25000\n");
    CHECK_EQ(quota_processors(root), 3);
}

/* Mounts version 1 from the group `from`, and what `more` says. */
static void mount_v1(const char *groups, const char *from, const char *more)
{
    char text[1024];
    put("/proc/self/cgroup", groups);
    snprintf(text, sizeof text,
             "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
             "33 31 0:30 %s /sys/fs/cgroup/cpuacct rw - cgroup cgroup rw,cpuacct\n"
             "34 31 0:31 %s /sys/fs/cgroup/cpu,cpuset rw - cgroup cgroup rw,cpu,cpuset\n%s",
             from, from, more);
    put("/proc/self/mountinfo", text);
}

static void test_v1(void)
{
    start_over();
    mount_v1("5:cpuacct:/other\n4:cpuset,cpu:/docker/0123\n2:memory:/docker/0123\n", "/", "");
    put("/sys/fs/cgroup/cpu,cpuset/docker/0123/cpu.cfs_quota_us", "-1\n");
    put("/sys/fs/cgroup/cpu,cpuset/docker/0123/cpu.cfs_period_us", "100000\n");
    CHECK_EQ(quota_processors(root), 0);
    put("/sys/fs/cgroup/cpu,cpuset/docker/0123/cpu.cfs_quota_us", "350000\n");
    CHECK_EQ(quota_processors(root), 4);

    /* Inside the container the mount begins at its group, whose name is the host's. */
    start_over();
    mount_v1("4:cpuset,cpu:/docker/0123\n", "/docker/0123", "");
    put("/sys/fs/cgroup/cpu,cpuset/cpu.cfs_quota_us", "200000\n");
    put("/sys/fs/cgroup/cpu,cpuset/cpu.cfs_period_us", "100000\n");
    CHECK_EQ(quota_processors(root), 2);
    put("/proc/self/cgroup", "4:cpuset,cpu:/docker/0123/worker\n"); /* below it */
    CHECK_EQ(quota_processors(root), 2);
    put("/proc/self/cgroup", "4:cpuset,cpu:/docker/01234\n"); /* only begins with the same letters */
    CHECK_EQ(quota_processors(root), 2);

    /* Both versions, as on a hybrid machine: the least counts. */
    mount_v1("4:cpuset,cpu:/docker/0123\n0::/\n", "/docker/0123",
             "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
    put("/sys/fs/cgroup/unified/cpu.max", "100000 100000\n");
    CHECK_EQ(quota_processors(root), 1);
}

/* Lines longer than the reader's buffer lose their middle, and the lines after them count. */
static void test_long_lines(void)
{
    static char text[20000];
    start_over();
    put("/proc/self/cgroup", "0::/\n");
    int used = snprintf(text, sizeof text, "22 1 0:20 / / rw - overlay overlay rw,lowerdir=");
    for (int i = 0; i < 1500; i++) used += snprintf(text + used, sizeof text - (size_t)used, "/a/layer:");
    snprintf(text + used, sizeof text - (size_t)used, "\n" MOUNTED_V2);
    put("/proc/self/mountinfo", text);
    put("/sys/fs/cgroup/cpu.max", "300000 100000\n");
    CHECK_EQ(quota_processors(root), 3);
}

/* ---- The library's default, in a child, because it is chosen once in a process -------------------- */

static bool write_to(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    if (!file) return false;
    const bool good = fputs(text, file) >= 0;
    return !fclose(file) && good;
}

/* Runs in a child with OMP_NUM_THREADS set to `omp`, or not at all; its exit code is the threads, if
 * workers_from is `from`; else 0. `group`: the control group to join first, or NULL. */
static int threads_of_child(const char *omp, const char *group, const char *from)
{
    fflush(NULL);
    const pid_t pid = fork();
    if (!pid) {
        fmla_device_info info = FMLA_INIT(fmla_device_info);
        if (group && !write_to(group, "0\n")) _exit(0);
        if (omp)
            setenv("OMP_NUM_THREADS", omp, 1);
        else
            unsetenv("OMP_NUM_THREADS");
        if (fmla_device_describe((fmla_device){FMLA_DEVICE_CPU, 0}, &info)) _exit(0);
        _exit(!strcmp(info.workers_from, from) && info.workers == fmla_num_threads() ? info.workers : 0);
    }
    int status = -1;
    return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

#define IGNORED "; OMP_NUM_THREADS is ignored, because it is no number from 1 on"

static void test_default(void)
{
    cpu_set_t set;
    CHECK(!sched_getaffinity(0, sizeof set, &set), "%s", strerror(errno));
    const int all = CPU_COUNT(&set), quota = quota_processors("");
    const bool bounded = quota && quota < all;
    const char *const from = bounded ? "CPU quota of the control group" : "processors of the process";
    const char *const ignored =
        bounded ? "CPU quota of the control group" IGNORED : "processors of the process" IGNORED;
    CHECK_EQ(threads_of_child(NULL, NULL, from), bounded ? quota : all);
    CHECK_EQ(threads_of_child("", NULL, from), bounded ? quota : all);
    static const char *const wrong[] = {"abc", "0", "-2", "3x", " "};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK_EQ(threads_of_child(wrong[i], NULL, ignored), bounded ? quota : all);
    CHECK_EQ(threads_of_child("3", NULL, "OMP_NUM_THREADS"), 3);
    CHECK_EQ(threads_of_child(" 5 ,2", NULL, "OMP_NUM_THREADS"), 5);
    CHECK_EQ(threads_of_child("3", NULL, from), 0); /* this test can fail */
}

/* A real group of one processor, in version 1 or 2, where this process may make one. */
static void test_real_group(void)
{
    static const struct {
        const char *folder, *file, *text;
    } kinds[] = {{"/sys/fs/cgroup/flashmla-test", "cpu.max", "100000 100000\n"},
                 {"/sys/fs/cgroup/unified/flashmla-test", "cpu.max", "100000 100000\n"},
                 {"/sys/fs/cgroup/cpu/flashmla-test", "cpu.cfs_quota_us", "100000\n"}};
    int made = 0;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds && sysconf(_SC_NPROCESSORS_ONLN) > 1; i++) {
        char file[128], tasks[128];
        snprintf(file, sizeof file, "%s/%s", kinds[i].folder, kinds[i].file);
        snprintf(tasks, sizeof tasks, "%s/cgroup.procs", kinds[i].folder);
        if (mkdir(kinds[i].folder, 0700)) continue;
        if (!access(file, W_OK) && write_to(file, kinds[i].text)) { /* the folder is a group's */
            CHECK_EQ(threads_of_child(NULL, tasks, "CPU quota of the control group"), 1);
            CHECK_EQ(threads_of_child("2", tasks, "OMP_NUM_THREADS"), 2);
            made++;
        }
        rmdir(kinds[i].folder);
    }
    printf("real control groups: %d\n", made);
}

int main(void)
{
    if (!mkdtemp(root)) abort();
    test_v2();
    test_v1();
    test_long_lines();
    nftw(root, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    test_default();
    test_real_group();
    return check_done("test_quota");
}

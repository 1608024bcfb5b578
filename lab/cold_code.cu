/* SPDX-License-Identifier: MIT
 *
 * What cold code costs: one warp an SM runs STEPS * 2 KB of FFMA instructions without a branch, and reads the clock
 * every 2 KB. A launch brings the first 64 KB of a kernel's code to the SMs. The SM fetches later code when it reaches
 * it, so the clocks of a step rise there, from some 350 to 1500 and more.
 *
 *     nvcc -O2 -std=c++17 -gencode arch=compute_90a,code=sm_90a -o cold_code lab/cold_code.cu && ./cold_code
 *
 * The program prints a line for each step: the median clocks over SMs and runs, first for launches after other code
 * and data have filled the caches, then for launches that follow a launch of the same kernel.
 *
 * An H200 took, cold, 306 to 439 clocks a step up to 60 KB, 370 for the next step, 1447 for the one after it, and 1327 to
 * 2041 from 64 KB on; hot, 300 to 360 throughout.
 */
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#ifdef QUICK
#define STEPS 4 /* compiles in seconds, but measures nothing */
#else
#define STEPS 40
#endif

enum { RUNS = 9, FLUSH_BYTES = 512 << 20, ROOM = 64 };

static void ok(cudaError_t error, int line)
{
    if (error != cudaSuccess) printf("cold_code.cu:%d: %s\n", line, cudaGetErrorString(error)), exit(1);
}
#define OK(call) ok((call), __LINE__)

#define FMA(x)  asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x) : "f"(b), "f"(c));
#define FMA_4   FMA(x) FMA(y) FMA(z) FMA(w)
#define FMA_16  FMA_4 FMA_4 FMA_4 FMA_4
#define FMA_128 FMA_16 FMA_16 FMA_16 FMA_16 FMA_16 FMA_16 FMA_16 FMA_16 /* 16 bytes each: 2 KB */

/* nvcc evaluates the condition, so a step compiles to 2 KB or to nothing. */
#define STEP(i)                                                          \
    if (i < STEPS) {                                                     \
        FMA_128                                                          \
        const long long now = read_clock();                              \
        if (threadIdx.x == 0) clocks[blockIdx.x * ROOM + i] = now - last; \
        last = now;                                                      \
    }
#define STEPS_4(i)  STEP(i) STEP(i + 1) STEP(i + 2) STEP(i + 3)
#define STEPS_20(i) STEPS_4(i) STEPS_4(i + 4) STEPS_4(i + 8) STEPS_4(i + 12) STEPS_4(i + 16)

__device__ __forceinline__ long long read_clock()
{
    long long now;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(now));
    return now;
}

/* KIND 0 is measured; KIND 1 is other code, which evicts it from the instruction caches. */
template <int KIND> __global__ void walk(long long *clocks, float b, float c)
{
    float x = threadIdx.x, y = x + 1, z = x + 2, w = x + 3;
    long long last = read_clock();
    STEPS_20(0)
    STEPS_20(20)
    if (x + y + z + w == 12345.0f) clocks[0] = KIND;
}

static std::vector<long long> medians(int sms, bool cold, long long *clocks, void *flushed)
{
    std::vector<std::vector<long long>> all(STEPS);
    std::vector<long long> host(sms * ROOM), result;
    for (int run = 0; run < RUNS; run++) {
        if (cold) {
            walk<1><<<sms, 32>>>(clocks, 0.5f, 0.25f);
            OK(cudaMemset(flushed, run, FLUSH_BYTES));
        }
        walk<0><<<sms, 32>>>(clocks, 0.5f, 0.25f);
        OK(cudaGetLastError());
        OK(cudaMemcpy(host.data(), clocks, host.size() * sizeof host[0], cudaMemcpyDeviceToHost));
        for (int sm = 0; sm < sms; sm++)
            for (int i = 0; i < STEPS; i++) all[i].push_back(host[sm * ROOM + i]);
    }
    for (auto &step : all) {
        std::nth_element(step.begin(), step.begin() + step.size() / 2, step.end());
        result.push_back(step[step.size() / 2]);
    }
    return result;
}

int main()
{
    int sms;
    long long *clocks;
    void *flushed;
    OK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    OK(cudaMalloc(&clocks, sms * ROOM * sizeof *clocks));
    OK(cudaMalloc(&flushed, FLUSH_BYTES));
    const std::vector<long long> cold = medians(sms, true, clocks, flushed), hot = medians(sms, false, clocks, flushed);
    printf("KB of code   cold   hot (clocks of 2 KB)\n");
    for (int i = 0; i < STEPS; i++) printf("%4d to %-4d %6lld %5lld\n", 2 * i, 2 * i + 2, cold[i], hot[i]);
    return 0;
}

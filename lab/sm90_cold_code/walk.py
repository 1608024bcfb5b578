# SPDX-License-Identifier: MIT
"""Writes walk.cu to standard output: what it takes to walk once through code that is cold (NOTES.md)."""


def walk(n):
    return " ".join(["F64"] * n)


print(
    r"""
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>
#define CK(x) do { cudaError_t e_ = (x); if (e_ != cudaSuccess) { printf("%s: %s\n", #x, cudaGetErrorString(e_)); exit(1); } } while (0)
typedef unsigned long long u64;
__device__ __forceinline__ u64 clk() { u64 t; asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)); return t; }
#define G(x) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x) : "f"(b), "f"(c));
#define F4 G(x) G(y) G(z) G(w)
#define F16 F4 F4 F4 F4
#define F64 F16 F16 F16 F16
extern "C" __global__ void __launch_bounds__(384) walk(u64 *out, float b, float c) {
 float x = threadIdx.x, y = x + 1, z = x + 2, w = x + 3; u64 t[50]; t[0] = clk();"""
)
for i in range(1, 41):
    print(walk(2) + f" t[{i}] = clk(); if (threadIdx.x == 0) out[blockIdx.x * 64 + {i}] = t[{i}] - t[{i-1}];")
print(
    r""" if (x + y + z + w == 12345.f) out[0] = 1; }
"""
)
print(
    'extern "C" __global__ void __launch_bounds__(384) wbig(float *out, float b, float c) { float x = threadIdx.x, y = x + 1, z = x + 2, w = x + 3; '
    + walk(300)
    + " if (x + y + z + w == 12345.f) out[0] = 1; }"
)
print(
    r"""
__global__ void readall(const uint4 *p, size_t n, unsigned *o)
{
    unsigned s = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) { uint4 v = __ldcg(p + i); s += v.x ^ v.y ^ v.z ^ v.w; }
    if (s == 0x1234567) *o = s;
}
int main()
{
    u64 *out; static u64 host[132 * 64]; char *big; unsigned *so;
    CK(cudaMalloc(&out, sizeof host)); CK(cudaMalloc(&big, 512ull << 20)); CK(cudaMemset(big, 0, 512ull << 20)); CK(cudaMalloc(&so, 4));
    for (int m = 0; m < 3; m++) {
        std::vector<u64> v[41];
        for (int r = 0; r < 9; r++) {
            if (m == 0) { wbig<<<132, 128>>>((float *)so, 1, 1); readall<<<528, 512>>>((uint4 *)big, (512ull << 20) / 16, so); }
            if (m == 1) { walk<<<132, 32>>>(out, 1, 1); wbig<<<132, 128>>>((float *)so, 1, 1); }
            if (m == 2) walk<<<132, 32>>>(out, 1, 1);
            walk<<<132, 32>>>(out, 1, 1);
            CK(cudaGetLastError()); CK(cudaDeviceSynchronize());
            CK(cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost));
            for (int i = 1; i < 41; i++) { std::vector<u64> w; for (int b = 0; b < 132; b++) w.push_back(host[b * 64 + i]); std::sort(w.begin(), w.end()); v[i].push_back(w[66]); }
        }
        printf("%s, clocks a 2 KB:", m == 0 ? "cold" : m == 1 ? "L2 warm" : "hot");
        for (int i = 1; i < 41; i++) { std::sort(v[i].begin(), v[i].end()); printf(" %llu", v[i][4]); }
        printf("\n");
    }
}"""
)

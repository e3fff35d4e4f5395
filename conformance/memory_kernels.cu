// The kernels that the memory probes launch; memory_kernels.ptx is made from this file by
// `python conformance/record.py --kernels` (NVRTC 13.0, compute_75, so that driver 580 takes it).
// Every kernel of several threads expects one block unless it says otherwise.

extern "C" __global__ void fill(int *out, int value) { out[threadIdx.x] = value; }

extern "C" __global__ void add(int *data, int value) { data[threadIdx.x] += value; }

extern "C" __global__ void copy(const int *from, int *to) { to[threadIdx.x] = from[threadIdx.x]; }

// Keeps a stream busy until the host sets state[0], but never longer than `ticks` of the device's
// clock: then it says so in state[1] and ends, so that no mistake of a probe can hang the GPU.
extern "C" __global__ void latch(volatile int *state, long long ticks) {
    long long start = clock64();
    while (state[0] == 0) {
        if (clock64() - start > ticks) {
            state[1] = 1;
            return;
        }
    }
}

// Reverses its block through as much dynamic shared memory as it has threads.
extern "C" __global__ void reverse(int *out) {
    extern __shared__ int scratch[];
    scratch[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = scratch[blockDim.x - 1 - threadIdx.x];
}

// The same through 1 KiB of static shared memory: at most 256 threads.
extern "C" __global__ void reverse_static(int *out) {
    __shared__ int scratch[256];
    scratch[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = scratch[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void __launch_bounds__(128) bounded(int *out) { out[threadIdx.x] = 1; }

__constant__ int table[16];
__device__ int counter;

extern "C" __global__ void lookup(int *out) { out[threadIdx.x] = table[threadIdx.x & 15] + counter; }

extern "C" __global__ void mixed(int a, double b, int *out) {
    out[0] = a;
    out[1] = (int)b;
}
